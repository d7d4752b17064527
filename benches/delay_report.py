"""The tables and the picture of `docs/deferral_quality.md`, from the runs of `delay_study.py`.

    python benches/delay_report.py RUNS.jsonl [...] [--engine RUNS.jsonl] [--page PAGE.md]

`--engine` has the runs of `delay_engine.py`, which get tables of their own. Without `--page` tables
are printed. With it they take the place of those between the page's marks, and the picture beside
the page is drawn (matplotlib: `pip install 'stepwell[plot]'`).

Losses are of validation, but where a column says otherwise. A *gap* is the loss of a run less that
of the exact run with the same seed, from the same base: the mean over what both have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from delay_cases import describe, lr_name
from delay_simulation import Delay

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

MARKS = "<!-- tables: begin -->", "<!-- tables: end -->"
ENGINE_MARKS = "<!-- engine: begin -->", "<!-- engine: end -->"
DEFAULT = Delay()
"""What `stepwell.Deferred()` is."""
FINE_TUNING_LR_MAX = 1e-4
"""Up to it, gaps are held against the spread of seeds."""
SHARE_MAX = 0.5
"""Elsewhere, of the gap of ZenFlow's way."""
MAKERS = {
    "engine": "`OffloadAdamW`: {}",
    "simulation": "simulated: {}",
    "zenflow": "DeepSpeed's ZenFlow",
    "zenflow in turn": "DeepSpeed's ZenFlow, `overlap_step` false",
    "zenflow untouched": "DeepSpeed's ZenFlow, its matrices not put right",
    "zenflow auto": 'DeepSpeed\'s ZenFlow, `update_interval` "auto", its default',
}
"""What stepped a model, in words; with the words for what was deferred."""
ENGINE_COLUMNS = [
    "",
    "seeds",
    "gap",
    "gap in training",
    "exact steps to the same loss",
    "within the seeds",
    "from its simulation",
]
COLUMNS = [
    "",
    "seeds",
    "gap",
    "gap in training",
    "exact steps to the same loss",
    "of ZenFlow's gap",
    "bar reached",
]


@dataclass(frozen=True)
class Run:
    """A line of the file."""

    setting: tuple[str, str, float]
    """Size, task, lr."""
    seed: int
    """Runs with equal seeds had equal batches."""
    base: float | None
    """The loss of what it started from, which names that; None: from nothing."""
    delay: Delay | None
    """None: exact."""
    by: str
    """What stepped the model."""
    line: dict[str, Any]
    """All of it."""

    @property
    def pair(self) -> tuple[int, float | None]:
        """What runs that are compared have in common."""
        return self.seed, self.base

    @property
    def failed(self) -> str | None:
        """Why it has no losses; None: it has."""
        words: str | None = self.line.get("failed")
        return words

    @property
    def loss(self) -> float:
        """Of validation, with all updates."""
        return float(self.line["validation_loss"])

    @property
    def train_loss(self) -> float:
        """The mean of the last 50 steps."""
        return float(self.line["train_loss"])


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs of these files, but for those that others start from."""
    runs = []
    for path in paths:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            case = line["case"]
            delay = None if case["delay"] is None else Delay(**case["delay"])
            setting = (case["size"], case["task"], case["lr"])
            if case["task"] != "base":
                by = line.get("by", "simulation")
                runs.append(Run(setting, case["seed"], line.get("base"), delay, by, line))
    return runs


Exact: TypeAlias = "dict[tuple[int, float | None], Run]"
"""Exact runs by what they share with those that are compared with them."""


def gap_of(runs: Iterable[Run], exact: Exact) -> float:
    """How much higher the loss ends than that of exact steps."""
    return statistics.fmean(run.loss - exact[run.pair].loss for run in runs)


def train_gap_of(runs: Iterable[Run], exact: Exact) -> float:
    """The same of the training loss."""
    return statistics.fmean(run.train_loss - exact[run.pair].train_loss for run in runs)


def exact_steps_of(runs: Iterable[Run], exact: Exact) -> str:
    """How many exact steps reach the loss that runs end at."""
    steps = []
    for run in runs:
        losses = exact[run.pair].line["validation_losses"]
        found = first_at_most(losses, run.loss)
        if found is None:
            return f"≥ {losses[-1][0]}"
        steps.append(found)
    return f"{statistics.fmean(steps):.0f}"


class Setting:
    """The runs of one size, task and lr."""

    def __init__(self, setting: tuple[str, str, float], runs: Iterable[Run]) -> None:
        self.size, self.task, self.lr = setting
        runs = [run for run in runs if run.setting == setting]
        self.exact = {run.pair: run for run in runs if run.delay is None}
        self.deferred: dict[Delay, list[Run]] = {}
        for run in runs:
            if run.delay is not None and run.pair in self.exact:
                self.deferred.setdefault(run.delay, []).append(run)

    @property
    def spread(self) -> float | None:
        """How far exact runs from one base are apart, at most; None: no base has two."""
        by_base: dict[float | None, list[float]] = {}
        for run in self.exact.values():
            by_base.setdefault(run.base, []).append(run.loss)
        return max(
            (max(losses) - min(losses) for losses in by_base.values() if len(losses) > 1),
            default=None,
        )

    @property
    def is_gentle(self) -> bool:
        """Whether it is fine-tuning with an lr that people use for it."""
        return self.task == "tune" and self.lr <= FINE_TUNING_LR_MAX

    def gap(self, delay: Delay) -> float:
        """How much higher the loss ends than that of exact steps."""
        return gap_of(self.deferred[delay], self.exact)

    def train_gap(self, delay: Delay) -> float:
        """The same of the training loss."""
        return train_gap_of(self.deferred[delay], self.exact)

    def exact_steps(self, delay: Delay) -> str:
        """How many exact steps reach the loss that runs end at."""
        return exact_steps_of(self.deferred[delay], self.exact)

    def of_zenflow(self, delay: Delay) -> float | None:
        """The gap over that of ZenFlow's way with the same interval and fraction.

        Of what both have: the same seeds, from the same bases.
        """
        ours = self.deferred[delay]
        theirs = {run.pair: run for run in self.deferred.get(zenflow_of(delay), ())}
        ours = [run for run in ours if run.pair in theirs]
        if delay.average or not ours:
            return None
        gap = gap_of([theirs[run.pair] for run in ours], self.exact)
        return gap_of(ours, self.exact) / gap if gap > 0 else None

    def verdict(self, delay: Delay) -> str:
        """Whether the bar is reached."""
        if delay.average:
            return ""
        if self.is_gentle:
            if self.spread is None:
                return ""
            return "yes" if self.gap(delay) <= self.spread else "no"
        share = self.of_zenflow(delay)
        return "" if share is None else "yes" if share <= SHARE_MAX else "no"

    def heading(self) -> list[str]:
        """What is above a table."""
        losses = [run.loss for run in self.exact.values()]
        first = next(iter(self.exact.values()))
        steps = first.line["validation_losses"][-1][0]
        exact = ", ".join(f"{loss:.4f}" for loss in losses)
        words = f"{steps:,} steps. Validation loss of exact runs: {exact}"
        if self.spread is not None:
            words += f"; those from one base are {self.spread:.4f} apart at most"
        return [f"### {title(self)}", "", textwrap.fill(f"{words}.", 100), ""]

    def table(self) -> str:
        """In Markdown, the smallest gap first."""
        lines = [*self.heading(), f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for delay in sorted(self.deferred, key=self.gap):
            name = describe(delay)
            share = self.of_zenflow(delay)
            cells = [
                f"**{name}**" if delay == DEFAULT else name,
                str(len(self.deferred[delay])),
                f"{self.gap(delay):+.4f}",
                f"{self.train_gap(delay):+.4f}",
                self.exact_steps(delay),
                "" if share is None else f"{share:.2f}",
                self.verdict(delay),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def zenflow_of(delay: Delay) -> Delay:
    """ZenFlow's way with the same interval, fraction and exact steps."""
    return replace(delay, predict=False, average=True, channels="columns")


def first_at_most(losses: Sequence[Sequence[float]], bound: float) -> float | None:
    """The step at which losses (step, loss) come down to `bound`, by lines between them."""
    for (step, loss), (next_step, next_loss) in itertools.pairwise(losses):
        if loss <= bound:
            return step
        if next_loss <= bound:
            return step + (next_step - step) * (loss - bound) / (loss - next_loss)
    return None


def title(setting: Setting) -> str:
    """What a setting is."""
    first = next(iter(setting.exact.values()))
    millions = first.line["parameters"] / 1e6
    count = f"{millions:.0f}" if millions >= 10 else f"{millions:.1f}"
    what = "fine-tuning" if setting.task == "tune" else "from nothing"
    return f"{count} M parameters, {what} at lr {lr_name(setting.lr)}"


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """Fine-tuning first, large models first."""
    found = [Setting(setting, runs) for setting in {run.setting for run in runs}]
    found = [setting for setting in found if setting.exact and setting.deferred]
    order = {"large": 0, "small": 1, "micro": 2, "tiny": 3}
    return sorted(found, key=lambda one: (one.task != "tune", order[one.size], one.lr))


# ---- the engine, and DeepSpeed -------------------------------------------------------------------


def engine_table(setting: Setting, runs: Iterable[Run]) -> str:
    """In Markdown: what all makers' runs end above the engine's exact ones.

    Args:
        setting: of the engine's runs.
        runs: of all makers.
    """
    made: dict[tuple[str, Delay | None], dict[tuple[int, float | None], Run]] = {}
    for run in runs:
        if run.setting == (setting.size, setting.task, setting.lr) and run.pair in setting.exact:
            made.setdefault((run.by, run.delay), {})[run.pair] = run
    rows: list[tuple[float, str]] = []
    for (by, delay), found in made.items():
        if by == "engine" and delay is None:
            continue
        name = MAKERS[by].format(named(delay, is_engine=by == "engine"))
        name = f"**{name}**" if by == "engine" and delay == DEFAULT else name
        ended = [run for run in found.values() if run.failed is None]
        if not ended:
            words = next(run.failed for run in found.values())
            rows.append((float("inf"), f"| {name} | {len(found)} | {words} | | | no | |"))
            continue
        gap = gap_of(ended, setting.exact)
        is_within = "" if setting.spread is None else "yes" if gap <= setting.spread else "no"
        twins = made.get(("simulation", delay), {}) if by != "simulation" else {}
        distances = [abs(run.loss - twins[run.pair].loss) for run in ended if run.pair in twins]
        cells = [
            name,
            str(len(ended)),
            f"{gap:+.4f}",
            f"{train_gap_of(ended, setting.exact):+.4f}",
            exact_steps_of(ended, setting.exact),
            is_within,
            f"{max(distances):.4f}" if distances else "",
        ]
        rows.append((gap, f"| {' | '.join(cells)} |"))
    head = [f"| {' | '.join(ENGINE_COLUMNS)} |", "|---" * len(ENGINE_COLUMNS) + "|"]
    return "\n".join([*setting.heading(), *head, *(row for _, row in sorted(rows))])


def named(delay: Delay | None, *, is_engine: bool) -> str:
    """A delay in words; the engine takes rows or columns."""
    words = describe(delay)
    return words.replace("rows", "channels") if is_engine else words


def engine_tables(runs: Sequence[Run]) -> str:
    """Of all settings."""
    settings = settings_of([run for run in runs if run.by == "engine"])
    return "\n\n".join(engine_table(setting, runs) for setting in settings)


# ---- the picture ---------------------------------------------------------------------------------

LINES = {
    "deferred": (Delay(predict=False), "tab:gray", ":"),
    "deferred, predicted": (DEFAULT, "tab:blue", "-"),
    "deferred, predicted, a tenth of the rows at once": (Delay(fraction=0.1), "tab:green", "-"),
    "ZenFlow's way: mean, a tenth of the columns at once": (
        Delay(predict=False, average=True, fraction=0.1, channels="columns"),
        "tab:red",
        "--",
    ),
}


def draw(axes: Axes, setting: Setting) -> None:
    """The gap over the interval. The band is the spread of exact runs."""
    if setting.spread is not None:
        axes.axhspan(0, setting.spread, color="black", alpha=0.12, linewidth=0, label="seeds")
    for label, (delay, color, style) in LINES.items():
        at = [replace(delay, interval=interval) for interval in (1, 2, 4, 8)]
        points = [(one.interval, setting.gap(one)) for one in at if one in setting.deferred]
        if points:
            intervals, gaps = zip(*points, strict=True)
            axes.plot(intervals, gaps, style, color=color, marker="o", markersize=4, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(setting), fontsize=9, loc="left")


def write_picture(settings: Sequence[Setting], path: Path) -> None:
    """Draws a panel for each setting."""
    # Not pyplot: that would look for a display.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The same runs give the same picture, byte by byte.
    matplotlib.rcParams["svg.hashsalt"] = "stepwell"
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    labelled: dict[str, Any] = {}
    for axes in panels:
        axes.set_visible(False)
    for axes, setting in zip(panels, settings, strict=False):
        axes.set_visible(True)
        draw(axes, setting)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    figure.supxlabel("interval", fontsize=9)
    figure.supylabel("validation loss above exact steps", fontsize=9)
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper left", ncols=2, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the tables and the picture of the study.")
    parser.add_argument("runs", type=Path, nargs="+", help="what `delay_study.py` wrote")
    parser.add_argument("--engine", type=Path, help="what `delay_engine.py` wrote")
    parser.add_argument("--page", type=Path, help="the page that the tables go to")
    options = parser.parse_args()
    settings = settings_of(read_runs(options.runs))
    tables = "\n\n".join(setting.table() for setting in settings)
    of_engine = engine_tables(read_runs([options.engine])) if options.engine else ""
    if options.page is None:
        print(f"{tables}\n\n{of_engine}")
        return
    picture = options.page.with_suffix(".svg")
    seen = f"![Validation loss above that of exact steps; the band is seeds]({picture.name})"
    try:
        page = put_between(options.page.read_text(), MARKS, f"{seen}\n\n{tables}")
        if of_engine:
            page = put_between(page, ENGINE_MARKS, of_engine)
    except ValueError as error:
        parser.error(f"`{options.page}`: {error}")
    options.page.write_text(page)
    write_picture(settings, picture)


def put_between(page: str, marks: tuple[str, str], body: str) -> str:
    """A page with another text between two marks.

    Raises:
        ValueError: it has not both.
    """
    begin, end = marks
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"a mark is missing, expected `{begin}` and `{end}`")
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


if __name__ == "__main__":
    main()
