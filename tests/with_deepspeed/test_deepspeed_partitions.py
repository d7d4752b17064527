"""ZeRO's partitions on the offload engine by themselves, without DeepSpeed: on the CPU.

Their steps, and which memory they announce, take and let go of.
"""

import itertools

import pytest
import torch
from insides import core_of_partitions, lane_of, make_partitions_late
from partition_cases import BF16, FP32, PRECISE, Steps, full, opened, partition, stepped
from stepwell.deepspeed.zero import gradients as gradients_module
from stepwell.deepspeed.zero import partitions as partitions_module
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.partition import Partition


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("offloaded", [False, True])
def test_weights_are_those_of_the_masters_after_each_step(offloaded, weight):
    made = [partition(numel, weight=weight, offloaded=offloaded) for numel in (5, 0, 3)]
    partitions = opened(*made)
    steps, fragments = Steps(partitions, made), [Fragment(0, 0, 5), Fragment(2, 0, 3)]
    before = [each.weight.clone() for each in made]
    for _ in range(2):
        for fragment in fragments:
            piece = full(fragment.numel, 1.0)
            partitions.gradients.collect(fragment, piece, is_owned=False, is_last=True)
        steps.take()
        partitions.finish()
        for fragment in fragments:
            master, now = made[fragment.group].master, made[fragment.group].weight
            assert torch.equal(now, master.detach().to(weight))
            assert not torch.equal(now, before[fragment.group])
        before = [each.weight.clone() for each in made]


def test_gradients_that_were_dropped_are_not_stepped():
    made = [partition(4)]
    partitions = opened(*made)
    gradients, fragment, steps = partitions.gradients, Fragment(0, 0, 4), Steps(partitions, made)
    for value in (9.0, 1.0):
        partitions.drop()
        gradients.collect(fragment, full(4, value), is_owned=False, is_last=True)
    steps.take()
    torch.testing.assert_close(steps.moments()[0], full(4, 0.1, FP32))


def test_a_copy_that_cannot_be_launched_fails_where_ranks_are_told():
    """The norm is theirs together: behind it the others would wait for this rank."""
    made = [partition(4)]
    partitions = opened(*made)
    gradients, steps = partitions.gradients, Steps(partitions, made)

    class Lane:
        def launch(self):
            raise OSError("the device has failed")

        def order(self):
            raise OSError("the device has failed")

        def __getattr__(self, name):
            return getattr(lane, name)

    gradients.collect(Fragment(0, 0, 4), full(4, 1.0), is_owned=False, is_last=True)
    lane = getattr(*lane_of(gradients))
    setattr(*lane_of(gradients), Lane())
    assert gradients.norm(float) == 2.0
    with pytest.raises(OSError, match="the device has failed"):
        steps.take()
    setattr(*lane_of(gradients), lane)


@pytest.mark.parametrize("name", ["norm_of", "copy"])
def test_ctrl_c_in_a_norm_of_the_program_s_leaves_no_norm_without_a_gradient(monkeypatch, name):
    made = [partition(4)]
    partitions = opened(*made)
    gradients, steps = partitions.gradients, Steps(partitions, made)
    gradients.collect(Fragment(0, 0, 4), full(4, 1.0), is_owned=False, is_last=False)
    owner = gradients_module if name == "norm_of" else getattr(*lane_of(gradients))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            gradients.norm(float)
    assert gradients.norm(float) == 2.0
    steps.take()
    torch.testing.assert_close(steps.moments()[0], full(4, 0.1, FP32))


def test_what_is_read_elsewhere_is_waited_for_once():
    """Gradients of the next step, which are on their way, would be waited for, too."""
    made = [partition(4)]
    partitions = opened(*made)
    partitions.are_weights_read_elsewhere = True
    steps, fragment, waits = Steps(partitions, made), Fragment(0, 0, 4), []
    noting = make_partitions_late(partitions)
    synchronize = noting.synchronize

    def note(**options):
        waits.append(options)
        synchronize(**options)

    noting.synchronize = note
    for nth in range(1, 4):
        partitions.gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=True)
        steps.take()
        for _ in range(2):
            partitions.finish()
        assert len(waits) == nth


def test_behind_a_step_that_was_refused_waits_are_for_the_last_one(monkeypatch):
    made = [partition(4)]
    partitions = opened(*made)
    steps, fragment = Steps(partitions, made), Fragment(0, 0, 4)
    late = make_partitions_late(partitions)

    def refuse(*_, **__):
        assert partitions.wait_for([fragment]) is False
        raise ValueError("refused")

    steps.take()
    assert partitions.wait_for([fragment]) is True
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="refused"):
        patched.setattr(partitions.engine, "submit", refuse)
        steps.take()
    partitions.end_left_step()
    partitions.drop()
    assert partitions.wait_for([fragment]) is True
    steps.take()
    assert partitions.is_busy
    assert not partitions.has_ended()
    partitions.end_left_step()
    assert not late.is_late
    assert partitions.has_ended()


# ---- memory ----


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    ("grad", "weight", "offloaded"),
    list(itertools.product((BF16, FP32), (BF16, FP32), (False, True))),
)
def test_what_is_announced_is_what_is_taken(grad, weight, offloaded, is_pinned, monkeypatch):
    announced, announce = [], partitions_module.announce

    def noted(numel, **bytes_of):
        announced.append((numel, bytes_of))
        return announce(numel, **bytes_of)

    monkeypatch.setattr(partitions_module, "announce", noted)
    made = [
        partition(numel, grad=grad, weight=weight, moments_bytes=numel, offloaded=offloaded)
        for numel in (64, 0, 32)
    ]
    # One with a master of its own, which is moved.
    there = full(32, PRECISE, FP32)
    made[2] = made[2]._replace(master=there)
    partitions = opened(*made, is_pinned=is_pinned)
    ((numel, said),) = announced
    crossing = [
        *partitions.gradients.grads,
        *(each for each in partitions.twins if each is not None),
    ]
    # The weights of the program itself are others' to pin.
    own = [each for each in crossing if not any(each is one.weight for one in made)]
    masters = [each.master for each in made]
    if weight == FP32:
        # What is uploaded is the master; or the weights, which are copies of it.
        crossing += [each.weight for each in made] if offloaded else masters
        own += [] if offloaded else masters
    taken = {id(each): each.nbytes for each in [*crossing, *masters]}
    assert numel == 96
    assert said["state"] + said["crossing"] == 96 + sum(taken.values())
    assert said["crossing"] == sum(each.nbytes for each in crossing)
    pinned = sum(each.nbytes for each in own) if is_pinned else 0
    assert core_of_partitions(partitions).pinned_nbytes == pinned
    # Weights that are offloaded are there already.
    weights = sum(each.weight.nbytes for each in made) if offloaded else 0
    assert said["held"] == weights + 32 * 4


def test_host_memory_is_bounded_also_for_gradients_that_are_set():
    taken = 64 * (4 + 2 + 2) + 100
    with pytest.raises(ValueError, match="host_bytes_max"):
        opened(partition(64, moments_bytes=100), host_bytes_max=taken - 1, is_pinned=True)
    for room, is_refused in ((255, True), (256, False)):
        made = partition(64, moments_bytes=100)
        partitions = opened(made, host_bytes_max=taken + room, is_pinned=True)
        partitions.gradients.set_gradient(Fragment(0, 0, 4), full(4, PRECISE, FP32))
        if is_refused:
            with pytest.raises(ValueError, match="`256` bytes"):
                stepped(partitions)
        else:
            stepped(partitions)
            (grad,) = partitions.gradients.owners[1].values()
            # It is taken once.
            stepped(partitions)
            assert partitions.gradients.owners[1][0] is grad
            partitions.drop()
            stepped(partitions)
            assert partitions.gradients.owners[1] == {}


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_masters_begin_as_they_were_or_as_the_weights(is_there, offloaded, weight):
    master = full(4, PRECISE if is_there else 0.0, FP32)[: 4 if is_there else 0]
    made = Partition(master, full(4, 3.0, weight), BF16, 0, offloaded)
    opened(made)
    assert made.master is master
    assert master.tolist() == [PRECISE if is_there else 3.0] * 4


def test_gradients_are_let_go_of_at_the_end():
    partitions = opened(partition(4), adds_on_host=True)
    gradients = partitions.gradients
    for is_last in (False, True):
        gradients.collect(Fragment(0, 0, 4), full(4, 1.0), is_owned=False, is_last=is_last)
    gradients.set_gradient(Fragment(0, 0, 4), full(4, PRECISE, FP32))
    stepped(partitions)
    partitions.end()
    assert gradients.grads == partitions.twins == []
    assert gradients.owners == [[], {}]
    assert not gradients.has_gradient(Fragment(0, 0, 4))
    partitions.end()
    partitions.finish()
    assert not partitions.is_busy
