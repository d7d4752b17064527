"""ZeRO's partitions on the offload engine by themselves, without DeepSpeed: on the CPU.

Which memory they announce and take, the norms of their gradients, and which gradients a step takes.
"""

import itertools
import math

import pytest
import torch
from insides import core_of_partitions, make_partitions_late
from partition_cases import BF16, FP32, HUGE, PRECISE, Steps, full, opened, partition, stepped
from stepwell.deepspeed.zero import host_memory
from stepwell.deepspeed.zero.partition import Fragment


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    ("grad", "weight", "offloaded"),
    list(itertools.product((BF16, FP32), (BF16, FP32), (False, True))),
)
def test_what_is_announced_is_what_is_taken(grad, weight, offloaded, is_pinned, monkeypatch):
    announced, announce = [], host_memory.announce

    def noted(numel, **bytes_of):
        announced.append((numel, bytes_of))
        return announce(numel, **bytes_of)

    monkeypatch.setattr(host_memory, "announce", noted)
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


# ---- gradients ----


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("value", [1.0, HUGE, math.inf, math.nan])
def test_norms(value, is_last, adds_on_host):
    partitions = opened(partition(8), partition(1), adds_on_host=adds_on_host)
    gradients, asked = partitions.gradients, []

    def add_up(squares):
        asked.append(squares.dtype)
        return float(squares)

    gradients.collect(Fragment(0, 0, 4), full(4, value), is_owned=False, is_last=is_last)
    gradients.collect(Fragment(0, 4, 4), full(4, 0.0), is_owned=False, is_last=True)
    gradients.collect(Fragment(1, 0, 1), full(1, 1.0), is_owned=False, is_last=is_last)
    expected = math.sqrt(4 * value**2 + 1.0) if math.isfinite(value) else math.inf
    assert gradients.norm(add_up) == pytest.approx(expected, rel=1e-7)
    assert asked == ([FP32] if value == 1.0 else [FP32, torch.float64])


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [1, 4])
def test_what_a_reduction_leaves_is_stepped_and_its_memory_free(
    count, dtype, backwards, adds_on_host
):
    partitions = opened(partition(10), partition(3), adds_on_host=adds_on_host)
    gradients = partitions.gradients
    # The last of them is shorter than its fragment, and that of another rank comes in between.
    fragments = [Fragment(0, 4, 3), None, Fragment(1, 0, 3), Fragment(0, 0, 4)]
    for left in reversed(range(backwards)):
        bucket = torch.arange(1.0, 20.0).to(dtype)
        pieces = [bucket[0:3], bucket[3:5], bucket[8:11].view(3, 1), bucket[5:8]]
        for first in range(0, 4, count):
            reduced = slice(first, first + count)
            gradients.collect_all(fragments[reduced], pieces[reduced], is_last=left == 0)
        bucket.fill_(math.nan)
    expected = [[6, 7, 8, 0, 1, 2, 3, 0, 0, 0], [9, 10, 11]]
    expected = [[each * backwards for each in grad] for grad in expected]
    norm = math.sqrt(sum(each**2 for grad in expected for each in grad))
    assert gradients.norm(float) == pytest.approx(norm)
    assert stepped(partitions) == expected


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("grad", [BF16, FP32])
def test_what_is_set_before_the_first_gradient_is_dropped_by_it(grad, is_last, adds_on_host):
    """As DeepSpeed has it. Before the first backward of all no `zero_grad` drops it."""
    partitions = opened(partition(4, grad=grad), adds_on_host=adds_on_host)
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients.set_gradient(fragment, full(4, PRECISE, FP32))
    assert gradients.norm(float) == pytest.approx(2 * PRECISE)
    gradients.collect(fragment, full(4, 3.0, grad), is_owned=False, is_last=is_last)
    assert gradients.norm(float) == 6.0
    assert stepped(partitions) == [[3.0] * 4]


@pytest.mark.parametrize("what", ["sent", "summed on the host", "set"])
def test_a_step_that_is_late_takes_its_own_gradients(what):
    made = [partition(4, grad=FP32)]
    partitions = opened(*made, adds_on_host=what == "summed on the host")
    late = make_partitions_late(partitions)
    gradients, fragment, steps = partitions.gradients, Fragment(0, 0, 4), Steps(partitions, made)
    gradients.collect(fragment, full(4, 1.0, FP32), is_owned=False, is_last=True)
    partitions.arrive()
    steps.take()
    assert late.is_late
    if what == "set":
        gradients.set_gradient(fragment, full(4, 8.0, FP32))
    else:
        gradients.collect(fragment, full(4, 8.0, FP32), is_owned=False, is_last=what == "sent")
    (moment,) = steps.moments()
    torch.testing.assert_close(moment, full(4, 0.1, FP32))
