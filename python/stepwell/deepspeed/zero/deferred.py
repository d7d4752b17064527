"""DeepSpeed's ZeRO-1 and -2 optimizer with updates that are deferred, on the offload engine.

This module imports DeepSpeed's optimizer, and is imported late.

A JSON with `zero_optimization.zenflow` gets it (`stepwell.deepspeed.zenflow` has what of that block
means what). It is the optimizer of `stage_1_2`, but that its partitions are deferred: an update
that is not selected takes effect some steps later, as `OffloadAdamW(deferred=...)` has it.

- On one rank whatever looks at a weight before the next forward in training, evaluation and state
  dicts see all updates: what is pending is applied first.
- On several, that would be a collective, which a look of one rank cannot be. There `drain`,
  `save_checkpoint` and a step that is skipped apply and gather, and a forward in evaluation mode
  or a state dict of the module before that is warned of. Masters and moments are a rank's own: a
  look at them applies what is pending of them, and weights on the device stay as they are.
- The first step, the first after what is pending was applied, and `warmup_steps` are exact. So a
  run that is resumed has the bits of the one that went on.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell.access.gate import LANDING_BYTES_MAX
from stepwell.deepspeed.logs import warn
from stepwell.deepspeed.zero.partition import Source
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.deepspeed.zero.pending import Deferral, Pending
from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer
from stepwell.store.deferred_steps import DeferralMetrics, DeferredSteps, StepKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from stepwell.deepspeed.plan import Plan
    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.deepspeed.zero.partition import Fragment, Partition
    from stepwell.store.deferred import Deferred

__all__ = ["DeferredZeroOptimizer"]


class DeferredZeroOptimizer(OffloadZeroOptimizer):
    """See the module. Takes what its base class takes; its `plan` has what is deferred."""

    def __init__(self, init_optimizer: Any, *args: Any, plan: Plan, **kwargs: Any) -> None:
        assert plan.zenflow is not None
        self._deferred: Deferred = plan.zenflow.deferred
        self._has_warned: set[str] = set()
        self._steps = DeferredSteps(self._deferred.warmup_steps, self._warn_once)
        # What was decided of the coming step.
        self._kind = StepKind.EXACT
        self._is_skipped = False
        super().__init__(init_optimizer, *args, plan=plan, **kwargs)

    def _open_partitions(self, partitions: list[Partition]) -> Partitions:
        sources = {}
        for params in self.bit16_groups:
            for param in params:
                if self.get_param_id(param) not in self.grad_position:
                    # It lies in the partitions of other ranks.
                    continue
                fragment = self._fragment(param)
                if fragment.numel:
                    first = self.grad_position[self.get_param_id(param)][1]
                    row_len = param.numel() // param.shape[0] if param.dim() > 1 else 0
                    sources[fragment] = Source(first, row_len)
        options = self._plan.options
        return Partitions(
            partitions,
            device=partitions[0].weight.device,
            fragments=self._fragments_alone(),
            order=self._order(),
            threads=self._plan.threads,
            host_bytes_max=options.host_bytes_max,
            deferral=Deferral(
                self._deferred, sources, None if self._is_alone else _weakly(self._weights)
            ),
        )

    @property
    def _pending(self) -> Pending:
        assert self._partitions.pending is not None
        return self._partitions.pending

    @property
    def deferral(self) -> DeferralMetrics:
        """Deferred updates in the last step."""
        return DeferralMetrics.of(self._deferred.interval, self._partitions.timing())

    def watch(self, module: torch.nn.Module) -> None:
        """On one rank forwards of `module` wait for the parameters.

        Of several ranks those in evaluation mode, and state dicts, are noticed that have late
        weights.
        """
        if self._is_alone:
            self._watch(module, self._partitions, LANDING_BYTES_MAX)
        else:
            hook = _LateUse(self)
            for handle in (
                module.register_forward_pre_hook(hook.forward),
                # torch has no types for it.
                module.register_state_dict_pre_hook(hook.state_dict),  # type: ignore[no-untyped-call]
            ):
                weakref.finalize(self, handle.remove)

    # ---- the step ----

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """As the base class; updates that are not selected are deferred."""
        try:
            with self._partitions.engine.stepping():
                super().step(closure)
        except BaseException:
            self._steps.excuse()
            # On this rank: no other may have failed.
            with contextlib.suppress(OSError, ValueError):
                self._partitions.complete()
            raise
        if self._is_skipped:
            self._is_skipped = False
            self._steps.excuse()
            # No forward is ahead that lands weights, so no access would be seen.
            self.drain()

    def _skip(self) -> None:
        super()._skip()
        self._is_skipped = True

    def _check_used(self) -> None:
        super()._check_used()
        # Before the norm, which is waited for.
        self._kind = self._steps.decide(
            self._next_step(),
            is_seen=self._is_seen(),
            is_settled=self._partitions.engine.is_settled,
        )
        self._pending.score(
            is_deferred=self._kind is StepKind.DEFERRED, is_selected=self._kind.selects
        )

    def _next_step(self) -> int:
        """The number of the coming update, from 1."""
        states = (self.optimizer.state.get(master) or {} for master in self._masters)
        return 1 + max((int(state.get("step", 0)) for state in states), default=0)

    def _is_seen(self) -> bool:
        """Whether weights may be late: a look at them is seen, or several ranks say when."""
        if not self._is_alone:
            return True
        return self._gate is not None and self._gate.is_open

    def _is_stepped(self, master: torch.Tensor) -> bool:
        return master.numel() > 0

    def _guard(self, operands: Mapping[int, Operand]) -> Collection[Fragment] | None:
        """Decides at last whether the step is deferred, and has uses of weights wait on one rank.

        Masters and moments are views for their homes alone, which apply what is pending.
        """
        kind = self._kind.now(is_settled=self._partitions.engine.is_settled)
        if not self._is_seen():
            kind = StepKind.EXACT
        self._steps.note(kind)
        # Those that the step itself waits for.
        uncovered: list[torch.Tensor] = []
        if self._gate is not None:
            uncovered = self._all_params()
            if (opening := self._gate.opening_all()) is not None:
                uncovered = self._gate.not_covered_of_all()
                self._partitions.begin_with(opening)
        return {self._fragment(each) for each in uncovered} if kind is StepKind.DEFERRED else None

    def _wait_for_weights(self) -> None:
        if self._gate is not None and self._gate.is_open:
            self._gate.wait_for_uncovered()
        else:
            self._partitions.wait_for_all()

    # ---- waiting ----

    def drain(self) -> None:
        """Applies all updates that are deferred: weights and state are those of the last step.

        On several ranks all of them call it, and the weights are gathered.

        Raises:
            OSError: the step failed in the background.
        """
        if self._is_alone:
            self.synchronize()
            return
        self._partitions.complete()
        self._pending.upload(self._masters, self._partitions.twins)
        self._gather_weights()

    def checkpoint_event_prologue(self) -> None:
        """A checkpoint is saved or loaded, on all ranks: it has all updates."""
        self.drain()

    def synchronize(self) -> None:
        """As the base class; what is deferred is applied. Weights on several ranks see `drain`."""
        if self._is_made():
            self._partitions.settle()
            super().synchronize()

    def note_forward(self, module: torch.nn.Module) -> None:
        """Several ranks begin a forward: one in evaluation mode may read late weights."""
        if not module.training and not self._pending.is_landed:
            self._warn_once(
                "a forward in evaluation mode reads weights that lack up to "
                f"{self._deferred.interval} updates, since several ranks cannot gather there. "
                "hint: engine.optimizer.drain() on all ranks before an evaluation"
            )

    def note_state_dict(self) -> None:
        """Several ranks make a state dict of the module."""
        if not self._pending.is_landed:
            self._warn_once(
                "a state dict of the module has weights that lack up to "
                f"{self._deferred.interval} updates, since several ranks cannot gather there. "
                "hint: engine.optimizer.drain() on all ranks before it, or engine.save_checkpoint()"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._has_warned:
            self._has_warned.add(text)
            warn(text)


class _LateUse:
    """Hooks of a module, which do not keep the optimizer alive."""

    def __init__(self, optimizer: DeferredZeroOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def forward(self, module: torch.nn.Module, _: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.note_forward(module)

    def state_dict(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.note_state_dict()


def _weakly(method: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """A method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> list[torch.Tensor]:
        found = reference()
        return [] if found is None else found()

    return call
