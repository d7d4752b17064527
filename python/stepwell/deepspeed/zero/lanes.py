"""Lanes on which gradients of ZeRO's partitions cross to host memory, in the order of the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from stepwell._tensors import view
from stepwell.offload.reads import Reads

if TYPE_CHECKING:
    from stepwell import _core

__all__ = ["CudaLane", "EngineLane", "Lane"]


class CudaLane:
    """Copies on a stream of torch's.

    So torch's allocator knows when the memory of a gradient is free again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads = Reads()

    def copy(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        """Copies `piece` to `target`, in the background."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(piece, non_blocking=True)
        piece.record_stream(self._stream)
        self._reads.let_go()
        self._reads.hold(piece, self._stream.record_event())

    def let_go(self) -> None:
        """Frees what is copied."""
        self._reads.let_go()

    def wait(self) -> None:
        """Waits until all is copied."""
        self._stream.synchronize()
        self._reads.let_go()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The next step of `engine` begins after all copies."""
        engine.take_part(
            [], [], source_owners=[], target_owners=[], stream=self._stream.cuda_stream
        )


class EngineLane:
    """Copies by the engine, which sees to their order, and holds what is copied."""

    def __init__(self, engine: _core.OffloadEngine) -> None:
        self._engine = engine

    def copy(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        """Copies `piece` to `target`, in the background."""
        self._engine.take_part(
            [piece.data_ptr()],
            [view(target)],
            source_owners=[piece.untyped_storage()],
            target_owners=[target.untyped_storage()],
            stream=0,
        )

    def let_go(self) -> None:
        """The engine frees what it has copied."""

    def wait(self) -> None:
        """Waits until all is copied."""
        self._engine.synchronize(stream=0)

    def order(self, engine: _core.OffloadEngine) -> None:
        """The engine knows its own copies."""


Lane: TypeAlias = CudaLane | EngineLane
