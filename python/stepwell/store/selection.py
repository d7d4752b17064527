"""Which channels are stepped on the device at once, and when that changes.

A channel is a row or a column of what lies of a matrix in one segment of the engine. The device has
a copy of the state of the channels that are selected, and steps it in every step, ahead of the host
(`rust/offload/selected.rs`). What is selected changes in an exact step, and in turns of its
segment.

Each segment has its share of channels. An exact step, which selects of all, comes first, and after
every look at the weights, so that a run that is resumed from there selects what one that goes on
does.

Scores are squared norms of the gradient of that very step. They are reduced on the device, for the
segments whose selection is due, and come to the host with the norm of all gradients, which the step
waits for in any case: no wait of its own, and nothing but scores crosses the bus.

Cost: the segments that are due, `1 / reselect` of the model per step, are read twice more on the
device; their channels are ranked on the host, in linear time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import torch

from stepwell import _core
from stepwell._sharding import local
from stepwell._tensors import view

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

__all__ = ["Selected", "Selector"]

_Tensor = TypeVar("_Tensor", bound="Hashable")

Selected: TypeAlias = "tuple[int, bool, list[int]]"
"""The number of a segment, whether its channels are columns, and the channels, ascending."""


class Selector(Generic[_Tensor]):
    """Chooses channels of the tensors of an engine.

    Args:
        segments: those of which channels may be selected.
        params: what stands for the tensors of the engine, in its order: parameters, or others.
        reselect: after how many steps a selection is due.
        device: where the parameters are.
    """

    def __init__(
        self,
        segments: Sequence[_core.Selectable],
        params: Sequence[_Tensor],
        reselect: int,
        device: torch.device,
    ) -> None:
        self._segments = segments
        self._params = params
        self._reselect = reselect
        self._step = 0
        # For each segment the step that selected channels of it, or that counts as that one.
        self._selected_at: dict[int, int] = {}
        self._leads = _leads(segments, reselect)
        # Squared norms, of the chosen channels and of all, of the last choice.
        self._captured: dict[int, tuple[float, float]] = {}
        self._due: list[_core.Selectable] = []
        # Whether these are all that the step has gradients of.
        self._is_all_due = False
        self.needs_exact = False
        """Whether the next step has to be exact: the last one was, without the scores of all."""
        most = sum(one.rows + one.row_len for one in segments if not _is_whole(one))
        # The device writes it, and the thread reads it behind a wait of its own.
        self._norms = torch.zeros(
            most, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda"
        )

    @property
    def share(self) -> float:
        """What the chosen channels had of the squared norms that they were chosen by, 0 to 1."""
        sums = self._captured.values()
        chosen, total = sum(chosen for chosen, _ in sums), sum(total for _, total in sums)
        return chosen / total if total > 0 else 0.0

    def reset(self) -> None:
        """Nothing is selected any more."""
        self._selected_at = {}
        self._captured = {}

    def score(
        self, params: Sequence[_Tensor], grads: Sequence[torch.Tensor], group: int | None
    ) -> None:
        """Reduces the gradients of what is due, on the device. Scores are there after a wait.

        Args:
            params: the parameters of the step.
            grads: their gradients, each contiguous.
            group: whose turn it is; None: all segments are due, since the step is exact.
        """
        grad_of = dict(zip(params, grads, strict=True))
        self._due = []
        self._is_all_due = group is None and bool(params)
        norms: list[torch.Tensor] = []
        for one in self._segments:
            grad = grad_of.get(self._params[one.tensor])
            if grad is None or not (group is None or self._is_due(one, group)):
                continue
            self._due.append(one)
            if _is_whole(one):
                continue
            end = one.first + one.rows * one.row_len
            block = local(grad).detach().view(-1)[one.first : end].view(one.rows, one.row_len)
            norms += [
                torch.linalg.vector_norm(block, dim=dim, dtype=torch.float32) for dim in (1, 0)
            ]
        if norms:
            found = torch.cat(norms)
            self._norms[: len(found)].copy_(found, non_blocking=True)

    def _is_due(self, one: _core.Selectable, group: int) -> bool:
        if one.group != group:
            return False
        selected_at = self._selected_at.get(one.segment)
        return selected_at is None or self._step - selected_at >= self._reselect

    def choose(self, at_once: Collection[_Tensor] | None) -> list[Selected]:
        """The selections that begin with the step, whose scores have come.

        Args:
            at_once: parameters that the deferred step updates at once; None: it is exact.
        """
        if at_once is None:
            self.reset()
            self.needs_exact = not self._is_all_due
            if self.needs_exact:
                # It was to be deferred when its gradients were scored, or no forward was seen.
                self._due = []
        found = self._channels()
        chosen: list[Selected] = []
        for one in self._due:
            if at_once is not None and self._params[one.tensor] in at_once:
                self._forget(one.segment)
                continue
            by_columns, channels = found.get(one.segment, (False, list(range(one.rows))))
            chosen.append((one.segment, by_columns, channels))
            lead = self._leads[one.segment] if at_once is None else 0
            self._selected_at[one.segment] = self._step - lead
        self._due, self._is_all_due = [], False
        self._step += 1
        return chosen

    def _channels(self) -> dict[int, tuple[bool, list[int]]]:
        """For the number of each segment that is due whether columns are chosen, and which.

        Not of those that are selected whole.
        """
        scored = [one for one in self._due if not _is_whole(one)]
        norms = view(self._norms[: sum(one.rows + one.row_len for one in scored)])
        extents = [(one.rows, one.row_len, one.row_count, one.column_count) for one in scored]
        chosen = _core.choose_channels(norms, extents)
        channels = {}
        for one, (by_columns, found, captured, total) in zip(scored, chosen, strict=True):
            channels[one.segment] = by_columns, found
            if math.isfinite(total):
                self._captured[one.segment] = captured, total
        return channels

    def holds(self, params: Collection[_Tensor]) -> bool:
        """Whether channels of any of these are selected."""
        known = set(params)
        return bool(known) and any(
            one.segment in self._selected_at and self._params[one.tensor] in known
            for one in self._segments
        )

    def drop(self, params: Iterable[_Tensor]) -> None:
        """The engine has ended what was selected of these."""
        dropped = set(params)
        for one in self._segments:
            if self._params[one.tensor] in dropped:
                self._forget(one.segment)

    def _forget(self, segment: int) -> None:
        self._selected_at.pop(segment, None)
        self._captured.pop(segment, None)


def _leads(segments: Sequence[_core.Selectable], reselect: int) -> dict[int, int]:
    """By how many steps the first selection of each segment is due sooner.

    An exact step selects channels of all segments, which would all be due together from then on: at
    `interval` 4 and `reselect` 16 the background would have a quarter of the model's copies to make
    in each of four steps, and none in the next twelve. So those of a group are dealt to its turns
    within `reselect` steps.
    """
    interval = 1 + max((one.group for one in segments), default=0)
    turns = max(reselect // interval, 1)
    leads, count_of = {}, [0] * interval
    for one in segments:
        leads[one.segment] = interval * (count_of[one.group] % turns)
        count_of[one.group] += 1
    return leads


def _is_whole(one: _core.Selectable) -> bool:
    """Whether all of it is selected, so that nothing is to be chosen."""
    return one.row_count == one.rows and one.column_count == 0
