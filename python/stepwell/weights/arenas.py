"""Pinned host memory that is taken piece by piece, given back, and taken again.

Memory comes in arenas of several pieces. Each is as large as all that there is, up to 1 GiB. So it
exceeds what was in use at once by that at most, where pieces have one size. Nothing is rounded to
powers of two. What is given back joins its neighbours.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import deque
from typing import NamedTuple

import torch

from stepwell import _core
from stepwell._budget import GIB, note_pinned
from stepwell._streams import device_name
from stepwell._tensors import tensor_on

__all__ = ["Arenas", "Piece"]

_LOGGER = logging.getLogger(__name__)

_ARENA_BYTES_MAX = GIB
# Where each piece begins.
_ALIGN_BYTES = 512


class _Range(NamedTuple):
    """Bytes of an arena."""

    arena: int
    """Its number."""
    begin: int
    end: int


class Piece:
    """Memory that was taken: `memory`, until `give_back`, which any thread may call."""

    def __init__(self, arenas: Arenas, taken: _Range, memory: torch.Tensor) -> None:
        self._arenas, self._taken = arenas, taken
        self.memory = memory
        """Bytes in host memory."""

    def give_back(self) -> None:
        """The memory may be taken again. Whoever takes it waits for copies that are under way."""
        self._arenas.returned.append(self._taken)


class Arenas:
    """Memory of one device's, and of one kind of use.

    Args:
        device: what it is pinned for.
        use: what the memory is for, as logs and errors have it.
        hint: what takes less.
    """

    def __init__(self, device: torch.device, use: str, hint: str) -> None:
        self._device, self._use, self._hint = device, use, hint
        # An engine without parameters: it pins, and keeps what is pinned.
        self._pinning: _core.OffloadEngine | None = None
        self._memories: list[torch.Tensor] = []
        # In their order, with something in use between any two of one arena.
        self._free: list[_Range] = []
        self.returned: deque[_Range] = deque()
        """What was given back, and did not join the rest yet: the garbage collector gives back on
        any thread, at any time."""
        self.nbytes = 0
        """Bytes of all arenas."""

    def take(self, nbytes: int) -> Piece:
        """Takes memory.

        Raises:
            ValueError: there is less.
            OSError: it cannot be had, or not be pinned.
        """
        size = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        while self.returned:
            self._join(self.returned.popleft())
        found = next((index for index, r in enumerate(self._free) if r.end - r.begin >= size), None)
        if found is None:
            found = self._grow(size)
        arena, begin, end = self._free.pop(found)
        if begin + size < end:
            self._free.insert(found, _Range(arena, begin + size, end))
        memory = self._memories[arena][begin : begin + nbytes]
        return Piece(self, _Range(arena, begin, begin + size), memory)

    def _join(self, free: _Range) -> None:
        arena, begin, end = free
        index = bisect(self._free, free)
        if index < len(self._free) and self._free[index][:2] == (arena, end):
            end = self._free.pop(index).end
        if index and (self._free[index - 1].arena, self._free[index - 1].end) == (arena, begin):
            index -= 1
            begin = self._free.pop(index).begin
        self._free.insert(index, _Range(arena, begin, end))

    def _grow(self, size: int) -> int:
        """Adds an arena of pieces of this size. Returns its index among what is free."""
        nbytes = max(min(self.nbytes, _ARENA_BYTES_MAX) // size, 1) * size
        with _core.MemoryClaim(nbytes) as claim:
            if claim.is_refused:
                raise ValueError(
                    f"{self._use} take `{nbytes}` bytes of host memory beside `{self.nbytes}`, "
                    f"`{claim.room_nbytes}` are free. hint: {self._hint}"
                )
            _LOGGER.info(
                "%.2f GiB of host memory for %s, beside %.2f GiB",
                nbytes / GIB,
                self._use,
                self.nbytes / GIB,
            )
            buffer = _core.Buffer(nbytes)
        if self._pinning is None:
            self._pinning = _core.OffloadEngine(device_name(self._device), [])
        self._pinning.pin(buffer)
        note_pinned(self, self._pinning.pinned_nbytes)
        self._memories.append(tensor_on(buffer))
        self.nbytes += nbytes
        self._free.append(_Range(len(self._memories) - 1, 0, nbytes))
        return len(self._free) - 1
