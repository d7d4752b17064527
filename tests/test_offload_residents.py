"""Parameters whose state stays on the device: stepped there, with the bits of host memory."""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optim_cases import bits
from selected_models import DEVICE, DTYPES, loss_of, model_of, step_with
from stepwell import Deferred, OffloadAdamW, Volume
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALL = 1 << 30
# Of state per parameter, and beside it once.
STATE_BYTES, EXTRA_BYTES = 12, 4
FIRST = STATE_BYTES * 33 * 40 + EXTRA_BYTES
"""What the first parameter of the model takes."""


def made(
    model: nn.Module, device_bytes_max: int = ALL, **options: Any
) -> tuple[nn.Module, OffloadAdamW]:
    """A copy of the model, and its optimizer."""
    model = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 1.0, **options}
    return model, OffloadAdamW(
        model.named_parameters(), device_bytes_max=device_bytes_max, **options
    )


def assert_alike(
    one: tuple[nn.Module, OffloadAdamW], other: tuple[nn.Module, OffloadAdamW]
) -> None:
    """Weights and state dicts are the same to the bit."""
    states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
    assert states[0].keys() == states[1].keys()
    named = enumerate(zip(one[0].named_parameters(), other[0].parameters(), strict=True))
    for index, ((name, param), expected) in named:
        assert torch.equal(bits(param), bits(expected)), name
        ours, theirs = states[0].get(index, {}), states[1].get(index, {})
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            assert value.is_cpu
            assert torch.equal(bits(value), bits(theirs[key])), f"{key} of {name}"


def some_have_none(step: int, index: int) -> bool:
    return (step + index) % 3 > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device_bytes_max", [FIRST, 2 * FIRST, ALL])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_bits_are_those_of_steps_in_host_memory(
    dtype: torch.dtype, device_bytes_max: int, weight_decay: float
) -> None:
    model = model_of(dtype)
    ours = made(model, device_bytes_max, weight_decay=weight_decay)
    theirs = made(model, 0, weight_decay=weight_decay)
    for step in range(1, 9):
        for each in (ours, theirs):
            step_with(*each, step, some_have_none)
        assert ours[1].grad_norm == theirs[1].grad_norm
    assert len(ours[1]._residents) > 0
    assert_alike(ours, theirs)


def test_groups_schedules_and_directions_are_each_parameters_own() -> None:
    model = model_of()
    pairs = []
    for device_bytes_max in (ALL, FIRST, 0):
        each = copy.deepcopy(model)
        params = list(each.parameters())
        groups = [
            {"params": params[:2], "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": params[2:4], "lr": 1e-3, "weight_decay": 0.3, "maximize": True},
            {"params": params[4:], "lr": torch.tensor(3e-3), "eps": 1e-5},
        ]
        optimizer = OffloadAdamW(groups, device_bytes_max=device_bytes_max)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(1, 7):
            step_with(each, optimizer, step, some_have_none)
            schedule.step()
        pairs.append((each, optimizer))
    assert_alike(pairs[0], pairs[2])
    assert_alike(pairs[1], pairs[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_either_kind_goes_on_from_the_others_state_dict(dtype: torch.dtype) -> None:
    runs = [made(model_of(dtype), nbytes) for nbytes in (ALL, 0)]
    for step in range(1, 4):
        for each in runs:
            step_with(*each, step)
    for saved in (0, 1):
        for nbytes in (ALL, FIRST, 0):
            resumed = made(runs[saved][0], nbytes)
            resumed[1].load_state_dict(copy.deepcopy(runs[saved][1].state_dict()))
            assert_alike(resumed, runs[0])
            for step in (4, 5):
                step_with(*resumed, step)
            went_on = made(runs[0][0], 0)
            went_on[1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
            for step in (4, 5):
                step_with(*went_on, step)
            assert_alike(resumed, went_on)


def test_a_state_dict_is_a_snapshot_and_saving_changes_nothing() -> None:
    (model, optimizer), other = made(model_of()), made(model_of())
    step_with(model, optimizer, 1)
    step_with(*other, 1)
    saved = optimizer.state_dict()["state"]
    before = {(index, key): bits(saved[index][key]) for index in saved for key in saved[index]}
    for step in (2, 3):
        step_with(model, optimizer, step)
        step_with(*other, step)
    assert all(torch.equal(bits(saved[index][key]), before[index, key]) for index, key in before)
    assert_alike((model, optimizer), other)


def test_decoded_state_dicts_are_in_host_memory() -> None:
    ours, theirs = made(model_of()), made(model_of(), 0)
    for each in (ours, theirs):
        step_with(*each, 1)
    decoded, expected = (each[1].decoded_state_dict()["state"] for each in (ours, theirs))
    for index, state in expected.items():
        assert decoded[index].keys() == state.keys()
        assert all(torch.equal(decoded[index][key].cpu(), state[key]) for key in ("exp_avg",))
        assert decoded[index]["exp_avg"].is_cpu


WRITES: dict[str, Callable[[nn.Module, OffloadAdamW], object]] = {
    "copy_": lambda model, _: [param.mul_(0.5) for param in model.parameters()],
    "data": lambda model, _: [param.data.mul_(0.5) for param in model.parameters()],
    "new data": lambda model, _: [
        setattr(param, "data", param.data * 0.5) for param in model.parameters()
    ],
    "load": lambda model, _: model.load_state_dict(
        {name: 0.5 * value for name, value in model.state_dict().items()}
    ),
    "moments": lambda _, optimizer: [
        state["exp_avg"].mul_(0.5) for state in optimizer.state.values()
    ],
    "new moments": lambda _, optimizer: [
        state.update(exp_avg=state["exp_avg"] * 0.5, exp_avg_sq=state["exp_avg_sq"].clone())
        for state in optimizer.state.values()
    ],
    "deleted": lambda _, optimizer: optimizer.state.clear(),
    "counts": lambda _, optimizer: [
        state.update(step=float(state["step"]) + 1) for state in optimizer.state.values()
    ],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", WRITES)
def test_what_the_program_writes_between_steps_counts(dtype: torch.dtype, write: str) -> None:
    runs = [made(model_of(dtype), nbytes) for nbytes in (ALL, 0)]
    for each in runs:
        for step in (1, 2):
            step_with(*each, step)
        with torch.no_grad():
            WRITES[write](*each)
        each[1].reread_parameters()
        for step in (3, 4):
            step_with(*each, step)
    assert_alike(*runs)


def test_a_write_that_is_seen_by_nothing_but_the_step_counts() -> None:
    """Through `.data`, with nothing to tell of it: the elements beside keep their masters."""
    (model, optimizer), untouched = (
        made(model_of(), clip_norm=None),
        made(model_of(), 0, clip_norm=None),
    )
    for each in ((model, optimizer), untouched):
        step_with(*each, 1)
    weight, expected = next(model.parameters()), next(untouched[0].parameters())
    weight.data[3, 5] = 7.0
    for each in ((model, optimizer), untouched):
        step_with(*each, 2)
    differs = bits(weight) != bits(expected)
    assert differs.nonzero().tolist() == [[3, 5]]
    # No update is larger than about lr (Kingma and Ba, section 2.1), beside what decays.
    assert 6.9 < float(weight.detach()[3, 5]) < 7.1
    trailing = [one.state_dict()["state"][0]["trailing"] for one in (optimizer, untouched[1])]
    differs = trailing[0] != trailing[1]
    assert differs.nonzero().tolist() in ([[3, 5]], [])


def test_state_that_is_kept_and_put_back_is_gone_on_from() -> None:
    model, optimizer = made(model_of())
    step_with(model, optimizer, 1)
    kept = {param: copy.deepcopy(state) for param, state in optimizer.state.items()}
    weights = copy.deepcopy(model.state_dict())
    step_with(model, optimizer, 2)
    expected = copy.deepcopy(model.state_dict())
    states = optimizer.state_dict()["state"]
    model.load_state_dict(weights)
    for param, state in kept.items():
        optimizer.state[param] = state
    step_with(model, optimizer, 2)
    again = optimizer.state_dict()["state"]
    assert all(
        torch.equal(bits(model.state_dict()[name]), bits(expected[name])) for name in expected
    )
    for index, state in states.items():
        assert all(torch.equal(bits(again[index][key]), bits(state[key])) for key in state)


def test_state_of_another_shape_is_refused_and_nothing_is_stepped() -> None:
    model, optimizer = made(model_of())
    step_with(model, optimizer, 1)
    first = next(model.parameters())
    optimizer.state[first] = {**optimizer.state[first], "exp_avg": torch.zeros(3)}
    before = {name: bits(value) for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"`exp_avg` .*first\.weight.* has the shape `\(3,\)`"):
        step_with(model, optimizer, 2)
    assert all(torch.equal(bits(value), before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("nonfinite", ["skip", "raise", "propagate"])
def test_a_gradient_that_is_not_finite_is_decided_on_for_all(where: int, nonfinite: str) -> None:
    runs = [made(model_of(), nbytes, nonfinite=nonfinite) for nbytes in (FIRST, 0)]
    for model, optimizer in runs:
        step_with(model, optimizer, 1)
        loss_of(model, 2).backward()
        grad = list(model.parameters())[where].grad
        assert grad is not None
        grad.view(-1)[0] = math.nan
        if nonfinite == "raise":
            with pytest.raises(ValueError, match="nan"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == (nonfinite == "skip")
        step_with(model, optimizer, 3)
    if nonfinite != "propagate":
        assert_alike(*runs)
    else:
        # NaNs may have another payload.
        for one, other in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
            assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_residents_have_fp32_moments_whatever_the_others_have(moments: str) -> None:
    coded, exact = made(model_of(), ALL, moments=moments), made(model_of(), 0)
    for each in (coded, exact):
        for step in range(1, 6):
            step_with(*each, step)
    assert_alike(coded, exact)
    # One without device memory has them coded, and one with it takes codes.
    host = made(coded[0], 0, moments=moments)
    host[1].load_state_dict(coded[1].state_dict())
    back = made(coded[0], ALL, moments=moments)
    back[1].load_state_dict(host[1].state_dict())
    for each in (host, back):
        step_with(*each, 6)
    one, other = (list(each[0].parameters()) for each in (host, back))
    for param, expected in zip(one, other, strict=True):
        # A step of the same codes, in the same arithmetic, before either is coded anew.
        assert torch.equal(bits(param), bits(expected))


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("device_bytes_max", [FIRST, 2 * FIRST, ALL])
def test_beside_deferred_updates_every_gradient_is_applied_once(
    fraction: float, device_bytes_max: int
) -> None:
    deferred = Deferred(interval=3, fraction=fraction, reselect=2)
    ours = made(model_of(), device_bytes_max, deferred=deferred)
    theirs = made(model_of(), 0)
    for step in range(1, 12):
        for each in (ours, theirs):
            step_with(*each, step, some_have_none)
        if step == 7:
            ours[1].drain()
    assert_alike(ours, theirs)


def test_a_resident_has_every_update_in_the_next_forward() -> None:
    model, optimizer = made(model_of(), FIRST, deferred=Deferred(interval=4))
    reference = made(model_of(), 0)
    for step in range(1, 7):
        step_with(model, optimizer, step)
        step_with(*reference, step)
    loss_of(model, 7)
    assert optimizer._engine is not None and optimizer._engine.pending_params
    first, last = (list(each.parameters()) for each in (model, reference[0]))
    assert torch.equal(bits(first[0]), bits(last[0]))


def test_steps_in_which_only_some_kinds_have_gradients() -> None:
    def has(step: int, index: int) -> bool:
        return [index == 0, index > 0, False, True][step % 4]

    for deferred in (None, Deferred(interval=2)):
        ours, theirs = made(model_of(), FIRST, deferred=deferred), made(model_of(), 0)
        for step in range(1, 14):
            for each in (ours, theirs):
                step_with(*each, step, has)
        assert_alike(ours, theirs)


def test_what_fits_is_stepped_on_the_device_and_takes_no_host_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["first.weight", "first.bias", "norm.weight"]
    nbytes = FIRST + 2 * (STATE_BYTES * 33 + EXTRA_BYTES)
    with caplog.at_level(logging.INFO, "stepwell"):
        model, optimizer = made(model_of(), nbytes + 10)
    numel = sum(param.numel() for param in model.parameters())
    params = dict(model.named_parameters())
    held = sum(params[name].numel() for name in names)
    assert [*map(id, optimizer._residents)] == [id(params[name]) for name in names]
    assert f"device memory for the state of {held} parameters" in caplog.text
    assert f"host memory for {numel - held} parameters" in caplog.text
    assert not any(param in optimizer._twins for param in optimizer._residents)
    step_with(model, optimizer, 1)
    assert optimizer.timing["resident_bytes"] == nbytes
    for name in names:
        resident = optimizer._residents._residents[id(params[name])]
        assert resident.memory is not None and resident.memory.device.type == DEVICE.type
    # A look at the state brings it to host memory, and frees that of the device.
    assert all(optimizer.state[params[name]]["exp_avg"].is_cpu for name in names)
    assert resident.memory is None


def test_without_host_memory_there_is_no_engine() -> None:
    model, optimizer = made(model_of(), ALL, host_bytes_max=0)
    step_with(model, optimizer, 1)
    assert optimizer._engine is None
    optimizer.synchronize()
    optimizer.drain()
    assert optimizer.timing["resident_bytes"] == optimizer._residents.state_nbytes


def test_parameters_that_thaw_come_or_leave() -> None:
    model = model_of()
    pairs = []
    for nbytes in (FIRST, ALL, 0):
        each = copy.deepcopy(model)
        params = list(each.parameters())
        params[0].requires_grad_(False)
        optimizer = OffloadAdamW(params[:3], lr=1e-2, device_bytes_max=nbytes)
        for step in (1, 2):
            step_with(each, optimizer, step, lambda _, index: 0 < index < 3)
        params[0].requires_grad_(True)
        optimizer.add_param_group({"params": params[3:]})
        step_with(each, optimizer, 3)
        # The first one leaves, with its state, and comes back.
        optimizer.param_groups[0]["params"].remove(params[0])
        step_with(each, optimizer, 4, lambda _, index: index > 0)
        optimizer.param_groups[0]["params"].insert(0, params[0])
        for step in (5, 6):
            step_with(each, optimizer, step)
        pairs.append((each, optimizer))
    assert_alike(pairs[0], pairs[2])
    assert_alike(pairs[1], pairs[2])


def test_memory_of_a_parameter_that_leaves_is_given_to_the_next() -> None:
    model, optimizer = made(model_of(), FIRST)
    first = next(model.parameters())
    assert [*optimizer._residents] == [first]
    optimizer.param_groups[0]["params"].remove(first)
    other = nn.Parameter(torch.ones_like(first))
    optimizer.add_param_group({"params": [other], "param_names": ["other"]})
    assert [*map(id, optimizer._residents)] == [id(other)]


def test_a_first_step_at_lr_0_makes_the_state() -> None:
    """As torch.distributed.checkpoint has it made before it loads."""
    runs = [made(model_of(), nbytes, lr=0.0) for nbytes in (FIRST, 0)]
    for model, optimizer in runs:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        optimizer.param_groups[0]["lr"] = 1e-2
        step_with(model, optimizer, 1)
    assert_alike(*runs)


def test_a_scaler_of_gradients_is_undone() -> None:
    runs = [made(model_of(torch.float16), nbytes) for nbytes in (FIRST, 0)]
    for model, optimizer in runs:
        for step in (1, 2, 3):
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.found_inf = torch.tensor(float(step == 2))
            step_with(model, optimizer, step)
        assert optimizer.skipped_steps == 1
    assert_alike(*runs)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda param: setattr(param, "grad", param.detach().to_sparse()), "dense"),
        (lambda param: setattr(param, "data", param.data[:2]), "as it was"),
        (lambda param: setattr(param, "data", param.data.half()), "as it was"),
    ],
)
def test_what_cannot_be_stepped_is_refused_before_anything_is(
    spoil: Callable[[nn.Parameter], object], said: str
) -> None:
    model, optimizer = made(model_of(), FIRST)
    step_with(model, optimizer, 1)
    loss_of(model, 2).backward()
    first, *others = model.parameters()
    before = [bits(param) for param in others]
    spoil(first)
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert all(torch.equal(bits(param), was) for param, was in zip(others, before, strict=True))


def test_state_that_is_looked_at_is_a_snapshot_whose_changes_count() -> None:
    runs = [made(model_of(), nbytes) for nbytes in (ALL, 0)]
    for model, optimizer in runs:
        step_with(model, optimizer, 1)
        first = next(model.parameters())
        state = optimizer.state
        kept = state[first]["exp_avg"]
        before = bits(kept)
        state[first]["exp_avg"] = kept * 0.5
        step_with(model, optimizer, 2)
        if optimizer is runs[0][1]:
            assert torch.equal(bits(kept), before)
        if optimizer is runs[1][1]:
            # Of host memory it is the state itself, which waits when it is asked for.
            state = optimizer.state
        assert float(state[first]["step"]) == 2
        state[first]["exp_avg"] = state[first]["exp_avg"] * 0.5
        step_with(model, optimizer, 3)
    assert_alike(*runs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resident_that_comes_back_to_host_memory_goes_on_with_its_state(
    dtype: torch.dtype,
) -> None:
    pairs = []
    for nbytes in (12 * 33 * 40 + 4, 0):
        model, optimizer = made(model_of(dtype), nbytes)
        for step in (1, 2):
            step_with(model, optimizer, step)
        first = optimizer.param_groups[0]["params"].pop(0)
        other = nn.Parameter(torch.ones_like(first))
        # It takes what the first one has left.
        optimizer.add_param_group({"params": [other], "param_names": ["other"]})
        optimizer.param_groups[0]["params"].insert(0, first)
        for step in (3, 4):
            step_with(model, optimizer, step)
        assert (first in optimizer._twins) is True
        pairs.append((model, optimizer))
    assert_alike(*pairs)


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_a_resident_that_comes_back_may_have_coded_moments(moments: str) -> None:
    model, optimizer = made(model_of(), FIRST, moments=moments)
    step_with(model, optimizer, 1)
    first = optimizer.param_groups[0]["params"].pop(0)
    other = nn.Parameter(torch.ones_like(first))
    optimizer.add_param_group({"params": [other], "param_names": ["other"]})
    optimizer.param_groups[0]["params"].insert(0, first)
    step_with(model, optimizer, 2)
    assert float(optimizer.state[first]["step"]) == 2


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_distributed_state_dicts_bring_all_of_the_state(dtype: torch.dtype, flatten: bool) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = made(model_of(dtype), FIRST)
    for step in (1, 2):
        step_with(model, optimizer, step)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    for nbytes in (0, FIRST, ALL):
        resumed = made(model, nbytes)
        set_optimizer_state_dict(*resumed, copy.deepcopy(saved), options=options)
        assert_alike(resumed, (model, optimizer))


def test_a_state_dict_has_rows_whatever_strides_the_program_gave_a_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(DEVICE, torch.bfloat16)
    optimizer = OffloadAdamW(model.parameters(), device_bytes_max=ALL)
    for _ in range(3):
        model(torch.randn(2, 3, 5, 5).to(DEVICE, torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    after = optimizer.state_dict()["state"]
    for index, state in before.items():
        assert all(
            torch.equal(bits(value), bits(after[index][key])) for key, value in state.items()
        )


def test_a_step_of_residents_alone_marks_what_it_leaves_out() -> None:
    """A write through `.data` to a parameter without a gradient counts, as it does else."""
    pairs = []
    for nbytes in (FIRST, 0):
        model, optimizer = made(model_of(), nbytes)
        for step in (1, 2):
            step_with(model, optimizer, step)
        loss_of(model, 3).backward()
        for index, param in enumerate(model.parameters()):
            if index:
                param.grad = None
                param.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        step_with(model, optimizer, 4)
        pairs.append((model, optimizer))
    assert_alike(*pairs)


def test_turns_go_on_in_steps_of_residents_alone() -> None:
    deferred = Deferred(interval=2)
    model, optimizer = made(model_of(), FIRST, deferred=deferred)
    for step in range(1, 6):
        step_with(model, optimizer, step)
    assert optimizer._engine is not None
    loss_of(model, 6)
    assert optimizer._engine.pending_params
    for step in range(6, 6 + 2 * deferred.turns + 1):
        step_with(model, optimizer, step, lambda _, index: index == 0)
    loss_of(model, 20)
    assert not optimizer._engine.pending_params


@pytest.mark.parametrize("device_bytes_max", [FIRST, ALL])
def test_looks_of_another_thread_come_between_steps(device_bytes_max: int) -> None:
    """Those of the first step too, which makes the engine."""
    (model, optimizer), reference = made(model_of(), device_bytes_max), made(model_of(), 0)
    is_over = threading.Event()
    failures: list[Exception] = []

    def look() -> None:
        try:
            while not is_over.is_set():
                for state in dict(optimizer.state).values():
                    assert "exp_avg" in state
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for step in range(1, 21):
            for each in ((model, optimizer), reference):
                step_with(*each, step)
    finally:
        is_over.set()
        reader.join(60)
    assert not failures
    assert_alike((model, optimizer), reference)


def test_a_handler_within_a_step_saves_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(model_of(), ALL)
    step_with(model, optimizer, 1)
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    step_with(model, optimizer, 2)
    found: list[Any] = []
    submission = optimizer._residents.submission
    monkeypatch.setattr(
        optimizer._residents,
        "submission",
        lambda *args: (found.append(optimizer.state_dict()["state"]), submission(*args))[1],
    )
    step_with(model, optimizer, 3)
    assert all(found[0][index].keys() == state.keys() for index, state in expected.items())
    assert {float(state["step"]) for state in found[0].values()} == {2.0}


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_looked_at_state_of_a_resident_that_leaves_is_good_in_host_memory(moments: str) -> None:
    model, optimizer = made(model_of(), FIRST, moments=moments)
    step_with(model, optimizer, 1)
    optimizer.state_dict()
    first = optimizer.param_groups[0]["params"].pop(0)
    other = nn.Parameter(torch.ones_like(first))
    optimizer.add_param_group({"params": [other], "param_names": ["other"]})
    optimizer.param_groups[0]["params"].insert(0, first)
    step_with(model, optimizer, 2)
    assert first in optimizer._twins
    assert float(optimizer.state[first]["step"]) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_has_the_shape_that_a_resident_was_added_with(dtype: torch.dtype) -> None:
    """As where a program prunes: it cuts the weight, and then the state."""
    found = []
    for nbytes in (ALL, 0):
        model, optimizer = made(model_of(dtype), nbytes)
        step_with(model, optimizer, 1)
        before = copy.deepcopy(optimizer.state_dict()["state"][0])
        step_with(model, optimizer, 2)
        first = next(model.parameters())
        first.data = first.data[:2].clone()
        state = optimizer.state_dict()["state"][0]
        assert all(state[key].shape == before[key].shape for key in before)
        found.append(state)
        if nbytes:
            optimizer.param_groups[0]["params"].pop(0)
            three = {"params": [nn.Parameter(torch.ones(3, device=DEVICE))], "param_names": ["x"]}
            optimizer.add_param_group(three)
            assert optimizer._residents._bytes_left == ALL - optimizer._residents.state_nbytes
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(bits(found[0][key]), bits(found[1][key])), key


def test_a_look_takes_nothing_of_host_bytes_max() -> None:
    model = model_of()
    numel = sum(param.numel() for param in model.parameters())
    model, optimizer = made(model, ALL, host_bytes_max=numel)
    step_with(model, optimizer, 1)
    optimizer.state_dict()
    three = {"params": [nn.Parameter(torch.ones(3, device=DEVICE))], "param_names": ["x"]}
    optimizer.add_param_group(three)


def test_state_that_is_read_in_inference_mode_may_be_written_outside_of_it() -> None:
    model, optimizer = made(model_of(), ALL)
    step_with(model, optimizer, 1)
    with torch.inference_mode():
        states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    for exp_avg in states:
        exp_avg.mul_(0.5)
    step_with(model, optimizer, 2)


def test_misaligned_gradients_are_copied() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("torch makes no such tensor there")
    runs = [made(model_of(torch.float32), nbytes) for nbytes in (FIRST, 0)]
    for model, optimizer in runs:
        first = next(model.parameters())
        loss_of(model, 1).backward()
        assert first.grad is not None
        memory = bytearray(4 * first.numel() + 1)
        grad = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=first.numel())
        first.grad = grad.view_as(first).copy_(first.grad)
        optimizer.step()
    assert_alike(*runs)


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "1"])
def test_a_number_of_bytes_is_expected(nbytes: Any) -> None:
    with pytest.raises(ValueError, match=r"`device_bytes_max` is .* expected bytes, 0 or more"):
        made(model_of(), nbytes)


def test_options_that_do_not_go_with_it_are_refused(tmp_path: Path) -> None:
    volume = Volume([tmp_path])
    for options, said in (
        ({"accumulate": "host"}, "`accumulate` is `host`"),
        ({"shard": True}, "`shard` is given"),
        ({"tier": volume}, "durability `commit`"),
    ):
        with pytest.raises(ValueError, match=said):
            made(model_of(), 1, **options)


def test_the_others_state_may_be_on_a_volume(tmp_path: Path) -> None:
    volume = Volume([tmp_path], durability="none")
    ours = made(model_of(), FIRST, tier=volume, host_bytes_max=1 << 20)
    theirs = made(model_of(), 0)
    for step in range(1, 5):
        for each in (ours, theirs):
            step_with(*each, step, some_have_none)
    assert_alike(ours, theirs)


def test_ctrl_c_at_any_line_steps_all_or_none() -> None:
    (model, optimizer), reference = made(model_of(), FIRST), made(model_of(), 0)
    # The first one opens the engine.
    for each in ((model, optimizer), reference):
        step_with(*each, 1)
    taken = 1
    for stop_at in range(3, 20_000, 53):
        for each in (model, reference[0]):
            loss_of(each, taken + 1).backward()
            for param in each.parameters():
                param.grad = torch.full_like(param, 0.1 * (-1) ** taken)
        was_interrupted = stepped_until(optimizer, stop_at)
        optimizer.synchronize()
        counts = {int(state["step"]) for state in optimizer.state.values()}
        assert counts in ({taken}, {taken + 1})
        if counts == {taken + 1}:
            reference[1].step()
            taken += 1
        for _, each_optimizer in ((model, optimizer), reference):
            each_optimizer.zero_grad()
        if not was_interrupted:
            break
    else:
        pytest.fail("no step ended")
    assert_alike((model, optimizer), reference)


def stepped_until(optimizer: OffloadAdamW, line: int) -> bool:
    """Whether Ctrl-C came in that line of a step, counted as Python goes over them."""
    left = line

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
