"""What the report of the study of deferred updates makes of runs (`benches/delay_report.py`)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CURVE = [[0, 5.0], [50, 3.0], [100, 2.0]]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))
    try:
        import delay_report
    finally:
        del sys.path[0]
    return delay_report


def line(report: ModuleType, loss: float, *, seed: int = 0, delay: Any = None, **case: Any) -> str:
    case = {"size": "small", "task": "new", "lr": 1e-3} | case
    case |= {"seed": seed, "delay": None if delay is None else dataclasses.asdict(delay)}
    curve = [*CURVE[:-1], [100, loss]]
    found = {"case": case, "validation_loss": loss, "train_loss": loss - 0.5}
    return json.dumps(found | {"validation_losses": curve, "parameters": 33_000_000})


def setting_of(report: ModuleType, tmp_path: Path, lines: list[str]) -> Any:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    (setting,) = report.settings_of(report.read_runs([path]))
    return setting


def test_gaps_are_between_runs_of_one_seed(report: ModuleType, tmp_path: Path) -> None:
    deferred = report.Delay()
    zenflow = report.Delay(predict=False, average=True, channels="columns")
    lines = [
        line(report, 2.0),
        line(report, 2.4, seed=1),
        line(report, 2.1, delay=deferred),
        line(report, 2.7, delay=deferred, seed=1),
        # Of a seed without an exact run.
        line(report, 9.0, delay=deferred, seed=2),
        line(report, 2.5, delay=zenflow),
        # What fine-tuning starts from is no result.
        line(report, 1.0, task="base"),
    ]
    setting = setting_of(report, tmp_path, lines)
    assert setting.spread == pytest.approx(0.4)
    assert setting.gap(deferred) == pytest.approx(0.2)
    # Of the seed that both have: 0.1 over 0.5.
    assert setting.of_zenflow(deferred) == pytest.approx(0.2)
    assert setting.verdict(deferred) == "yes"
    # Lines from 3.0 at 50 to 2.0, and to 2.4, at 100: 95, and 25 from the end at 2.7.
    assert setting.exact_steps(deferred) == f"{(95 + 75) / 2:.0f}"
    assert setting.exact_steps(zenflow) == "75"
    assert "| **deferred S=4 predicted** | 2 | +0.2000 | +0.2000 | 85 | 0.20 | yes |" in (
        setting.table()
    )


def test_gaps_are_between_runs_from_one_base(report: ModuleType, tmp_path: Path) -> None:
    case = {"task": "tune", "lr": 1e-5}
    based = [
        (1.0, line(report, 2.0, **case)),
        (1.0, line(report, 2.3, seed=1, **case)),
        (1.5, line(report, 3.0, **case)),
        (1.5, line(report, 3.1, delay=report.Delay(), **case)),
        # Of a base without an exact run.
        (1.7, line(report, 9.0, delay=report.Delay(), **case)),
    ]
    lines = [json.dumps(json.loads(text) | {"base": base}) for base, text in based]
    setting = setting_of(report, tmp_path, lines)
    assert setting.gap(report.Delay()) == pytest.approx(0.1)
    assert setting.spread == pytest.approx(0.3)


@pytest.mark.parametrize(("loss", "verdict"), [(2.05, "yes"), (2.15, "no")])
def test_fine_tuning_is_held_against_the_spread_of_seeds(
    report: ModuleType, tmp_path: Path, loss: float, verdict: str
) -> None:
    case = {"task": "tune", "lr": 1e-5}
    lines = [line(report, 2.0, **case), line(report, 2.1, seed=1, **case)]
    lines += [line(report, loss, delay=report.Delay(), **case)]
    assert setting_of(report, tmp_path, lines).verdict(report.Delay()) == verdict


def test_a_run_that_ends_lower_takes_no_fewer_steps(report: ModuleType, tmp_path: Path) -> None:
    lines = [line(report, 2.0), line(report, 1.9, delay=report.Delay())]
    assert setting_of(report, tmp_path, lines).exact_steps(report.Delay()) == "≥ 100"


def test_other_makers_are_held_against_the_exact_runs_of_the_engine(
    report: ModuleType, tmp_path: Path
) -> None:
    zenflow = report.Delay(predict=False, average=True, fraction=0.1, channels="columns")

    def made(by: str, loss: float, *, seed: int = 0, delay: Any = None) -> str:
        found = json.loads(line(report, loss, seed=seed, delay=delay))
        return json.dumps(found | {"by": by})

    failed = {"failed": "the loss of step 1 is nan", "by": "zenflow auto"}
    lines = [
        made("engine", 2.0),
        made("engine", 2.3, seed=1),
        made("engine", 2.1, delay=report.Delay()),
        made("engine", 2.6, seed=1, delay=report.Delay()),
        made("simulation", 2.1, delay=report.Delay()),
        made("simulation", 2.5, seed=1, delay=report.Delay()),
        made("simulation", 2.25),
        made("zenflow", 2.5, delay=zenflow),
        json.dumps(json.loads(line(report, 0.0, delay=zenflow)) | failed),
    ]
    path = tmp_path / "engine.jsonl"
    path.write_text("\n".join(lines) + "\n")
    rows = report.engine_tables(report.read_runs([path])).splitlines()[-5:]
    default = "**`OffloadAdamW`: deferred S=4 predicted**"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    # Seed 1 comes down from 3.0 to 2.3 between steps 50 and 100: to 2.5 in step 86.
    assert cells == [
        ["simulated: deferred S=4 predicted", "2", "+0.1500", "+0.1500", "90", "yes", ""],
        [default, "2", "+0.2000", "+0.2000", "87", "yes", "0.1000"],
        ["simulated: exact", "1", "+0.2500", "+0.2500", "88", "yes", ""],
        ["DeepSpeed's ZenFlow", "1", "+0.5000", "+0.5000", "75", "no", ""],
        [report.MAKERS["zenflow auto"], "1", failed["failed"], "", "", "no", ""],
    ]


def test_marks_keep_what_is_around_them(report: ModuleType) -> None:
    begin, end = report.ENGINE_MARKS
    page = report.put_between(f"a\n{begin}\nold\n{end}\nb\n", report.ENGINE_MARKS, "new")
    assert page == f"a\n{begin}\n\nnew\n\n{end}\nb\n"
    with pytest.raises(ValueError, match="a mark is missing"):
        report.put_between(f"a\n{begin}\n", report.ENGINE_MARKS, "new")


def test_the_page_and_its_picture_are_those_of_the_runs(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [line(report, 2.0), line(report, 2.3, delay=report.Delay())]
    setting = setting_of(report, tmp_path, lines)
    for name in ("one.svg", "two.svg"):
        report.write_picture([setting], tmp_path / name)
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "two.svg").read_text()
    # Letters are drawn, and named in comments.
    assert "<!-- deferred, predicted -->" in picture
    assert "<!-- 33 M parameters, from nothing at lr 1e-3 -->" in picture
