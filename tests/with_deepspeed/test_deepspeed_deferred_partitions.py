"""Partitions whose updates are deferred, without DeepSpeed: beside AdamW's steps of the same."""

import gc
import weakref

import pytest
import stepwell
import torch
from insides import make_partitions_late
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Deferral, Partitions
from stepwell.deepspeed.zero.runs import Source
from stepwell.store.engine import Submitted

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
        self.params = {torch.nn.Parameter(torch.empty(0)): each for each in FRAGMENTS}
        for param, (group, begin, numel) in self.params.items():
            param.data = self.weights[group].narrow(0, begin, numel)
        self.masters = [
            (each * 1.001 if is_there else each[:0]).float().requires_grad_()
            for each in self.weights
        ]
        self.exact = Exact(self.masters, self.weights)
        self.optimizer = stepwell.AdamW([{"params": [each]} for each in self.masters], lr=0.5)
        self.operands = Operands(self.optimizer, 0)
        self.partitions = Partitions(
            [
                Partition(master, weight, weight.dtype, 8 * weight.numel())
                for master, weight in zip(self.masters, self.weights, strict=True)
            ],
            device=torch.device("cpu"),
            fragments=self.params if is_alone else {},
            deferral=Deferral(
                stepwell.Deferred(**{**LATER, **deferred}),
                FRAGMENTS,
                None if is_alone else lambda: self.weights,
            ),
            threads=1,
        )
        self.late = None
        if late:
            self.late = make_partitions_late(self.partitions)

    def prepared(self, number, at_once, *, grad_scale=1.0, missing=()):
        """A step that is ready to begin."""
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
        partitions.end_last_step()
        operands = {group: self.operands.of(group, group, self.masters[group]) for group in (0, 1)}
        self.begun = self.operands.begun(operands.values())
        return partitions.prepare(operands, self.weights)

    def step(self, number, at_once=None, *, grad_scale=1.0, missing=()):
        with self.partitions.engine.stepping():
            prepared = self.prepared(number, at_once, grad_scale=grad_scale, missing=missing)
            self.submit(prepared, at_once, grad_scale)

    def submit(self, prepared, at_once, grad_scale=1.0):
        self.partitions.submit(prepared, grad_scale=grad_scale, at_once=at_once, begun=self.begun)
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
        assert not run.partitions.engine.is_settled
        assert not run.partitions.has_pending()
        assert run.partitions.is_landed
        assert run.partitions.wait_for(FRAGMENTS) is True
        run.assert_weights_are(run.exact.masters)
    run.partitions.finish()
    run.assert_state_is_exact()


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("is_alone", [True, False])
def test_what_is_deferred_is_applied_at_the_end(weight, is_alone):
    run = Run(weight, is_alone=is_alone).later(5)
    partitions = run.partitions
    partitions.wait_for_all()
    before = [each.clone() for each in run.weights]
    assert partitions.has_pending()
    assert not partitions.is_landed
    versions = [param._version for param in run.params]
    partitions.complete()
    run.assert_state_is_exact()
    assert (partitions.has_pending(), partitions.engine.is_settled) == (False, True)
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
    partitions.complete()
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
    run.partitions.complete()
    assert not run.partitions.is_landed
    run.step(3)
    assert run.partitions.is_landed
    run.partitions.wait_for_all()
    run.assert_weights_are(run.exact.masters)
    # What programs write to them stays.
    run.partitions.complete()
    run.weights[1].zero_()
    run.partitions.upload(run.masters)
    assert not run.weights[1].any()


def test_what_is_updated_at_once_is_not_deferred():
    run = Run().later(1)
    fragment = next(iter(FRAGMENTS))
    run.step(1, {fragment})
    run.partitions.wait_for_all()
    run.partitions.finish()
    group, begin, numel = fragment
    end = begin + numel
    expected = run.exact.masters[group].detach()
    assert torch.equal(run.weights[group][begin:end], expected[begin:end].to(BF16))
    assert torch.equal(run.masters[group][begin:end], expected[begin:end])
    assert not torch.equal(run.masters[group][end:], expected[end:])
    run.partitions.complete()
    run.assert_state_is_exact()


def test_a_gradient_is_scaled_and_one_that_is_missing_is_zero():
    run = Run()
    for number, missing in enumerate(((), list(FRAGMENTS)[:1], list(FRAGMENTS))):
        run.step(number, None if number == 0 else (), grad_scale=0.25, missing=missing)
    run.partitions.complete()
    run.assert_state_is_exact()


def test_what_runs_ahead_is_the_weights_alone():
    run, exact = Run(predict=True).later(4), Run().later(4)
    for each in (run, exact):
        each.partitions.wait_for_all()
    assert not all(map(torch.equal, run.weights, exact.weights))
    for each in (run, exact):
        each.partitions.complete()
    assert all(map(torch.equal, run.weights, exact.weights))
    run.assert_state_is_exact()


# ---- waits ----


def test_what_is_read_while_a_step_is_submitted_is_old():
    run = Run(late=True)
    run.step(0)
    with run.partitions.engine.stepping():
        prepared = run.prepared(1, ())
        run.partitions.engine.announce(Submitted(0))
        assert run.partitions.wait_for(FRAGMENTS) is False
        # Nothing is applied in a step.
        run.partitions.complete()
        assert not run.partitions.engine.is_settled
        run.submit(prepared, ())
    assert run.partitions.wait_for(FRAGMENTS) is True
    run.partitions.complete()
    run.assert_state_is_exact()


def test_a_step_that_is_not_taken_changes_nothing():
    run, expected = Run().later(2), Run().later(2)
    with run.partitions.engine.stepping():
        run.prepared(2, ())
    run.partitions.drop()
    run.partitions.finish()
    for each in (run, expected):
        # The gradients of some are missing, which are zero then.
        each.step(3, (), missing=list(FRAGMENTS)[1:])
        each.partitions.complete()
    assert all(map(torch.equal, run.masters, expected.masters))
    assert all(map(torch.equal, run.weights, expected.weights))


def test_in_a_step_what_was_submitted_is_waited_for_and_nothing_is_applied():
    run = Run(late=True).later(2)
    with run.partitions.engine.stepping():
        run.partitions.complete()
        assert not run.late.is_late
        assert run.partitions.has_pending()
    run.partitions.complete()
    assert not run.partitions.has_pending()


# ---- what is told ----


def test_before_the_first_step():
    run = Run(is_alone=False)
    partitions = run.partitions
    assert partitions.engine.is_settled
    assert not partitions.has_pending()
    assert partitions.is_landed
    assert partitions.wait_for(FRAGMENTS) is True
    partitions.upload(run.masters)
    assert partitions.timing()["background"] == 0.0
    run.assert_weights_are(run.weights)


def test_state_that_is_loaded_is_stepped():
    run = Run().later(2)
    run.partitions.complete()
    for each, masters in ((run.optimizer, run.masters), (run.exact.optimizer, run.exact.masters)):
        for number, master in enumerate(masters[:2], 1):
            state = each.state[master]
            state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], number)
    run.later(2, 2)
    run.partitions.complete()
    run.assert_state_is_exact()


# ---- selected channels ----


def test_selected_channels_are_stepped_at_once():
    run = Run(fraction=0.5, reselect=1)
    partitions = run.partitions
    for number in range(4):
        run.step(number, None if number == 0 else ())
    partitions.wait_for_all()
    timing = partitions.timing()
    assert 0.5 <= timing["selected_share"] <= 1.0
    assert timing["selected_bytes"] > 0
    # The vector is selected whole.
    vector = list(FRAGMENTS)[1]
    end = vector.begin + vector.numel
    expected = run.exact.masters[0].detach()[vector.begin : end].to(BF16)
    assert torch.equal(run.weights[0][vector.begin : end], expected)
    assert partitions.has_pending()
    partitions.complete()
    run.assert_state_is_exact()
    run.assert_weights_are(run.exact.masters)


def test_what_is_updated_at_once_is_selected_no_more():
    run = Run(fraction=0.5).later(3)
    assert run.partitions.timing()["selected_share"] > 0
    run.step(3, set(FRAGMENTS))
    assert run.partitions.timing()["selected_share"] == 0
    run.partitions.complete()
    run.assert_state_is_exact()


def test_whole_selections_leave_nothing_late():
    run = Run(fraction=1.0)
    for number in range(3):
        run.step(number, None if number == 0 else ())
        run.partitions.wait_for_all()
        if number:
            # Of the matrix of whole rows; of the other one a row is cut.
            expected = run.exact.masters[1].detach().to(BF16)
            assert torch.equal(run.weights[1], expected)


def test_what_is_selected_is_chosen_anew_after_a_look():
    run = Run(fraction=0.5)
    run.later(3)
    assert run.partitions.timing()["selected_share"] > 0
    run.partitions.complete()
    assert run.partitions.timing()["selected_share"] == 0
    run.later(3, 3)
    run.partitions.complete()
    run.assert_state_is_exact()


# ---- the end ----


def test_what_is_deferred_is_applied_when_nothing_steps_any_more():
    run = Run().later(4)
    gone = weakref.ref(run.partitions)
    del run.partitions
    gc.collect()
    assert gone() is None
    run.assert_state_is_exact()
