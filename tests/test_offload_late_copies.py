"""Copies that the device makes late: what they read and write is left alone until they have ended.

A CPU has no such copies. Here an adder stands for them that adds nothing before it must.
"""

import pytest
import stepwell
import torch
from stepwell.deepspeed.zero import gradients
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.offload import accumulation
from stepwell.offload.reads import Reads


class LateAdder:
    """As `Adder` on a device that does nothing before it is waited for."""

    def __init__(self, device):
        self.pending = []

    def run(self, operation, target, grad):
        self.pending.append((operation, target, grad))

    def finish(self):
        for call in self.pending:
            call[0](*call[1:])
        self.pending.clear()


class Event:
    """As torch's, of a copy that has ended or not."""

    def __init__(self):
        self.has_ended = False

    def query(self):
        return self.has_ended

    def synchronize(self):
        self.has_ended = True


@pytest.fixture
def partitions(monkeypatch):
    monkeypatch.setattr(gradients, "Adder", LateAdder)
    master = torch.empty(0, dtype=torch.float32)
    partition = Partition(master, torch.ones(8), torch.float32, 0)
    return Partitions([partition], device=torch.device("cpu"), threads=1, is_pinned=False)


def test_a_sum_that_is_dropped_does_not_land_on_what_comes_next(partitions):
    fragment = Fragment(0, 0, 8)
    partitions.gradients.add_on_host(fragment, torch.ones(8))
    partitions.gradients.drop_sums()
    partitions.gradients.add(fragment, torch.full((8,), 2.0), is_owned=True)
    partitions.gradients.send(fragment)
    partitions.arrive()
    assert partitions.gradients.grads[0].tolist() == [2.0] * 8


def test_a_sum_that_is_dropped_is_stepped_as_zero(partitions):
    partitions.gradients.add_on_host(Fragment(0, 0, 4), torch.ones(4))
    partitions.gradients.drop_sums()
    partitions.gradients.add(Fragment(0, 4, 4), torch.full((4,), 2.0), is_owned=True)
    assert partitions.gradients.norm(float) == 4.0
    (grad,) = partitions.stepped_grads()
    partitions.arrive()
    assert grad.tolist() == [0.0] * 4 + [2.0] * 4


def test_additions_have_ended_when_partitions_are_gone(partitions):
    partitions.gradients.add_on_host(Fragment(0, 0, 8), torch.ones(8))
    adder = partitions.gradients._adder
    partitions._finalizer()
    assert not adder.pending


def test_additions_have_ended_when_the_host_sides_are_unpinned(monkeypatch):
    monkeypatch.setattr(accumulation, "Adder", LateAdder)
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = stepwell.OffloadAdamW([first], accumulate="host", threads=1)
    first.sum().backward()
    adder = optimizer._collector.sums._adder
    assert adder.pending
    optimizer.add_param_group({"params": [second]})
    assert not adder.pending


def test_autograd_does_not_write_a_gradient_that_is_being_copied():
    weight, reads, event, pieces = torch.nn.Parameter(torch.zeros(4)), Reads(), Event(), []

    def take(param):
        reads.hold(param.grad.view(-1), event)
        pieces.append((param.grad.untyped_storage().data_ptr(), param.grad.tolist()))
        param.grad = None

    weight.register_post_accumulate_grad_hook(take)
    hidden = torch.ones(4, requires_grad=True) * 1
    # Its gradient is that of the weight's view, to which that of the later use is added.
    later = hidden * 5
    ((hidden + weight.view(-1)) * 2).sum().add((later * 3).sum()).backward()
    ((address, values),) = pieces
    ((_, held),) = reads._held
    assert held.untyped_storage().data_ptr() == address
    assert held.tolist() == values == [2.0] * 4


def test_what_is_copied_is_let_go_of_in_order():
    reads, events = Reads(), [Event(), Event(), Event()]
    for event in events:
        reads.hold(torch.zeros(4), event)
    events[0].has_ended = True
    reads.let_go()
    assert len(reads._held) == 2
    reads.bound(16)
    assert [event.has_ended for event in events] == [True, True, False]
    assert len(reads._held) == 1
    events[2].has_ended = True
    reads.let_go()
    assert not reads._held
    assert reads._nbytes == 0
