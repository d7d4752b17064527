"""New weights of ZeRO on several ranks, gathered behind the step. Imports no DeepSpeed.

Every rank gathers, in the order of the partitions, as `ranks.gathering` has it; what a program
reads waits for what it needs, on its own rank. Under ZeRO-1 and -2 a parameter group is one flat
tensor, of which each rank steps a part. It is gathered in buckets: the same elements of the parts
of all ranks at once, since all are stepped at once.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from stepwell.access.guard import Uploads
from stepwell.ranks.gathering import Gatherer, Piece, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from functools import partial

    from stepwell.deepspeed.zero.partitions import Partitions
    from stepwell.deepspeed.zero.persistent import Upload
    from stepwell.ranks.peers import Peers

__all__ = ["GatheredPersistents", "GatheredUploads", "GatheredWeights"]

# As many elements as two segments, which the engine uploads one by one. Launches of smaller buckets
# stand in the way of those of the forward.
_BUCKET_LEN = 8 << 20


class GatheredUploads(Uploads):
    """New weights that come from all ranks: what a `Gate` waits for.

    Args:
        partitions: what steps those of this rank, and finishes when all have come.
        peers: the ranks.
    """

    def __init__(self, partitions: Partitions, peers: Peers) -> None:
        self._partitions = partitions
        self._world_size = peers.world_size
        self.gatherer: Gatherer = partitions.gather(peers)
        """The thread that gathers them."""

    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """The current stream and the step's stream wait for the new weights of `params`."""
        engine = self._partitions.engine
        started = time.perf_counter()
        self.gatherer.wait(map(id, params), engine.streams)
        engine.seconds_waited += time.perf_counter() - started

    def confirm(self) -> None:
        """Waits until all ranks have told that their parts of the last step are good.

        Raises:
            OSError: one is not.
        """
        self.gatherer.confirm()

    def finish(self) -> None:
        """Waits until all of them are gathered, and what they were read from may be written."""
        self._partitions.finish()


class GatheredPersistents(GatheredUploads):
    """Of persistent parameters under ZeRO-3."""

    def submission(self, uploads: Mapping[torch.Tensor, Upload]) -> list[partial[Any]]:
        """The calls that begin to gather `uploads`, in their order: that of all ranks.

        They are made directly after the step is submitted.
        """
        pieces = []
        for (group, begin, numel), source, target in uploads.values():
            whole = bytes_of(target)
            parts = whole.chunk(self._world_size)
            pieces.append(Piece(group, begin, begin + numel, parts, whole, bytes_of(source)))
        places = {id(param): nth for nth, param in enumerate(uploads)}
        return self.gatherer.submission(pieces, places)


class GatheredWeights(GatheredUploads):
    """Of all parameters under ZeRO-1 and -2.

    Args:
        partitions: as `GatheredUploads` has it.
        peers: likewise.
        groups: of each group its parameters, which lie in one flat tensor.
    """

    def __init__(
        self, partitions: Partitions, peers: Peers, groups: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        super().__init__(partitions, peers)
        self._rank = peers.rank
        self._groups = [list(params) for params in groups]
        # Of each group that was stepped: by parameter, the last bucket that has elements of it.
        self._buckets: dict[int, dict[int, int]] = {}

    def submission(
        self, order: Sequence[int], weights: Sequence[Sequence[torch.Tensor]]
    ) -> list[partial[Any]]:
        """The calls that begin to gather, made directly after the step is submitted.

        Args:
            order: the groups, as they are stepped.
            weights: of each group, the part of each rank, one behind the other.
        """
        pieces: list[Piece] = []
        places: dict[int, int] = {}
        for group in order:
            parts, first = weights[group], len(pieces)
            if group not in self._buckets:
                self._buckets[group] = {
                    id(param): _last_bucket(param, parts)
                    for param in self._groups[group]
                    if param.numel()
                }
            if not self._buckets[group]:
                continue
            cuts = [torch.split(bytes_of(part), _BUCKET_LEN * part.itemsize) for part in parts]
            numel, nothing = parts[self._rank].numel(), bytes_of(parts[0])[:0]
            for nth, cut in enumerate(itertools.zip_longest(*cuts, fillvalue=nothing)):
                begin = nth * _BUCKET_LEN
                pieces.append(Piece(group, begin, min(begin + _BUCKET_LEN, numel), cut))
            places.update((key, first + nth) for key, nth in self._buckets[group].items())
        return self.gatherer.submission(pieces, places)


def _last_bucket(param: torch.Tensor, parts: Sequence[torch.Tensor]) -> int:
    """The last bucket of the parts of all ranks that `param` has elements in."""
    found = 0
    begin = param.storage_offset()
    end = begin + param.numel()
    for part in parts:
        first = part.storage_offset()
        last = min(end, first + part.numel())
        if max(begin, first) < last:
            found = max(found, int(last - first - 1) // _BUCKET_LEN)
    return found
