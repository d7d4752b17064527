"""What is told of deferral, and which steps are deferred."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import stepwell
from stepwell import Deferred, OffloadAdamW
from stepwell.store.deferred_steps import DeferredSteps, StepKind
from test_offload_deferred import loss_of, model_of, train

# ---- what is told ----


def test_metrics_of_a_step() -> None:
    model = model_of()
    deferred = Deferred(interval=3, fraction=0.25, reselect=4)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=deferred)
    assert optimizer.deferral is None
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert optimizer._background.engine is not None
    optimizer._background.engine.finish()
    metrics = optimizer.deferral
    assert metrics is not None
    assert metrics.interval == 3 and metrics.oldest_age == 2 - 1
    assert 0.25 < metrics.captured_share <= 1
    assert metrics.selected_bytes == optimizer.timing["selected_bytes"] > 0
    assert metrics.background_seconds > 0 and metrics.waited_seconds >= 0
    model = model_of()
    exact = OffloadAdamW(model, lr=1e-2)
    train(model, exact, range(1))
    assert exact.deferral is None


def test_looks_in_every_step_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    for step in range(18):
        train(model, optimizer, range(step, step + 1))
        # An average of weights, say.
        next(model.parameters()).norm()
    warnings = [line for line in caplog.messages if "steps were exact" in line]
    assert len(warnings) == 1 and "of the last 16 steps" in warnings[0]


def test_warnings_of_looks_become_rare(caplog: pytest.LogCaptureFixture) -> None:
    steps = DeferredSteps(0)
    for _ in range(2000):
        steps.note(StepKind.EXACT_AFTER_SETTLE)
    # At 16, 160 and 1600.
    assert len(caplog.messages) == 3
    steps = DeferredSteps(0)
    caplog.clear()
    for number in range(2000):
        steps.note(StepKind.DEFERRED.now(is_settled=number % 3 == 0))
    assert not caplog.messages


@pytest.mark.parametrize("how", ["interrupted", "skipped"])
def test_steps_behind_those_that_were_left_or_skipped_are_no_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
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


@pytest.mark.parametrize("interval", [0, 9, 2.0, True, "auto"])
def test_other_intervals_are_refused(interval: int) -> None:
    wanted = f"`interval` is `{interval!r}`, expected an integer, 1 to 8. hint: .* interval=4"
    with pytest.raises(ValueError, match=wanted):
        stepwell.Deferred(interval=interval)


# ---- which steps are deferred ----


def test_a_step_is_deferred_once_it_is_warm_seen_and_not_the_first() -> None:
    said: list[str] = []
    steps = DeferredSteps(3, said.append)
    exact, last = StepKind.EXACT, StepKind.EXACT_BEFORE_DEFERRED
    for step, kind in ((1, exact), (2, exact), (3, last), (4, StepKind.DEFERRED)):
        assert steps.decide(step, is_seen=True, is_settled=False) is kind
        settled = steps.decide(step, is_seen=True, is_settled=True)
        assert settled is (StepKind.EXACT_AFTER_SETTLE if step > 3 else kind)
        assert settled.selects == (step >= 3)
    assert not said
    # After the last update was applied nothing is known of the next forward.
    assert steps.decide(5, is_seen=False, is_settled=True) is exact
    assert not said
    for _ in range(2):
        assert steps.decide(5, is_seen=False, is_settled=False) is exact
    assert len(said) == 1
    assert "every step is exact" in said[0]


def test_looks_are_warned_of_where_steps_would_be_deferred(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step, is_seen, count in ((3, True, 0), (4, False, 0), (4, True, 1)):
        steps = DeferredSteps(3)
        caplog.clear()
        for _ in range(16):
            steps.note(steps.decide(step, is_seen=is_seen, is_settled=True))
        assert caplog.text.count("were exact") == count
