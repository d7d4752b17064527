"""Partitions whose updates are deferred, without DeepSpeed: beside AdamW's steps of the same."""

import gc
import time
import weakref

import pytest
import stepwell
import torch
from insides import core_of_partitions, make_partitions_late
from stepwell.deepspeed.zero import deferred_partitions
from stepwell.deepspeed.zero.deferred_gradients import Source
from stepwell.deepspeed.zero.deferred_partitions import DeferredPartitions
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition

BF16, FP32 = torch.bfloat16, torch.float32
# A matrix of which a row is cut, a vector, one that lies elsewhere; and a partition of one matrix.
FRAGMENTS = {
    Fragment(0, 0, 37): Source(3, 8),
    Fragment(0, 37, 11): Source(0, 0),
    Fragment(1, 0, 48): Source(0, 16),
}
NUMELS = (48, 48, 0)
LATER = {"interval": 3, "predict": False}


class Run:
    """Steps of partitions whose updates are deferred.

    Args:
        is_there: whether the masters begin with values of their own.
        deferred: the options of `stepwell.Deferred`.
    """

    def __init__(self, weight=BF16, *, is_alone=True, is_there=False, late=False, **deferred):
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(each, generator=generator).to(weight) for each in NUMELS]
        self.params = [torch.nn.Parameter(torch.empty_like(each)) for each in self.weights]
        for param, each in zip(self.params, self.weights, strict=True):
            param.data = each
        self.masters = [
            (each * 1.001 if is_there else each[:0]).float().requires_grad_()
            for each in self.weights
        ]
        self.exact = Exact(self.masters, self.weights)
        self.optimizer = stepwell.AdamW([{"params": [each]} for each in self.masters], lr=0.5)
        self.operands = Operands(self.optimizer, 0)
        self.partitions = DeferredPartitions(
            [
                Partition(master, weight, weight.dtype, 8 * weight.numel())
                for master, weight in zip(self.masters, self.weights, strict=True)
            ],
            FRAGMENTS,
            self.params,
            stepwell.Deferred(**{**LATER, **deferred}),
            device=torch.device("cpu"),
            is_alone=is_alone,
            threads=1,
        )
        self.late = None
        if late:
            self.late = make_partitions_late(self.partitions)

    def prepared(self, number, at_once, *, grad_scale=1.0, missing=(), order=(0, 1)):
        """The operands of a step, and the calls that begin it."""
        partitions, generator = self.partitions, torch.Generator().manual_seed(1000 + number)
        grads = [torch.zeros(each) for each in NUMELS]
        for fragment in FRAGMENTS:
            grad = torch.randn(fragment.numel, generator=generator).to(self.weights[0].dtype)
            if fragment in missing:
                continue
            partitions.gradients.collect(fragment, grad, is_owned=True, is_last=True)
            begin = fragment.begin
            grads[fragment.group][begin : begin + fragment.numel] = grad.float() * grad_scale
        self.exact.step(grads)
        partitions.score(is_deferred=at_once is not None, is_selected=True)
        partitions.gradients.norm(float)
        operands = {
            group: self.operands.of(
                group, group, self.masters[group], None, partitions.twins[group]
            )
            for group in order
        }
        return operands, partitions.prepare(operands, grad_scale=grad_scale, at_once=at_once)

    def step(self, number, at_once=None, **options):
        with self.partitions.stepping():
            operands, calls = self.prepared(number, at_once, **options)
            self.operands.commit(list(operands.values()), calls)
            self.partitions.forget()

    def later(self, count, first=0):
        """Takes an exact step, and others that are deferred."""
        for number in range(first, first + count):
            self.step(number, None if number == first else ())
        return self

    def assert_state_is_exact(self):
        """The masters and moments are those of the last step; nothing waits for them here."""
        for group, expected in enumerate(self.exact.masters[:2]):
            assert torch.equal(self.masters[group], expected), group
            state, others = self.optimizer.state[self.masters[group]], self.exact.state(group)
            assert state.keys() == others.keys()
            assert all(torch.equal(state[name], others[name]) for name in others)

    def assert_weights_are(self, masters):
        for weight, master in zip(self.weights, masters, strict=True):
            assert torch.equal(weight, master.detach().to(weight.dtype))


class Exact:
    """The same steps, at once."""

    def __init__(self, masters, weights):
        self.masters = [
            torch.nn.Parameter((master if master.numel() else weight).detach().float().clone())
            for master, weight in zip(masters, weights, strict=True)
        ]
        self.optimizer = stepwell.AdamW(self.masters, lr=0.5)

    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()

    def state(self, group):
        return self.optimizer.state[self.masters[group]]


# ---- steps ----


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_exact_steps(weight, is_there):
    run = Run(weight, is_there=is_there)
    for number in range(3):
        run.step(number)
        assert not run.partitions.is_settled
        assert not run.partitions.has_pending()
        assert run.partitions.is_landed
        assert run.partitions.wait(FRAGMENTS) is True
        run.assert_weights_are(run.exact.masters)
    run.partitions.settle()
    run.assert_state_is_exact()


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("is_alone", [True, False])
def test_what_is_deferred_is_applied_at_the_end(weight, is_alone):
    run = Run(weight, is_alone=is_alone).later(5)
    partitions = run.partitions
    partitions.wait_for_landing()
    before = [each.clone() for each in run.weights]
    assert partitions.has_pending()
    assert not partitions.is_landed
    versions = [param._version for param in run.params]
    partitions.finish()
    run.assert_state_is_exact()
    assert (partitions.has_pending(), partitions.is_settled) == (False, True)
    assert partitions.is_landed is is_alone
    if is_alone:
        run.assert_weights_are(run.exact.masters)
    else:
        # The other ranks still have these.
        run.assert_weights_are(before)
    changed = [
        param._version > version for param, version in zip(run.params, versions, strict=True)
    ]
    assert changed == [is_alone] * 3
    # There is nothing more to do.
    versions = [param._version for param in run.params]
    partitions.finish()
    assert [param._version for param in run.params] == versions
    partitions.upload(run.masters)
    run.assert_weights_are(run.exact.masters)
    assert partitions.is_landed
    run.later(3, 5)
    partitions.upload(run.masters)
    run.assert_weights_are(run.exact.masters)
    run.assert_state_is_exact()


def test_weights_of_several_ranks_follow_with_the_next_step():
    run = Run(is_alone=False).later(3)
    run.partitions.finish()
    assert not run.partitions.is_landed
    run.step(3)
    assert run.partitions.is_landed
    run.partitions.wait_for_landing()
    run.assert_weights_are(run.exact.masters)
    # What programs write to them stays.
    run.partitions.finish()
    run.weights[1].zero_()
    run.partitions.upload(run.masters)
    assert not run.weights[1].any()


def test_what_is_updated_at_once_is_not_deferred():
    run = Run().later(1)
    fragment = next(iter(FRAGMENTS))
    run.step(1, {fragment})
    run.partitions.wait_for_landing()
    run.partitions.settle()
    group, begin, numel = fragment
    end = begin + numel
    expected = run.exact.masters[group].detach()
    assert torch.equal(run.weights[group][begin:end], expected[begin:end].to(BF16))
    assert torch.equal(run.masters[group][begin:end], expected[begin:end])
    assert not torch.equal(run.masters[group][end:], expected[end:])
    run.partitions.finish()
    run.assert_state_is_exact()


def test_a_gradient_is_scaled_and_one_that_is_missing_is_zero():
    run = Run()
    for number, missing in enumerate(((), list(FRAGMENTS)[:1], list(FRAGMENTS))):
        run.step(number, None if number == 0 else (), grad_scale=0.25, missing=missing)
    run.partitions.finish()
    run.assert_state_is_exact()


def test_what_runs_ahead_is_the_weights_alone():
    run, exact = Run(predict=True).later(4), Run().later(4)
    for each in (run, exact):
        each.partitions.wait_for_landing()
    assert not all(map(torch.equal, run.weights, exact.weights))
    for each in (run, exact):
        each.partitions.finish()
    assert all(map(torch.equal, run.weights, exact.weights))
    run.assert_state_is_exact()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_partitions_are_stepped_in_the_order_of_the_operands(order):
    run = Run(late=True)
    run.step(0, order=order)
    runs = [each for fragment in FRAGMENTS for each in run.partitions._runs[fragment]]
    groups = [runs[index].group for index in run.late.stepped]
    assert groups == [each for group in order for each in groups if each == group]
    assert sorted(run.late.stepped) == list(range(len(runs)))
    run.partitions.finish()
    run.assert_state_is_exact()


# ---- waits ----


def test_what_is_read_while_a_step_is_submitted_is_old():
    run = Run(late=True)
    run.step(0)
    with run.partitions.stepping():
        operands, calls = run.prepared(1, ())
        assert run.partitions.wait(FRAGMENTS) is False
        # Nothing is applied in a step.
        run.partitions.finish()
        assert not run.partitions.is_settled
        run.operands.commit(list(operands.values()), calls)
        run.partitions.forget()
    assert run.partitions.wait(FRAGMENTS) is True
    run.partitions.finish()
    run.assert_state_is_exact()


@pytest.mark.parametrize("wait", ["settle", "finish_job", "wait_for_landing", "synchronize"])
def test_waits(wait):
    run = Run(late=True)
    run.step(0)
    assert run.late.is_late
    getattr(run.partitions, wait)()
    assert not run.late.is_late
    run.assert_weights_are(run.exact.masters)


def test_a_step_that_is_not_taken_changes_nothing():
    run, expected = Run().later(2), Run().later(2)
    with run.partitions.stepping(), pytest.raises(ValueError, match=r"have `\[4, 4, 4, 3, 4\]`"):
        _, (submit, *_) = run.prepared(2, ())
        submit.keywords["steps"].pop()
        submit()
    run.partitions.drop()
    run.partitions.settle()
    for each in (run, expected):
        # The gradients of some are missing, which are zero then.
        each.step(3, (), missing=list(FRAGMENTS)[1:])
        each.partitions.finish()
    assert all(map(torch.equal, run.masters, expected.masters))
    assert all(map(torch.equal, run.weights, expected.weights))


def test_waits_are_for_all_of_a_fragment():
    run = Run(late=True)
    run.step(0)
    fragment = list(FRAGMENTS)[1]
    run.partitions.wait([fragment])
    first = len(run.partitions._runs[next(iter(FRAGMENTS))])
    assert run.late.waits == [("wait", first, 0, fragment.numel)]


def test_in_a_step_what_was_submitted_is_waited_for_and_nothing_is_applied():
    run = Run(late=True).later(2)
    with run.partitions.stepping():
        run.partitions.finish()
        assert not run.late.is_late
        assert run.partitions.has_pending()
    run.partitions.finish()
    assert not run.partitions.has_pending()


# ---- what is told ----


def test_before_the_first_step():
    run = Run(is_alone=False)
    partitions = run.partitions
    assert partitions.is_settled
    assert not partitions.has_pending()
    assert partitions.is_landed
    assert partitions.wait(FRAGMENTS) is True
    partitions.upload(run.masters)
    assert partitions.timing()["background"] == 0.0
    run.assert_weights_are(run.weights)


def test_seconds_that_were_waited():
    began = time.perf_counter()
    run = Run()
    assert {"selected_share", "selected_bytes"} & run.partitions.timing().keys() == set()
    assert run.partitions.timing()["gate"] == 0.0
    for number in range(2):
        run.step(number)
        timing = run.partitions.timing()
        assert timing["gate"] == 0.0
        assert 0 < timing["background"] < time.perf_counter() - began
        run.partitions.wait_for_landing()
        assert 0 < run.partitions.timing()["gate"] < time.perf_counter() - began


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_what_deferred_partitions_announce(weight, is_there, monkeypatch):
    calls = {"announce": [], "memory_of": []}

    def noted(name):
        call = getattr(deferred_partitions, name)

        def note(*args, **named):
            calls[name].append((args, named, call(*args, **named)))
            return calls[name][-1][2]

        monkeypatch.setattr(deferred_partitions, name, note)

    noted("announce")
    noted("memory_of")
    run = Run(weight, is_there=is_there)
    (((numel,), said, _),), ((_, _, memory),) = calls.values()
    masters = sum(each.nbytes for each in run.masters)
    twins = sum(each.nbytes for each in run.partitions.twins if each is not None)
    # What is uploaded is pinned; where that is the master it is no more state.
    crossing = twins or masters
    assert numel == 96
    assert (
        said["crossing"]
        == memory.pinned + crossing
        == core_of_partitions(run.partitions).pinned_nbytes
    )
    assert said["state"] == 8 * 96 + (masters if twins else 0)
    # Masters that are there are moved.
    assert said["held"] == (masters if is_there else 0)


def test_memory_is_claimed_until_the_first_step():
    class Claim:
        ends = 0

        def end(self):
            self.ends += 1

    run = Run()
    run.partitions.claim = claim = Claim()
    run.partitions.finish()
    assert claim.ends == 0
    run.step(0)
    assert claim.ends == 1


def test_state_that_is_loaded_is_stepped():
    run = Run().later(2)
    run.partitions.finish()
    for each, masters in ((run.optimizer, run.masters), (run.exact.optimizer, run.exact.masters)):
        for number, master in enumerate(masters[:2], 1):
            state = each.state[master]
            state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], number)
    run.later(2, 2)
    run.partitions.finish()
    run.assert_state_is_exact()


# ---- selected channels ----


def test_selected_channels_are_stepped_at_once():
    run = Run(fraction=0.5, reselect=1)
    partitions = run.partitions
    for number in range(4):
        run.step(number, None if number == 0 else ())
    partitions.wait_for_landing()
    timing = partitions.timing()
    assert 0.5 <= timing["selected_share"] <= 1.0
    assert timing["selected_bytes"] > 0
    # The vector is selected whole.
    vector = list(FRAGMENTS)[1]
    end = vector.begin + vector.numel
    expected = run.exact.masters[0].detach()[vector.begin : end].to(BF16)
    assert torch.equal(run.weights[0][vector.begin : end], expected)
    assert partitions.has_pending()
    partitions.finish()
    run.assert_state_is_exact()
    run.assert_weights_are(run.exact.masters)


def test_what_is_updated_at_once_is_selected_no_more():
    run = Run(fraction=0.5).later(3)
    assert run.partitions.timing()["selected_share"] > 0
    run.step(3, set(FRAGMENTS))
    assert run.partitions.timing()["selected_share"] == 0
    run.partitions.finish()
    run.assert_state_is_exact()


def test_whole_selections_leave_nothing_late():
    run = Run(fraction=1.0)
    for number in range(3):
        run.step(number, None if number == 0 else ())
        run.partitions.wait_for_landing()
        if number:
            # Of the matrix of whole rows; of the other one a row is cut.
            expected = run.exact.masters[1].detach().to(BF16)
            assert torch.equal(run.weights[1], expected)


def test_what_is_selected_is_chosen_anew_after_a_look():
    run = Run(fraction=0.5)
    run.later(3)
    assert run.partitions.timing()["selected_share"] > 0
    run.partitions.finish()
    assert run.partitions.timing()["selected_share"] == 0
    run.later(3, 3)
    run.partitions.finish()
    run.assert_state_is_exact()


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("is_selected", [False, True])
def test_what_is_scored(is_deferred, is_selected, monkeypatch):
    run = Run(fraction=0.5, interval=4)
    scored = []
    monkeypatch.setattr(run.partitions._selector, "score", lambda *args: scored.append(args))
    run.later(1)
    for fragment in FRAGMENTS:
        grad = torch.ones(fragment.numel, dtype=BF16)
        run.partitions.gradients.collect(fragment, grad, is_owned=True, is_last=True)
    run.partitions.score(is_deferred=is_deferred, is_selected=is_selected)
    runs, grads, group = scored[-1]
    assert [each.numel for each in runs] == [each.numel() for each in grads]
    assert sum(each.numel for each in runs) == (96 if is_deferred or is_selected else 0)
    assert (group is None) is not is_deferred


# ---- the end ----


def test_what_is_deferred_is_applied_when_nothing_steps_any_more():
    run = Run().later(4)
    gone = weakref.ref(run.partitions)
    del run.partitions
    gc.collect()
    assert gone() is None
    run.assert_state_is_exact()


def test_after_the_end_nothing_waits():
    run = Run().later(2)
    run.partitions._finalizer()
    run.partitions._core = None
    run.partitions.finish()
    run.partitions.finish_job()
    run.assert_state_is_exact()


def test_at_the_end_the_step_is_waited_for_before_what_is_deferred_is_applied():
    class Core:
        def __init__(self, has_pending):
            self.has_pending, self.is_busy = has_pending, True

        def synchronize(self, *, stream):
            assert stream == 0
            self.is_busy = False

        def settle(self, *, stream):
            assert stream == 0
            assert not self.is_busy
            self.is_busy, self.has_pending = self.has_pending, False
            return self.is_busy

    for has_pending in (False, True):
        core = Core(has_pending)
        deferred_partitions._drain(core)
        assert not core.has_pending
        assert not core.is_busy
