"""Which runs are left out, and what the engine is told (`benches/delay_engine.py`)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benches"))
    try:
        import delay_engine
    finally:
        del sys.path[0]
    return delay_engine


@pytest.fixture
def trained(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was trained, with a base of loss 1.5."""
    found: list[Any] = []

    def line_of(work: Any, base: dict[str, Any] | None, _: torch.device) -> dict[str, Any]:
        found.append(work)
        line = {"case": bench.dataclasses.asdict(work.case), "by": work.by, "seconds": 0.0}
        line |= {"train_loss": 1.0, "validation_loss": 1.0}
        return line if base is None else line | {"base": base["loss"]}

    monkeypatch.setattr(bench, "line_of", line_of)
    monkeypatch.setattr(bench, "base_of", lambda *_: {"masters": [], "loss": 1.5})
    return found


def works_of(bench: ModuleType) -> list[Any]:
    return [work for work in bench.plan("tiny", ["tune", "new"]) if "zenflow" not in work.by]


def test_a_run_that_has_its_line_is_left_out(
    bench: ModuleType, trained: list[Any], tmp_path: Path
) -> None:
    path, works = tmp_path / "runs.jsonl", works_of(bench)
    bench.run(path, works[:3], math.inf, CPU)
    bench.run(path, works, math.inf, CPU)
    assert trained == works
    assert len(path.read_text().splitlines()) == len(works) == len(bench.done_in(path))


def test_a_run_from_another_base_is_another_run(
    bench: ModuleType, trained: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    work = works_of(bench)[0]
    assert work.case.task == "tune"
    line = {"case": bench.dataclasses.asdict(work.case), "by": work.by, "base": 1.25}
    path.write_text(json.dumps(line) + "\n")
    bench.run(path, [work], math.inf, CPU)
    assert trained == [work]


def test_no_run_is_begun_that_would_not_end_in_time(
    bench: ModuleType, trained: list[Any], tmp_path: Path
) -> None:
    bench.run(tmp_path / "runs.jsonl", works_of(bench), -math.inf, CPU)
    assert trained == []


def test_a_plan_names_no_run_twice(bench: ModuleType) -> None:
    works = bench.plan("tiny", ["tune", "new"])
    assert len(works) == len(set(works))
    assert {work.by for work in works} == set(bench.get_args(bench.By))
    assert {work.case.task for work in bench.plan("tiny", ["new"])} == {"new"}


def test_the_engine_takes_no_means(bench: ModuleType) -> None:
    deferred = bench.deferred_of(bench.SELECTED)
    assert (deferred.interval, deferred.predict, deferred.fraction) == (4, True, 0.1)
    assert bench.deferred_of(bench.PREDICTED) == bench.Deferred()
    with pytest.raises(ValueError, match="expected updates one after the other"):
        bench.deferred_of(bench.ZENFLOW)


def test_matrices_are_viewed_as_they_are_stored(bench: ModuleType) -> None:
    matrix, norm = torch.arange(6.0).view(2, 3), torch.tensor([7.0, 8.0])
    params = [torch.zeros(2), torch.zeros(2, 3)]
    optimizer = SimpleNamespace(
        bit16_groups_flat=[torch.cat([matrix.t().flatten(), torch.zeros(2), norm])],
        round_robin_bit16_groups=[params[::-1]],
        round_robin_bit16_meta=[[matrix, norm]],
        round_robin_bit16_offsets=[[0, 8]],
        round_robin_bit16_indices=[[1, 0]],
        bit16_groups=[params],
    )
    bench.view_by_columns(optimizer, 0)
    assert torch.equal(params[0], norm)
    assert torch.equal(params[1], matrix)


@pytest.mark.parametrize("which", ["exact", "deferred"])
def test_16_bit_weights_are_those_of_the_simulation(bench: ModuleType, which: str) -> None:
    """Losses of the study's model, its weights in bf16, by the engine and by the simulation."""
    delay = None if which == "exact" else bench.PREDICTED
    case = bench.Case(size="tiny", task="new", lr=1e-3, delay=delay)
    engine, simulated = bench.EngineTrainer(case, None, CPU), bench.Trainer(case, None, CPU)
    generator = torch.Generator().manual_seed(0)
    for _ in range(16):
        batch = torch.randint(0, 256, (2, 33), generator=generator)
        # A weight whose last bit is another moves a loss by 1e-4.
        assert float(engine.step(batch)) == pytest.approx(float(simulated.step(batch)), rel=1e-3)
    engine.drain()
    simulated.drain()
    # Of what weights moved, 16 steps of 1e-3.
    for param, other in zip(engine.model.parameters(), simulated.model.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-2, atol=1e-3)
