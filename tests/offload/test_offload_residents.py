"""Parameters whose state stays on the device: stepped there, with the bits of host memory."""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from insides import is_pending
from optim_cases import bits
from resident_models import ALL, EXTRA_BYTES, FIRST, STATE_BYTES, assert_alike, made, some_have_none
from selected_models import DEVICE, DTYPES, loss_of, model_of, step_with, train
from step_lines import interrupted_at
from stepwell import Deferred, OffloadAdamW, Volume
from stepwell.store.engine import Engine
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


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
    assert optimizer._background.engine is not None and optimizer._background.engine.pending_params
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
    # A look at the state brings it to host memory.
    assert all(optimizer.state[params[name]]["exp_avg"].is_cpu for name in names)


def test_without_host_memory_there_is_no_engine() -> None:
    model, optimizer = made(model_of(), ALL, host_bytes_max=0)
    step_with(model, optimizer, 1)
    assert optimizer._background.engine is None
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
    assert optimizer._background.engine is not None
    loss_of(model, 6)
    assert optimizer._background.engine.pending_params
    for step in range(6, 6 + 2 * deferred.interval + 1):
        step_with(model, optimizer, step, lambda _, index: index == 0)
    loss_of(model, 20)
    assert not optimizer._background.engine.pending_params


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


def note_taken(patched: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The gradients that the engine takes from now on."""
    taken: list[torch.Tensor] = []
    take = Engine.take

    def noted(self: Engine, params: Any, grads: Sequence[torch.Tensor]) -> None:
        taken.extend(grads)
        take(self, params, grads)

    patched.setattr(Engine, "take", noted)
    return taken


def assert_apart(model: nn.Module, taken: Sequence[torch.Tensor]) -> None:
    """No gradient that was taken lies in a weight."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not any(grad.untyped_storage().data_ptr() in weights for grad in taken)


def lay(grads_of: Iterable[torch.Tensor], weight: torch.Tensor, *, copies: bool) -> None:
    """The gradients of parameters lie in a weight, or are copies of what would."""
    for each in grads_of:
        if each.numel() <= weight.numel():
            grad = weight.detach().view(-1)[: each.numel()].view_as(each)
            each.grad = grad.clone() if copies else grad


@pytest.mark.parametrize("device_bytes_max", [ALL, FIRST, 0])
@pytest.mark.parametrize("deferred", [None, Deferred(interval=2, fraction=1.0)])
def test_a_gradient_may_lie_in_a_weight_that_the_step_writes(
    monkeypatch: pytest.MonkeyPatch, device_bytes_max: int, deferred: Deferred | None
) -> None:
    # Each weight is written by another part of the step than reads the gradients.
    taken = note_taken(monkeypatch)
    runs = [
        made(model_of(torch.float32), device_bytes_max, deferred=deferred),
        made(model_of(torch.float32), 0),
    ]
    for step in range(3):
        for model, optimizer in runs:
            loss_of(model, step).backward()
            first, *others = model.parameters()
            lay(others, first, copies=False)
            taken.clear()
            optimizer.step()
            assert_apart(model, taken)
            optimizer.zero_grad()
    assert_alike(*runs)


@pytest.mark.parametrize("device_bytes_max", [ALL, FIRST, 0])
def test_a_gradient_may_lie_in_a_weight_whose_own_gradient_is_strided(
    device_bytes_max: int,
) -> None:
    runs = []
    for is_copy in (False, True):
        params = [nn.Parameter(torch.full((33, 40), float(n))) for n in range(3)]
        optimizer = OffloadAdamW(params, lr=0.1, device_bytes_max=device_bytes_max)
        for step in (1.0, 2.0):
            params[0].grad = torch.linspace(-step, 1.0, 33 * 40).view(40, 33).t()
            params[1].grad = params[0].data.clone() if is_copy else params[0].data
            params[2].grad = torch.full((33, 40), step)
            optimizer.step()
        optimizer.synchronize()
        runs.append([bits(param) for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("device_bytes_max", [FIRST, 0])
def test_a_gradient_may_lie_in_a_weight_that_lands_with_the_step(
    monkeypatch: pytest.MonkeyPatch, device_bytes_max: int
) -> None:
    taken = note_taken(monkeypatch)
    runs = []
    for copies in (False, True):
        model, optimizer = run = made(
            model_of(torch.float32), device_bytes_max, deferred=Deferred(interval=2)
        )
        train(*run, range(3))
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        # It has updates that are deferred, and no gradient of its own.
        *others, last = model.parameters()
        assert is_pending(optimizer, last)
        last.grad = None
        # The step is exact in both runs, since a gradient has a way to the weight.
        way = last.detach()
        lay(others, way, copies=copies)
        taken.clear()
        optimizer.step()
        assert_apart(model, taken)
        train(*run, range(4, 7))
        runs.append(run)
    assert_alike(*runs)


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "1"])
def test_a_number_of_bytes_is_expected(nbytes: Any) -> None:
    with pytest.raises(ValueError, match=r"`device_bytes_max` is .* expected bytes"):
        made(model_of(), nbytes)


def test_options_that_do_not_go_with_it_are_refused(tmp_path: Path) -> None:
    volume = Volume([tmp_path])
    for options, said in (
        ({"accumulate": "host"}, "`accumulate` is `host`"),
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
        was_interrupted = interrupted_at(optimizer, stop_at)
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
