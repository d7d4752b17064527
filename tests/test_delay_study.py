"""Which runs of the study are left, and who takes them (`benches/delay_study.py`)."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Generator

sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))
try:
    import delay_cases
    import delay_study
finally:
    del sys.path[0]

CASES = [case for part in delay_cases.plan().values() for case in part]
RUNS = [case for case in CASES if case.task != "base"]


def left(done: set[str]) -> list[Any]:
    return [
        case for part in delay_cases.plan().values() for case in delay_cases.left_of(part, done)
    ]


def test_a_plan_names_no_run_twice() -> None:
    assert len({case.key for case in CASES}) == len(CASES)


@given(done=st.sets(st.sampled_from(CASES)), count=st.integers(1, 9))
def test_shares_together_run_all_that_is_left(done: set[Any], count: int) -> None:
    cases = left({case.key for case in done})
    shares = [delay_cases.share_of(cases, index, count) for index in range(count)]
    runs = [case for share in shares for case in share if case.task != "base"]
    assert sorted(case.key for case in runs) == sorted(
        case.key for case in cases if case.task != "base"
    )
    assert {case.key for case in runs} >= {case.key for case in RUNS if case not in done}


@given(done=st.sets(st.sampled_from(CASES)), count=st.integers(1, 9))
def test_fine_tuning_is_compared_within_one_process(done: set[Any], count: int) -> None:
    cases = left({case.key for case in done})
    for index in range(count):
        share = delay_cases.share_of(cases, index, count)
        for case in share:
            if case.task == "tune":
                exact = delay_cases.Case(
                    size=case.size, task="tune", lr=case.lr, seed=case.seed, delay=None
                )
                assert exact in share
                assert any(one.task == "base" and one.size == case.size for one in share)


def test_nothing_is_left_where_all_is_done() -> None:
    assert left({case.key for case in CASES}) == []


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "a/b", "0/0"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no share, expected"):
        delay_study.share_in(text)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Runs that all take as many steps, so that those of all slots end together."""

    def train(case: Any, *_: Any, **__: Any) -> Generator[None, None, Any]:
        for _ in range(3):
            yield
        line = {"case": asdict(case), "seconds": 0.0, "train_loss": 1.0, "validation_loss": 1.0}
        return delay_study.Ended(line=line, masters=[])

    monkeypatch.setattr(delay_study, "train", train)
    monkeypatch.setattr(
        delay_study, "read_texts", lambda device: dict.fromkeys(["base", "new", "tune"])
    )
    return delay_study


def lines_of(path: Path) -> list[Any]:
    return [json.loads(text)["case"] for text in path.read_text().splitlines()]


def test_runs_go_on_where_those_of_all_slots_end_together(
    trained: ModuleType, tmp_path: Path
) -> None:
    path, cases = tmp_path / "runs.jsonl", delay_cases.plan()["tiny"]
    runner = trained.Runner(path, set(), math.inf, torch.device("cpu"), fuse=False)
    runner.run(cases)
    assert sorted(map(json.dumps, lines_of(path))) == sorted(json.dumps(asdict(c)) for c in cases)
    assert trained.done_in(path) == {case.key for case in cases}
    assert left(trained.done_in(path)) == left({case.key for case in cases})


def test_no_run_is_begun_that_would_not_end_in_time(
    trained: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cases = tmp_path / "runs.jsonl", delay_cases.plan()["tiny"]
    trained.Runner(path, set(), -math.inf, torch.device("cpu"), fuse=False).run(cases)
    assert not path.exists()
    assert f"{len(cases)} runs are left" in capsys.readouterr().out
