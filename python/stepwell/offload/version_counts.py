"""Counts the write of a step to its weights, without Python in between.

A signal's handler runs between two instructions of Python, and may write weights, save, or apply
what is deferred. So what looks whether that has happened, what counts the step's own write, and
what notes the counts are calls of C. Made one directly after the other, and directly before the
submit, they leave a handler no place. A tensor under way would call Python (`under_way`). So counts
are read and raised through aliases: tensors that share the parameter's counter, and nothing is read
or written through. Where weights lie aliases do not tell. That is looked at just before.

Parameters may share a counter, as slices of one buffer do. So how far it goes up is looked at, not
known.

Cost: a microsecond per parameter for its alias.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from stepwell._sharding import PLAIN, local
from stepwell.offload.under_way import without_waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.offload.engine import Engine
    from stepwell.offload.fingerprints import FingerprintStatus
    from stepwell.offload.twins import Twins

__all__ = ["OutdatedError", "VersionCounts", "count_writes"]

_get_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_get_num_settled = attrgetter("num_settled")
_get_num_taken = attrgetter("num_taken")


class OutdatedError(ValueError):
    """A step was not submitted, and nothing was stepped: what was ready is out of date.

    A signal's handler, or another thread, has written weights, saved, or applied what was deferred.
    """


class VersionCounts:
    """Those of `params`, whose twins were noted, from before a step is made ready to its submit.

    The memory of `params` counts as shared while this lives: ask what is exposed before.

    Args:
        twins: the host sides of all parameters.
        params: the parameters whose weights come with a step.
        besides: plain parameters without a twin that the same step writes.
        engine: what submits it.
        fingerprints: what is marked in them comes after this is made.
    """

    def __init__(
        self,
        twins: Twins,
        params: Sequence[torch.Tensor],
        besides: Sequence[torch.Tensor],
        engine: Engine,
        fingerprints: FingerprintStatus,
    ) -> None:
        noted = [twins[param].version for param in params]
        counts = [(0, 0, 0, 0) if version is None else version for version in noted]
        wholes = list(map(_alias, params))
        pieces = [
            whole if type(param) in PLAIN else _alias(local(param))
            for param, whole in zip(params, wholes, strict=True)
        ]
        # As versions have it: of each parameter, and of this rank's piece of it.
        counters = [*wholes, *pieces]
        own_pieces = [
            piece for whole, piece in zip(wholes, pieces, strict=True) if piece is not whole
        ]
        self._expected = [*[count[0] for count in counts], *[count[1] for count in counts]]
        self._expected += [engine.num_settled, fingerprints.num_taken]
        self._seen: list[int] = []
        # Found while they are plain: to ask what is under way for its class would wait.
        places = [*map(local, params), *besides]
        addresses = [count[3] for count in counts]
        addresses += map(torch.Tensor.data_ptr, besides)
        found: list[int] = []
        self.checks: list[partial[Any]] = [
            # No method: a cycle would keep the aliases, and the memory shared.
            partial(_check_addresses, places, addresses),
            partial(self._seen.extend, map(_get_version, counters)),
            partial(self._seen.extend, map(_get_num_settled, [engine])),
            partial(self._seen.extend, map(_get_num_taken, [fingerprints])),
            # Raises ValueError where they differ.
            partial([self._expected].index, self._seen),
        ]
        """Calls that raise ValueError where anything has happened since this was made."""
        versions = zip(
            islice(found, len(wholes)),
            islice(found, len(wholes), None),
            [count[2] for count in counts],
            addresses[: len(wholes)],
            strict=True,
        )
        self.counting: list[partial[Any]] = [
            count_writes([*wholes, *own_pieces, *besides]),
            partial(found.extend, map(_get_version, counters)),
            partial(
                deque[None](maxlen=0).extend,
                map(setattr, [twins[param] for param in params], repeat("version"), versions),
            ),
        ]
        """Calls that count a write to each parameter, and note what that has come to."""

    @property
    def is_outdated(self) -> bool:
        """Whether counts were looked at, and have changed."""
        return bool(self._seen) and self._seen != self._expected


def _check_addresses(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
    """Raises OutdatedError where one of `tensors`, which may be under way, lies elsewhere."""
    with without_waiting():
        if list(map(torch.Tensor.data_ptr, tensors)) != addresses:
            raise OutdatedError


def count_writes(tensors: Sequence[torch.Tensor]) -> partial[Any]:
    """A call that tells autograd of a write to each of `tensors`, which are not under way."""
    return partial(torch._C._increment_version, list(tensors))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    # DTensors have no class of ours, and their own aliases a counter of their own.
    return tensor.detach() if type(tensor) in PLAIN else tensor
