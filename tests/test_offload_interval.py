"""`interval="auto"`, with measured times that the tests make up; what is told of deferral."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

import pytest
import stepwell
import torch
from stepwell import Deferred, OffloadAdamW
from stepwell.offload.deferral import SettledSteps
from stepwell.offload.interval import WINDOW_STEPS, IntervalTuner, StepTimes
from test_offload_deferred import loss_of, model_of, train

if TYPE_CHECKING:
    from torch import nn


def chosen(times: StepTimes, *, interval: int = 4, moments: str = "fp32") -> int | None:
    tuner = IntervalTuner(moments)
    tuner.set(interval)
    for _ in range(WINDOW_STEPS - 1):
        tuner.note(times)
        assert tuner.choice() is None
    tuner.note(times)
    choice = tuner.choice()
    assert tuner.choice() is None
    return choice


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # In time, and an interval of 3 would not be by far enough.
        (StepTimes(step=1.0, waited=0.0, turn=0.9), None),
        # At 3 the turn takes 10 / 8 as long.
        (StepTimes(step=1.0, waited=0.0, turn=0.55), 3),
        # Without deferral by several steps: 26 / 8.
        (StepTimes(step=1.0, waited=0.0, turn=0.2), 1),
        # It takes 1.2 where there is 1: at 6 it is .75 of it, at 5 .85.
        (StepTimes(step=1.2, waited=0.2, turn=1.1), 6),
        (StepTimes(step=1.2, waited=0.2, turn=1.05), 5),
        # Waiting for something else.
        (StepTimes(step=1.2, waited=0.2, turn=0.8), None),
        # None is enough.
        (StepTimes(step=9.0, waited=8.0, turn=9.0), 8),
        # Late by less than is told from noise.
        (StepTimes(step=1.0, waited=0.01, turn=1.0), None),
    ],
)
def test_the_interval_follows_from_what_steps_take(times: StepTimes, expected: int | None) -> None:
    assert chosen(times) == expected


def test_coded_moments_move_less() -> None:
    times = StepTimes(step=1.0, waited=0.0, turn=0.25)
    assert chosen(times) == 2
    assert chosen(times, moments="q8") == 1


def test_a_step_that_was_held_up_does_not_count() -> None:
    tuner = IntervalTuner("fp32")
    for number in range(WINDOW_STEPS):
        slow = number % 4 == 0
        tuner.note(StepTimes(step=9.0 if slow else 1.0, waited=8.0 if slow else 0.0, turn=0.9))
    assert tuner.choice() is None


def test_measuring_begins_anew_where_updates_were_applied() -> None:
    tuner = IntervalTuner("fp32")
    for _ in range(2):
        for _ in range(WINDOW_STEPS - 1):
            tuner.note(StepTimes(step=1.0, waited=0.0, turn=0.1))
        tuner.forget()
        assert tuner.choice() is None


SLOW = StepTimes(step=1.2, waited=0.2, turn=1.05)


def auto(
    monkeypatch: pytest.MonkeyPatch, times: StepTimes, **options: int
) -> tuple[nn.Module, OffloadAdamW]:
    monkeypatch.setattr(StepTimes, "of", lambda *_: times)
    model = model_of()
    deferred = Deferred(interval="auto")
    return model, OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred, **options)


def test_a_change_applies_everything_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    model, optimizer = auto(monkeypatch, SLOW)
    train(model, optimizer, range(WINDOW_STEPS + 1))
    assert optimizer.deferral is not None and optimizer.deferral.interval == 4
    first = optimizer._engine
    # The first step was exact. The last measured one is over where the next begins.
    train(model, optimizer, range(WINDOW_STEPS + 1, WINDOW_STEPS + 2))
    assert optimizer.deferral.interval == 5
    engine = optimizer._engine
    assert engine is not None and engine is not first
    assert not engine.behind
    assert "have interval=5 from now on, after 4" in caplog.text
    train(model, optimizer, range(40, 43))
    assert optimizer._engine is engine and engine.behind
    counts = {int(state["step"]) for state in optimizer.state.values()}
    assert counts == {WINDOW_STEPS + 5}


def test_a_resumed_run_has_the_interval_and_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = auto(monkeypatch, SLOW)
    train(model, optimizer, range(WINDOW_STEPS + 4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    went_on = train(model, optimizer, range(20, 20 + WINDOW_STEPS + 6))
    resumed_model, resumed = auto(monkeypatch, SLOW)
    train(resumed_model, resumed, range(90, 93))
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.state_dict()["param_groups"][0]["deferred_interval"] == 5
    assert "deferred_interval" not in resumed.param_groups[0]
    assert train(resumed_model, resumed, range(20, 20 + WINDOW_STEPS + 6)) == went_on
    for param, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(param, other)
    # A run with a fixed interval keeps its own.
    fixed = OffloadAdamW(model.parameters(), lr=1e-2, deferred=Deferred(interval=2))
    fixed.load_state_dict(saved[1])
    train(model, fixed, range(2))
    assert fixed.deferral is not None and fixed.deferral.interval == 2


def test_the_interval_stays_where_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="parameters take") as refused:
        auto(monkeypatch, SLOW, host_bytes_max=1)
    room = int(str(refused.value).split("`")[1])
    model, optimizer = auto(monkeypatch, SLOW, host_bytes_max=room)
    train(model, optimizer, range(2 * WINDOW_STEPS + 6))
    assert optimizer.deferral is not None and optimizer.deferral.interval == 4
    assert optimizer._engine is not None and optimizer._engine.behind
    assert caplog.text.count("keep interval=4") == 1


# ---- what is told ----


def test_metrics_of_a_step() -> None:
    model = model_of()
    deferred = Deferred(interval=3, fraction=0.25, reselect=4)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred)
    assert optimizer.deferral is None
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert optimizer._engine is not None
    optimizer._engine.finish()
    metrics = optimizer.deferral
    assert metrics is not None
    assert metrics.interval == 3 and metrics.oldest_age == 2 - 1
    assert 0.25 < metrics.captured_share <= 1
    assert metrics.selected_bytes == optimizer.timing["selected_bytes"] > 0
    assert metrics.background_seconds > 0 and metrics.waited_seconds >= 0
    exact = OffloadAdamW(model_of().parameters(), lr=1e-2)
    assert exact.deferral is None


def test_looks_in_every_step_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=Deferred(interval=4))
    for step in range(18):
        train(model, optimizer, range(step, step + 1))
        # An average of weights, say.
        next(model.parameters()).norm()
    warnings = [line for line in caplog.messages if "steps were exact" in line]
    assert len(warnings) == 1 and "of the last 16 steps" in warnings[0]


def test_warnings_of_looks_become_rare(caplog: pytest.LogCaptureFixture) -> None:
    settled = SettledSteps()
    for _ in range(2000):
        settled.note(is_settled=True)
    # At 16, 160 and 1600.
    assert len(caplog.messages) == 3
    settled = SettledSteps()
    caplog.clear()
    for number in range(2000):
        settled.note(is_settled=number % 3 == 0)
    assert not caplog.messages


@pytest.mark.parametrize("interval", [0, 9, "often"])
def test_other_intervals_are_refused(interval: int) -> None:
    with pytest.raises(ValueError, match=f"`interval` is `{interval}`, expected 1 to 8, or auto"):
        stepwell.Deferred(interval=interval)
