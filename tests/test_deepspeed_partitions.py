"""ZeRO's partitions on the offload engine by themselves, without DeepSpeed: on the CPU.

What their gradients come to, which memory they announce, and what is brought from a volume.
"""

import itertools
import math
import os

import pytest
import stepwell
import torch
from late_engine import LateEngine
from stepwell import _core
from stepwell.deepspeed.zero import partitions as partitions_module
from stepwell.deepspeed.zero.deferred_gradients import DeferredGradients, Source, runs_of
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.mapped import MappedState
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions, Update

BF16, FP32 = torch.bfloat16, torch.float32
PRECISE = 1.0009765625
"""Not a bf16 number."""
HUGE = 2.0**100
"""Its square is no float32 number."""


def partition(numel, *, grad=BF16, master=FP32, weight=BF16, moments_bytes=0, offloaded=False):
    held = torch.empty(0, dtype=master, requires_grad=True)
    return Partition(held, torch.ones(numel, dtype=weight), grad, moments_bytes, offloaded)


def opened(*partitions, **options):
    settings = {"device": torch.device("cpu"), "threads": 1, "is_pinned": False, **options}
    return Partitions(list(partitions), **settings)


def full(numel, value, dtype=BF16):
    return torch.full((numel,), value, dtype=dtype)


class Steps:
    """Takes steps of partitions with Stepwell's AdamW."""

    def __init__(self, partitions, made):
        self.partitions, self.masters = partitions, [each.master for each in made]
        self.weights = [each.weight for each in made]
        self.optimizer = stepwell.AdamW([{"params": [each]} for each in self.masters], lr=0.5)
        self.operands = Operands(self.optimizer, 0)

    def take(self, grad_scale=1.0):
        grads = self.partitions.stepped_grads()
        operands = [
            self.operands.of(group, group, master, grad, twin)
            for group, (master, grad, twin) in enumerate(
                zip(self.masters, grads, self.partitions.twins, strict=True)
            )
        ]
        updates = [
            Update(group, each.tensor, each.step, each.hyper.core(grad_scale))
            for group, each in enumerate(operands)
            if each.tensor is not None
        ]
        calls = self.partitions.prepare(updates, self.weights, [operands], grad_scale=grad_scale)
        self.operands.commit(operands, calls)
        self.partitions.forget()

    def moments(self):
        self.partitions.finish()
        return [self.optimizer.state[master]["exp_avg"] for master in self.masters]


def stepped(partitions):
    """What the coming step would take."""
    grads = partitions.stepped_grads()
    partitions.arrive()
    return [grad.tolist() for grad in grads]


# ---- gradients ----


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
    partitions._engine = late = LateEngine(partitions._engine)
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


# ---- steps ----


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


def test_behind_a_step_that_was_refused_waits_are_for_the_last_one(monkeypatch):
    made = [partition(4)]
    partitions = opened(*made)
    steps, fragment = Steps(partitions, made), Fragment(0, 0, 4)
    partitions._engine = late = LateEngine(partitions._engine)

    def refuse(*_, **__):
        assert partitions.wait([fragment]) is False
        raise ValueError("refused")

    steps.take()
    assert partitions.wait([fragment]) is True
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="refused"):
        patched.setattr(late, "submit", refuse)
        steps.take()
    partitions.settle()
    partitions.drop()
    assert partitions.wait([fragment]) is True
    steps.take()
    assert partitions.is_busy
    assert not partitions.has_ended()
    partitions.settle()
    assert not late.is_late
    assert partitions.has_ended()


# ---- gradients whose updates are deferred ----


@pytest.mark.parametrize("row_len", [0, 1, 7])
@pytest.mark.parametrize("first", [0, 3, 7, 9])
@pytest.mark.parametrize("numel", [0, 2, 4, 11, 35])
def test_runs_are_whole_rows_and_what_is_cut_of_rows(numel, first, row_len):
    runs = runs_of(Fragment(2, 100, numel), Source(first, row_len))
    covered = [at for run in runs for at in range(run.begin, run.begin + run.numel)]
    assert covered == list(range(100, 100 + numel))
    # Which of a parameter's rows are whole in the fragment.
    rows = range(first, first + numel)
    whole = [at for at in rows if row_len and at % row_len == 0 and at + row_len - 1 in rows]
    assert [run.begin - 100 + first for run in runs if run.row_len] == whole[:1]
    assert sum(run.numel for run in runs if run.row_len) == len(whole) * row_len
    assert all(run.group == 2 and run.numel and run.row_len in (0, row_len) for run in runs)


class Taken:
    """Of an engine: what is taken of gradients."""

    def __init__(self):
        self.taken, self.released = {}, []

    def take_deferred(self, indices, addresses, *, source_owners, stream):
        self.taken |= dict(zip(indices, addresses, strict=True))

    def discard(self):
        self.taken.clear()

    def release(self, *, stream):
        self.released.append(stream)


def test_runs_are_taken_from_where_they_lie():
    core, fragments = Taken(), {Fragment(0, 4, 12): Source(3, 5), Fragment(1, 0, 6): Source(0, 0)}
    runs = {fragment: runs_of(fragment, source) for fragment, source in fragments.items()}
    gradients = DeferredGradients(core, runs, [BF16, FP32], torch.device("cpu"))
    fragment, missing = fragments
    grad = torch.arange(12, dtype=BF16)
    gradients.collect(fragment, grad, is_owned=True, is_last=True)
    # Cut of a row, two rows, and nothing behind them.
    head, rows = runs[fragment]
    assert core.taken == {0: grad.data_ptr(), 1: grad[2:].data_ptr()}
    assert [each.tolist() for _, each in gradients.by_run()] == [[0, 1], list(range(2, 12))]
    assert [gradients.address(fragment, run) for run in (head, rows)] == list(core.taken.values())
    gradients.gradient(fragment).zero_()
    assert gradients.norm(float) == pytest.approx(math.sqrt(sum(at**2 for at in range(12))))
    gradients.take_zeros()
    assert core.taken.keys() == {0, 1, 2}
    assert gradients.gradient(fragment).tolist() == list(range(12))
    assert gradients.gradient(missing).tolist() == [0.0] * 6
    gradients.release(0)
    assert not gradients.has_gradient(fragment)


def deferred_gradients(*numels, row_len=4, dtype=BF16):
    """Gradients of partitions of one fragment each, by an engine that takes them."""
    core = Taken()
    fragments = [Fragment(group, 0, numel) for group, numel in enumerate(numels)]
    runs = {fragment: runs_of(fragment, Source(0, row_len)) for fragment in fragments}
    made = DeferredGradients(core, runs, [dtype] * len(numels), torch.device("cpu"))
    return made, core, fragments


def test_deferred_gradients_are_summed_on_the_device():
    gradients, core, (fragment, empty) = deferred_gradients(4, 0)
    assert gradients.has_gradient(empty)
    assert not gradients.has_gradient(fragment)
    bucket = full(4, 1.0)
    for is_last in (False, True, True):
        # Also behind the backward that was announced as the last.
        gradients.collect(fragment, bucket, is_owned=False, is_last=is_last)
        bucket.fill_(2.0)
        gradients.collect(empty, full(0, 1.0), is_owned=True, is_last=is_last)
        assert gradients.has_gradient(empty)
        assert gradients.has_gradient(fragment)
        assert list(core.taken) == [0] * is_last
    assert gradients.gradient(fragment).tolist() == [5.0] * 4
    assert gradients.norm(float) == 10.0
    gradients.add(fragment, full(4, 3.0), is_owned=False, is_total=True)
    assert core.taken == {}
    assert gradients.norm(float) == 6.0
    assert list(core.taken) == [0]
    gradients.release(5)
    assert sorted(core.released) == [0, 5]
    assert not gradients.has_gradient(fragment)
    # Nothing of it is known to the next step.
    assert gradients.norm(float) == 0.0
    gradients.add(fragment, full(4, 1.0), is_owned=False)
    assert list(core.taken) == [0]
    gradients.release(5)
    assert sorted(core.released) == [0, 5, 5]


def test_deferred_gradients_that_are_dropped():
    gradients, core, (fragment, other) = deferred_gradients(4, 4)
    gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=True)
    gradients.add(other, full(4, 1.0), is_owned=False)
    gradients.drop()
    assert core.taken == {}
    assert gradients.norm(float) == 0.0
    assert not gradients.has_gradient(fragment)
    gradients.release(7)
    assert core.released == [7]
    with pytest.raises(ValueError, match="on its way to its deferred update"):
        gradients.gradient(fragment)


def test_norms_of_deferred_gradients_beyond_float32():
    gradients, _, (fragment, other) = deferred_gradients(4, 1)
    gradients.add(fragment, full(4, HUGE), is_owned=False)
    gradients.add(other, full(1, HUGE), is_owned=False)
    assert gradients.norm(float) == pytest.approx(HUGE * math.sqrt(5.0), rel=1e-7)
    gradients.drop()
    gradients.add(other, full(1, math.nan), is_owned=False)
    assert gradients.norm(float) == math.inf


def test_deferred_gradients_are_read_and_not_set():
    gradients, _, (fragment,) = deferred_gradients(4, dtype=FP32)
    gradients.add(fragment, full(4, 1.0, FP32), is_owned=True)
    gradients.gradient(fragment).zero_()
    with pytest.raises(ValueError, match="a gradient is set, which deferred updates"):
        gradients.set_gradient(fragment, full(4, 2.0, FP32))
    assert gradients.gradient(fragment).tolist() == [1.0] * 4


def test_deferred_gradients_of_another_dtype_are_refused():
    gradients, core, (fragment,) = deferred_gradients(4, dtype=FP32)
    with pytest.raises(ValueError, match=r"a gradient is `torch.bfloat16`, expected"):
        gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=True)
    assert core.taken == {}


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
    assert partitions._engine.pinned_nbytes == pinned
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
                partitions.stepped_grads()
        else:
            (grad,) = partitions.stepped_grads()
            # It is taken once.
            assert partitions.stepped_grads()[0] is grad
            partitions.drop()
            assert partitions.stepped_grads() == partitions.gradients.grads
            assert partitions.gradients.owners[1] == {}


def test_memory_is_pinned_where_it_crosses_the_bus(monkeypatch):
    asked, memory = [], partitions_module.host_memory

    def noted(engine, numel, dtype, *, is_pinned):
        asked.append((dtype, is_pinned))
        return memory(engine, numel, dtype, is_pinned=is_pinned)

    monkeypatch.setattr(partitions_module, "host_memory", noted)
    crossing = {
        (BF16, False): [(FP32, False), (BF16, True), (BF16, True)],
        (FP32, False): [(FP32, True), (BF16, True)],
        (BF16, True): [(FP32, False), (BF16, True)],
        (FP32, True): [(FP32, False), (BF16, True)],
    }
    for (weight, offloaded), expected in crossing.items():
        for is_pinned in (True, False):
            asked.clear()
            opened(partition(8, weight=weight, offloaded=offloaded), is_pinned=is_pinned)
            assert asked == [(dtype, pins and is_pinned) for dtype, pins in expected]


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
    partitions.stepped_grads()
    partitions.end()
    assert gradients.grads == partitions.twins == []
    assert gradients.owners == [[], {}]
    assert not gradients.has_gradient(Fragment(0, 0, 4))
    partitions.end()
    partitions.finish()
    assert not partitions.is_busy


# ---- state that is brought from a volume ----


def places(numel):
    """Like moments in fp32, and codes with their scales."""
    return {
        "exp_avg": torch.empty(numel, device="meta"),
        "codes": torch.empty(numel, dtype=torch.uint8, device="meta"),
        "scales": torch.empty(-(-numel // 128), dtype=BF16, device="meta"),
    }


def test_chunks_are_brought_once(tmp_path):
    size = _core.CHUNK_LEN
    numel = 3 * size + 5
    mapped = MappedState(tmp_path, places(numel), numel)
    assert mapped.missing(0, 1) == [(0, size)]
    assert mapped.missing(size - 1, size + 1) == [(0, 2 * size)]
    assert mapped.missing(size, size + 1) == [(size, 2 * size)]
    assert mapped.missing(0, numel) == [(0, numel)]
    mapped.note(size, 2 * size)
    assert mapped.missing(size, 2 * size) == []
    assert mapped.missing(0, numel) == [(0, size), (2 * size, numel)]
    assert mapped.missing(3 * size, numel) == [(3 * size, numel)]


def test_tensors_of_a_file_lie_apart(tmp_path):
    numel = 1000
    mapped = MappedState(tmp_path, places(numel), numel)
    assert {name: (each.dtype, each.numel()) for name, each in mapped.tensors.items()} == {
        name: (each.dtype, each.numel()) for name, each in places(numel).items()
    }
    for value, each in enumerate(mapped.tensors.values(), 1):
        assert each.data_ptr() % 64 == 0
        each.fill_(value)
    assert [each.unique().tolist() for each in mapped.tensors.values()] == [[1], [2], [3]]
    assert list(tmp_path.iterdir()) == []


def test_writes_to_what_was_brought_are_seen(tmp_path):
    size = _core.CHUNK_LEN
    mapped = MappedState(tmp_path, places(3 * size), 3 * size)
    for each in mapped.tensors.values():
        each.zero_()
    mapped.note(0, size)
    mapped.note(2 * size, 3 * size)
    assert not mapped.is_written
    # Not there, and no fragments are had of it.
    mapped.tensors["exp_avg"][size : 2 * size] = 1.0
    mapped.tensors["scales"][0] = 1.0
    assert not mapped.is_written
    for name, at in (("exp_avg", size - 1), ("codes", 2 * size), ("exp_avg", 3 * size - 1)):
        mapped.tensors[name][at] = 1
        assert mapped.is_written
        mapped.tensors[name][at] = 0
        assert not mapped.is_written


def test_space_is_taken_for_what_is_brought(tmp_path):
    size = _core.CHUNK_LEN
    numel = 64 * size
    mapped = MappedState(tmp_path, places(numel), numel)

    def taken():
        # In units of 512 bytes, whatever the file system's block is.
        return 512 * os.fstat(mapped._file.fileno()).st_blocks

    assert taken() < size
    mapped.take(size, 2 * size)
    one = size * 4 + size + size // 64
    assert one <= taken() < 2 * one
    mapped.take(63 * size, numel)
    assert 2 * one <= taken() < 4 * one
