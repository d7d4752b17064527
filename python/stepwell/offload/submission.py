"""How a step of OffloadAdamW is handed to the background, in two parts.

- `_prepare` brings the updates into the form in which the core takes them. The thread does so while
  the device computes the norm of the gradients, so the device waits for less behind it. The step
  may be skipped or refused yet: no value changes, and nothing counts as stepped.
- `_submit` asks for all that a program may change in the wait for the norm (where weights and
  gradients lie, what else refers to them, what is deferred), and makes a list of calls, which
  Ctrl-C cannot part. What may fail comes before them, or is the first of them that steps anything:
  the core's own submit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell import _state
from stepwell.offload.state_dicts import OffloadStateDicts
from stepwell.offload.version_counts import OutdatedError, VersionCounts, count_writes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from stepwell._operand import BoundUpdate, Update
    from stepwell.offload.deferred_steps import DeferredSteps
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
    hosted: EngineStep | None
    """The same for the engine; None: there is none, since the host steps no parameter, ever."""
    swapping: list[tuple[torch.Tensor, _state.State, _state.State]]
    """As `HostSide.write_through` has it."""
    grads: Mapping[int, torch.Tensor]
    """As `Engine.submission` has it."""
    residents: ResidentsStep


class OffloadSubmission(OffloadStateDicts):
    """The same as far as it submits steps."""

    _deferred_steps: DeferredSteps | None

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
        if selector.needs_exact:
            engine.is_settled = True
        self._drop_written(stale)
        if self._is_deferred(engine, number):
            selector.score(params, grads, engine.next_group())
        elif steps.is_followed_by_deferred(number, is_seen=self._is_seen()):
            selector.score(params, grads, None)
        else:
            selector.score([], [], None)

    def _drop_written(self, stale: Sequence[torch.Tensor]) -> None:
        """Has the step be exact where channels are selected of weights that were written.

        Called before `reread`. Of such channels the device has copies, which an exact step drops.

        Args:
            stale: parameters that may have been written.
        """
        engine = self._engine
        if engine is None or engine.selector is None:
            return
        selector, differs = engine.selector, self._twins.differs
        # By the bits: what is marked stale depends on what was seen, which a resumed run has not.
        if any(selector.holds([one]) and differs(one) for one in stale):
            engine.is_settled = True

    def _at_once(
        self,
        engine: Engine,
        updated: Sequence[torch.Tensor],
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
        return set(gate.not_covered(updated, exposed))

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
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
    ) -> Prepared:
        """The updates of a step, which were checked, as they are submitted.

        State that is not dense, or counts updates by a number, gets the form in which it is
        stepped; and there is an engine from here on.

        Args:
            updates: of the host.
            on_device: of the device.
            params: the parameters that the host steps.
            grads: their gradients.
        """
        residents = self._residents.prepare(on_device.updates)
        if not len(self._twins):
            return Prepared([], None, [], {}, residents)
        for update in updates:
            if update.operand.is_moved and update.operand.state is not None:
                # The step goes on in the background, and works on the state itself.
                _state.make_dense(update.operand.param, update.operand.state, self._moments)
        swapping = self._host.write_through(updates, self._states)
        bound_updates = self._bind(updates)
        engine = self._background.opened()
        selects = engine.selector is not None
        grad_of = dict(zip(map(id, params), grads, strict=True)) if selects else {}
        return Prepared(bound_updates, engine.prepare(bound_updates), swapping, grad_of, residents)

    def _submit(
        self, prepared: Prepared, grad_scale: float, number: int, *, is_checked: bool
    ) -> None:
        """Submits a step that was decided on.

        Args:
            prepared: the step.
            grad_scale: what all gradients are multiplied by.
            number: as `_score` has it.
            is_checked: whether it is looked at what it is to follow once more, last of all.

        Raises:
            OutdatedError: that has changed meanwhile.
        """
        states = self.__dict__["state"]
        updates, hosted, swapping, grads, residents = prepared
        if hosted is None:
            stepping = self._residents.submission(residents, grad_scale, states)
            self._commit([], [count_writes(residents.params), *stepping])
            return
        engine, gate = self._background.opened(), self._background.open_gate
        # Weights of deferred updates land with this step, also those of parameters without update.
        updated = hosted.params
        others = engine.pending_besides(updated)
        landing = [*updated, *others]
        shared = set() if gate is None else set(self._background.exposed(landing))
        if not is_checked:
            self._twins.note(landing)
        counts = VersionCounts(
            self._twins, landing, residents.params, engine, self._host.fingerprints
        )
        steps, at_once = self._deferred_steps, None
        is_seen, is_settled = self._is_seen(), engine.is_settled
        may_defer = self._background.gate is not None and shared.isdisjoint(others)
        if may_defer:
            at_once = self._at_once(engine, updated, number, shared)
        if at_once is not None:
            # What they name in memory is on the volume after this step, and so is what comes next.
            at_once.update(param for param, _, _ in swapping)
        # Ctrl-C may land in all that is Python. So this comes before the submit, and does no harm
        # without it: host and device hold the same weights, and there is nothing to wait for.
        # Forwards wait by themselves once the step runs.
        before = [
            partial(self._twins.mark_stale, self._twins.left_out(landing)),
            partial(self._host.fingerprints.mark_outdated, updated),
        ]
        if gate is not None:
            before.append(partial(gate.open, landing, shared))
        selected = []
        if engine.selector is not None:
            selected = engine.selector.choose(at_once)
            engine.selector.drop(at_once or ())
        submitted = [
            *engine.submission(hosted, grad_scale, at_once=at_once, grads=grads, selected=selected),
            partial(setattr, self._background, "is_unreleased", True),
            partial(self._swapping.__setitem__, 0, swapping),
            # Behind the submit: where that fails nothing is stepped.
            *self._residents.submission(residents, grad_scale, states),
        ]
        for each in updates:
            if each.state.get("step") is not each.bound.counter:
                # The program has set it while the step waited for the norm.
                _state.repair_step(each.state, each.update.step - 1)
        checks = counts.checks if is_checked else []
        calls = [*before, *checks, *counts.counting, *submitted]
        try:
            self._commit(updates, calls, counts=False)
        except ValueError as error:
            if not counts.is_outdated:
                raise
            raise OutdatedError from error
        if steps is not None and may_defer:
            steps.note(number, is_seen=is_seen, is_settled=is_settled)
        self._host.fingerprints.mark_verified(updated)
        self._host.drop_fresh(updated)
        if gate is not None and gate.uncovered:
            # The step itself waits for them, so that the guard sees no access. Those of the first
            # step of a new run: it has seen no forward. Not where memory is shared: writes to it
            # are not seen anyway.
            self._twins.mark_stale(param for param in gate.uncovered if param not in shared)
