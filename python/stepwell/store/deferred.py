"""Updates that are deferred: what a user sets, what it takes, and what is done about it.

A deferred step keeps its gradients in host memory. A part of the model, one of `interval`, has its
turn in the background: all its gradients since the last turn are applied, one after the other, each
with the clip coefficient, lr and count of its own step. The new weights land with the next step,
between its backward and the forward after it. So no forward waits for the background, which moves
`(24 + 2 * interval) / interval` bytes per parameter and step instead of 26.

Forwards in training read weights that lack up to `interval` updates. Whatever else reads or
writes a parameter before the next forward, evaluation and state dicts see the weights with all
updates: what is pending is applied first (`Engine.settle`). The first step, and the first after
that, are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._checks import count, flag, fraction
from stepwell._option_names import named_options
from stepwell._sharding import local
from stepwell._tensors import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "INTERVAL_MAX",
    "DeferralBytes",
    "Deferred",
    "Extents",
    "deferred_core",
    "memory_of",
]

INTERVAL_MAX = 8
"""The most steps between two turns: the core's `INTERVAL_MAX`, as a test compares."""


@named_options("`Deferred`")
@dataclass(frozen=True, kw_only=True)
class Deferred:
    """Which updates of `OffloadAdamW` are deferred, and how far.

    Delay costs quality where a model learns fast, and little where it does not (`docs/deferred.md`
    has figures). So this is an option beside the exact step, and never its default.

    Raises:
        ValueError: a value is out of range.
    """

    interval: int = 4
    """Every how many steps a part of the model has its turn: 1 to 8. A gradient takes effect at
    most `interval + 1` steps after it was computed, and `(interval + 3) / 2` on average; an exact
    one takes effect after 1."""

    predict: bool = True
    """Whether weights that land run ahead along the momentum, by the `(interval + 1) / 2` updates
    that they lack on average while forwards read them. The masters do not, so `state_dict()` and
    evaluation see no predicted weight."""

    warmup_steps: int = 0
    """So many steps of a parameter are exact before the first that is deferred: where a model
    learns fast, a weight that is a step old costs most."""

    fraction: float = 0.0
    """Which share of each matrix the device steps at once, in every step, ahead of the host: 0 to
    1. Of what lies of a matrix in one segment (4 Mi elements) that share of the rows, or
    of the columns, is selected: those with the largest gradients, of the axis that captures more.
    A parameter of more than two dimensions is a matrix of its first one and the rest. Parameters of
    one dimension with at most 64 Ki elements (norms, biases) are selected whole. A row that crosses
    the border of two segments is not. 1 selects everything that gets a gradient. Takes 12 bytes of
    device memory per selected parameter. With coded moments the device goes on in fp32 from what
    they decode to: what forwards read of selected channels then differs from what the host will
    have by what coding rounds away (`docs/deferred.md`)."""

    reselect: int = 16
    """After how many steps the channels of a segment are chosen anew, in its next turn."""

    def __post_init__(self) -> None:
        hint = (
            "begin with interval=4 (moments='q8': 2), and take more where "
            "optimizer.deferral.waited_seconds is above a fiftieth of a step"
        )
        checked = {
            "interval": count(self.interval, "`interval`", most=INTERVAL_MAX, hint=hint),
            "predict": flag(self.predict, "`predict`"),
            "warmup_steps": count(self.warmup_steps, "`warmup_steps`", least=0),
            "fraction": fraction(self.fraction, "`fraction`"),
            "reselect": count(self.reselect, "`reselect`"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def selects(self) -> bool:
        """Whether channels are stepped on the device."""
        return self.fraction > 0

    @property
    def predicted_updates(self) -> float:
        """By how many updates the weights of a turn run ahead."""
        return (self.interval + 1) / 2 if self.predict else 0.0


class Extents(NamedTuple):
    """The tensors of an engine, in its order."""

    numels: list[int]
    """Elements of each."""
    dtypes: list[str]
    """Of the gradient, and of the weight on the device."""
    row_lens: list[int]
    """Elements of a row of its matrix; 0: it is none."""

    @classmethod
    def of(cls, params: Iterable[torch.Tensor]) -> Extents:
        """Those of whole parameters, or of their local pieces."""
        pieces = [local(param) for param in params]
        return cls(
            [piece.numel() for piece in pieces],
            [name_of(piece.dtype) for piece in pieces],
            [
                piece.numel() // piece.shape[0] if piece.dim() > 1 and piece.numel() else 0
                for piece in pieces
            ],
        )


class DeferralBytes(NamedTuple):
    """What deferred updates take, in bytes."""

    gradients: int
    """Pinned host memory, for gradients that wait."""
    predicted: int
    """Pinned host memory, for weights that run ahead."""
    selected: int
    """Device memory, for the state of selected channels."""
    staging: int
    """Pinned host memory, through which that state is sent."""

    @property
    def pinned(self) -> int:
        """Pinned host memory in all."""
        return self.gradients + self.predicted + self.staging


def memory_of(extents: Extents, deferred: Deferred) -> DeferralBytes:
    """What deferred updates of these tensors take."""
    numels, dtypes, row_lens = extents
    gradients, predicted = _core.deferral_nbytes(numels, dtypes, deferred.interval)
    selected, staging = 0, 0
    if deferred.selects:
        selected, staging = _core.selection_nbytes(
            numels, dtypes, deferred.interval, row_lens, fraction=deferred.fraction
        )
    return DeferralBytes(gradients, predicted if deferred.predict else 0, selected, staging)


def deferred_core(
    device: torch.device,
    name: str,
    extents: Extents,
    deferred: Deferred,
    threads: int | None,
    tier: Mapping[str, Any] | None = None,
    threads_share: float = 1.0,
) -> tuple[_core.OffloadEngine, int]:
    """An engine of the core whose steps may be deferred, with the memory for it.

    Args:
        device: where the weights are.
        name: what the core calls it.
        extents: the tensors.
        deferred: which updates are deferred.
        threads: workers that step; None: as `OffloadAdamW` has it.
        tier: what has the state of some tensors, as the core is told it; None: nothing has.
        threads_share: without `threads`, which share of the workers there are.

    Returns:
        It, and the bytes of device memory for the state of selected channels; 0: none is selected.

    Raises:
        OSError: the device cannot be had, or refuses to pin.
    """
    memory = memory_of(extents, deferred)
    selection: dict[str, Any] = {}
    if memory.selected:
        selected = torch.empty(memory.selected, dtype=torch.uint8, device=device)
        selection = {
            "row_lens": extents.row_lens,
            "fraction": deferred.fraction,
            "selection": (selected.data_ptr(), selected.untyped_storage()),
            "staging": _core.Buffer(memory.staging),
        }
    core = _core.OffloadEngine(
        name,
        extents.numels,
        threads=threads,
        threads_share=threads_share,
        generations=2,
        interval=deferred.interval,
        dtypes=extents.dtypes,
        gradients=_core.Buffer(memory.gradients),
        predicted=_core.Buffer(memory.predicted) if deferred.predict else None,
        **selection,
        **(tier or {}),
    )
    return core, memory.selected
