"""Timing in interleaved pairs.

What two things cost in the same minute on the same machine, and how sure that is.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["EQUAL_WITHIN", "Passes", "Ratio", "interleave", "ratio"]

Passes: TypeAlias = "Mapping[str, Callable[[], object]]"
"""What a contender does, one after the other, by name."""

EQUAL_WITHIN = 0.03
"""Two times count as equal if their ratio differs from 1 by no more."""

_RESAMPLES = 2000
# OpenMP's idle threads spin for some milliseconds, on the cores that the next contender's are
# pinned to.
_SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class Ratio:
    """How many times longer a peer takes: the median over pairs, and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["faster", "equal", "slower", "unclear"]:
        """What may be said of the one that is not the peer; nothing where the interval has both."""
        if abs(self.median - 1.0) <= EQUAL_WITHIN:
            return "equal"
        if self.low <= 1.0 <= self.high:
            return "unclear"
        return "faster" if self.median > 1.0 else "slower"


def interleave(
    contenders: Mapping[str, Passes], *, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every pass of every contender in each of `repeats` rounds.

    One round before them is not measured. Every round runs each contender once, in an order that
    rotates from round to round.
    """
    names = list(contenders)
    seconds = {name: {pass_: [0.0] * repeats for pass_ in contenders[name]} for name in names}
    for round_ in range(-1, repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(_SETTLE_SECONDS)
            for pass_, run in contenders[name].items():
                started = time.perf_counter()
                run()
                if round_ >= 0:
                    seconds[name][pass_][round_] = time.perf_counter() - started
    return seconds


def ratio(peer: Sequence[float], ours: Sequence[float]) -> Ratio:
    """The peer's seconds over ours, pair by pair.

    The interval is a percentile bootstrap over the pairs, from a fixed seed.
    """
    ratios = [theirs / mine for theirs, mine in zip(peer, ours, strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    return Ratio(
        statistics.median(ratios),
        medians[round(0.025 * _RESAMPLES)],
        medians[round(0.975 * _RESAMPLES) - 1],
    )
