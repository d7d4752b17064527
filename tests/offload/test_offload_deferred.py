"""Deferred updates: each gradient once, with its own coefficients; every look sees all of them."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from insides import (
    core_of,
    engine_of,
    forwards_wait,
    gate_of,
    is_any_under_way,
    num_pending,
)
from stepwell import Deferred, OffloadAdamW, _state
from stepwell._budget import GIB
from stepwell.store import gradients
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


def test_forwards_in_training_do_not_wait_for_what_is_deferred() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(4))
    assert num_pending(optimizer)
    loss_of(model, 4)
    assert num_pending(optimizer)


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


def test_warmup_steps_are_exact() -> None:
    model = model_of()
    exact_model = copy.deepcopy(model)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4, warmup_steps=5))
    exact = OffloadAdamW(exact_model, lr=1e-2)
    assert train(model, optimizer, range(6)) == train(exact_model, exact, range(6))
    assert train(model, optimizer, range(6, 10)) != train(exact_model, exact, range(6, 10))


def test_a_capture_does_not_begin_with_late_weights() -> None:
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


def test_evaluation_with_gradients_after_a_forward_in_training_sees_all_updates() -> None:
    model = model_of()
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=Deferred(interval=4))
    train(model, optimizer, range(6))
    loss_of(model, 6)
    assert num_pending(optimizer)
    # A part in evaluation mode within a model in training reads what has landed.
    model[2].eval()  # type: ignore[index]
    loss_of(model, 7)
    assert num_pending(optimizer)
    model.eval()
    loss_of(model, 7)
    assert not num_pending(optimizer)


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
        assert num_pending(optimizer)
        landed.append(weights(model))
        optimizer.drain()
    for ahead, behind in zip(*landed, strict=True):
        num_updates = (behind - ahead) / lr
        expected = torch.full_like(num_updates, (interval + 1) / 2)
        torch.testing.assert_close(num_updates, expected, atol=0.05, rtol=0)


# ---- what is told ----


def test_metrics_of_a_step() -> None:
    model = model_of()
    deferred = Deferred(interval=3, fraction=0.25, reselect=4)
    optimizer = OffloadAdamW(model, lr=1e-2, deferred=deferred)
    assert optimizer.deferral is None
    train(model, optimizer, range(6))
    loss_of(model, 6)
    engine_of(optimizer).finish()
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


# ---- host memory ----


def matrices() -> nn.Module:
    """Matrices of one size, of which each turn has as many: what gradients take depends on it."""
    model = nn.Sequential()
    for _ in range(8):
        model.extend([nn.Linear(640, 640), nn.LayerNorm(640)])
    return model.to(torch.bfloat16)


@pytest.mark.parametrize(("moments", "most"), [("fp32", 20), ("q8", 14)])
def test_host_memory_is_announced_as_documented_and_no_more_is_taken(
    moments: str, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = matrices()
    numel = sum(param.numel() for param in model.parameters())

    def optimizer_with(host_bytes_max: int) -> OffloadAdamW:
        return OffloadAdamW(
            model,
            lr=1e-3,
            moments=moments,  # type: ignore[arg-type]
            host_bytes_max=host_bytes_max,
            deferred=Deferred(interval=4),
        )

    with pytest.raises(ValueError, match="bytes of host memory, `0` are left") as refused:
        optimizer_with(0)
    (announced,) = map(int, re.findall(r"take `(\d+)` bytes", str(refused.value)))
    assert announced <= most * numel
    with pytest.raises(ValueError, match=f"`{announced - 1}` are left of `host_bytes_max`"):
        optimizer_with(announced - 1)
    with caplog.at_level(logging.INFO, "stepwell"):
        optimizer = optimizer_with(announced)
    (said,) = [each for each in caplog.records if "GiB of host memory for" in each.getMessage()]
    assert said.args is not None
    assert said.args[:2] == (announced / GIB, numel)  # type: ignore[index]
    for _ in range(6):
        model(torch.randn(2, 640, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.deferral is not None and optimizer.deferral.oldest_age > 0
    pinned = core_of(optimizer).pinned_nbytes
    state = sum(map(_state.nbytes_of, optimizer.state.values()))
    assert 0.9 * announced < pinned + state <= announced
