"""What the gradients of ZeRO's partitions come to, without DeepSpeed: sums, sets and norms."""

import math

import pytest
import torch
from insides import make_partitions_late
from partition_cases import BF16, FP32, HUGE, PRECISE, Steps, full, opened, partition, stepped
from stepwell.deepspeed.zero.fragment import Fragment


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("numel", [1, 5])
def test_a_gradient_counts_however_short_it_is(numel, adds_on_host):
    partitions = opened(partition(numel), partition(3), adds_on_host=adds_on_host)
    gradients = partitions.gradients
    used, unused, empty = Fragment(0, 0, numel), Fragment(1, 0, 3), Fragment(1, 3, 0)
    assert gradients.has_gradient(empty) is True
    assert gradients.has_gradient(used) is False
    for value, is_last in ((1.0, False), (2.0, True)):
        gradients.collect(used, full(numel, value), is_owned=False, is_last=is_last)
        gradients.collect(empty, full(0, value), is_owned=False, is_last=is_last)
        assert gradients.has_gradient(used) is True
    assert gradients.has_gradient(unused) is False
    assert gradients.norm(float) == pytest.approx(3.0 * math.sqrt(numel), rel=1e-6)
    assert stepped(partitions) == [[3.0] * numel, [0.0] * 3]


@pytest.mark.parametrize("adds_on_host", [False, True])
def test_what_is_not_owned_may_be_written_again(adds_on_host):
    partitions = opened(partition(4), adds_on_host=adds_on_host)
    bucket = full(4, 1.0)
    partitions.gradients.collect(Fragment(0, 0, 4), bucket, is_owned=False, is_last=False)
    bucket.fill_(7.0)
    assert partitions.gradients.norm(float) == 2.0
    assert stepped(partitions) == [[1.0] * 4]


def test_a_total_takes_the_place_of_what_was_sent_before():
    partitions = opened(partition(4))
    for value in (1.0, 5.0):
        total = full(4, value)
        partitions.gradients.add(Fragment(0, 0, 4), total, is_owned=False, is_total=True)
        partitions.gradients.send(Fragment(0, 0, 4))
    assert partitions.gradients.norm(float) == 10.0
    assert stepped(partitions) == [[5.0] * 4]


@pytest.mark.parametrize("adds_on_host", [False, True])
def test_backwards_after_the_one_that_was_announced_as_the_last(adds_on_host):
    partitions = opened(partition(4), adds_on_host=adds_on_host)
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    for count, is_last in enumerate((True, True, False, True), 1):
        gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=is_last)
        if is_last:
            assert gradients.norm(float) == 2.0 * count
    assert stepped(partitions) == [[4.0] * 4]


@pytest.mark.parametrize("adds_on_host", [False, True])
def test_the_sum_goes_on_as_if_nothing_had_been_set_between_backwards(adds_on_host):
    partitions = opened(partition(4), adds_on_host=adds_on_host)
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=False)
    value = full(4, PRECISE, FP32)
    gradients.set_gradient(fragment, value)
    value.fill_(7.0)
    assert gradients.gradient(fragment).tolist() == [PRECISE] * 4
    gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=True)
    assert gradients.gradient(fragment).tolist() == [2.0] * 4
    assert gradients.norm(float) == 4.0
    assert stepped(partitions) == [[2.0] * 4]


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("is_norm_kept", [False, True])
@pytest.mark.parametrize("grad", [BF16, FP32])
def test_what_is_set_is_stepped_in_the_precision_of_the_master(grad, is_norm_kept, adds_on_host):
    partitions = opened(partition(8, grad=grad), partition(3), adds_on_host=adds_on_host)
    gradients, fragment, rest = partitions.gradients, Fragment(0, 2, 4), Fragment(0, 6, 2)
    for is_last in (False, True):
        for each in (fragment, rest):
            gradients.collect(each, full(each.numel, 1.0, grad), is_owned=False, is_last=is_last)
    gradients.set_gradient(fragment, full(4, PRECISE, FP32), is_norm_kept=is_norm_kept)
    assert gradients.gradient(fragment).tolist() == [PRECISE] * 4
    squares = (16.0 if is_norm_kept else 4 * PRECISE**2) + 8.0
    assert gradients.norm(float) == pytest.approx(math.sqrt(squares), rel=1e-7)
    assert stepped(partitions) == [[0.0] * 2 + [PRECISE] * 4 + [2.0] * 2, [0.0] * 3]
    # Another one after the set: it was the last.
    gradients.set_gradient(fragment, full(4, 2 * PRECISE, FP32))
    assert stepped(partitions)[0][2:6] == [2 * PRECISE] * 4


@pytest.mark.parametrize("is_norm_kept", [False, True])
def test_a_gradient_that_is_set_without_a_backward_is_stepped_once(is_norm_kept):
    made = [partition(4), partition(2)]
    partitions = opened(*made)
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    steps = Steps(partitions, made)
    value = full(4, PRECISE, FP32)
    gradients.set_gradient(fragment, value, is_norm_kept=is_norm_kept)
    value.fill_(7.0)
    assert gradients.norm(float) == (0.0 if is_norm_kept else pytest.approx(2 * PRECISE, rel=1e-7))
    steps.take(0.5)
    # As it was stepped.
    assert gradients.gradient(fragment).tolist() == [0.5 * PRECISE] * 4
    first = [moment.clone() for moment in steps.moments()]
    torch.testing.assert_close(first[0], full(4, 0.05 * PRECISE, FP32))
    assert not first[1].any()
    assert stepped(partitions) == [[0.0] * 4, [0.0] * 2]
    assert gradients.norm(float) == 0.0
    steps.take()
    assert torch.equal(steps.moments()[0], first[0] * 0.9)


@pytest.mark.parametrize("grad", [BF16, FP32])
def test_what_a_step_has_taken_is_read_as_it_was_stepped(grad):
    made = [partition(4, grad=grad)]
    partitions = opened(*made)
    gradients, fragment, steps = partitions.gradients, Fragment(0, 0, 4), Steps(partitions, made)
    assert gradients.gradient(fragment).tolist() == [0.0] * 4
    for nth in (1.0, 2.0):
        gradients.collect(fragment, full(4, nth, grad), is_owned=False, is_last=True)
        for _ in range(2):
            found = gradients.gradient(fragment)
            assert found.tolist() == [nth] * 4
            found.fill_(7.0)
        assert gradients.norm(float) == 2.0 * nth
        steps.take(0.25)
        for _ in range(2):
            assert gradients.gradient(fragment).tolist() == [0.25 * nth] * 4
        assert partitions.timing()["bytes_downloaded"] == 4 * grad.itemsize
        assert not gradients.has_gradient(fragment)
    value = full(4, 3.0, FP32)
    gradients.set_gradient(fragment, value)
    value.fill_(7.0)
    assert gradients.gradient(fragment).tolist() == [3.0] * 4


@pytest.mark.parametrize("adds_on_host", [False, True])
@pytest.mark.parametrize("grad", [BF16, FP32])
@pytest.mark.parametrize("order", [(True,), (False, True), (True, True)])
def test_what_is_set_before_the_first_backward_is_dropped(order, grad, adds_on_host):
    made = [partition(4, grad=grad)]
    partitions = opened(*made, adds_on_host=adds_on_host)
    gradients, fragment, steps = partitions.gradients, Fragment(0, 0, 4), Steps(partitions, made)
    gradients.collect(fragment, full(4, 9.0, grad), is_owned=False, is_last=True)
    steps.take()
    gradients.set_gradient(fragment, full(4, PRECISE, FP32))
    for is_last in order:
        gradients.collect(fragment, full(4, 1.0, grad), is_owned=False, is_last=is_last)
    assert gradients.norm(float) == 2.0 * len(order)
    assert stepped(partitions) == [[float(len(order))] * 4]


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


def test_bytes_of_sums_in_host_memory_are_counted():
    made = [partition(4), partition(2)]
    partitions = opened(*made, adds_on_host=True)
    for is_last in (False, False, True):
        for group, each in enumerate(made):
            piece = torch.ones_like(each.weight)
            fragment = Fragment(group, 0, piece.numel())
            partitions.gradients.collect(fragment, piece, is_owned=True, is_last=is_last)
    Steps(partitions, made).take()
    assert partitions.timing()["bytes_downloaded"] == 3 * 12


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


def test_what_is_dropped_and_what_is_kept():
    partitions = opened(partition(8), adds_on_host=True)
    gradients = partitions.gradients
    sent, summed, begun = Fragment(0, 0, 2), Fragment(0, 2, 2), Fragment(0, 4, 2)
    for _ in range(2):
        gradients.collect(sent, full(2, 1.0), is_owned=False, is_last=True)
        for is_last in (False, True):
            gradients.collect(summed, full(2, 1.0), is_owned=False, is_last=is_last)
        gradients.add(begun, full(2, 1.0), is_owned=False)
        gradients.set_gradient(Fragment(0, 6, 2), full(2, PRECISE, FP32))
        gradients.drop_sums()
        found = [gradients.has_gradient(each) for each in (sent, summed, begun)]
        assert found == [True, False, False]
        assert gradients.norm(float) == pytest.approx(math.sqrt(2 + 2 * PRECISE**2), rel=1e-7)
        gradients.add(begun, full(2, 1.0), is_owned=False)
        gradients.collect(summed, full(2, 1.0), is_owned=False, is_last=False)
        partitions.drop()
        assert not any(map(gradients.has_gradient, (sent, summed, begun, Fragment(0, 6, 2))))
        assert gradients.norm(float) == 0.0
        assert stepped(partitions) == [[0.0] * 8]


def test_what_was_set_goes_with_the_sum_that_took_its_place():
    partitions = opened(partition(4, grad=FP32), adds_on_host=True)
    gradients, fragment = partitions.gradients, Fragment(0, 0, 4)
    gradients.set_gradient(fragment, full(4, 5.0, FP32))
    gradients.collect(fragment, full(4, 1.0, FP32), is_owned=False, is_last=False)
    gradients.drop_sums()
    assert gradients.norm(float) == 0.0
    assert stepped(partitions) == [[0.0] * 4]
