"""How a step of OffloadAdamW is handed to the background, in two parts.

- `_prepare` makes all of it but for what the norm of the gradients decides: the clip coefficient,
  and which channels are selected. The thread does so while the device computes the norm, and the
  device waits for less between the norm and the step. It changes nothing: the step may be skipped
  or refused yet.
- `_submit` makes a list of calls, which Ctrl-C cannot part. What may fail comes before them, or is
  the first of them that steps anything: the core's own submit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell import _state
from stepwell.offload.state_dicts import OffloadStateDicts

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stepwell._operand import BoundUpdate, Update
    from stepwell.offload.engine import Engine, EngineStep
    from stepwell.offload.residents import ResidentsStep, ResidentUpdate

__all__ = ["OffloadSubmission", "OnDevice", "Prepared", "number_of"]


class OnDevice(NamedTuple):
    """What the device steps in a step."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    """Of each parameter."""
    updates: list[ResidentUpdate]

    def merged(
        self,
        stepped: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All parameters and their gradients, in the order of `stepped`.

        A norm is summed in that order, so its bits do not depend on which are stepped where.
        """
        if not self.params:
            return params, grads
        by_id = {id(param): grad for param, grad in zip(params, grads, strict=True)}
        by_id.update((id(param), grad) for param, grad in zip(self.params, self.grads, strict=True))
        return stepped, [by_id[id(param)] for param in stepped]


def number_of(updates: Sequence[Update], on_device: Sequence[ResidentUpdate]) -> int:
    """Which update it is, from 1, of the parameter that has seen most; 0: there is none."""
    return max([*(each.step for each in updates), *(each.step for each in on_device)], default=0)


class Prepared(NamedTuple):
    """A step that waits for the norm of its gradients."""

    updates: list[BoundUpdate]
    """Of the parameters that the host steps."""
    hosted: Hosted | None
    """None: the host steps none, ever."""
    residents: ResidentsStep


class Hosted(NamedTuple):
    """The part of a step that the host takes."""

    engine: Engine
    num_settled: int
    """The engine's, when it was prepared."""
    step: EngineStep
    at_once: set[torch.Tensor] | None
    """The parameters that a deferred step updates at once; None: it is exact."""
    may_defer: bool
    """Whether it might have been deferred, but for what was written or looked at."""
    swapping: list[tuple[torch.Tensor, _state.State, _state.State]]
    """As `HostSide.write_through` has it."""
    landing: list[torch.Tensor]
    """The parameters whose weights come with it."""
    others: list[torch.Tensor]
    """Those of them that it does not update: of updates that were deferred."""
    shared: set[torch.Tensor]
    """Those of them whose memory can be reached without an access that the gate sees."""


class OffloadSubmission(OffloadStateDicts):
    """The same as far as it submits steps."""

    def _score(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        number: int,
        stale: Sequence[torch.Tensor],
    ) -> None:
        """Scores channels of which some may be selected; the norm that comes next is waited for.

        Called before `reread`, behind which weights that were written differ from none of the host.

        Args:
            params: the parameters of the step.
            grads: their gradients.
            number: which step it is, of the parameter that has seen most; 0: nothing is stepped.
            stale: those of `params` that may have been written.
        """
        steps = self._deferred_steps
        if steps is None or number == 0 or not len(self._twins):
            return
        engine = self._background.opened()
        selector = engine.selector
        if selector is None:
            return
        # By the bits: what is marked stale depends on what was seen, which a resumed run has not.
        is_written = any(selector.holds([one]) and self._twins.differs(one) for one in stale)
        if selector.needs_exact or is_written:
            # Of what was written the device has copies. An exact step drops them.
            engine.is_settled = True
        if self._is_deferred(engine, number):
            selector.score(params, grads, engine.next_group())
        elif steps.is_followed_by_deferred(number, is_seen=self._is_seen()):
            selector.score(params, grads, None)
        else:
            selector.score([], [], None)

    def _at_once(
        self,
        engine: Engine,
        updates: Sequence[Update],
        number: int,
        exposed: Collection[torch.Tensor],
    ) -> set[torch.Tensor] | None:
        """The parameters that a deferred step updates at once; None: the step is exact.

        `number`: as `_score` has it.
        """
        gate = self._background.gate
        if gate is None or not self._is_deferred(engine, number):
            return None
        # The step waits for the weights of these, since no forward is known to.
        return set(gate.not_covered([update.param for update in updates], exposed))

    def _is_seen(self) -> bool:
        """Whether forwards are seen, and so every other look at a weight."""
        gate = self._background.open_gate
        return gate is not None and not gate.guard.was_compiled

    def _is_deferred(self, engine: Engine, number: int) -> bool:
        """Whether a step is deferred; `number`: as `_score` has it."""
        return self._deferred_steps is not None and self._deferred_steps.is_deferred(
            number, is_seen=self._is_seen(), is_settled=engine.is_settled
        )

    def _prepare(
        self,
        updates: list[Update],
        on_device: OnDevice,
        number: int,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
    ) -> Prepared:
        """A step of updates that were checked, but for what the norm decides.

        Args:
            updates: of the host.
            on_device: of the device.
            number: as `_score` has it.
            params: the parameters that the host steps.
            grads: their gradients.
        """
        residents = self._residents.prepare(on_device.updates)
        if not len(self._twins):
            return Prepared([], None, residents)
        for update in updates:
            if update.operand.is_moved and update.operand.state is not None:
                # The step goes on in the background, and works on the state itself.
                _state.make_dense(update.operand.param, update.operand.state, self._moments)
        swapping = self._host.write_through(updates, self._states)
        bound_updates = self._bind(updates)
        updated = [update.param for update in updates]
        engine = self._background.opened()
        gate = self._background.open_gate
        # Weights of deferred updates land with this step, also those of parameters without update.
        others = engine.pending_besides(updated)
        landing = [*updated, *others]
        shared = set() if gate is None else set(self._background.exposed(landing))
        may_defer = self._background.gate is not None and not shared.intersection(others)
        at_once = self._at_once(engine, updates, number, shared) if may_defer else None
        if at_once is not None:
            # What they name in memory is on the volume after this step, and so is what comes next.
            at_once.update(param for param, _, _ in swapping)
        selects = engine.selector is not None
        step = engine.prepare(
            bound_updates, at_once, dict(zip(params, grads, strict=True)) if selects else None
        )
        hosted = Hosted(
            engine, engine.num_settled, step, at_once, may_defer, swapping, landing, others, shared
        )
        return Prepared(bound_updates, hosted, residents)

    def _is_current(self, prepared: Prepared) -> bool:
        """Whether nothing has applied deferred updates since; a signal's handler may."""
        hosted = prepared.hosted
        return hosted is None or (
            hosted.engine is self._engine and hosted.engine.num_settled == hosted.num_settled
        )

    def _submit(self, prepared: Prepared, grad_scale: float, number: int) -> None:
        """Submits a step that was decided on.

        Args:
            prepared: the step.
            grad_scale: what all gradients are multiplied by.
            number: as `_score` has it.
        """
        states = self.__dict__["state"]
        updates, hosted, residents = prepared
        if hosted is None:
            self._commit([], self._residents.submission(residents, grad_scale, states))
            return
        engine, gate = hosted.engine, self._background.open_gate
        updated = [each.update.param for each in updates]
        steps, at_once = self._deferred_steps, hosted.at_once
        if steps is not None and hosted.may_defer:
            steps.note(number, is_seen=self._is_seen(), is_settled=engine.is_settled)
        # Ctrl-C may land in all that is Python. So this comes before the submit, and does no harm
        # without it: host and device hold the same weights, and there is nothing to wait for.
        # Forwards wait by themselves once the step runs.
        before = [
            partial(self._twins.mark_stale, self._twins.left_out(hosted.landing)),
            partial(self._twins.note, hosted.landing),
            partial(self._host.fingerprints.mark_outdated, updated),
        ]
        if gate is not None:
            before.append(partial(gate.open, hosted.landing, hosted.shared))
        selected = []
        if engine.selector is not None:
            selected = engine.selector.choose(at_once)
            engine.selector.drop(at_once or ())
        submitted = [
            *engine.submission(hosted.step, grad_scale, selected),
            partial(setattr, self._background, "is_unreleased", True),
            partial(self._swapping.__setitem__, 0, hosted.swapping),
            # Behind the submit: where that fails nothing is stepped.
            *self._residents.submission(residents, grad_scale, states),
        ]
        if hosted.others:
            torch.autograd.graph.increment_version(hosted.others)
        self._commit(updates, [*before, *submitted])
        self._host.fingerprints.mark_verified(updated)
        self._host.drop_fresh(updated)
        if gate is not None and gate.uncovered:
            # The step itself waits for them, so that the guard sees no access. Those of the first
            # step of a new run: it has seen no forward. Not where memory is shared: writes to it
            # are not seen anyway.
            self._twins.mark_stale(param for param in gate.uncovered if param not in hosted.shared)
