"""Gradients of ZeRO's partitions whose updates are deferred, without DeepSpeed."""

import math

import pytest
import torch
from partition_cases import BF16, FP32, HUGE, full
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.runs import RunGradients, Source, runs_of


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
    gradients = RunGradients(core, runs, [BF16, FP32], torch.device("cpu"))
    fragment, missing = fragments
    grad = torch.arange(12, dtype=BF16)
    gradients.collect(fragment, grad, is_owned=True, is_last=True)
    # Cut of a row, two rows, and nothing behind them.
    head, rows = runs[fragment]
    assert core.taken == {0: grad.data_ptr(), 1: grad[2:].data_ptr()}
    assert [each.tolist() for each in gradients.known().values()] == [[0, 1], list(range(2, 12))]
    assert [gradients.of(run).data_ptr() for run in (head, rows)] == list(core.taken.values())
    gradients.gradient(fragment).zero_()
    assert gradients.norm(float) == pytest.approx(math.sqrt(sum(at**2 for at in range(12))))
    gradients.complete(None)
    assert core.taken.keys() == {0, 1, 2}
    assert gradients.gradient(fragment).tolist() == list(range(12))
    assert gradients.gradient(missing).tolist() == [0.0] * 6
    gradients.note_step(1.0)
    assert not gradients.has_gradient(fragment)


def deferred_gradients(*numels, row_len=4, dtype=BF16):
    """Gradients of partitions of one fragment each, by an engine that takes them."""
    core = Taken()
    fragments = [Fragment(group, 0, numel) for group, numel in enumerate(numels)]
    runs = {fragment: runs_of(fragment, Source(0, row_len)) for fragment in fragments}
    made = RunGradients(core, runs, [dtype] * len(numels), torch.device("cpu"))
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
    gradients.note_step(1.0)
    assert core.released == [0]
    assert not gradients.has_gradient(fragment)
    # Nothing of it is known to the next step.
    assert gradients.norm(float) == 0.0
    gradients.add(fragment, full(4, 1.0), is_owned=False)
    assert list(core.taken) == [0]
    gradients.note_step(1.0)
    assert core.released == [0]


def test_deferred_gradients_that_are_dropped():
    gradients, core, (fragment, other) = deferred_gradients(4, 4)
    gradients.collect(fragment, full(4, 1.0), is_owned=False, is_last=True)
    gradients.add(other, full(4, 1.0), is_owned=False)
    gradients.drop()
    assert core.taken == {}
    assert gradients.norm(float) == 0.0
    assert not gradients.has_gradient(fragment)
    gradients.note_step(1.0)
    assert core.released == []
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
