"""One weight that lies in host memory between its uses.

On the device its storage has no bytes while it is away; the parameter has the class of one that is
under way then (`stepwell.access.writes`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from stepwell._tensors import COUNT_ALONE, references
from stepwell.access.descriptive import without_waiting
from stepwell.access.writes import Waiting, begin, end

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.nn import Parameter

__all__ = ["Graph", "HostWeight"]


class _Keeper(Waiting, Protocol):
    """What a use of a weight that is away asks, and what has its host side."""

    def take(self, weight: HostWeight) -> None:
        """The host gets what the program has written to a weight that is about to leave."""


class HostWeight:
    """A `Weight`: a parameter whose elements lie in host memory between uses.

    Args:
        param: the parameter, whose storage is on the device.
        source: its elements in host memory.
        key: its number.
        away: asked when it is used while it is away.
    """

    is_persistent = False
    stays = False

    def __init__(
        self,
        param: Parameter,
        source: torch.Tensor,
        key: int,
        away: _Keeper,
    ) -> None:
        self.param, self.source, self.key = param, source, key
        self.numel = self.part_numel = param.numel()
        self.shape = param.shape
        self.users: set[Hashable] = set()
        self.state = True
        """Whether it is on the device."""
        # Writes that autograd has counted, when it came.
        self._version = param._version
        self._away = away
        self.graph: weakref.ref[Graph] | None = None
        """Alive as long as what autograd has made of its last use that was seen."""
        self.view = param.data
        """On the same storage, and always a plain tensor."""
        self.storage: int = self.view.untyped_storage()._cdata
        """Which one that is."""

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Gives the storage its bytes, and has them copied on the current stream."""
        self._resize(self.view.nbytes)
        return self.view.copy_(source, non_blocking=True)

    def put(self, whole: torch.Tensor) -> None:
        """The parameter is a plain one: what was copied is in its storage."""
        self.state = True
        end(self.param)
        self.note_taken()

    def note_taken(self) -> None:
        """The host has what is on the device."""
        self._version = self.param._version

    def discard(self) -> None:
        """What was copied is not put."""
        if not self.state:
            self._resize(0)

    def rest(self) -> None:
        """A use outside of modules asks, as if it were away: it may write it."""
        begin(self.param, self._away)

    def resume(self) -> None:
        """A use of what rests begins."""
        end(self.param)

    def drop(self) -> None:
        """The bytes leave, once the host has what was written to them."""
        if self.param._version != self._version:
            self._away.take(self)
        # In this order, wherever Ctrl-C comes: a use of it finds memory, or fetches it anew.
        begin(self.param, self._away)
        self.state = False
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        storage = self.view.untyped_storage()
        # On the CPU it stays where an array of numpy has been made of it, or it is shared.
        if storage.resizable() and (self.view.is_cuda or not storage.is_shared()):
            storage.resize_(nbytes)

    @property
    def is_replaced(self) -> bool:
        """Whether the program has given the parameter other memory."""
        with without_waiting():
            return bool(self.param.untyped_storage()._cdata != self.storage)

    def check(self) -> None:
        """Raises ValueError if the program has given the parameter what no weight can be."""
        with without_waiting():
            found, expected = self.param, self.view
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                raise ValueError(
                    f"a parameter is `{found.dtype}` of `{tuple(found.shape)}`, expected "
                    f"`{expected.dtype}` of `{tuple(expected.shape)}`, as it was. hint: make a new "
                    "optimizer and load this one's state_dict()"
                )

    def check_device(self) -> None:
        """Raises ValueError if the program has moved the parameter to another device."""
        with without_waiting():
            if self.param.device != self.view.device:
                raise ValueError(
                    f"a parameter is on `{self.param.device}`, expected `{self.view.device}`, "
                    "where its modules use it: it lies in host memory in between. hint: no "
                    "model.to() of another device; model.state_dict() has host memory"
                )

    def put_back(self) -> None:
        """The parameter is on a storage of its own again, with what the host has."""
        if self.is_held:
            # The program may give that memory back to the parameter, as it is.
            with torch.inference_mode(mode=False):
                self.view = torch.empty_like(self.view)
            self.storage = self.view.untyped_storage()._cdata
        # Where it has no bytes it is about to leave.
        if self.view.untyped_storage().nbytes():
            self.view.copy_(self.source)
        self.param.data = self.view

    @property
    def is_in_graph(self) -> bool:
        """Whether a node of autograd's graph is left that was made of its use."""
        return self.graph is not None and self.graph() is not None

    @property
    def is_held(self) -> bool:
        """Whether other tensors are on its storage than the parameter."""
        _, count, _ = references(self.view)
        return count > COUNT_ALONE + (not self.is_replaced)

    @property
    def is_written(self) -> bool:
        """Whether the program has written it since it was brought. The thread waits."""
        if self.is_replaced or not self.state:
            return self.is_replaced
        there = self.source.data.to(self.view.device)
        return not torch.equal(_bytes_of(there), _bytes_of(self.view))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Graph:
    """Goes with a node of autograd's graph, which has no weak references."""
