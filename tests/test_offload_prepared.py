"""A step is prepared while the device computes the norm: what that may not change."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from resident_models import FIRST, assert_alike, made
from selected_models import model_of, train
from stepwell import Deferred, Volume
from stepwell.offload.engine import Engine
from stepwell.offload.gate import Gate
from stepwell.offload.gradients import Gradients
from stepwell.offload.step import OffloadStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# With residents, with selected channels, with both, and coded.
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "residents": {"device_bytes_max": FIRST},
    "deferred": {"deferred": Deferred(interval=2)},
    "selected": {"deferred": Deferred(interval=2, fraction=0.3, reselect=2)},
    "both": {
        "device_bytes_max": FIRST,
        "deferred": Deferred(interval=2, fraction=0.3, reselect=2),
    },
    "q8": {"device_bytes_max": FIRST, "deferred": Deferred(interval=2), "moments": "q8"},
}


def not_early(patched: pytest.MonkeyPatch) -> None:
    """Steps are prepared when the norm is known, as those of ranks are."""
    norm_of = OffloadStep._norm_of
    patched.setattr(
        OffloadStep, "_norm_of", lambda self, params, grads, _: norm_of(self, params, grads, None)
    )


def record(patched: pytest.MonkeyPatch) -> list[str]:
    """The order of what is prepared and read, from now on."""
    calls: list[str] = []
    prepare, read_with = Engine.prepare, Gradients.read_with

    def read(self: Gradients, scalar: torch.Tensor, meanwhile: Callable[[], None]) -> float:
        calls.append("launched")
        found = read_with(self, scalar, meanwhile)
        calls.append("read")
        return found

    def prepared(self: Engine, *args: Any) -> Any:
        calls.append("prepared")
        return prepare(self, *args)

    patched.setattr(Engine, "prepare", prepared)
    patched.setattr(Gradients, "read_with", read)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_the_thread_prepares_a_step_before_it_waits_for_the_norm(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer = made(model_of(), **{"device_bytes_max": 0, **KINDS[kind]})
    calls = record(monkeypatch)
    train(model, optimizer, range(2))
    assert calls == 2 * ["launched", "prepared", "read"]


def test_a_step_that_writes_to_a_volume_is_prepared_when_it_is_decided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = made(model_of(), 0, tier=Volume([str(tmp_path)]))
    calls = record(monkeypatch)
    train(model, optimizer, range(2))
    assert calls == 2 * ["launched", "read", "prepared"]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_steps_that_are_prepared_later(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runs = []
    for is_early in (True, False):
        with monkeypatch.context() as patched:
            if not is_early:
                not_early(patched)
            run = made(model_of(), **{"device_bytes_max": 0, **KINDS[kind]})
            losses = train(*run, range(9))
            runs.append((run, losses))
    assert runs[0][1] == runs[1][1]
    assert_alike(runs[0][0], runs[1][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_step_that_is_skipped_or_refused_leaves_nothing_of_what_was_prepared(
    monkeypatch: pytest.MonkeyPatch, kind: str, bad: int
) -> None:
    runs = []
    for is_early, nonfinite in ((True, "skip"), (True, "raise"), (False, "skip")):
        with monkeypatch.context() as patched:
            if not is_early:
                not_early(patched)
            options = {"device_bytes_max": 0, **KINDS[kind], "nonfinite": nonfinite}
            model, optimizer = made(model_of(), **options)
            train(model, optimizer, range(bad))
            optimizer.zero_grad()
            before = copy.deepcopy(optimizer.state_dict()["state"]) if bad == 1 else None
            (math.inf * next(model.parameters()).sum()).backward()
            for param in model.parameters():
                param.grad = torch.full_like(param, math.nan)
            if nonfinite == "raise":
                with pytest.raises(ValueError, match="norm of the gradients"):
                    optimizer.step()
            else:
                optimizer.step()
            if before is not None:
                after = optimizer.state_dict()["state"]
                assert str(after) == str(before)
            train(model, optimizer, range(bad, 9))
            runs.append((model, optimizer))
    assert_alike(runs[0], runs[2])
    assert_alike(runs[1], runs[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [OSError("no memory"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_fails_while_it_is_prepared_can_be_taken_again(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException, at: int
) -> None:
    runs = []
    for is_early in (True, False):
        with monkeypatch.context() as patched:
            if not is_early:
                not_early(patched)
            model, optimizer = made(model_of(), **{"device_bytes_max": 0, **KINDS[kind]})
            train(model, optimizer, range(at))
            prepare = Engine.prepare

            def fail(self: Engine, *args: Any, prepare: Any = prepare) -> Any:
                prepare(self, *args)
                raise error

            with patched.context() as failing, pytest.raises(type(error)):
                failing.setattr(Engine, "prepare", fail)
                train(model, optimizer, [at])
            optimizer.step()
            train(model, optimizer, range(at + 1, 9))
            runs.append((model, optimizer))
    assert_alike(*runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["state_dict", "drain", "model", "nothing"])
def test_a_handler_that_looks_while_the_norm_is_computed_is_as_good_as_before(
    monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    runs = []
    for is_early in (True, False):
        with monkeypatch.context() as patched:
            if not is_early:
                not_early(patched)
            runs.append(looked_at(patched, KINDS[kind], what))
    assert str(runs[0][1]) == str(runs[1][1])
    assert_alike(runs[0][0], runs[1][0])


def looked_at(patched: pytest.MonkeyPatch, options: dict[str, Any], what: str) -> tuple[Any, Any]:
    """A run, and what a signal's handler has found in some of its steps.

    It runs when the wait for the norm has ended, before the step is submitted.
    """
    model, optimizer = run = made(model_of(), **{"device_bytes_max": 0, **options})
    looks: list[Any] = []
    handlers: dict[str, Callable[[], object]] = {
        "state_dict": lambda: looks.append(copy.deepcopy(optimizer.state_dict()["state"])),
        "drain": optimizer.drain,
        "model": lambda: looks.append(copy.deepcopy(model.state_dict())),
        "nothing": lambda: None,
    }
    read_with = Gradients.read_with

    def read(self: Gradients, *args: Any) -> float:
        found = read_with(self, *args)
        handlers[what]()
        return found

    for step in range(9):
        with patched.context() as handled:
            if step in (1, 4, 5):
                handled.setattr(Gradients, "read_with", read)
            train(*run, [step])
    return run, looks


@pytest.mark.parametrize("kind", ["exact", "residents", "deferred"])
def test_a_handler_that_saves_while_a_step_is_submitted_leaves_its_weights_awaited(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Forwards wait for the weights of a step from here on, and it is submitted next.
    _, optimizer = run = made(model_of(), **{"device_bytes_max": 0, **KINDS[kind]})
    train(*run, range(3))
    under_way: list[bool] = []
    opened = Gate.open

    def saved(self: Gate, *args: Any) -> None:
        opened(self, *args)
        before = self.guard.any_under_way
        optimizer.state_dict()
        under_way.append(before and self.guard.any_under_way)

    monkeypatch.setattr(Gate, "open", saved)
    train(*run, [3])
    assert under_way == [True]


def test_a_first_step_that_only_makes_state_prepares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made(model_of(), 0, lr=0.0)
    calls = record(monkeypatch)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert calls == ["launched", "read"]
    assert optimizer.state
