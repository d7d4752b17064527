"""Which steps of an optimizer are deferred, and what is told of them.

A step is deferred where forwards are seen, once the parameters are warm. The first step is exact,
and the first after what was pending has been applied: so a run that is resumed from there has the
same bits. `decide` says so before the norm of the gradients, by a `StepKind`. After that a step can
only become exact: where all was applied meanwhile (`StepKind.now`, and the core), and where no
forward is known to wait for what would land (`Steps.submit`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["COMPILED", "DeferralMetrics", "DeferredSteps", "StepKind"]

COMPILED = (
    "torch.compile, torch.jit or a CUDA graph has them within other code. "
    "hint: compile modules of the model, before the first step: `layer.compile()`"
)
"""Why forwards of a model that is given are not seen."""

_LOGGER = logging.getLogger(__name__)

# Of so many steps half are exact before that is warned of.
_WINDOW = 16


@dataclass(frozen=True, kw_only=True)
class DeferralMetrics:
    """Deferred updates in the last step."""

    interval: int
    """Every how many steps a part of the model has its turn."""
    captured_share: float
    """Which share of the squared norms of gradients the selected channels had, 0 to 1, when they
    were chosen; 0 where none is selected."""
    selected_bytes: int
    """Device memory for the state of selected channels."""
    oldest_age: int
    """How many steps ago the oldest gradient was computed that is deferred."""
    waited_seconds: float
    """How long forwards waited for weights, and the step for the step before it."""
    background_seconds: float
    """How long the background stepped."""

    @classmethod
    def of(cls, interval: int, timing: Mapping[str, float]) -> DeferralMetrics:
        """Those of a step.

        Args:
            interval: every how many steps a part of the model has its turn.
            timing: what the step took, as `OffloadAdamW.timing` has it.
        """
        return cls(
            interval=interval,
            captured_share=timing.get("selected_share", 0.0),
            selected_bytes=int(timing.get("selected_bytes", 0)),
            oldest_age=int(timing["oldest_age"]),
            waited_seconds=timing.get("background", 0.0) + timing["gate"],
            background_seconds=timing["step"],
        )


class StepKind(Enum):
    """What was decided of a step."""

    EXACT = auto()
    """It applies all that is pending."""
    EXACT_BEFORE_DEFERRED = auto()
    """Likewise, and selects channels: the next step may be deferred."""
    EXACT_AFTER_SETTLE = auto()
    """Likewise; it would be deferred, but all that was pending had been applied before it."""
    DEFERRED = auto()
    """It leaves updates pending."""

    @property
    def selects(self) -> bool:
        """Whether it is exact and selects channels."""
        return self in (StepKind.EXACT_BEFORE_DEFERRED, StepKind.EXACT_AFTER_SETTLE)

    def now(self, *, is_settled: bool) -> StepKind:
        """It, when the step begins: a look in the wait for the norm may have applied all."""
        is_late = self is StepKind.DEFERRED and is_settled
        return StepKind.EXACT_AFTER_SETTLE if is_late else self


class DeferredSteps:
    """Decides for the steps of one optimizer, and warns where few of them are deferred.

    A warning of steps that looks have made exact is followed by the next one after ten times as
    many steps.

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
        self._warn, self._why = warn, why
        self._has_warned = False
        self._is_excused = False
        # Whether each of the last steps was exact for what was applied.
        self._last: deque[bool] = deque(maxlen=_WINDOW)
        self._num_noted = 0
        self._warns_at = 0

    def decide(self, step: int, *, is_seen: bool, is_settled: bool) -> StepKind:
        """Decides on a step.

        Args:
            step: which update it is, from 1, of the parameter that has seen most.
            is_seen: whether forwards are, so that every other look at a weight is as well.
            is_settled: whether nothing was submitted since all updates were applied.
        """
        if not is_seen:
            if not is_settled and not self._has_warned:
                self._has_warned = True
                self._warn(
                    "updates are not deferred, and every step is exact: forwards cannot be seen, "
                    f"since {self._why()}"
                )
            return StepKind.EXACT
        if step <= self._warmup_steps:
            is_last = step == self._warmup_steps
            return StepKind.EXACT_BEFORE_DEFERRED if is_last else StepKind.EXACT
        return StepKind.DEFERRED.now(is_settled=is_settled)

    def note(self, kind: StepKind) -> None:
        """A step has begun."""
        is_excused, self._is_excused = self._is_excused, False
        is_settled = kind is StepKind.EXACT_AFTER_SETTLE
        if not (kind is StepKind.DEFERRED or (is_settled and not is_excused)):
            return
        self._num_noted += 1
        self._last.append(is_settled)
        count = sum(self._last)
        is_often = len(self._last) == _WINDOW and 2 * count >= _WINDOW
        if is_often and self._num_noted >= self._warns_at:
            self._warns_at = 10 * self._num_noted
            _LOGGER.warning(
                "%d of the last %d steps were exact, though updates are to be deferred: something "
                "reads or writes parameters or optimizer state between steps, which applies all "
                "updates. hint: look less often (an average of weights every 100 steps, say), or "
                "leave out `deferred`",
                count,
                _WINDOW,
            )

    def excuse(self) -> None:
        """A step was skipped, or left by an error or Ctrl-C, and all updates were applied.

        That the next one is exact is no look of the program's.
        """
        self._is_excused = True
