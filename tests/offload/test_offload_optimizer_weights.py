"""Weights that others write, replace, copy or save between the steps of OffloadAdamW."""

import contextlib
import copy
import io
import pickle

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, train
from optim_cases import DTYPES, bits

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


def _load(net, values):
    net.load_state_dict(values)


def _copy(net, values):
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(values[name])


def _swap(net, values):
    for name, param in net.named_parameters():
        param.data = values[name].clone()


def _data(net, values):
    for name, param in net.named_parameters():
        param.data.copy_(values[name])


@pytest.mark.parametrize(
    "write", [_load, _copy, _swap, _data], ids=["load_state_dict", "copy_", "data=", "data.copy_"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_between_steps_is_stepped(dtype, write):
    ours, theirs = pair(dtype=dtype)
    # None is what is there: `AdamW` would drop the trailing bits of that, too.
    values = {
        name: (2 + torch.rand(param.shape)).to(dtype) for name, param in ours[0].named_parameters()
    }
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        if net is ours[0] and write is not _load:
            # Not by a way that waits.
            optimizer.synchronize()
        write(net, values)
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_other_memory_at_the_same_address_is_read_again():
    """As after `model.half().float()`: freed memory is given out again."""
    ours, theirs = pair(torch.nn.Linear(7, 3, bias=False), gives_model=False)
    for net, optimizer in (theirs, ours):
        memory = torch.zeros(3, 7).numpy()
        for step in range(3):
            memory[...] = 0.1 * step
            # A storage of its own each time.
            net.weight.data = torch.from_numpy(memory)
            train(net, optimizer, 1, first=step)
    assert_equal(ours, theirs)


def test_other_memory_after_a_skipped_step_is_read():
    """A skipped step reads the weight, whose memory is freed and given out again."""
    ours, theirs = pair(torch.nn.Linear(7, 300, bias=False))
    for net, optimizer in (theirs, ours):
        for value in range(3):
            net.weight.grad = torch.full_like(net.weight, torch.nan)
            optimizer.step()
            net.weight.data = torch.empty(0)
            net.weight.data = torch.full((300, 7), float(value))
        train(net, optimizer, 1)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_that_is_written_after_a_step_that_was_not_taken_is_stepped(dtype, nonfinite):
    ours, theirs = pair(dtype=dtype, nonfinite=nonfinite)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        if net is ours[0]:
            loss_of(net, 2).backward()
            net[3].bias.grad[1] = torch.nan
            with contextlib.suppress(ValueError):
                optimizer.step()
        # A parameter is written, and the others keep their trailing bits.
        net[0].weight.data.mul_(0.5)
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_the_model_are_on_their_own(duplicate):
    (net, optimizer), _ = pair(accumulation_steps=1)
    train(net, optimizer, 2)
    optimizer.synchronize()
    twin = duplicate(net)
    train(net, optimizer, 1)
    optimizer.synchronize()
    before = [bits(param) for param in net.parameters()]
    reference = stepwell.OffloadAdamW(twin, lr=1e-2)
    train(twin, reference, 2)
    assert all(
        torch.equal(bits(param), old) for param, old in zip(net.parameters(), before, strict=True)
    )


def test_saved_model_is_the_stepped_one():
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
    stream = io.BytesIO()
    torch.save(ours[0].state_dict(), stream)
    stream.seek(0)
    for name, value in torch.load(stream).items():
        assert torch.equal(bits(value), bits(theirs[0].get_parameter(name)))
