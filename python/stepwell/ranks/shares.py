"""Which rows of each parameter this rank steps, where ranks hold the same parameters.

A parameter is cut along its first dimension, where a chunk of its state begins: a chunk is of one
rank. So the pieces of state, one behind the other, are the state of the whole, and the bits of a
step do not depend on the number of ranks. Every rank has rows of every parameter that has chunks
enough. So the first weights are there first on all of them. What is left over goes to the rank that
has the least.

Cost: none; a piece is a view.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Shares"]


class Shares:
    """The rows that each of `world_size` ranks steps; every rank has the same of these.

    Args:
        rank: this one.
        world_size: how many ranks there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        """This one."""
        self.world_size = world_size
        """How many ranks there are."""
        self._bounds: dict[torch.Tensor, list[int]] = {}
        self._loads = [0] * world_size

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """Deals out the rows of `params`, which are plain tensors and new."""
        for param in params:
            num_rows, row_len = _rows(param)
            unit = _core.CHUNK_LEN // math.gcd(_core.CHUNK_LEN, max(row_len, 1))
            num_units = -(-num_rows // unit)
            each, left = divmod(num_units, self.world_size)
            counts = [each] * self.world_size
            by_load = sorted(range(self.world_size), key=self._loads.__getitem__)
            for rank in by_load[:left]:
                counts[rank] += 1
            bounds = [0]
            for count in counts:
                bounds.append(min(bounds[-1] + count * unit, num_rows))
            self._bounds[param] = bounds
            for rank in range(self.world_size):
                self._loads[rank] += (bounds[rank + 1] - bounds[rank]) * row_len

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._bounds

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The parameters whose rows are dealt out."""
        return iter(self._bounds)

    def remove(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets `params`."""
        for param in params:
            if (bounds := self._bounds.pop(param, None)) is not None:
                for rank in range(self.world_size):
                    self._loads[rank] -= (bounds[rank + 1] - bounds[rank]) * _rows(param)[1]

    def piece(self, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `tensor`, which has the shape of `param`; of a scalar one, or none.

        Call it without grad mode.
        """
        bounds = self._bounds[param]
        rows = tensor if tensor.dim() else tensor.view(1)
        return rows[bounds[self.rank] : bounds[self.rank + 1]]

    def elements(self, param: torch.Tensor, rank: int | None = None) -> tuple[int, int]:
        """The first element of `param` that `rank` steps, and the end of them.

        None: this rank.
        """
        rank = self.rank if rank is None else rank
        bounds, row_len = self._bounds[param], _rows(param)[1]
        return bounds[rank] * row_len, bounds[rank + 1] * row_len

    def digest(self, params: Iterable[torch.Tensor]) -> int:
        """A number of 62 bits that is the same where the cuts, dtypes and order of `params` are."""
        found = blake2b(digest_size=8)
        for param in params:
            found.update(f"{tuple(param.shape)} {param.dtype} {self._bounds[param]}".encode())
        return int.from_bytes(found.digest(), "little") >> 2


def _rows(param: torch.Tensor) -> tuple[int, int]:
    """How many rows `param` has, and the elements of one. Its memory is not looked at."""
    shape = param.shape
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)
