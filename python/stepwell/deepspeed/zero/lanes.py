"""Lanes on which gradients of ZeRO's partitions cross to host memory, in the order of the calls."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import torch

from stepwell._tensors import view
from stepwell.offload.reads import Reads

if TYPE_CHECKING:
    from stepwell import _core

__all__ = ["CudaLane", "EngineLane", "Lane", "ThreadLane"]

# Gradients that a `ThreadLane` has not copied yet.
_UNDER_WAY_BYTES_MAX = 256 << 20


class CudaLane:
    """Copies to pinned memory, on a stream of torch's.

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

    def drain(self) -> None:
        """The memory that is copied to is unpinned next."""
        self.wait()

    def drop(self) -> None:
        """Waits until all is copied: no step takes it."""
        self.wait()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The next step of `engine` begins after all copies."""
        engine.take_part(
            [], [], source_owners=[], target_owners=[], stream=self._stream.cuda_stream
        )


class ThreadLane:
    """Copies to memory that is not pinned, by a thread.

    The driver holds up the thread that asks for such a copy until it has ended. What is copied is
    freed then. No more than 256 MiB wait: a backward that makes gradients faster waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "stepwell-gradients")
        self._copies: deque[tuple[Future[None], int]] = deque()
        # Backwards copy on autograd's thread, steps wait on others.
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def copy(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        """Copies `piece` to `target`, in the background.

        Raises:
            RuntimeError: an earlier copy has failed.
            ValueError: this is a forked child.
        """
        self._check_process()
        made = torch.cuda.current_stream(self._device).record_event()
        with self._lock:
            self._bound(_UNDER_WAY_BYTES_MAX)
            try:
                copied = self._thread.submit(self._copy, piece, target, made)
                self._copies.append((copied, piece.nbytes))
            except BaseException:
                # After Ctrl-C between the two no other wait would see the copy.
                self._thread.submit(lambda: None).result()
                raise

    @torch.no_grad()  # As its caller has it, which is on another thread.
    def _copy(self, piece: torch.Tensor, target: torch.Tensor, made: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            target.copy_(piece)

    def _bound(self, nbytes_max: int) -> None:
        """Waits until no more than `nbytes_max` are under way."""
        while self._copies and sum(nbytes for _, nbytes in self._copies) > nbytes_max:
            self._copies[0][0].result()
            self._copies.popleft()

    def let_go(self) -> None:
        """What is copied is freed by itself."""

    def wait(self) -> None:
        """Waits until all is copied.

        Raises:
            RuntimeError: a copy has failed.
            ValueError: this is a forked child.
        """
        self._check_process()
        with self._lock:
            self._bound(0)

    def drain(self) -> None:
        """Nothing is unpinned, and the thread holds what it copies.

        A wait might have no end: in a forked child, or where this thread collects garbage.
        """

    def drop(self) -> None:
        """Waits until all is copied, or has failed: no step takes it.

        Raises:
            ValueError: this is a forked child.
        """
        self._check_process()
        with self._lock:
            while self._copies:
                self._copies[0][0].exception()
                self._copies.popleft()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The next step of `engine` begins after all copies: the thread waits for them."""
        self.wait()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ValueError(
                f"gradients are copied by a thread of process `{self._pid}`, this is "
                f"`{os.getpid()}`. hint: train in the process that made the optimizer"
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

    def drain(self) -> None:
        """The memory that is copied to is unpinned next."""
        self.wait()

    def drop(self) -> None:
        """Waits until all is copied: no step takes it."""
        self.wait()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The engine knows its own copies."""


Lane: TypeAlias = CudaLane | ThreadLane | EngineLane
