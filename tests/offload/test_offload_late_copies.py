"""Copies that the device makes late: what they read and write is left alone until they have ended.

A CPU has no such copies. Here an adder stands for them that adds nothing before it must.
"""

import pytest
import torch
from insides import make_late
from offload_cases import assert_equal, pair, train
from stepwell.deepspeed.zero import gradients
from stepwell.deepspeed.zero.partition import Fragment, Partition
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.store import host_collector


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

    def copy(self, copies):
        for piece, target, fragment in copies:
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
        late = make_late(optimizer) if net is ours[0] else None
        optimizer.zero_grad()
        first, second = net(3.0), net(-5.0)
        first.backward()
        optimizer.step()
        assert late is None or late.is_late
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
    assert_equal(ours, theirs)
