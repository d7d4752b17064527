"""Gradients of several backwards, summed by autograd, under deferred updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from insides import engine_of, num_pending
from selected_models import DTYPES, assert_same, loss_of, model_of, pair
from stepwell import Deferred
from stepwell.store import gradients

if TYPE_CHECKING:
    from torch import nn

STEPS = range(1, 13)
# Told how many backwards there are, the optimizer takes each sum within the last one.
TOLD = [2, None]


def read_by_forwards(model: nn.Module, twin: nn.Module) -> None:
    """`twin` gets the weights of `model`, of which a forward in training has begun."""
    with torch.no_grad():
        for mine, read in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(read)


def gradients_of(model: nn.Module, part: int) -> list[torch.Tensor]:
    """Of one backward. No parameter has any afterwards."""
    return list(torch.autograd.grad(loss_of(model, part), list(model.parameters())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("interval", "fraction"), [(1, 0.0), (4, 0.0), (4, 0.25), (4, 1.0)])
@pytest.mark.parametrize("accumulation_steps", TOLD)
def test_what_is_applied_is_the_sum_of_all_backwards_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    interval: int,
    fraction: float,
    accumulation_steps: int | None,
) -> None:
    """Of weights that are late. An exact engine is handed sums of separate gradients of these."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)
    deferred = Deferred(interval=interval, fraction=fraction, reselect=3)
    model, optimizer = pair(deferred, dtype, accumulation_steps=accumulation_steps)[0]
    exact_model, exact = pair(deferred, dtype)[1]
    twin = model_of(dtype)
    num_late = 0
    for step in STEPS:
        parts = []
        for part in (2 * step, 2 * step + 1):
            loss = loss_of(model, part)
            read_by_forwards(model, twin)
            loss.backward()
            parts.append(gradients_of(twin, part))
        params = zip(exact_model.parameters(), twin.parameters(), strict=True)
        num_late += sum(not torch.equal(newest, read) for newest, read in params)
        for param, one, other in zip(exact_model.parameters(), *parts, strict=True):
            param.grad = one + other
        for each in (optimizer, exact):
            each.step()
            each.zero_grad()
        assert optimizer.grad_norm == exact.grad_norm
    assert num_pending(optimizer)
    assert (num_late > 0) == (fraction < 1)
    assert_same((model, optimizer), (exact_model, exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulation_steps", TOLD)
def test_everything_selected_is_an_exact_run_of_the_same_sums(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, accumulation_steps: int | None
) -> None:
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)
    deferred = Deferred(interval=4, fraction=1.0)
    runs = pair(deferred, dtype, accumulation_steps=accumulation_steps)
    losses: list[list[float]] = [[], []]
    for step in STEPS:
        for (model, optimizer), found in zip(runs, losses, strict=True):
            for part in (2 * step, 2 * step + 1):
                loss = loss_of(model, part)
                loss.backward()
                found.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
    deferring = engine_of(runs[0][1])
    assert deferring is not None and deferring.pending_params
    assert_same(*runs)
