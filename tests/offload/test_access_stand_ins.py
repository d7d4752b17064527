"""Stand-ins: what a function of torch is called with, and what the stand-in stays."""

import copy
import io

import pytest
import torch
from insides import begin
from stepwell.access import stand_ins
from stepwell.access.stand_ins import StandIn
from stepwell.access.writes import Writes

NUMEL = 8


class Memory:
    """What stand-ins stand for, and what was asked for of it."""

    def __init__(self):
        self.calls, self.has_part = [], True
        self.memory = torch.arange(float(NUMEL))

    def whole(self):
        self.calls.append("whole")
        return self.memory

    def part(self, begin, numel):
        self.calls.append((begin, numel))
        return self.memory[begin : begin + numel] if self.has_part else None


@pytest.fixture
def source():
    return Memory()


@pytest.fixture
def flat(source):
    tensor = torch.zeros(0)
    stand_ins.begin(tensor, torch.full((NUMEL,), torch.nan), source)
    return tensor


def test_what_describes_it_is_its_own(source, flat):
    flat.mark = 1
    assert (flat.shape, flat.dtype, flat.numel(), flat.mark) == ((NUMEL,), torch.float32, NUMEL, 1)
    assert flat.grad is None
    assert isinstance(flat, torch.Tensor)
    assert not flat.requires_grad_(False).requires_grad
    assert not source.calls


def test_functions_are_called_with_what_it_stands_for(source, flat):
    plain = torch.ones(NUMEL)
    for found in (flat + plain, torch.add(plain, other=flat), torch.stack([plain, flat]).sum(0)):
        assert torch.equal(found, source.memory + 1)
        assert type(found) is torch.Tensor
    assert torch.equal(flat.data, source.memory)
    assert flat.data_ptr() == flat.detach().data_ptr() == source.memory.data_ptr()


def test_what_is_written_in_place_is_there_and_the_stand_in_is_given_back(source, flat):
    same = flat
    same += 1
    assert same is flat
    assert flat.mul_(2) is flat.contiguous() is flat
    assert torch.add(flat, 1, out=flat) is flat
    assert torch.equal(source.memory, 2 * (torch.arange(float(NUMEL)) + 1) + 1)


def test_it_can_be_given_other_data(source, flat):
    flat.data = torch.ones(NUMEL)
    assert torch.equal(source.memory, torch.ones(NUMEL))
    assert flat.sum() == NUMEL


def test_whether_it_has_gradients_is_said_by_the_stand_in(flat):
    flat.requires_grad_()
    assert (flat * 2).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        flat.add_(1)
    flat.requires_grad_(False)
    assert not (flat * 2).requires_grad


def test_copies_and_pickles_are_plain(source, flat):
    file = io.BytesIO()
    torch.save([flat, flat], file)
    file.seek(0)
    for one, other in (copy.deepcopy([flat, flat]), torch.load(file)):
        assert one is other
        assert type(one) is torch.Tensor
        assert torch.equal(one, source.memory)
        assert one.data_ptr() != source.memory.data_ptr()


def test_a_part_is_asked_for_alone(source, flat):
    for dim, first, numel in ((0, 2, 3), (-1, 0, NUMEL), (0, NUMEL, 0), (0, 0, 1)):
        assert torch.equal(flat.narrow(dim, first, numel), source.memory[first : first + numel])
        assert source.calls.pop() == (first, numel)
        assert not source.calls
    source.has_part = False
    assert torch.equal(flat.narrow(0, 2, 3), source.memory[2:5])
    assert source.calls == [(2, 3), "whole"]


def test_a_part_beyond_it_is_torchs_error(source, flat):
    with pytest.raises(RuntimeError):
        flat.narrow(0, 6, 3)
    assert source.calls == ["whole"]


def test_in_the_end_it_is_plain(flat):
    stand_ins.end(flat, torch.ones(3))
    assert type(flat) is torch.Tensor
    assert torch.equal(flat, torch.ones(3))


def test_tensors_are_swapped_with_what_they_stand_for(source, flat):
    other = torch.ones(3)
    torch.utils.swap_tensors(flat, other)
    assert torch.equal(flat, torch.ones(3))
    assert type(other) is StandIn
    assert torch.equal(other + 0, source.memory)


@pytest.mark.parametrize("is_first", [False, True])
def test_it_is_used_with_what_a_step_writes(source, flat, is_first):
    class Step:
        waits = ()

        def wait(self, parts):
            self.waits = parts

    step, tensor = Step(), torch.ones(NUMEL)
    begin(Writes(step.wait, tuple).protection([], {tensor: "a part"}))
    found = flat + tensor if is_first else torch.add(tensor, flat)
    assert torch.equal(found, source.memory + 1)
    assert step.waits == ["a part"]
    assert type(tensor) is torch.Tensor
