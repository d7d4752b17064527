"""`interval="auto"`, with measured times that the tests make up; what is told of deferral."""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import stepwell
import torch
from stepwell import Deferred, OffloadAdamW
from stepwell.offload import host_side
from stepwell.offload.deferral import SettledSteps
from stepwell.offload.deferred import Extents, memory_of
from stepwell.offload.deferred_steps import DeferredSteps
from stepwell.offload.interval import WINDOW_STEPS, IntervalTuner, StepTimes
from test_offload_deferred import loss_of, model_of, train

if TYPE_CHECKING:
    from collections.abc import Callable

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
        # At 7 it is 38 / 56 of it.
        (StepTimes(step=1.2, waited=0.2, turn=1.25), 7),
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


@pytest.mark.parametrize("begin", [IntervalTuner.forget, lambda tuner: tuner.set(4)])
def test_measuring_begins_anew_where_updates_were_applied(
    begin: Callable[[IntervalTuner], None],
) -> None:
    tuner = IntervalTuner("fp32")
    for _ in range(2):
        for _ in range(WINDOW_STEPS - 1):
            tuner.note(StepTimes(step=1.0, waited=0.0, turn=0.1))
        begin(tuner)
        tuner.note(StepTimes(step=1.0, waited=0.0, turn=0.1))
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
    assert not engine.pending_params
    assert "have interval=5 from now on, after 4" in caplog.text
    train(model, optimizer, range(40, 43))
    assert optimizer._engine is engine and engine.pending_params
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
    # So does one that is still to choose, of state that came with none.
    chosen = resumed.state_dict()["param_groups"][0]["deferred_interval"]
    resumed.load_state_dict(fixed.state_dict())
    assert resumed.state_dict()["param_groups"][0]["deferred_interval"] == chosen


def test_the_interval_stays_where_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"deferred updates of all .* take") as refused:
        auto(monkeypatch, SLOW, host_bytes_max=1)
    room = int(str(refused.value).split("`")[3])
    model, optimizer = auto(monkeypatch, SLOW, host_bytes_max=room)
    train(model, optimizer, range(2 * WINDOW_STEPS + 6))
    assert optimizer.deferral is not None and optimizer.deferral.interval == 4
    assert optimizer._engine is not None and optimizer._engine.pending_params
    assert caplog.text.count("keep interval=4") == 1


def test_another_interval_counts_on_what_an_engine_gives_back_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state dict may bring one before the first step: no engine has taken memory by then."""
    held: list[int] = []
    announce = host_side.announce

    def noted(*args: int, **options: Any) -> object:
        held.append(options["held"])
        return announce(*args, **options)

    model = model_of()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=Deferred(interval="auto"))
    monkeypatch.setattr(host_side, "announce", noted)
    saved = optimizer.state_dict()
    for interval in (5, 6):
        saved["param_groups"][0]["deferred_interval"] = interval
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(1))
    given_back = memory_of(Extents.of(model.parameters()), Deferred(interval=5)).pinned
    assert held == [0, given_back]


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
    model = model_of()
    exact = OffloadAdamW(model.parameters(), lr=1e-2)
    train(model, exact, range(1))
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


@pytest.mark.parametrize("how", ["interrupted", "skipped"])
def test_steps_behind_those_that_were_left_or_skipped_are_no_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=Deferred(interval=4))
    for step in range(36):
        if step % 2 == 0:
            train(model, optimizer, range(step, step + 1))
        elif how == "interrupted":
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(OffloadAdamW, "_submit", mock.Mock(side_effect=KeyboardInterrupt))
                train(model, optimizer, range(step, step + 1))
        else:
            loss = math.inf * loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # All were exact.
    assert optimizer.deferral.oldest_age == 0
    assert not [line for line in caplog.messages if "steps were exact" in line]


@pytest.mark.parametrize("interval", [0, 9, "often"])
def test_other_intervals_are_refused(interval: int) -> None:
    wanted = f"`interval` is `{interval}`, expected an integer, 1 to 8, or auto"
    with pytest.raises(ValueError, match=wanted):
        stepwell.Deferred(interval=interval)


# ---- which steps are deferred ----


def test_a_step_is_deferred_once_it_is_warm_seen_and_not_the_first() -> None:
    said: list[str] = []
    steps = DeferredSteps(Deferred(interval=2, warmup_steps=3), "fp32", said.append)
    assert steps.chosen_interval is None
    assert steps.measure(1.0, {}, is_settled=False, has_pending=True) is None
    for step, is_deferred in ((1, False), (3, False), (4, True), (5, True)):
        assert steps.is_deferred(step, is_seen=True, is_settled=False) == is_deferred
        assert not steps.is_deferred(step, is_seen=True, is_settled=True)
        # The next step is one more.
        assert steps.is_followed_by_deferred(step, is_seen=True) == (step >= 3)
        assert not steps.is_followed_by_deferred(step, is_seen=False)
    assert not said
    # After the last update was applied nothing is known of the next forward.
    assert not steps.is_deferred(5, is_seen=False, is_settled=True)
    assert not said
    for _ in range(2):
        assert not steps.is_deferred(5, is_seen=False, is_settled=False)
    assert len(said) == 1
    assert "every step is exact" in said[0]


def test_the_interval_of_steps_is_chosen_from_their_beginnings() -> None:
    steps = DeferredSteps(Deferred(interval="auto"), "fp32")
    assert (steps.deferred.interval, steps.chosen_interval) == (4, 4)
    # Of 1 s each, and in time by far.
    timing = {"step": 0.25, "gradients": 0.05, "gate": 0.0}
    found = []
    for second in range(2 * WINDOW_STEPS):
        is_settled, has_pending = second == 3, second > 3
        found.append(
            steps.measure(100.0 + second, timing, is_settled=is_settled, has_pending=has_pending)
        )
    # The steps after the fourth are measured.
    assert found.index(1) == 3 + WINDOW_STEPS
    assert [each for each in found if each is not None] == [1]
    assert steps.at_interval(1).interval == 1
    assert steps.deferred.interval == 4
    steps.set_interval(1)
    assert (steps.deferred.interval, steps.chosen_interval) == (1, 1)
    late = {"step": 3.0, "gradients": 0.0, "gate": 2.0}
    # There is no memory for what would be better.
    for expected in (5, None):
        found = [
            steps.measure(200.0 + 3 * second, late, is_settled=second == 0, has_pending=True)
            for second in range(WINDOW_STEPS + 1)
        ]
        assert found[-1] == expected
        steps.limit_interval()


def test_looks_are_warned_of_where_steps_would_be_deferred(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step, is_seen, count in ((3, True, 0), (4, False, 0), (4, True, 1)):
        steps = DeferredSteps(Deferred(interval=2, warmup_steps=3), "fp32")
        caplog.clear()
        for _ in range(16):
            steps.note(step, is_seen=is_seen, is_settled=True)
        assert caplog.text.count("were exact") == count
