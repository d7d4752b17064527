"""Copies that the device makes late: what they read and write is left alone until they have ended.

A CPU has no such copies. Here an adder stands for them that adds nothing before it must.
"""

import pytest
import stepwell
import torch
from late_engine import LateEngine
from offload_cases import assert_equal, pair, train
from stepwell.deepspeed.zero import gradients
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.store import host_collector
from stepwell.store.adder import Adder
from stepwell.store.reads import Reads


class LateAdder:
    """As `Adder` on a device that does nothing before it is waited for."""

    def __init__(self, device):
        self.pending = []

    def run(self, operation, target, grad, norms=None):
        self.pending.append((operation, target, grad))

    def finish(self):
        for call in self.pending:
            call[0](*call[1:])
        self.pending.clear()

    def order(self, engine):
        """They come late all the same."""


class LateLane:
    """As the lane on which gradients go down, on such a device."""

    def __init__(self):
        self.pending = []

    def copy(self, piece, target, fragment):
        assert piece.numel() == target.numel() == fragment.numel
        self.pending.append((piece, target))

    def launch(self):
        """They come late all the same."""

    def wait(self):
        for piece, target in self.pending:
            target.copy_(piece)
        self.pending.clear()

    drain = drop = wait

    def order(self):
        """The engine is asked for nothing."""


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
    partitions.gradients.complete(partitions.engine.core)
    partitions.arrive()
    assert partitions.gradients.grads[0].tolist() == [0.0] * 4 + [2.0] * 4


def test_what_is_added_late_may_not_be_written(partitions):
    # Partitions that add on the host copy what is not theirs.
    partitions.gradients._adds_on_host = True
    bucket, fragment = torch.ones(8), Fragment(0, 0, 8)
    partitions.gradients.collect(fragment, bucket, is_owned=False, is_last=False)
    bucket.fill_(7.0)
    assert partitions.gradients.gradient(fragment).tolist() == [1.0] * 8


def read(gradients, fragment):
    return gradients.gradient(fragment)


def read_beside_what_is_set(gradients, fragment):
    gradients._values_set[Fragment(0, 7, 1)] = torch.ones(1)
    gradients._widen()
    (grad,) = gradients.owners[1].values()
    return grad[: fragment.numel]


def send_again(gradients, fragment):
    gradients.add(fragment, torch.zeros(4), is_owned=True)
    gradients.send(fragment)
    return gradients.grads[0][:4]


def add_to_what_was_sent(gradients, fragment):
    gradients.add_on_host(fragment, torch.zeros(4))
    return gradients.gradient(fragment)


def set_what_was_sent(gradients, fragment):
    gradients.set_gradient(fragment, torch.full((4,), 2.0))
    return gradients.gradient(fragment)


@pytest.mark.parametrize(
    "use", [read, read_beside_what_is_set, send_again, add_to_what_was_sent, set_what_was_sent]
)
def test_a_copy_has_ended_before_its_target_is_used(partitions, use):
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients._lane = LateLane()
    gradients.add(fragment, torch.full((4,), 2.0), is_owned=True)
    gradients.send(fragment)
    found = use(gradients, fragment)
    partitions.arrive()
    assert found.tolist() == [2.0] * 4


def test_a_copy_has_ended_before_the_host_adds_to_its_target(partitions):
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients._lane, gradients._adder = LateLane(), Adder(torch.device("cpu"))
    gradients.add(fragment, torch.full((4,), 2.0), is_owned=True)
    gradients.send(fragment)
    gradients.add_on_host(fragment, torch.ones(4))
    assert gradients.gradient(fragment).tolist() == [3.0] * 4


def test_squares_beyond_float32_are_of_gradients_that_have_arrived(partitions):
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients._lane = LateLane()
    gradients.add(fragment, torch.full((4,), 2.0**100), is_owned=True)
    assert gradients.norm(float) == 2.0**101


def test_a_copy_that_is_dropped_does_not_land_on_what_comes_next(partitions):
    gradients, fragment = partitions.gradients, Fragment(0, 0, 8)
    gradients._lane = LateLane()
    gradients.add(fragment, torch.ones(8), is_owned=True)
    gradients.send(fragment)
    partitions.drop()
    gradients.add_on_host(fragment, torch.full((8,), 2.0))
    partitions.arrive()
    assert gradients.grads[0].tolist() == [2.0] * 8


def test_additions_have_ended_when_partitions_are_gone(partitions):
    partitions.gradients.add_on_host(Fragment(0, 0, 8), torch.ones(8))
    adder = partitions.gradients._adder
    partitions._finalizer()
    assert not adder.pending


def test_additions_have_ended_when_the_host_sides_are_unpinned(monkeypatch):
    monkeypatch.setattr(host_collector, "Adder", LateAdder)
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = stepwell.OffloadAdamW([first], accumulate="host", threads=1)
    first.sum().backward()
    adder = optimizer._collector._adder
    assert adder.pending
    optimizer.add_param_group({"params": [second]})
    assert not adder.pending


def test_additions_have_ended_when_they_are_stepped(monkeypatch):
    monkeypatch.setattr(host_collector, "Adder", LateAdder)
    ours, theirs = pair(accumulate="host", threads=1)
    for each in (ours, theirs):
        train(*each, 2)
    assert_equal(ours, theirs)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, scale):
        return (self.weight * scale).sum()


def test_sums_are_stepped_before_the_next_backward_adds_to_them():
    """Of a backward whose forward was before the step, so that nothing has waited for it."""
    ours, theirs = pair(Scaled(), accumulate="host", threads=1)
    for net, optimizer in (ours, theirs):
        net(2.0).backward()
        optimizer.step()
        if net is ours[0]:
            optimizer._background.engine._core = LateEngine(optimizer._background.engine._core)
        optimizer.zero_grad()
        first, second = net(3.0), net(-5.0)
        first.backward()
        optimizer.step()
        if net is ours[0]:
            assert optimizer._background.engine._core.is_late
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
    assert_equal(ours, theirs)


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
