"""The runs of the study of deferred updates: what each is, which there are, and what to call them.

| task | text | steps | lr |
|---|---|---|---|
| base | Python sources | more | 100 steps of warm-up, a cosine down to a tenth |
| new | Python sources | 1,000 | as base |
| tune | C++ headers | 1,000 | 30 steps of warm-up, then constant |

`tune` starts from the weights of `base`, rounded to bf16, with moments from nothing. Equal
seeds mean equal batches, so runs are compared in pairs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delay_model import SIZES, Task
from delay_simulation import Delay, Hyper

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = [
    "SELECTED",
    "Case",
    "describe",
    "key_in",
    "left_of",
    "lr_name",
    "name_of",
    "plan",
    "share_of",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run."""

    size: str
    """Key of `SIZES`."""
    task: Task
    """What is trained on what."""
    lr: float
    """The highest learning rate."""
    seed: int = 0
    """Of the batches, and of the weights from nothing."""
    delay: Delay | None = None
    """What is deferred; None: nothing."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return SIZES[self.size].base_steps if self.task == "base" else SIZES[self.size].steps

    @property
    def seconds(self) -> float:
        """Of a GPU's time, as planned with."""
        return self.steps * SIZES[self.size].seconds_per_step / SIZES[self.size].slots

    @property
    def key(self) -> str:
        """What tells its line from those of other runs."""
        return key_in(dataclasses.asdict(self))

    def lrs(self) -> list[float]:
        """The learning rate of each step."""
        warmup = 30 if self.task == "tune" else 100
        rates = []
        for step in range(self.steps):
            part = (
                1.0 if self.task == "tune" else 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
            )
            rates.append(self.lr * part * min(1.0, (step + 1) / warmup))
        return rates

    @property
    def hyper(self) -> Hyper:
        """Those of pre-training, or torch's defaults."""
        if self.task == "tune":
            return Hyper()
        return Hyper(betas=(0.9, 0.95), weight_decay=0.1)


def key_in(case: dict[str, Any]) -> str:
    """The key of a case, as a line has it."""
    return json.dumps(case, sort_keys=True)


# ---- the plan ----

PREDICTED = Delay(interval=4)
SELECTED = Delay(interval=4, fraction=0.1)
ZENFLOW = Delay(interval=4, predict=False, average=True, fraction=0.1, channels="columns")


def at(delay: Delay, interval: int) -> Delay:
    """The same with another interval."""
    return dataclasses.replace(delay, interval=interval)


def plain(interval: int) -> Delay:
    """Without prediction."""
    return Delay(interval=interval, predict=False)


def cases(
    size: str, task: Task, lrs: Iterable[float], runs: Iterable[tuple[Delay | None, int]]
) -> list[Case]:
    """Of each learning rate, these delays with these seeds."""
    runs = list(runs)
    return [
        Case(size=size, task=task, lr=lr, seed=seed, delay=delay)
        for lr in lrs
        for delay, seed in runs
    ]


INTERVALS = 1, 2, 4, 8
WARM_PREDICTED = dataclasses.replace(PREDICTED, warmup_steps=250)
WARM_SELECTED = dataclasses.replace(SELECTED, warmup_steps=250)
WARM_ZENFLOW = dataclasses.replace(ZENFLOW, warmup_steps=250)


def grid() -> list[Delay]:
    """Every interval with every selection: predicted, plain, and the mean.

    Not the mean of one gradient, which is that gradient.
    """
    ways = PREDICTED, plain(4), dataclasses.replace(ZENFLOW, fraction=0.0)
    selected = [
        dataclasses.replace(way, fraction=share, channels=axis)
        for axis in ("rows", "columns")
        for share in (0.1, 0.05)
        for way in ways
    ]
    return [
        at(way, interval)
        for way in (*ways, *selected)
        for interval in INTERVALS
        if not (way.average and interval == 1)
    ]


def small_grid(task: Task, lrs: Sequence[float]) -> list[Case]:
    """What is compared at the small size: what matters most first."""
    ways = [PREDICTED, SELECTED, ZENFLOW, plain(4)]
    warm = [WARM_PREDICTED, WARM_SELECTED, WARM_ZENFLOW] if task == "new" else []
    seeds = [
        *(at(way, interval) for interval in INTERVALS for way in ways),
        *warm,
    ]
    seeds.remove(at(ZENFLOW, 1))
    rest = [*grid(), *([dataclasses.replace(PREDICTED, warmup_steps=100)] if warm else [])]
    rest = [delay for delay in rest if delay not in seeds]
    runs: list[tuple[Delay | None, int]] = [(None, seed) for seed in range(3)]
    runs += [(delay, 0) for delay in [*seeds, *rest]]
    runs += [(delay, seed) for seed in (1, 2) for delay in [*seeds, *rest]]
    return cases("small", task, lrs, runs)


def plan() -> dict[str, list[Case]]:
    """The parts of the study, each in the order in which it is run."""
    small = Case(size="small", task="base", lr=SIZES["small"].base_lr, seed=100)
    large = Case(size="large", task="base", lr=SIZES["large"].base_lr, seed=100)
    tiny = Case(size="tiny", task="base", lr=SIZES["tiny"].base_lr, seed=100)
    exact: list[tuple[Delay | None, int]] = [(None, seed) for seed in range(3)]

    def tune_large(lr: float, *runs: tuple[Delay | None, int]) -> list[Case]:
        return cases("large", "tune", [lr], runs)

    compared: list[tuple[Delay | None, int]] = [
        (delay, seed) for seed in range(3) for delay in (PREDICTED, SELECTED, ZENFLOW)
    ]
    return {
        "large-tune": [
            large,
            *(case for lr in (1e-4, 1e-5, 3e-5) for case in tune_large(lr, *exact, *compared)),
            *tune_large(1e-4, (at(PREDICTED, 2), 0)),
            *tune_large(1e-5, (at(PREDICTED, 2), 0)),
        ],
        "small-tune": [small, *small_grid("tune", [1e-4, 1e-5, 3e-5])],
        "small-new": small_grid("new", [3e-4, 1e-3]),
        "large-new": cases("large", "new", [3e-4, 1e-3], [*exact, *compared, (WARM_PREDICTED, 0)]),
        "tiny": [
            tiny,
            *cases("tiny", "new", [1e-3], [*exact, (PREDICTED, 0), (SELECTED, 0), (ZENFLOW, 0)]),
            *cases("tiny", "tune", [1e-3], [*exact, (PREDICTED, 0), (SELECTED, 0), (ZENFLOW, 0)]),
        ],
    }


# ---- what is left of it ----


def left_of(cases: Sequence[Case], done: Container[str]) -> list[Case]:
    """What has to be run, in this order.

    Each process trains a base of its own, whose weights go with it. So a run of fine-tuning needs
    its base again, and the exact run that it is held against.

    Args:
        cases: those of a part.
        done: keys of the runs that have their lines.
    """
    new = [case for case in cases if case.key not in done]
    paired = {(case.lr, case.seed) for case in new if case.task == "tune"}
    return [
        case
        for case in cases
        if case in new
        or (case.task == "base" and paired)
        or (case.task == "tune" and not case.delay and (case.lr, case.seed) in paired)
    ]


def share_of(cases: Sequence[Case], index: int, count: int) -> list[Case]:
    """What one of several processes runs, in this order; together they run all.

    Fine-tuning at one lr stays together, so that what is compared has one base. The longest go
    first, each to the process that has least to do.

    Args:
        cases: of all parts, those that are left.
        index: of the process.
        count: of processes.
    """
    bases = {case.size: case for case in cases if case.task == "base"}
    together: dict[str, list[Case]] = {}
    for case in cases:
        if case.task != "base":
            name = f"{case.size} tune {case.lr}" if case.task == "tune" else case.key
            together.setdefault(name, []).append(case)
    shares: list[list[Case]] = [[] for _ in range(count)]

    def seconds(share: Iterable[Case]) -> float:
        return sum(case.seconds for case in share)

    def with_base(group: list[Case]) -> list[Case]:
        base = bases.get(group[0].size) if group[0].task == "tune" else None
        return group if base is None else [base, *group]

    groups = [with_base(group) for group in together.values()]
    for group in sorted(groups, key=seconds, reverse=True):
        share = min(shares, key=seconds)
        share += [case for case in group if case not in share]
    return [case for case in cases if case in shares[index]]


# ---- in words ----


def name_of(case: Case) -> str:
    """A line's name, for people."""
    lr = lr_name(case.lr)
    return f"{case.size} {case.task} lr {lr} seed {case.seed} {describe(case.delay)}"


def lr_name(lr: float) -> str:
    """A learning rate, as people write it."""
    return f"{lr:.0e}".replace("e-0", "e-")


def describe(delay: Delay | None) -> str:
    """A delay in words."""
    if delay is None:
        return "exact"
    words = ["mean" if delay.average else "deferred", f"S={delay.interval}"]
    words += ["predicted"] if delay.predict else []
    words += [f"{delay.channels} {delay.fraction:g}"] if delay.fraction else []
    words += [f"warm-up {delay.warmup_steps}"] if delay.warmup_steps else []
    return " ".join(words)
