"""What deferred updates do, step by step: figures of the last step, and whether any is deferred."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DeferralMetrics", "SettledSteps"]

_LOGGER = logging.getLogger(__name__)


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


class SettledSteps:
    """Warns where so many steps are exact, since something looks at weights, that few are deferred.

    A warning is followed by the next one after ten times as many steps.
    """

    _WINDOW = 16

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=self._WINDOW)
        self._num_steps = 0
        self._warns_at = 0

    def note(self, *, is_settled: bool) -> None:
        """A step that would be deferred begins; whether it is exact, for what was applied."""
        self._num_steps += 1
        self._last.append(is_settled)
        count = sum(self._last)
        is_often = len(self._last) == self._WINDOW and 2 * count >= self._WINDOW
        if is_often and self._num_steps >= self._warns_at:
            self._warns_at = 10 * self._num_steps
            _LOGGER.warning(
                "%d of the last %d steps were exact, though updates are to be deferred: something "
                "reads or writes parameters or optimizer state between steps, which applies all "
                "updates. hint: look less often (an average of weights every 100 steps, say), or "
                "leave out `deferred`",
                count,
                self._WINDOW,
            )
