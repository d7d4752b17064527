"""The host sides of parameters on a device.

A weight and a gradient each, in pinned memory of exactly their size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell._sharding import like, local
from stepwell._tensors import tensor_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Twins"]

# Of every tensor in a buffer: what the widest vectors and the device's copies like.
_ALIGN_BYTES = 64


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Twins:
    """For each parameter a `weight` and a `grad`.

    A step writes the weight, and the device gets a copy of it.

    Both have the parameter's dtype and the shape of this rank's piece; those of a DTensor are
    DTensors placed as it is.
    """

    def __init__(self) -> None:
        self._weights: dict[torch.Tensor, torch.Tensor] = {}
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, tuple[int, int, int]] = {}
        self.buffers: list[_core.Buffer] = []

    @staticmethod
    def nbytes(params: Iterable[torch.Tensor]) -> int:
        """Bytes of pinned memory that `add` takes."""
        return 2 * sum(_aligned(local(param).nbytes) for param in params)

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Makes the twins of `params`, and copies their weights.

        Raises:
            OSError: there is no memory for them; nothing was changed.
        """
        nbytes = self.nbytes(params) // 2
        buffers = [_core.Buffer(nbytes), _core.Buffer(nbytes)]
        for twins, buffer in zip((self._weights, self._grads), buffers, strict=True):
            memory, begin = (
                tensor_on(buffer) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu"),
                0,
            )
            for param in params:
                piece = local(param)
                run = memory[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
                twins[param] = like(param, run)
                begin += _aligned(piece.nbytes)
        self.buffers += buffers
        self.refresh(params)

    def remove(self, params: Sequence[torch.Tensor]) -> None:
        """Takes back the last `add`, which was of `params`."""
        for param in params:
            for known in (self._weights, self._grads, self._versions):
                known.pop(param, None)
        del self.buffers[-2:]

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._weights

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The parameters, in the order in which they were added."""
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """The host side of `param`."""
        return self._weights[param]

    def grad(self, param: torch.Tensor) -> torch.Tensor:
        """Where the gradient of `param` comes to."""
        return self._grads[param]

    def stale(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` whose weights someone else has written, or moved."""
        return [param for param in params if self._versions.get(param) != _version(param)]

    def refresh(self, params: Iterable[torch.Tensor]) -> None:
        """Copies the weights of `params` to the host."""
        for param in params:
            local(self._weights[param]).copy_(local(param))
            self.note([param])

    def forget(self) -> None:
        """Takes nothing for granted of the weights on the device: all of them are stale."""
        self._versions = {}

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Takes the weights of `params` on the device, as they are now, for those of the host."""
        self._versions.update((param, _version(param)) for param in params)


def _version(param: torch.Tensor) -> tuple[int, int, int]:
    # A write to a DTensor does not count as one to its piece, nor the other way round.
    piece = local(param)
    return param._version, piece._version, piece.data_ptr()
