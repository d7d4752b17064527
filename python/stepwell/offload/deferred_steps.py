"""Which steps of an optimizer are deferred: one decision for each step.

A step is deferred where forwards are seen, once the parameters are warm. The first step is exact,
and the first after what was pending has been applied: so a run that is resumed from there has the
same bits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stepwell.offload.deferral import SettledSteps

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMPILED", "DeferredSteps"]

COMPILED = (
    "torch.compile, torch.jit or a CUDA graph has them within other code. "
    "hint: compile modules of the model, before the first step: `layer.compile()`"
)
"""Why forwards of a model that is given are not seen."""

_LOGGER = logging.getLogger(__name__)


class DeferredSteps:
    """Decides for the steps of one optimizer.

    A step is given by its number: which update it is, from 1, of the parameter that has seen most.

    Args:
        warmup_steps: so many steps of a parameter are exact before the first that is deferred.
        warn: tells the user that no step is deferred.
        why: why forwards are not seen, and what to do.
    """

    def __init__(
        self,
        warmup_steps: int,
        warn: Callable[[str], None] = _LOGGER.warning,
        why: Callable[[], str] = lambda: COMPILED,
    ) -> None:
        self._warmup_steps = warmup_steps
        self._why = why
        self._settled_steps = SettledSteps()
        self._is_excused = False
        self._warn = warn
        self._has_warned = False

    def is_deferred(self, step: int, *, is_seen: bool, is_settled: bool) -> bool:
        """Whether a step is deferred.

        Args:
            step: its number.
            is_seen: whether forwards are, so that every other look at a weight is as well.
            is_settled: whether nothing was submitted since all updates were applied.
        """
        if is_settled:
            return False
        if not is_seen:
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    "updates are not deferred, and every step is exact: forwards cannot be seen, "
                    f"since {self._why()}"
                )
            return False
        return step > self._warmup_steps

    def is_followed_by_deferred(self, step: int, *, is_seen: bool) -> bool:
        """Whether a step that is exact selects channels: the next step may be deferred."""
        return is_seen and step >= self._warmup_steps

    def note(self, step: int, *, is_seen: bool, is_settled: bool) -> None:
        """A step begins; the arguments are those of `is_deferred`."""
        is_excused, self._is_excused = self._is_excused, False
        if is_seen and step > self._warmup_steps and not (is_settled and is_excused):
            self._settled_steps.note(is_settled=is_settled)

    def excuse(self) -> None:
        """A step was skipped, or left by an error or Ctrl-C, and all updates were applied.

        That the next one is exact is no look of the program's.
        """
        self._is_excused = True
