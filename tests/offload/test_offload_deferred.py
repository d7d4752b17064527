"""Deferred updates: each gradient once, with its own coefficients; every look sees all of them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import stepwell
import torch
from insides import (
    engine_of,
    forwards_wait,
    gate_of,
    host_weight,
    is_any_under_way,
    is_pending,
    num_pending,
)
from stepwell import Deferred, OffloadAdamW, _core
from stepwell.access.under_way import without_waiting
from stepwell.store import gradients
from stepwell.store.deferred import INTERVAL_MAX, Extents, memory_of
from torch import nn
from torch.utils import checkpoint as checkpointing

# The host is a device too: there copies are late as well.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(width: int = 64, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3)).to(DEVICE, dtype)


def loss_of(model: nn.Module, step: int, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, width, generator=generator).to(DEVICE, dtype)
    return model(x).float().square().mean()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 64
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, width)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("interval", [1, 3])
def test_gradients_that_do_not_depend_on_weights_are_all_applied(
    interval: int, moments: str
) -> None:
    """What is pending is applied before anything is read, to the same bits as without delay."""
    model = model_of()
    exact_model = copy.deepcopy(model)
    deferred = Deferred(interval=interval, warmup_steps=1)
    options: dict[str, Any] = {"lr": 1e-2, "moments": moments}
    optimizer = OffloadAdamW(model, deferred=deferred, **options)
    exact = OffloadAdamW(exact_model, **options)
    for step in range(1, 8):
        generator = torch.Generator().manual_seed(step)
        # A forward and a backward, whose gradients are replaced.
        loss_of(model, step).backward()
        loss_of(exact_model, step).backward()
        for param, other in zip(model.parameters(), exact_model.parameters(), strict=True):
            grad = torch.randn(param.shape, generator=generator).to(DEVICE, param.dtype)
            param.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        exact.step()
    assert num_pending(optimizer)
    if moments == "fp32":
        for param, other in zip(model.parameters(), exact_model.parameters(), strict=True):
            assert torch.equal(param, other)
    counts = [int(state["step"]) for state in optimizer.state.values()]
    assert counts == [7] * len(counts)
    assert not num_pending(optimizer)


def test_forwards_in_training_do_not_wait_for_what_is_deferred() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(4))
    assert num_pending(optimizer)
    loss_of(model, 4)
    assert num_pending(optimizer)


LOOKS = [
    "eval",
    "no_grad",
    "no_grad in training mode",
    "state_dict",
    "access",
    "drain",
    "synchronize",
    "state",
    "copy",
]


@pytest.mark.parametrize("how", LOOKS)
def test_every_look_sees_all_updates(how: str) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    engine = engine_of(optimizer)
    assert engine is not None and engine.pending_params
    if how == "eval":
        model.eval()
        loss_of(model, 6)
    elif how == "no_grad":
        model.eval()
        with torch.no_grad():
            loss_of(model, 6)
    elif how == "no_grad in training mode":
        with torch.no_grad():
            loss_of(model, 6)
    elif how == "state_dict":
        model.state_dict()
    elif how == "access":
        assert next(model.parameters()).norm() > 0
    elif how == "drain":
        optimizer.drain()
    elif how == "synchronize":
        optimizer.synchronize()
    elif how == "state":
        assert optimizer.state
    else:
        copy.deepcopy(model)
    assert not engine.pending_params
    for param in model.parameters():
        assert torch.equal(param.cpu(), host_weight(optimizer, param))


def test_a_forward_without_gradients_behind_one_with_them_reads_the_same_weights() -> None:
    """It may be a part of it, and the backward needs its weights as they are."""
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss = loss_of(model, 6)
    with torch.no_grad():
        assert torch.equal(loss_of(model, 6), loss)
    assert num_pending(optimizer)
    loss.backward()


class Checkpointed(nn.Sequential):
    """Runs without gradients at first, and again in the backward."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpointing.checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def test_a_reentrant_checkpoint_is_no_look() -> None:
    model = Checkpointed(*model_of().children())
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert num_pending(optimizer)


def test_autograd_sees_that_a_drain_has_written_weights() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss = loss_of(model, 6)
    optimizer.drain()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_drain_applies_all_and_holds_nothing() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    for step in range(0, 12, 4):
        train(model, optimizer, range(step, step + 4))
        engine = engine_of(optimizer)
        assert engine is not None and engine.pending_params and engine.held
        optimizer.drain()
        assert not engine.pending_params and not engine.held


def test_a_capture_does_not_begin_with_late_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(4))
    # It waits for all that has landed.
    loss_of(model, 4)
    assert not is_any_under_way(optimizer)
    with pytest.raises(ValueError, match=r"hint: optimizer.synchronize\(\) before the capture"):
        gate_of(optimizer).capture()
    assert forwards_wait(optimizer)
    optimizer.synchronize()
    gate_of(optimizer).capture()
    assert not forwards_wait(optimizer)


def test_a_parameter_that_was_swapped_sees_all_updates() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    optimizer.zero_grad()
    under_way = next(each for each in model.parameters() if type(each) is not nn.Parameter)
    other = nn.Parameter(torch.zeros_like(host_weight(optimizer, under_way)).to(DEVICE))
    other.__class__ = type(under_way)
    # It has the class of what is under way, and no guard.
    assert torch.equal(other.cpu(), torch.zeros(other.shape, dtype=other.dtype))
    assert not num_pending(optimizer)


def test_a_state_dict_in_the_middle_of_a_step_sees_all_updates() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert num_pending(optimizer)
    model.state_dict()
    assert not num_pending(optimizer)


def test_resuming_has_the_bits_of_going_on_with_a_drain() -> None:
    def fresh() -> tuple[nn.Module, OffloadAdamW]:
        model = model_of()
        deferred = Deferred(interval=3, warmup_steps=2)
        return model, OffloadAdamW(model, lr=1e-2, clip_norm=1.0, deferred=deferred)

    model, optimizer = fresh()
    train(model, optimizer, range(8))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    went_on = train(model, optimizer, range(8, 15))
    resumed_model, resumed_optimizer = fresh()
    # A step of another training: its state is loaded over.
    train(resumed_model, resumed_optimizer, range(50, 54))
    resumed_model.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    assert train(resumed_model, resumed_optimizer, range(8, 15)) == went_on
    for param, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_a_run_resumed_anew_sees_the_looks_of_the_one_that_went_on(
    fraction: float, thaws: bool
) -> None:
    """Also one behind its first step, which is the first that has a gate."""

    def fresh() -> tuple[nn.Module, OffloadAdamW]:
        model = model_of()
        model[1].requires_grad_(not thaws)
        deferred = Deferred(interval=3, warmup_steps=2, fraction=fraction)
        return model, OffloadAdamW(model, lr=1e-2, deferred=deferred)

    def went_on(model: nn.Module, optimizer: OffloadAdamW) -> list[float]:
        # With what has thawed the engine and the gate are made anew.
        model[1].requires_grad_(True)
        losses = train(model, optimizer, range(8, 9))
        assert model[2].weight.norm() > 0
        return losses + train(model, optimizer, range(9, 17))

    model, optimizer = fresh()
    train(model, optimizer, range(8))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = went_on(model, optimizer)
    resumed_model, resumed_optimizer = fresh()
    resumed_model.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    assert went_on(resumed_model, resumed_optimizer) == expected
    for param, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(param, other)
    # No hook is left but those of the gate.
    assert all(len(each._forward_pre_hooks) <= 1 for each in resumed_model)


def test_warmup_steps_are_exact() -> None:
    model = model_of()
    exact_model = copy.deepcopy(model)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4, warmup_steps=5))
    exact = OffloadAdamW(exact_model, lr=1e-2)
    assert train(model, optimizer, range(6)) == train(exact_model, exact, range(6))
    assert train(model, optimizer, range(6, 10)) != train(exact_model, exact, range(6, 10))


def test_a_step_that_is_skipped_is_dropped_for_all() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=2))
    train(model, optimizer, range(4))
    loss_of(model, 4).backward()
    next(iter(model.parameters())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    train(model, optimizer, range(5, 8))
    assert [int(state["step"]) for state in optimizer.state.values()] == [7] * 8
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("interval", [1, 3])
def test_a_parameter_without_gradients_is_behind_until_its_own_weight_has_landed(
    interval: int,
) -> None:
    model, deferred = model_of(), Deferred(interval=interval)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=deferred)
    train(model, optimizer, range(3))
    first, engine = next(iter(model.parameters())), engine_of(optimizer)
    has_pending, is_written = [], []
    assert engine is not None
    for step in range(3, 6 + 2 * deferred.interval):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        first.grad = None
        version = first._version
        optimizer.step()
        has_pending.append(is_pending(optimizer, first))
        is_written.append(first._version > version)
        assert (id(first) in engine.held) == is_pending(optimizer, first)
    assert has_pending == [True] * (2 * deferred.interval) + [False] * 3
    # The last of these has landed its own weight.
    assert is_written == [True] * (2 * deferred.interval + 1) + [False] * 2
    with without_waiting():
        assert torch.equal(first.cpu(), host_weight(optimizer, first))


def test_gradients_that_an_engine_took_which_is_gone_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)
    found = []
    for accumulation_steps in (1, None):
        model = model_of()
        optimizer = OffloadAdamW(
            model.parameters(),
            model=model,
            lr=1e-2,
            deferred=Deferred(interval=2),
            accumulation_steps=accumulation_steps,
        )
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device=DEVICE))]})
        optimizer.step()
        optimizer.drain()
        found.append(weights(model))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def pending_of(optimizer: OffloadAdamW) -> int:
    return num_pending(optimizer)


def test_an_optimizer_that_goes_leaves_weights_with_all_updates() -> None:
    model, exact_model = model_of(), model_of()
    for net, deferred in ((model, Deferred(interval=4)), (exact_model, None)):
        optimizer = OffloadAdamW(net, lr=1e-2, deferred=deferred)
        for step in range(6):
            loss_of(net, 0).backward()
            for index, param in enumerate(net.parameters()):
                generator = torch.Generator().manual_seed(100 * step + index)
                grad = torch.randn(param.shape, generator=generator)
                param.grad = grad.to(DEVICE, param.dtype)
            optimizer.step()
        del optimizer
    for param, other in zip(model.parameters(), exact_model.parameters(), strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_applies_nothing_leaves_nothing_pending(nonfinite: Any) -> None:
    model = model_of()
    deferred = Deferred(interval=4)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=deferred, nonfinite=nonfinite)
    train(model, optimizer, range(6))
    assert pending_of(optimizer)
    loss_of(model, 6).backward()
    next(iter(model.parameters())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    if nonfinite == "raise":
        with pytest.raises(ValueError, match="norm"):
            optimizer.step()
    else:
        optimizer.step()
    assert not pending_of(optimizer)
    for param in model.parameters():
        assert torch.equal(param.cpu(), host_weight(optimizer, param))


def test_evaluation_with_gradients_after_a_forward_in_training_sees_all_updates() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert pending_of(optimizer)
    # A part in evaluation mode within a model in training reads what has landed.
    model[2].eval()  # type: ignore[index]
    loss_of(model, 7)
    assert pending_of(optimizer)
    model.eval()
    loss_of(model, 7)
    assert not pending_of(optimizer)


def test_a_write_after_the_forward_is_refused() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=2))
    train(model, optimizer, range(4))
    loss_of(model, 4).backward()
    with torch.no_grad():
        next(iter(model.parameters())).clamp_(-0.01, 0.01)
    with pytest.raises(ValueError, match="the writes are lost") as caught:
        optimizer.step()
    assert "drain()" in str(caught.value)
    # By the names that the model has for them, and no other.
    assert "lost: parameter `0.weight` (group 0, index 0, shape (64, 64)). " in str(caught.value)
    # It can be done again, in a way that counts.
    optimizer.drain()
    with torch.no_grad():
        next(iter(model.parameters())).clamp_(-0.01, 0.01)
    train(model, optimizer, range(5, 8))
    assert float(next(iter(model.parameters())).detach().abs().max()) < 0.1


def test_a_write_between_a_step_and_the_next_forward_counts() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-9, deferred=Deferred(interval=2))
    train(model, optimizer, range(4))
    first = next(iter(model.parameters()))
    with torch.no_grad():
        first.fill_(0.5)
    train(model, optimizer, range(4, 8))
    assert torch.allclose(first.float().cpu(), torch.tensor(0.5), atol=1e-2)
    first.data.fill_(0.25)
    train(model, optimizer, range(8, 12))
    assert torch.allclose(first.float().cpu(), torch.tensor(0.25), atol=1e-2)


def test_writes_through_data_to_frozen_parameters_count() -> None:
    """At any time, once their last update has landed."""
    model = model_of()
    first = next(iter(model.parameters()))
    optimizer = OffloadAdamW(model, lr=1e-9, deferred=Deferred(interval=2))
    train(model, optimizer, range(4))
    first.requires_grad_(requires_grad=False)
    train(model, optimizer, range(4, 8))
    engine = engine_of(optimizer)
    assert engine is not None and is_pending(optimizer, first)
    train(model, optimizer, range(8, 9))
    assert engine.pending_params and not is_pending(optimizer, first)
    loss_of(model, 10)
    # What lay ahead along the momentum is the host's own weight by now.
    assert torch.equal(first.cpu(), host_weight(optimizer, first))
    for values in (0.5, 0.25):
        loss_of(model, 10)
        first.data.fill_(values)
        train(model, optimizer, range(10, 13))
        first.requires_grad_(requires_grad=True)
        train(model, optimizer, range(13, 16))
        optimizer.drain()
        assert torch.allclose(first.float().cpu(), torch.tensor(values), atol=1e-2)
        first.requires_grad_(requires_grad=False)
        train(model, optimizer, range(16, 23))


def test_what_cannot_be_seen_is_not_deferred(caplog: pytest.LogCaptureFixture) -> None:
    params = [nn.Parameter(torch.randn(50, device=DEVICE))]
    optimizer = OffloadAdamW(params, lr=1e-2, deferred=Deferred())
    with caplog.at_level(logging.WARNING, "stepwell"):
        for _ in range(3):
            params[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [line for line in caplog.messages if "not deferred" in line]
    assert len(said) == 1
    assert "no model is given. hint: OffloadAdamW(model, ...)" in said[0]
    assert not num_pending(optimizer)


def test_what_is_compiled_later_is_not_deferred_and_the_warning_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred())
    loss = torch.compile(lambda step: loss_of(model, step), backend="eager")
    with caplog.at_level(logging.WARNING, "stepwell"):
        for step in range(4):
            loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [line for line in caplog.messages if "not deferred" in line]
    assert len(said) == 1
    assert "torch.compile" in said[0] and "layer.compile()" in said[0]
    assert "no model is given" not in said[0]


def test_options_that_do_not_go_together_are_refused() -> None:
    params = [nn.Parameter(torch.randn(50, device=DEVICE))]
    with pytest.raises(ValueError, match="`accumulate` is `host`"):
        OffloadAdamW(params, deferred=Deferred(), accumulate="host")
    with pytest.raises(ValueError, match=r"`deferred` is `4`, expected a stepwell.Deferred"):
        OffloadAdamW(params, deferred=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`interval` is `9`"):
        Deferred(interval=9)
    for option in ("interval", "warmup_steps", "reselect"):
        for value in (1.5, True, 1 << 70):
            with pytest.raises(ValueError, match=f"`{option}` is `{value}`, expected an integer"):
                Deferred(**{option: value})
    with pytest.raises(ValueError, match="`warmup_steps` is `-1`"):
        Deferred(warmup_steps=-1)
    assert stepwell.Deferred is Deferred


def test_the_largest_interval_is_the_cores() -> None:
    _core.deferral_nbytes([1], ["bfloat16"], INTERVAL_MAX)
    with pytest.raises(ValueError, match=f"expected 1 to {INTERVAL_MAX}"):
        _core.deferral_nbytes([1], ["bfloat16"], INTERVAL_MAX + 1)


def test_memory_is_announced_and_taken_as_announced() -> None:
    model = model_of(256)
    numel = sum(param.numel() for param in model.parameters())
    with pytest.raises(ValueError, match="bytes of host memory"):
        OffloadAdamW(model, deferred=Deferred(interval=4), host_bytes_max=17 * numel)
    OffloadAdamW(model, deferred=Deferred(interval=4), host_bytes_max=28 * numel)


@pytest.mark.parametrize("interval", [1, 4])
def test_weights_that_land_run_ahead_by_the_updates_that_they_lack_on_average(
    interval: int,
) -> None:
    """With gradients that stay as they are each update is one of `lr`."""
    lr = 1e-3
    landed = []
    for predict in (True, False):
        model = model_of(dtype=torch.float32)
        deferred = Deferred(interval=interval, predict=predict)
        optimizer = OffloadAdamW(model, lr=lr, weight_decay=0.0, deferred=deferred)
        for step in range(3 * interval + 4):
            loss_of(model, step).backward()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        loss_of(model, 0)
        assert pending_of(optimizer)
        landed.append(weights(model))
        optimizer.drain()
    for ahead, behind in zip(*landed, strict=True):
        num_updates = (behind - ahead) / lr
        expected = torch.full_like(num_updates, (interval + 1) / 2)
        torch.testing.assert_close(num_updates, expected, atol=0.05, rtol=0)


def test_what_deferral_takes() -> None:
    shapes = [(64, 64), (64,), (0, 4), (8, 2, 3), ()]
    extents = Extents.of([torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])
    assert extents.row_lens == [64, 0, 0, 6, 0]
    plain = memory_of(extents, Deferred(predict=False))
    assert plain.gradients > 0
    assert plain[1:] == (0, 0, 0)
    assert plain.pinned == plain.gradients
    ahead = memory_of(extents, Deferred())
    assert ahead.pinned == ahead.gradients + ahead.predicted > plain.pinned
    for options in ({"fraction": 0.5}, {"fraction": 1.0}):
        selected = memory_of(extents, Deferred(**options))
        assert selected[:2] == ahead[:2]
        assert selected.pinned == ahead.pinned + selected.staging > ahead.pinned
        assert selected.selected > 0
