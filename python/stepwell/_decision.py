"""What becomes of a step: one decision, taken from facts, for `AdamW` and `OffloadAdamW`."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["NONFINITE", "Facts", "Nonfinite", "Outcome", "decide"]

Nonfinite: TypeAlias = Literal["raise", "skip", "propagate"]
"""What a gradient that is not finite does."""

NONFINITE: tuple[Nonfinite, ...] = ("raise", "skip", "propagate")


class Outcome(Enum):
    """What an optimizer does with a step that was asked for."""

    STEP = "step"
    """All updates are applied."""
    SKIP = "skip"
    """Nothing is changed, and the step is counted as skipped."""
    REFUSE = "refuse"
    """Nothing is changed, and an error says why."""
    MAKE_STATE = "make state"
    """State is made, and no update is counted.

    torch.distributed.checkpoint makes room in this way for what it loads.
    """


class Facts(NamedTuple):
    """What is known of a step. Ranks that share parameters have agreed on each of these."""

    found_inf: bool = False
    """Whether a GradScaler has found a gradient that is not finite."""
    has_error: bool = False
    """Whether the step cannot be taken on some rank."""
    is_nonfinite: bool = False
    """Whether a gradient is not finite."""
    is_nonzero: bool = True
    """Whether a gradient has an element that is not 0."""
    is_first_at_lr_0: bool = False
    """Whether there is no state yet and every lr is 0."""


def decide(facts: Facts, nonfinite: Nonfinite) -> Outcome:
    """The outcome of a step under the policy `nonfinite`."""
    if facts.found_inf:
        return Outcome.SKIP
    if facts.has_error:
        return Outcome.REFUSE
    if facts.is_nonfinite and nonfinite != "propagate":
        return Outcome.REFUSE if nonfinite == "raise" else Outcome.SKIP
    if facts.is_first_at_lr_0 and not facts.is_nonzero:
        return Outcome.MAKE_STATE
    return Outcome.STEP
