"""What is deferred of ZeRO's partitions, and weights of several ranks that lack it.

Weights that several ranks hold on the device are equal at any time. So where a rank applies what is
pending of its partitions, its weights there stay as they are: what is applied follows with the next
step, or with `upload`. Imports no DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepwell.deepspeed.zero.partition import Fragment, Source
    from stepwell.deepspeed.zero.run_gradients import RunGradients
    from stepwell.deepspeed.zero.spans import Spans
    from stepwell.store.deferred import Deferred
    from stepwell.store.engine import Engine, Submitted

__all__ = ["Deferral", "Pending"]


class Deferral(NamedTuple):
    """How updates of partitions are deferred."""

    options: Deferred
    sources: Mapping[Fragment, Source]
    """All fragments, in the order of the forward."""
    weights: Callable[[], Sequence[torch.Tensor]] | None = None
    """Gives the weights of all partitions, of which other ranks have the same; None: none has."""


class Pending:
    """Updates of partitions whose turn has not come.

    Args:
        engine: what defers them.
        spans: of the partitions.
        gradients: of the coming step.
        weights: as `Deferral` has it.
    """

    def __init__(
        self,
        engine: Engine,
        spans: Spans,
        gradients: RunGradients,
        weights: Callable[[], Sequence[torch.Tensor]] | None,
    ) -> None:
        self._engine, self._spans, self._gradients = engine, spans, gradients
        self._weights = weights
        # Of several ranks the last step that was applied past the weights on the device.
        self._applied_past: Submitted | None = None

    def score(self, *, is_deferred: bool, is_selected: bool) -> None:
        """Scores channels of which some may be selected; the norm that comes next is waited for.

        Args:
            is_deferred: whether the coming step is.
            is_selected: whether an exact step is to select.
        """
        selector = self._engine.selector
        if selector is None:
            return
        spans: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        if is_deferred or is_selected:
            found = self._gradients.known()
            for span, run in zip(self._spans.tensors, self._spans.runs, strict=True):
                if run in found:
                    spans.append(span)
                    grads.append(found[run])
        selector.score(spans, grads, self._engine.next_group() if is_deferred else None)

    def settle(self) -> None:
        """Applies all that is deferred. Does nothing in a step, and where nothing is.

        Raises:
            OSError: the step or the device has failed.
        """
        engine, weights = self._engine, self._weights
        with engine.lock:
            if weights is None or not engine.will_settle:
                engine.settle()
                return
            # What lands is there.
            engine.finish()
            kept = [(weight, weight.clone()) for weight in weights()]
            try:
                engine.settle()
            finally:
                self._applied_past = engine.submitted
                with torch.no_grad():
                    for weight, before in kept:
                        weight.copy_(before)

    @property
    def is_landed(self) -> bool:
        """Whether the weights on the device lack no update."""
        submitted = self._engine.submitted
        is_past = submitted is not None and self._applied_past is submitted
        return not (self._engine.has_pending() or is_past)

    def upload(self, masters: Sequence[torch.Tensor], twins: Sequence[torch.Tensor | None]) -> None:
        """This rank's weights on the device are those of the last step, which is complete.

        Args:
            masters: of all partitions.
            twins: the host sides of their weights; None: the master is.
        """
        if self.is_landed or self._weights is None:
            return
        with torch.no_grad():
            for weight, twin, master in zip(self._weights(), twins, masters, strict=True):
                weight.copy_(master.detach() if twin is None else twin)
        self._applied_past = None
