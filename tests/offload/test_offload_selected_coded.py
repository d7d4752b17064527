"""Selected channels of coded moments: the host's state is that without a selection, and the device
steps its copy in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from insides import host_weight, num_pending
from selected_models import CODECS, DTYPES, assert_same, drawn, loss_of, pair, step_with
from stepwell import AdamW, Deferred

if TYPE_CHECKING:
    from stepwell import OffloadAdamW
from torch import nn


def beside_unselected(
    deferred: Deferred, dtype: torch.dtype, moments: str, **options: Any
) -> list[tuple[nn.Module, OffloadAdamW]]:
    """The same model with coded moments, as `deferred` says, and without selected channels."""
    unselected = replace(deferred, fraction=0.0)
    return [pair(how, dtype, moments=moments, **options)[0] for how in (deferred, unselected)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moments", CODECS)
@pytest.mark.parametrize(
    ("interval", "fraction", "predict"), [(1, 0.2, False), (3, 0.2, True), (2, 1.0, True)]
)
def test_coded_state_is_that_without_selected_channels(
    dtype: torch.dtype, moments: str, interval: int, fraction: float, predict: bool
) -> None:
    """Masters, moments and weights, whatever is selected and however often that changes."""
    deferred = Deferred(
        interval=interval, fraction=fraction, reselect=2 * interval, predict=predict
    )
    selected, unselected = beside_unselected(deferred, dtype, moments)
    for step in range(1, 20):
        for model, optimizer in (selected, unselected):
            if step == 7:
                loss_of(model, step).backward()
                next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            else:
                step_with(model, optimizer, step)
        if step == 12:
            selected[1].drain()
            unselected[1].drain()
    assert num_pending(selected[1])
    assert selected[1].skipped_steps == 1
    assert_same(selected, unselected)


def master_of(weight: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The master that the state has, or the weight and its trailing bits: a carry to the upper half
    where they are negative."""
    if "trailing" in state:
        trailing = state["trailing"].to(torch.int32)
        return ((weight.view(torch.int16).to(torch.int32) << 16) + trailing).view(torch.float32)
    return state.get("master", weight).clone()


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the weight of a master is: of bf16, ties away from zero."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    upper = (master.view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moments", CODECS)
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_forwards_read_fp32_steps_of_the_state_that_was_coded(
    dtype: torch.dtype, moments: str, fraction: float
) -> None:
    """From the selection on; what coding rounds away later is not in them."""
    deferred = Deferred(interval=2, fraction=fraction, reselect=100, predict=False)
    options: dict[str, Any] = {"moments": moments, "clip_norm": None}
    (model, optimizer), _ = pair(deferred, dtype, **options)
    # The same first step, which is exact and selects.
    (twin, twin_optimizer), _ = pair(deferred, dtype, **options)
    step_with(model, optimizer, 1)
    step_with(twin, twin_optimizer, 1)
    decoded = twin_optimizer.decoded_state_dict()["state"]
    masters = [
        nn.Parameter(master_of(param.detach().cpu(), twin_optimizer.state[param]))
        for param in twin.parameters()
    ]
    in_fp32 = AdamW(masters, lr=1e-2, weight_decay=0.1)
    state = in_fp32.state_dict()
    state["state"] = {
        index: {name: parts[name] for name in ("step", "exp_avg", "exp_avg_sq")}
        for index, parts in decoded.items()
    }
    in_fp32.load_state_dict(state)
    for step in range(2, 10):
        step_with(model, optimizer, step)
        for index, (master, param) in enumerate(zip(masters, model.parameters(), strict=True)):
            master.grad = drawn(param, step, index).float().cpu()
        in_fp32.step()
    loss_of(model, 0)
    assert num_pending(optimizer)
    expected = [rounded(master.detach(), dtype) for master in masters]
    for (name, param), weight in zip(model.named_parameters(), expected, strict=True):
        is_same = param.detach().cpu() == weight
        if fraction == 1 or param.dim() == 1:
            assert is_same.all(), name
        elif name == "first.weight":
            rows, columns = (int(is_same.all(dim).sum()) for dim in (1, 0))
            assert (rows, columns) in {(8, 0), (0, 10)}
    assert num_pending(optimizer)
    # The host's are others, and count.
    optimizer.drain()
    weights = [param.detach().cpu() for param in model.parameters()]
    assert any(
        not torch.equal(weight, each) for weight, each in zip(weights, expected, strict=True)
    )
    for param in model.parameters():
        assert torch.equal(param.detach().cpu(), host_weight(optimizer, param))
