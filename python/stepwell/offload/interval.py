"""`Deferred(interval="auto")`: the smallest interval at which the background finishes in time.

A turn steps one of `interval` parts of the model, and moves `state + 2 * interval` bytes for each
of its parameters. So from the seconds that it takes at one interval follow those at another. The
background is in time if that is less than what a step takes without waiting for it.

Steps are measured in windows, and medians decide: a step that was held up by something else does
not. A change makes the engine anew, which applies what is pending: the step that follows is exact.
So an interval grows only where steps wait, and shrinks only with time to spare.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell import _state
from stepwell.offload.deferral import waited_seconds_of
from stepwell.offload.deferred import INTERVAL_MAX, Deferred

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WINDOW_STEPS", "IntervalTuner", "StepTimes"]

WINDOW_STEPS = 16
"""Deferred steps that are measured before the interval may change."""

_GRADIENT_BYTES = 2.0
# Which share of a step may be waiting before the interval grows.
_WAITED_SHARE_MAX = 0.02
# How much longer than measured a turn may take: to be chosen, and to be chosen over a larger one
# that works.
_GROW_MARGIN, _SHRINK_MARGIN = 1.1, 1.4


class StepTimes(NamedTuple):
    """What a deferred step took, in seconds."""

    step: float
    """From its beginning to that of the next."""
    waited: float
    """The part of it that forwards and the next step waited for the background."""
    turn: float
    """What the background took for its turn."""

    @classmethod
    def of(cls, step: float, timing: Mapping[str, float]) -> StepTimes:
        """Those of a step.

        Args:
            step: from its beginning to that of the next.
            timing: what it took, as `OffloadAdamW.timing` has it.
        """
        turn = timing["step"] - timing["gradients"]
        return cls(step=step, waited=waited_seconds_of(timing), turn=turn)


class IntervalTuner:
    """Chooses an interval from measured steps.

    Args:
        moments: how moments are held.
    """

    def __init__(self, moments: str) -> None:
        self.interval = Deferred.INTERVAL_AT_FIRST
        """The interval that is measured."""
        self._interval_max = INTERVAL_MAX
        self._state_bytes = _state.step_bytes(torch.bfloat16, moments)
        self._window: list[StepTimes] = []

    def set(self, interval: int) -> None:
        """Steps have this interval from now on."""
        self.interval = interval
        self._window = []

    def limit(self) -> None:
        """There is no memory for a larger interval."""
        self._interval_max = self.interval

    def note(self, times: StepTimes) -> None:
        """A deferred step is over."""
        self._window.append(times)

    def forget(self) -> None:
        """What is pending was applied: a run that resumes there begins to measure as well."""
        self._window = []

    def choice(self) -> int | None:
        """Another interval that is better, once a window is full; None: there is none."""
        if len(self._window) < WINDOW_STEPS:
            return None
        turn = median(times.turn for times in self._window)
        step = median(times.step for times in self._window)
        waited = median(times.waited for times in self._window)
        self._window = []
        spare = step - waited
        at_least = self._smallest(turn, spare / _GROW_MARGIN)
        if at_least > self.interval and waited > _WAITED_SHARE_MAX * step:
            return at_least
        at_most = self._smallest(turn, spare / _SHRINK_MARGIN)
        return at_most if at_most < self.interval else None

    def _smallest(self, turn: float, seconds: float) -> int:
        """The smallest interval at which a turn takes so many seconds at most, or the largest."""
        now = self._turn_bytes(self.interval)
        intervals = range(1, self._interval_max)
        fitting = (each for each in intervals if turn * self._turn_bytes(each) / now <= seconds)
        return next(fitting, self._interval_max)

    def _turn_bytes(self, interval: int) -> float:
        return self._state_bytes / interval + _GRADIENT_BYTES
