"""Selected channels: stepped on the device at once, with the bits that the host gives them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from insides import core_of, engine_of, host_weight, is_pending, num_pending
from optim_cases import bits
from selected_models import (
    CODECS,
    DEVICE,
    DTYPES,
    assert_same,
    drawn,
    loss_of,
    model_of,
    pair,
    step_with,
    train,
)
from stepwell import Deferred, OffloadAdamW
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


def test_a_selected_row_has_every_update_in_the_next_forward() -> None:
    """Without prediction, a weight is that of the last step where it is selected."""
    deferred = Deferred(interval=4, fraction=0.25, reselect=100)
    (model, optimizer), exact = pair(deferred)
    weight = model.get_parameter("first.weight")
    for step in range(1, 7):
        step_with(model, optimizer, step)
        step_with(*exact, step)
    loss_of(model, 7)
    assert num_pending(optimizer)
    # A forward in training lets the parameter be read.
    now, expected = weight.detach(), exact[0].get_parameter("first.weight").detach()
    rows, columns = (int((now == expected).all(dim).sum()) for dim in (1, 0))
    assert num_pending(optimizer)
    assert (rows, columns) in {(8, 0), (0, 10)}
    bias = model.get_parameter("first.bias").detach()
    assert torch.equal(bias, exact[0].get_parameter("first.bias").detach())


class Recorded:
    """The selections that an optimizer hands to its engine, as they are in place."""

    def __init__(self, optimizer: OffloadAdamW) -> None:
        assert engine_of(optimizer).selector is not None
        self.segments = {one.segment: one for one in core_of(optimizer).selectable()}
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.held: dict[int, tuple[bool, list[int]]] = {}
        selector, choose = engine_of(optimizer).selector, engine_of(optimizer).selector.choose
        self.next: dict[int, tuple[bool, list[int]]] = {}

        def recording(at_once: Any) -> Any:
            chosen = choose(at_once)
            self.next = {segment: (axis, channels) for segment, axis, channels in chosen}
            return chosen

        selector.choose = recording  # type: ignore[method-assign]

    def selected(self, param: torch.Tensor) -> torch.Tensor:
        """Which elements of `param` the device steps."""
        mask = torch.zeros(param.numel(), dtype=torch.bool)
        for number, (by_columns, channels) in self.held.items():
            one = self.segments[number]
            if self.params[one.tensor] is param:
                block = mask[one.first : one.first + one.rows * one.row_len]
                block = block.view(one.rows, one.row_len)
                if by_columns:
                    block[:, channels] = True
                else:
                    block[channels] = True
        return mask.view(param.shape)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_what_a_forward_reads_is_current_where_selected_and_bounded_elsewhere(
    interval: int,
) -> None:
    """Elementwise: how many updates a weight lacks. Gradients do not depend on weights."""
    deferred = Deferred(interval=interval, fraction=0.2, reselect=3, predict=False)
    (model, optimizer), exact = pair(deferred)
    # It is exact.
    step_with(model, optimizer, 1)
    step_with(*exact, 1)
    params, expected = list(model.parameters()), list(exact[0].parameters())
    history = [[param.detach().cpu().clone()] for param in expected]
    recorded = Recorded(optimizer)
    num_current, num_moved = 0, 0
    for step in range(2, 27):
        step_with(model, optimizer, step)
        step_with(*exact, step)
        # Neither waits: a forward in training has read them.
        loss_of(model, 0)
        assert num_pending(optimizer)
        for index, (param, newest) in enumerate(zip(params, expected, strict=True)):
            history[index].append(newest.detach().cpu().clone())
            weight = param.detach().cpu()
            lag = torch.full(param.shape, 99)
            for age, then in enumerate(reversed(history[index])):
                lag[(weight == then) & (lag == 99)] = age
            assert int(lag.max()) <= interval, f"step {step}, parameter {index}"
            is_selected = recorded.selected(param)
            assert not lag[is_selected].any(), f"step {step}, parameter {index}"
            num_current += int(is_selected.sum())
        before = dict(recorded.held)
        recorded.held.update(recorded.next)
        num_moved += sum(before.get(key, now) != now for key, now in recorded.held.items())
    # The first selections are those of the exact step, which is not recorded.
    assert num_current > 1000 and num_moved > 3
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


def test_four_dimensions_have_channels_like_two() -> None:
    """Each element of the weights has its gradient once, however late it is."""
    found = []
    for deferred in (None, Deferred(interval=4, fraction=1.0), Deferred(interval=3, fraction=0.3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 9, (3, 2)), nn.Conv2d(9, 5, 3)).to(DEVICE)
        optimizer = OffloadAdamW(model, lr=1e-2, clip_norm=1.0, threads=1, deferred=deferred)
        for step in range(14):
            model(torch.zeros(1, 3, 8, 8, device=DEVICE)).sum().backward()
            for index, param in enumerate(model.parameters()):
                param.grad = drawn(param, step, index)
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer))
    exact, everything, some = found
    whole = 12 * sum(param.numel() for param in exact[0].parameters())
    assert 0 < some[1].timing["selected_bytes"] < whole <= everything[1].timing["selected_bytes"]
    # Gradients do not depend on how late weights are.
    assert_same(everything, exact)
    assert_same(some, exact)


class Zeros(nn.Module):
    """Two weights that are -0; what its forward has read of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4, 4), -0.0) for _ in range(2))
        self.read: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        self.read = [(weight * 1).detach().cpu() for weight in self.weights]
        return -torch.stack(list(self.weights)).sum()


@pytest.mark.parametrize("lrs", [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0)])
def test_groups_whose_scalars_are_zeros_of_other_signs_are_stepped_apart(
    lrs: tuple[float, float],
) -> None:
    read = []
    for deferred in (None, Deferred(interval=4, fraction=1.0)):
        model = Zeros().to(DEVICE)
        groups = [{"params": [w], "lr": lr} for w, lr in zip(model.weights, lrs, strict=True)]
        optimizer = OffloadAdamW(groups, weight_decay=0.0, threads=1, deferred=deferred)
        for _ in range(4):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        model()
        read.append([weight.view(torch.int32) for weight in model.read])
    assert all(map(torch.equal, *read))


def test_nothing_selected_takes_nothing_and_changes_nothing() -> None:
    deferred = Deferred(interval=2, fraction=0.0)
    (model, optimizer), _ = pair(deferred)
    other = copy.deepcopy(model)
    other_optimizer = OffloadAdamW(
        other, lr=1e-2, weight_decay=0.1, clip_norm=1.0, deferred=Deferred(interval=2)
    )
    assert train(model, optimizer, range(8)) == train(other, other_optimizer, range(8))
    assert engine_of(optimizer).selector is None
    assert "selected_bytes" not in optimizer.timing


LOOKS = ["eval", "state_dict", "access", "drain", "state", "copy"]


@pytest.mark.parametrize("how", LOOKS)
def test_every_look_sees_all_updates(how: str) -> None:
    deferred = Deferred(interval=4, fraction=0.3, reselect=4)
    selected, exact = pair(deferred)
    for step in range(1, 12):
        step_with(*selected, step)
        step_with(*exact, step)
    model, optimizer = selected
    if how == "eval":
        model.eval()
        with torch.no_grad():
            loss_of(model, 6)
        model.train()
    elif how == "state_dict":
        model.state_dict()
    elif how == "access":
        assert next(model.parameters()).norm() > 0
    elif how == "drain":
        optimizer.drain()
    elif how == "state":
        assert optimizer.state
    else:
        copy.deepcopy(model)
    assert not num_pending(optimizer)
    for param, expected in zip(model.parameters(), exact[0].parameters(), strict=True):
        assert torch.equal(param, expected)
    for step in range(12, 20):
        step_with(*selected, step)
        step_with(*exact, step)
    assert_same(selected, exact)


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


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_is_not_finite_is_dropped_for_all_channels(nonfinite: Any) -> None:
    selected, exact = pair(Deferred(interval=3, fraction=0.3, reselect=2), nonfinite=nonfinite)
    for step in range(1, 12):
        for each in (selected, exact):
            if step in {5, 8}:
                loss_of(each[0], step).backward()
                next(each[0].parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
                if nonfinite == "raise":
                    with pytest.raises(ValueError, match="norm"):
                        each[1].step()
                else:
                    each[1].step()
                each[1].zero_grad()
            else:
                step_with(*each, step)
    assert_same(selected, exact)


@pytest.mark.parametrize("seed", range(6))
def test_parameters_may_miss_gradients(seed: int) -> None:
    deferred = Deferred(interval=1 + seed % 4, fraction=0.4, reselect=1 + 3 * seed)
    selected, exact = pair(deferred)

    def has_grad(step: int, index: int) -> bool:
        # Some for longer than any turn takes to come round.
        generator = torch.Generator().manual_seed(97 * seed + 31 * (step // 7) + index)
        is_long = bool(torch.rand((), generator=generator) < 0.3)
        generator.manual_seed(1000 * seed + 10 * step + index)
        return not is_long and bool(torch.rand((), generator=generator) < 0.8)

    for step in range(1, 40):
        for each in (selected, exact):
            step_with(*each, step, has_grad)
    assert_same(selected, exact)


def test_a_write_between_a_step_and_the_next_forward_counts() -> None:
    (model, optimizer), _ = pair(Deferred(interval=2, fraction=0.5), lr=1e-9, weight_decay=0.0)
    weight = model.get_parameter("first.weight")
    # After the first, which is exact and selects, as well as after later ones.
    for begin, count, value in ((0, 1, 0.75), (1, 5, 0.5), (6, 1, 0.25)):
        train(model, optimizer, range(begin, begin + count))
        with torch.no_grad():
            weight.fill_(value)
        train(model, optimizer, range(begin + count, begin + count + 1))
        assert torch.allclose(weight.float().cpu(), torch.tensor(value), atol=1e-2)
    train(model, optimizer, range(10, 14))
    weight.data.fill_(0.125)
    train(model, optimizer, range(14, 20))
    assert torch.allclose(weight.float().cpu(), torch.tensor(0.125), atol=1e-2)


def test_a_write_after_the_forward_that_follows_an_exact_step_counts() -> None:
    """The device has masters of selected channels then, that no step has touched yet."""
    (model, optimizer), _ = pair(Deferred(interval=2, fraction=0.5), lr=1e-9, weight_decay=0.0)
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()
    weight = model.get_parameter("last.weight")
    with torch.no_grad():
        weight.fill_(0.5)
    optimizer.step()
    train(model, optimizer, range(2, 7))
    optimizer.drain()
    assert torch.allclose(weight.float().cpu(), torch.tensor(0.5), atol=1e-2)


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_left_out_for_long_is_settled_only_where_it_was_written(is_written: bool) -> None:
    """A write to it would not be seen. A resumed run has seen less than the one that went on."""
    deferred = Deferred(interval=2, fraction=0.5, reselect=100)
    (model, optimizer), _ = pair(deferred, lr=1e-9, weight_decay=0.0)
    weight = model.get_parameter("last.weight")
    index = [name for name, _ in model.named_parameters()].index("last.weight")
    for step in range(1, 14):
        if step == 13 and is_written:
            weight.data.fill_(0.5)
        step_with(model, optimizer, step, lambda step, at: at != index or not 4 <= step < 13)
        engine = engine_of(optimizer)
        assert engine is not None
        is_exact = step == 1 or (step == 13 and is_written)
        assert bool(engine.pending_params) != is_exact, step
    optimizer.drain()
    assert torch.equal(weight.float(), torch.full_like(weight.float(), 0.5)) == is_written


def test_a_write_after_a_later_forward_is_refused() -> None:
    (model, optimizer), _ = pair(Deferred(interval=2, fraction=0.5))
    train(model, optimizer, range(5))
    loss_of(model, 5).backward()
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.01, 0.01)
    with pytest.raises(ValueError, match="the writes are lost"):
        optimizer.step()
    for param in model.parameters():
        assert torch.equal(param.cpu(), host_weight(optimizer, param))
    train(model, optimizer, range(6, 12))


def test_a_step_that_updates_a_weight_at_once_ends_its_selection() -> None:
    """It waits for what is held by others, too, and selects anew in the next turn of the weight."""
    deferred = Deferred(interval=2, fraction=0.25, reselect=100)
    (model, optimizer), exact = pair(deferred)
    weight = model.get_parameter("first.weight")
    for step in range(1, 12):
        # A forward in training lets the parameter be read.
        loss_of(model, step)
        kept = weight.detach() if step == 4 else None
        step_with(model, optimizer, step)
        step_with(*exact, step)
        assert is_pending(optimizer, weight) == (step not in {1, 4})
        del kept
    loss_of(model, 12)
    now, expected = weight.detach(), exact[0].get_parameter("first.weight").detach()
    rows, columns = (int((now == expected).all(dim).sum()) for dim in (1, 0))
    assert (rows, columns) in {(8, 0), (0, 10)}


def test_an_exact_step_that_was_not_scored_is_followed_by_another() -> None:
    """What is held gets no gradient, and lacks updates: all are applied, which no score foresaw."""
    deferred = Deferred(interval=2, fraction=0.25, reselect=100)
    (model, optimizer), exact = pair(deferred)
    weight = model.get_parameter("first.weight")
    found = []
    for step in range(1, 8):
        loss_of(model, step)
        kept = weight.detach() if step == 4 else None
        for each in ((model, optimizer), exact):
            step_with(*each, step, lambda step, index: step != 4 or index > 0)
        found.append(num_pending(optimizer) > 0)
        del kept
    assert found == [False, True, True, False, False, True, True]
    assert_same((model, optimizer), exact)


def test_a_step_without_gradients_selects_nothing() -> None:
    selected, exact = pair(Deferred(interval=2, fraction=0.3))
    for step in range(1, 8):
        for model, optimizer in (selected, exact):
            optimizer.step()
            step_with(model, optimizer, step)
    assert_same(selected, exact)


def test_gradients_of_several_backwards_are_summed() -> None:
    selected, exact = pair(Deferred(interval=2, fraction=0.3, reselect=2), accumulation_steps=2)
    for step in range(1, 9):
        for model, optimizer in (selected, exact):
            for part in range(2):
                loss_of(model, 2 * step + part).backward()
            # The same for both: gradients of the same weights.
            for index, param in enumerate(model.parameters()):
                param.grad = drawn(param, step, index)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(selected, exact)


def test_parameters_may_be_added_frozen_and_thawed() -> None:
    selected, exact = pair(Deferred(interval=3, fraction=0.3, reselect=3))
    for step in range(1, 22):
        for model, optimizer in (selected, exact):
            first = next(model.parameters())
            first.requires_grad_(not 5 <= step < 15)
            step_with(model, optimizer, step, lambda step, index: index > 0 or not 5 <= step < 15)
            if step == 8:
                extra = nn.Linear(20, 20).to(DEVICE, torch.bfloat16)
                optimizer.add_param_group({"params": list(extra.parameters())})
    assert_same(selected, exact)


def test_lr_and_clipping_may_change() -> None:
    selected, exact = pair(Deferred(interval=4, fraction=0.2, reselect=8))
    for step in range(1, 15):
        for model, optimizer in (selected, exact):
            optimizer.param_groups[0]["lr"] = 1e-2 / step
            optimizer.clip_norm = 0.5 * step
            step_with(model, optimizer, step)
    assert_same(selected, exact)


def test_what_is_captured_is_told() -> None:
    (model, optimizer), _ = pair(Deferred(interval=2, fraction=0.25, reselect=2))
    for step in range(1, 7):
        step_with(model, optimizer, step)
    timing = optimizer.timing
    assert 0.25 < timing["selected_share"] < 1
    assert timing["selected_bytes"] > 0


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`fraction` is `1\.5`"):
        Deferred(fraction=1.5)
    with pytest.raises(ValueError, match="`reselect` is `0`"):
        Deferred(reselect=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    deferred = Deferred(interval=2, fraction=0.3)
    default, runs = torch.get_default_dtype(), []
    for while_stepping in (dtype, default):
        model = model_of()
        optimizer = OffloadAdamW(model, deferred=deferred)
        for step in range(6):
            loss_of(model, step).backward()
            torch.set_default_dtype(while_stepping)
            try:
                optimizer.step()
            finally:
                torch.set_default_dtype(default)
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same(*runs)
