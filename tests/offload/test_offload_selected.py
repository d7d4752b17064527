"""Selected channels: stepped on the device at once, with the bits that the host gives them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from insides import host_weight, num_pending
from optim_cases import bits
from selected_models import (
    CODECS,
    DEVICE,
    DTYPES,
    assert_same,
    drawn,
    loss_of,
    pair,
    step_with,
    train,
)
from stepwell import AdamW, Deferred, OffloadAdamW
from torch import nn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
@pytest.mark.parametrize("reselect", [1, 4])
def test_all_gradients_are_applied_once_whoever_steps(
    dtype: torch.dtype, interval: int, fraction: float, reselect: int
) -> None:
    deferred = Deferred(interval=interval, fraction=fraction, reselect=reselect)
    selected, exact = pair(deferred, dtype)
    for step in range(1, 14):
        for each in (selected, exact):
            step_with(*each, step)
        if step == 9:
            selected[1].drain()
    assert num_pending(selected[1])
    assert_same(selected, exact)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_what_a_forward_reads_is_current_where_selected_and_bounded_elsewhere(
    interval: int,
) -> None:
    """Elementwise: how many updates a weight lacks. Gradients do not depend on weights."""
    deferred = Deferred(interval=interval, fraction=0.2, reselect=3, predict=False)
    (model, optimizer), exact = pair(deferred)
    history = [[param.detach().cpu().clone()] for param in exact[0].parameters()]
    for step in range(1, 27):
        step_with(model, optimizer, step)
        step_with(*exact, step)
        # Neither waits: a forward in training has read them.
        loss_of(model, 0)
        assert bool(num_pending(optimizer)) == (step > 1)
        for (name, param), newest, before in zip(
            model.named_parameters(), exact[0].parameters(), history, strict=True
        ):
            before.append(newest.detach().cpu().clone())
            weight = param.detach().cpu()
            lag = torch.full(param.shape, 99)
            for age, then in enumerate(reversed(before)):
                lag[(weight == then) & (lag == 99)] = age
            assert int(lag.max()) <= interval, f"step {step}, {name}"
            # A fifth of the rows or of the columns is selected, and what is small as a whole.
            if param.dim() == 1:
                assert not lag.any(), f"step {step}, {name}"
            elif name == "first.weight":
                rows, columns = (int((lag == 0).all(dim).sum()) for dim in (1, 0))
                assert rows >= 6 or columns >= 8, f"step {step}"
    assert_same((model, optimizer), exact)


EXTREMES = (0.0, -0.0, 1e-45, -1e-40, 1.1754942e-38, 6e-8, 6.1e-5, 65504.0, 1e18, -3e38, 3.38e38)


def extreme(param: torch.Tensor, seed: int) -> torch.Tensor:
    """Finite values of all magnitudes, some of them special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(param.shape, generator=generator)
    values *= 10.0 ** torch.randint(-44, 38, param.shape, generator=generator)
    which = torch.randint(0, len(EXTREMES), param.shape, generator=generator)
    is_one = torch.rand(param.shape, generator=generator) < 1 / 6
    values = torch.where(is_one, torch.tensor(EXTREMES)[which], values)
    most = torch.finfo(param.dtype).max
    return values.clamp(-most, most).nan_to_num().to(DEVICE, param.dtype)


def assert_same_but_nans(
    one: tuple[nn.Module, OffloadAdamW], other: tuple[nn.Module, OffloadAdamW]
) -> None:
    for _, optimizer in (one, other):
        optimizer.state_dict()
    for param, expected in zip(one[0].parameters(), other[0].parameters(), strict=True):
        known = ~(param.isnan() & expected.isnan()).cpu()
        states = one[1].state[param], other[1].state[expected]
        found = [(param, expected), *((states[0][key], states[1][key]) for key in states[0])]
        for ours, theirs in found:
            if ours.shape == param.shape:
                is_nan = ours.isnan() & theirs.isnan()
                differ = (bits(ours) != bits(theirs)).cpu().view(param.shape) & known
                assert not (differ & ~is_nan.cpu()).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.filterwarnings("ignore")
def test_extreme_values_have_the_bits_of_an_exact_run(dtype: torch.dtype, fraction: float) -> None:
    selected, exact = pair(Deferred(interval=2, fraction=fraction), dtype, clip_norm=None)
    for model, _ in (selected, exact):
        with torch.no_grad():
            for index, param in enumerate(model.parameters()):
                param.copy_(extreme(param, index))
    for step in range(1, 7):
        for model, optimizer in (selected, exact):
            loss_of(model, step).backward()
            for index, param in enumerate(model.parameters()):
                param.grad = extreme(param, 100 * step + index)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_but_nans(selected, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_the_kernel_of_a_gpu_has_the_bits_of_the_host(dtype: torch.dtype, fraction: float) -> None:
    """Of several segments: rows cross their borders, and a launch has more than one block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1531, 3001), nn.LayerNorm(3001)).to("cuda", dtype)
    found = []
    for each, how in (
        (model, Deferred(interval=3, fraction=fraction, reselect=3)),
        (copy.deepcopy(model), None),
    ):
        optimizer = OffloadAdamW(each, lr=1e-2, weight_decay=0.1, deferred=how)
        for step in range(1, 9):
            x = torch.zeros(2, 1531, device="cuda", dtype=dtype)
            each(x).sum().backward()
            for index, param in enumerate(each.parameters()):
                make = extreme if step % 2 else lambda param, seed: drawn(param, seed, 0)
                param.grad = make(param, 100 * step + index).to("cuda")
            optimizer.step()
            optimizer.zero_grad()
        found.append((each, optimizer))
    assert_same_but_nans(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_selected_is_an_exact_run(dtype: torch.dtype) -> None:
    (model, optimizer), (exact_model, exact) = pair(Deferred(interval=4, fraction=1.0), dtype)
    assert train(model, optimizer, range(20)) == train(exact_model, exact, range(20))
    assert optimizer.timing["selected_bytes"] >= 12 * sum(p.numel() for p in model.parameters())
    assert_same((model, optimizer), (exact_model, exact))


@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize("moments", ["fp32", *CODECS])
def test_resuming_has_the_bits_of_going_on_with_a_drain(moments: str, has_trained: bool) -> None:
    def fresh() -> tuple[nn.Module, OffloadAdamW]:
        deferred = Deferred(interval=3, warmup_steps=2, fraction=0.3, reselect=5)
        return pair(deferred, moments=moments)[0]

    model, optimizer = fresh()
    train(model, optimizer, range(11))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    went_on = train(model, optimizer, range(11, 24))
    resumed_model, resumed_optimizer = fresh()
    if has_trained:
        # Steps of another training: its state is loaded over.
        train(resumed_model, resumed_optimizer, range(50, 57))
    resumed_model.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    assert train(resumed_model, resumed_optimizer, range(11, 24)) == went_on
    assert_same((resumed_model, resumed_optimizer), (model, optimizer))


@pytest.mark.parametrize("seed", range(6))
def test_parameters_may_miss_gradients_and_steps_be_left_out(seed: int) -> None:
    deferred = Deferred(interval=1 + seed % 4, fraction=0.4, reselect=1 + 3 * seed)
    selected, exact = pair(deferred)

    def has_grad(step: int, index: int) -> bool:
        # Some for longer than any turn takes to come round.
        generator = torch.Generator().manual_seed(97 * seed + 31 * (step // 7) + index)
        is_long = bool(torch.rand((), generator=generator) < 0.3)
        generator.manual_seed(1000 * seed + 10 * step + index)
        return not is_long and bool(torch.rand((), generator=generator) < 0.8)

    for step in range(1, 40):
        for model, optimizer in (selected, exact):
            if step % 13 == 0:
                (loss_of(model, step) * float("nan")).backward()
                optimizer.step()
                optimizer.zero_grad()
            step_with(model, optimizer, step, has_grad)
    assert selected[1].skipped_steps == exact[1].skipped_steps == 3
    assert_same(selected, exact)


# ---- moments that are coded: the host's state is that without a selection ----


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
