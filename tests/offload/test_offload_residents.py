"""Parameters whose state stays on the device: stepped, saved and written as in host memory."""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from insides import num_pending
from optim_cases import bits
from selected_models import assert_same, loss_of, model_of, step_with
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
    return model, OffloadAdamW(model, device_bytes_max=device_bytes_max, **options)


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_residents_have_fp32_moments_whatever_the_others_have(moments: str) -> None:
    coded, exact = made(model_of(), ALL, moments=moments), made(model_of(), 0)
    for each in (coded, exact):
        for step in range(1, 6):
            step_with(*each, step)
    assert_same(coded, exact)
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


def test_a_resident_has_every_update_in_the_next_forward() -> None:
    model, optimizer = made(model_of(), FIRST, deferred=Deferred(interval=4))
    reference = made(model_of(), 0)
    for step in range(1, 7):
        step_with(model, optimizer, step)
        step_with(*reference, step)
    loss_of(model, 7)
    assert num_pending(optimizer)
    first, last = (list(each.parameters()) for each in (model, reference[0]))
    assert torch.equal(bits(first[0]), bits(last[0]))


def test_what_fits_is_stepped_on_the_device_and_takes_no_host_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["first.weight", "first.bias", "norm.weight"]
    nbytes = FIRST + 2 * (STATE_BYTES * 33 + EXTRA_BYTES)
    with caplog.at_level(logging.INFO, "stepwell"):
        model, optimizer = made(model_of(), nbytes + 10)
    numel = sum(param.numel() for param in model.parameters())
    held = sum(model.get_parameter(name).numel() for name in names)
    assert f"device memory for the state of {held} parameters" in caplog.text
    assert f"host memory for {numel - held} parameters" in caplog.text
    step_with(model, optimizer, 1)
    assert optimizer.timing["resident_bytes"] == nbytes
    # A look at the state brings it to host memory.
    assert all(optimizer.state[model.get_parameter(name)]["exp_avg"].is_cpu for name in names)


def test_all_state_may_be_on_the_device() -> None:
    model, optimizer = made(model_of(), ALL, host_bytes_max=0)
    step_with(model, optimizer, 1)
    optimizer.synchronize()
    optimizer.drain()
    numel = sum(param.numel() for param in model.parameters())
    assert optimizer.timing["resident_bytes"] >= STATE_BYTES * numel


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
    assert_same(pairs[0], pairs[2])
    assert_same(pairs[1], pairs[2])


def test_memory_of_a_parameter_that_leaves_is_given_to_the_next() -> None:
    model, optimizer = made(model_of(), FIRST)
    first = next(model.parameters())
    optimizer.param_groups[0]["params"].remove(first)
    other = nn.Parameter(torch.ones_like(first))
    optimizer.add_param_group({"params": [other], "param_names": ["other"]})
    other.grad = torch.ones_like(other)
    optimizer.step()
    assert optimizer.timing["resident_bytes"] == FIRST


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


def test_turns_go_on_in_steps_of_residents_alone() -> None:
    deferred = Deferred(interval=2)
    model, optimizer = made(model_of(), FIRST, deferred=deferred)
    for step in range(1, 6):
        step_with(model, optimizer, step)
    loss_of(model, 6)
    assert num_pending(optimizer)
    for step in range(6, 6 + 2 * deferred.interval + 1):
        step_with(model, optimizer, step, lambda _, index: index == 0)
    loss_of(model, 20)
    assert not num_pending(optimizer)


def test_options_that_do_not_go_with_it_are_refused(tmp_path: Path) -> None:
    volume = Volume([tmp_path])
    for options, said in (
        ({"accumulate": "host"}, "`accumulate` is `host`"),
        ({"tier": volume}, "durability `commit`"),
    ):
        with pytest.raises(ValueError, match=said):
            made(model_of(), 1, **options)


# ---- its state, as programs see, save, write and load it ----


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
    assert_same((model, optimizer), other)


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


def test_state_of_another_shape_is_refused_and_nothing_is_stepped() -> None:
    model, optimizer = made(model_of())
    step_with(model, optimizer, 1)
    first = next(model.parameters())
    optimizer.state[first] = {**optimizer.state[first], "exp_avg": torch.zeros(3)}
    before = {name: bits(value) for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"`exp_avg` .*first\.weight.* has the shape `\(3,\)`"):
        step_with(model, optimizer, 2)
    assert all(torch.equal(bits(value), before[name]) for name, value in model.state_dict().items())


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
    assert_same((model, optimizer), reference)
