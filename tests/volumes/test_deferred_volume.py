"""Deferred updates of state on a volume: the same bits as of state in host memory."""

import copy
import gc
import os
from pathlib import Path

import pytest
import stepwell
import torch
from insides import engine_of, num_pending, swapped_of, twins_of
from offload_cases import assert_equal, loss_of, train
from optim_cases import bits
from stepwell import _state
from stepwell.store.deferred import Extents, memory_of
from volume_models import folders, net_of, pinned_bytes

STEPS = 9


def host_bytes_max(net, deferred, host_bytes=2 << 20):
    """With so much host memory for state, buffers included."""
    waiting = memory_of(Extents.of(net.parameters()), deferred).pinned
    # Half of what is pinned without deferral: gradients have memory of their own.
    return pinned_bytes(net) // 2 + waiting + host_bytes


def on_volume(net, tmp_path, deferred, *, host_bytes=2 << 20, **options):
    """An optimizer whose state is on a volume, but for `host_bytes`, buffers included."""
    optimizer = stepwell.OffloadAdamW(
        net,
        threads=2,
        deferred=deferred,
        host_bytes_max=host_bytes_max(net, deferred, host_bytes),
        tier=stepwell.Volume(folders(tmp_path), durability="none"),
        **options,
    )
    assert swapped_of(optimizer).volume.core is not None
    return optimizer


def pair(tmp_path, deferred, *, host_bytes=2 << 20, **options):
    """A model with its state on a volume, and the same with it in host memory."""
    net = net_of(torch.bfloat16)
    twin = copy.deepcopy(net)
    optimizer = on_volume(net, tmp_path, deferred, host_bytes=host_bytes, lr=1e-2, **options)
    reference = stepwell.OffloadAdamW(twin, lr=1e-2, threads=2, deferred=deferred, **options)
    return (net, optimizer), (twin, reference)


def assert_same_weights(net, twin):
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(bits(param), bits(expected))


def assert_same_forwards(one, other, steps=STEPS, first=0):
    """Each forward reads weights that lack the same updates."""
    assert train(*one, steps, first) == train(*other, steps, first)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "q8"])
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_a_volume_has_the_bits_of_host_memory(tmp_path, interval, predict, moments):
    deferred = stepwell.Deferred(interval=interval, predict=predict)
    one, other = pair(tmp_path, deferred, moments=moments)
    assert_same_forwards(one, other)
    assert num_pending(one[1])
    assert_equal(one, other)
    # The look has read state into memory: steps go on from there.
    assert_same_forwards(one, other, first=STEPS)
    assert_equal(one, other)


def test_state_in_memory_of_a_parameter_without_gradient_is_stepped_later(tmp_path):
    """The step after a look does not write it back, and one that is deferred does."""
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, tmp_path, stepwell.Deferred(interval=2), lr=1e-2)
    train(net, optimizer, 5)
    optimizer.state_dict()
    for step in range(5, 12):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        if step < 8:
            net[2].weight.grad = None
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [each["step"].item() for each in state.values()].count(9) == 1
    assert all(torch.isfinite(param).all() for param in net.parameters())


def test_what_is_pending_is_applied_when_the_optimizer_goes(tmp_path):
    one, other = pair(tmp_path, stepwell.Deferred(interval=4))
    assert_same_forwards(one, other, 7)
    nets = one[0], other[0]
    del one, other
    assert_same_weights(*nets)


def test_a_cycle_that_is_collected_applies_what_is_pending(tmp_path):
    """Finalizers of the volume and of the engine come in no order that could be relied on."""
    one, other = pair(tmp_path, stepwell.Deferred(interval=4))
    assert_same_forwards(one, other, 7)
    nets = one[0], other[0]
    one[1].itself, other[1].itself = one[1], other[1]
    del one, other
    gc.collect()
    assert_same_weights(*nets)


def test_a_turn_reads_and_writes_its_part_of_the_volume(tmp_path):
    moved = {}
    for interval in (1, 4):
        deferred = stepwell.Deferred(interval=interval)
        path = tmp_path / str(interval)
        path.mkdir()
        (net, optimizer), _ = pair(path, deferred)
        train(net, optimizer, 9)
        before = swapped_of(optimizer).volume.core.bytes_moved
        train(net, optimizer, 8, first=9)
        engine_of(optimizer).finish()
        after = swapped_of(optimizer).volume.core.bytes_moved
        moved[interval] = [end - begin for begin, end in zip(before, after, strict=True)]
    for each, quarter in zip(moved[1], moved[4], strict=True):
        assert 0 < quarter <= each / 3


def test_a_drive_that_fails_with_updates_pending_ends_every_look(tmp_path):
    (net, optimizer), _ = pair(tmp_path, stepwell.Deferred(interval=4))
    train(net, optimizer, 7)
    engine_of(optimizer).finish()
    # Its files have no name any more.
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and str(tmp_path / "drive1") in str(path.readlink()):
            os.truncate(path, 1 << 13)
    # Each would be without the updates that are pending.
    for look in (
        lambda: optimizer.drain(),
        lambda: optimizer.state,
        lambda: net.state_dict(),
        lambda: net[2].weight.sum(),
        lambda: loss_of(net.eval(), 0),
        lambda: optimizer.step(),
    ):
        with pytest.raises(OSError, match=r"(?s)member `1`.*drive1"):
            look()


def test_sums_of_several_backwards_are_deferred_as_in_memory(tmp_path):
    deferred = stepwell.Deferred(interval=3)
    both = pair(tmp_path, deferred, accumulation_steps=2, clip_norm=0.5)
    for number in range(10):
        for net, optimizer in both:
            optimizer.zero_grad()
            for micro in range(2):
                loss_of(net, 2 * number + micro).backward()
            optimizer.step()
    assert num_pending(both[0][1])
    assert_equal(*both)


def test_memory_for_gradients_that_wait_is_not_given_to_state(tmp_path):
    """`host_bytes_max` is the most that all of it takes."""
    deferred = stepwell.Deferred(interval=4)
    (net, optimizer), _ = pair(tmp_path, deferred)
    train(net, optimizer, 3)
    twins, swapped = twins_of(optimizer), swapped_of(optimizer)
    fitting = [param for param in net.parameters() if param not in swapped]
    in_memory = sum(_state.nbytes(param, "fp32") for param in fitting)
    waiting = memory_of(Extents.of(net.parameters()), deferred).pinned
    taken = twins.total_nbytes + swapped.volume.memory_bytes + in_memory + waiting
    assert taken <= host_bytes_max(net, deferred)


def test_what_does_not_go_together_is_refused(tmp_path):
    net = net_of()
    named = list(net.named_parameters())
    volume = stepwell.Volume(folders(tmp_path), durability="commit")
    with pytest.raises(ValueError, match=r"durability `commit`.*\n?.*durability='none'"):
        stepwell.OffloadAdamW(named, deferred=stepwell.Deferred(), tier=volume)
    volume = stepwell.Volume(folders(tmp_path), durability="none")
    with pytest.raises(ValueError, match="no selected channels"):
        stepwell.OffloadAdamW(named, deferred=stepwell.Deferred(fraction=0.1), tier=volume)
