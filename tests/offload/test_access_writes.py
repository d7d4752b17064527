"""Tensors that a step writes: what waits for which part, and where what waits for them goes."""

import pytest
import torch
import torch.distributed as dist
from insides import begin
from stepwell.access.writes import Writes, Written
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh


class Step:
    """The owner of parts: it notes what was waited for."""

    def __init__(self):
        self.waits = []
        self.meanwhile = []
        """Called in the next wait, each once."""

    def wait(self, parts):
        self.waits.append(list(parts))
        while self.meanwhile:
            self.meanwhile.pop()()


def fail():
    raise AssertionError("the owner is there")


@pytest.fixture
def step():
    return Step()


@pytest.fixture
def writes(step):
    return Writes(step.wait, fail)


def written(count=3):
    return [torch.full((3,), float(value)) for value in range(count)]


def protect(writes, parts):
    begin(writes.protection([], parts))


def kinds(*tensors):
    return [type(tensor) for tensor in tensors]


def test_a_use_waits_for_its_part_and_ends_the_wait_of_all_that_have_it(step, writes):
    one, other, third = tensors = written()
    part = ["a"]
    protect(writes, {one: part, other: part, third: ["b"]})
    assert kinds(*tensors) == [Written] * 3
    assert torch.equal(other + 1, torch.full((3,), 2.0))
    assert step.waits == [[["a"]]]
    assert kinds(*tensors) == [torch.Tensor, torch.Tensor, Written]
    assert (writes.holds(one), writes.holds(third), bool(writes)) == (False, True, True)
    one.sum(), other.sum()
    assert step.waits == [[["a"]]]
    third.mul_(2)
    assert step.waits == [[["a"]], [["b"]]]
    assert not writes
    writes.wait_for(tensors)
    writes.use(None)
    assert len(step.waits) == 2


def test_what_one_call_is_given_is_waited_for_at_once_wherever_it_is(step, writes):
    one, other, third = written()
    protect(writes, {one: "a", other: "b", third: "c"})
    torch.stack([one, other], out=torch.empty(2, 3))
    torch.add(torch.zeros(3), other=third)
    assert step.waits == [["a", "b"], ["c"]]


def test_a_wait_ends_the_protection_of_its_own_step_only(step, writes):
    one, other = written(2)
    protect(writes, {one: "a", other: "b"})
    before = writes.num_steps
    # Another thread submits the next step while this one waits.
    step.meanwhile += [
        lambda: protect(writes, {one: "c", other: "d"}),
        lambda: writes.clear(before),
    ]
    writes.wait_for([one])
    assert writes.num_steps == before + 1
    assert kinds(one, other) == [Written, Written]
    writes.clear(before)
    assert kinds(one, other) == [Written, Written]
    one.sum()
    assert step.waits == [["a"], ["c"]]
    assert kinds(one, other) == [torch.Tensor, Written]
    writes.clear(writes.num_steps)
    assert kinds(one, other) == [torch.Tensor, torch.Tensor]
    assert not writes


def test_a_use_behind_which_a_step_begins_waits_for_that_as_well(step, writes):
    (one,) = written(1)
    protect(writes, {one: "a"})
    step.meanwhile.append(lambda: protect(writes, {one: "b"}))
    one.sum()
    assert step.waits == [["a"], ["b"]]
    assert type(one) is torch.Tensor


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_local_tensor_of_a_dtensor_waits(mesh, step, writes):
    whole = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    uses = [
        lambda: whole._local_tensor,
        lambda: whole.to_local(),
        lambda: whole + 1,
        lambda: torch.sum(input=whole),
        lambda: setattr(whole, "_local_tensor", torch.ones(3)),
    ]
    for use in uses:
        protect(writes, {whole: "a"})
        assert type(whole) is not DTensor
        assert (whole.shape, isinstance(whole, DTensor)) == ((3,), True)
        whole.grad = None
        assert not step.waits
        use()
        assert step.waits
        assert all(each == ["a"] for each in step.waits)
        assert type(whole) is DTensor
        step.waits.clear()
    assert torch.equal(whole.to_local(), torch.ones(3))


# ---- where the owner goes ----


def protected(finish):
    writes = Writes(Step().wait, finish)
    tensor = torch.zeros(3)
    protect(writes, {tensor: "a part"})
    assert type(tensor) is Written
    return writes, tensor


def test_where_the_owner_is_gone_the_whole_step_is_waited_for():
    waited = []
    writes, tensor = protected(lambda: waited.append(True))
    assert tensor.sum() == 0
    assert waited == [True]
    assert type(tensor) is torch.Tensor
    assert not writes


def test_a_step_that_fails_where_the_owner_is_gone_raises():
    def fail():
        raise OSError("the step has failed")

    writes, tensor = protected(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="has failed"):
            tensor.sum()
    assert writes
    # Where no step comes any more, nothing has to be waited for.
    writes.close()
    assert tensor.sum() == 0
    assert not writes
