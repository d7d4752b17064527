"""A step is prepared while the device computes the norm: what that may not change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from optim_cases import bits
from prepared_steps import KINDS, made_as, preparing
from resident_models import assert_alike, made
from selected_models import loss_of, model_of, train
from stepwell import OffloadAdamW, Volume
from stepwell.offload.engine import Engine
from stepwell.offload.gradients import Gradients
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
    model, optimizer = made_as(kind)
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
        with preparing(monkeypatch, is_early=is_early):
            run = made_as(kind)
            losses = train(*run, range(9))
            runs.append((run, losses))
    assert runs[0][1] == runs[1][1]
    assert_alike(runs[0][0], runs[1][0])


def seen(optimizer: OffloadAdamW) -> dict[str, Any]:
    """All that a program sees, or a later step follows from."""
    states = optimizer.__dict__["state"]
    params = optimizer._in_order()
    steps, host = optimizer._deferred_steps, optimizer._host
    return {
        "weights": [bits(param).tolist() for param in params],
        "versions": [param._version for param in params],
        "states": {
            id(param): {name: bits(value).tolist() for name, value in state.items()}
            for param, state in states.items()
        },
        "fresh": set(host._fresh),
        "outdated": set(host.fingerprints._outdated),
        "unverified": set(host.fingerprints._unverified),
        "stale": set(optimizer._twins.stale()),
        "steps": None if steps is None else (steps._is_excused, vars(steps._settled_steps).copy()),
        "left": optimizer._has_left,
        "pending": dict(optimizer._engine._pending) if optimizer._engine else {},
        "swapping": list(optimizer._swapping[0]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_while_a_step_is_prepared(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer = made_as(kind)
    read_with, pairs = Gradients.read_with, []

    def read(self: Gradients, scalar: torch.Tensor, meanwhile: Callable[[], None]) -> float:
        before = seen(optimizer)
        found = read_with(self, scalar, meanwhile)
        pairs.append((before, seen(optimizer)))
        return found

    monkeypatch.setattr(Gradients, "read_with", read)
    steps = range(5)
    for step in steps:
        # One that is stepped no more has updates that are deferred.
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for param in list(model.parameters())[2 if step > 2 else 9 :][:1]:
            param.grad = None
        optimizer.step()
    assert len(pairs) == len(steps)
    for before, after in pairs:
        assert before == after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_step_that_is_skipped_or_refused_leaves_nothing_of_what_was_prepared(
    monkeypatch: pytest.MonkeyPatch, kind: str, bad: int
) -> None:
    runs = []
    for is_early, nonfinite in ((True, "skip"), (True, "raise"), (False, "skip")):
        with preparing(monkeypatch, is_early=is_early):
            model, optimizer = made_as(kind, nonfinite=nonfinite)
            train(model, optimizer, range(bad))
            optimizer.zero_grad()
            (math.inf * next(model.parameters()).sum()).backward()
            for param in model.parameters():
                param.grad = torch.full_like(param, math.nan)
            if nonfinite == "raise":
                with pytest.raises(ValueError, match="norm of the gradients"):
                    optimizer.step()
            else:
                optimizer.step()
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
        with preparing(monkeypatch, is_early=is_early) as patched:
            model, optimizer = made_as(kind)
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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_step_whose_norm_is_summed_over_ranks_is_prepared_when_it_is_decided(
    monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh
) -> None:
    # Of one mesh: where the norm is not finite the ranks look again, behind the wait.
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]))
    optimizer = OffloadAdamW([weight])
    # Of one rank, which has no other to agree with.
    monkeypatch.setattr(OffloadAdamW, "_agreeing_meshes", lambda _: [mesh])
    calls = record(monkeypatch)
    weight.grad = weight.detach().clone()
    optimizer.step()
    assert calls == ["launched", "read", "prepared"]
    optimizer.synchronize()
