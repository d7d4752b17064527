"""Which weights on the device a program has written since they were uploaded.

The engine keeps a checksum of each segment, as it was behind its last upload, or behind the kernel
that has stepped some of it since (UP-4 in `rust/offload/uploads.rs`). Before a step they are taken
again, behind all uploads. Where they differ a program has written, however it did. A weight that
has moved and kept its contents was not written, nor is one that got the same bits again.

Where some weights are away, of which nothing was uploaded, the others are looked at from here: the
core would look at all.

What was never copied to the host has a checksum that no memory has.

Cost: two reads of the weights per step, on the device, and 4 KiB of its memory per segment of 4 Mi
elements.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from stepwell.store.twins import Twins

__all__ = ["Contents"]

# A sum of words that are multiplied by odd numbers: all of them are never this.
_UNKNOWN = -1


class Contents:
    """The contents of the weights of an engine.

    Args:
        core: the engine.
        store: its parameters.
        params: these, in its order.
        twins: their host sides, which keep what is known of them when the engine ends.
        device: where they are.
        stream: gives the current stream, which has waited for all weights.
        uploaded: those that are on the device between steps; None: all.

    Raises:
        OSError: the device has no kernel for checksums.
    """

    def __init__(
        self,
        core: _core.OffloadEngine,
        store: _core.Store,
        params: Sequence[torch.Tensor],
        twins: Twins,
        *,
        device: torch.device,
        stream: Callable[[], int],
        uploaded: Iterable[torch.Tensor] | None = None,
    ) -> None:
        self._core = core
        self._uploaded = None if uploaded is None else set(map(id, uploaded))
        self._store, self._stream = store, stream
        first = core.first_segments()
        shape = first[-1], _core.CHECKSUM_SUMS
        self._known = torch.full(shape, _UNKNOWN, dtype=torch.int64, device=device)
        # By the parameter's id.
        self._segments: dict[int, slice] = {}
        self._params = list(params)
        for param, (begin, end) in zip(params, pairwise(first), strict=True):
            self._segments[id(param)] = slice(begin, end)
            known = self._known[begin:end]
            before = twins[param].checksums
            if before is not None and before.shape == known.shape:
                known.copy_(before)
            twins[param].checksums = known
        core.keep_checksums(self._known.data_ptr())
        self._found = self._known

    def look(self) -> torch.Tensor:
        """Compares the weights that come with the step of the store's last look.

        Returns whether any differs: one element, on the device.
        """
        # A signal's handler may look meanwhile: the memory that is written is this call's own.
        found, stream = self._known.clone(), self._stream()
        if self._uploaded is not None:
            self._take_checksums(found, self._uploaded, stream)
        elif found.numel():
            # Of another size, dtype or device than they were.
            for index in self._store.take_checksums(found.data_ptr(), stream=stream):
                found[self._segments[id(self._params[index])]] = _UNKNOWN - 1
        self._found = found
        return (found != self._known).any()

    def _take_checksums(self, found: torch.Tensor, uploaded: Collection[int], stream: int) -> None:
        """As the store's, of weights that are on the device; those of others are left."""
        for param in self._store.landing:
            if id(param) not in uploaded or not param.numel():
                continue
            # It was looked at for the step: it is as it was, but may be elsewhere.
            pieces = torch.split(param.detach().view(-1), _core.SEGMENT_LEN)
            addresses = [piece.data_ptr() for piece in pieces]
            sizes = [int(piece.nbytes) for piece in pieces]
            sums = found[self._segments[id(param)]]
            self._core.checksums(addresses, sizes, sums.data_ptr(), stream=stream)

    def differing(self) -> list[torch.Tensor]:
        """The parameters whose weights differed in the last look. The thread waits for it."""
        differs = (self._found != self._known).any(1).tolist()
        return [param for param in self._params if any(differs[self._segments[id(param)]])]

    def written(self) -> list[torch.Tensor]:
        """Looks, and returns the parameters whose weights differ. The thread waits."""
        return self.differing() if bool(self.look()) else []

    def accept(self, params: Iterable[torch.Tensor]) -> None:
        """`params` were copied to the host as they were in the last look."""
        for param in params:
            at = self._segments[id(param)]
            self._known[at].copy_(self._found[at])
