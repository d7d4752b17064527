"""Which steps of an optimizer are deferred, and at which interval: one decision for each step.

A step is deferred where forwards are seen, once the parameters are warm. The first step is exact,
and the first after what was pending has been applied: so a run that is resumed from there has the
same bits.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from stepwell.offload.deferral import SettledSteps
from stepwell.offload.interval import IntervalTuner, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepwell.offload.deferred import Deferred

__all__ = ["DeferredSteps"]

_LOGGER = logging.getLogger(__name__)


class DeferredSteps:
    """Decides for the steps of one optimizer.

    A step is given by its number: which update it is, from 1, of the parameter that has seen most.

    Args:
        deferred: what the user has set.
        moments: how moments are held.
        warn: tells the user that no step is deferred.
    """

    def __init__(
        self, deferred: Deferred, moments: str, warn: Callable[[str], None] = _LOGGER.warning
    ) -> None:
        self._tuner: IntervalTuner | None = None
        if deferred.interval == "auto":
            self._tuner = IntervalTuner(moments)
            deferred = replace(deferred, interval=self._tuner.interval)
        self.deferred = deferred
        """What holds for the step that comes; its interval is a number."""
        self._step_began = 0.0
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
                    "updates are not deferred, and every step is exact: forwards cannot be seen "
                    "(torch.compile, DTensor, a CUDA graph, or parameters in no module)"
                )
            return False
        return step > self.deferred.warmup_steps

    def is_followed_by_deferred(self, step: int, *, is_seen: bool) -> bool:
        """Whether a step that is exact selects channels: the next step may be deferred."""
        return is_seen and step >= self.deferred.warmup_steps

    def note(self, step: int, *, is_seen: bool, is_settled: bool) -> None:
        """A step begins; the arguments are those of `is_deferred`."""
        is_excused, self._is_excused = self._is_excused, False
        if is_seen and step > self.deferred.warmup_steps and not (is_settled and is_excused):
            self._settled_steps.note(is_settled=is_settled)

    def excuse(self) -> None:
        """A step was skipped, or left by an error or Ctrl-C, and all updates were applied.

        That the next one is exact is no look of the program's.
        """
        self._is_excused = True

    # ---- the interval ----

    @property
    def chosen_interval(self) -> int | None:
        """The interval that was chosen last; None: the user has set it."""
        return None if self._tuner is None else self._tuner.interval

    def measure(
        self, began: float, timing: Mapping[str, float], *, is_settled: bool, has_pending: bool
    ) -> int | None:
        """The last step is over. Returns an interval that is better, if there is one.

        Args:
            began: when the step that comes began, in seconds.
            timing: what the last one took, as `OffloadAdamW.timing` has it.
            is_settled: whether all updates were applied since.
            has_pending: whether it has left updates pending.
        """
        if self._tuner is None:
            return None
        if is_settled:
            self._tuner.forget()
        elif has_pending:
            self._tuner.note(StepTimes.of(began - self._step_began, timing))
        self._step_began = began
        return self._tuner.choice()

    def at_interval(self, interval: int) -> Deferred:
        """`deferred` at another interval."""
        return replace(self.deferred, interval=interval)

    def set_interval(self, interval: int) -> None:
        """Steps have this interval from now on, which was to be chosen."""
        assert self._tuner is not None
        self.deferred = self.at_interval(interval)
        self._tuner.set(interval)

    def limit_interval(self) -> None:
        """There is no memory for a larger interval."""
        assert self._tuner is not None
        self._tuner.limit()
