"""State that stays on the device, as programs see, save, write and load it."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optim_cases import bits
from resident_models import ALL, FIRST, assert_alike, made
from selected_models import DEVICE, DTYPES, model_of, step_with
from stepwell import OffloadAdamW
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_states_are_in_the_order_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 2)).to(DEVICE)
    # All but the first weight.
    optimizer = OffloadAdamW(model, device_bytes_max=12 * 14)
    model(torch.ones(2, 64, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert list(map(id, optimizer.state)) == list(map(id, model.parameters()))
    assert list(optimizer.state_dict()["state"]) == [0, 1, 2, 3]


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
    optimizer = OffloadAdamW(model, device_bytes_max=ALL)
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
    begin = optimizer._residents.begin
    monkeypatch.setattr(
        optimizer._residents,
        "begin",
        lambda: (found.append(optimizer.state_dict()["state"]), begin())[1],
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
