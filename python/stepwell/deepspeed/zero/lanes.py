"""Lanes on which gradients of ZeRO's partitions cross to host memory, in the order of the calls."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from stepwell._tensors import view
from stepwell.deepspeed.zero.partition import Fragment
from stepwell.store.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stepwell import _core

__all__ = ["Copy", "CudaLane", "EngineLane", "Lane"]

BATCH_BYTES = 64 << 20
"""Of gradients that a `CudaLane` copies at once: a millisecond of the bus, and device memory that
is held until then. The step begins with the first batch that it needs."""


class Copy(NamedTuple):
    """A gradient on its way, or several that lie side by side, here and in their partition."""

    piece: torch.Tensor
    target: torch.Tensor
    fragment: Fragment


def _joined(copies: Sequence[Copy]) -> Iterator[Copy]:
    """The same copies in their order, neighbours as one: a call for each is slow."""
    first = 0
    for end in range(1, len(copies) + 1):
        if end == len(copies) or not _are_adjacent(copies[end - 1], copies[end]):
            yield _as_one(copies[first:end])
            first = end


def _are_adjacent(first: Copy, second: Copy) -> bool:
    """Whether the second begins where the first ends: in its partition, and on the device."""
    (piece, _, (group, begin, numel)), (other, _, fragment) = first, second
    return (
        (group, begin + numel) == (fragment.group, fragment.begin)
        and piece.dtype == other.dtype
        and int(piece.storage_offset()) + piece.numel() == int(other.storage_offset())
        and piece.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _as_one(copies: Sequence[Copy]) -> Copy:
    first = copies[0]
    if len(copies) == 1:
        return first
    group, begin, _ = first.fragment
    numel = sum(each.fragment.numel for each in copies)
    piece, target = (
        each.as_strided((numel,), (1,), each.storage_offset())
        for each in (first.piece, first.target)
    )
    return Copy(piece, target, Fragment(group, begin, numel))


def _batches(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Copies of no more than `BATCH_BYTES`, in their order. Larger ones come in parts."""
    batch: list[Copy] = []
    room = BATCH_BYTES
    for piece, target, (group, begin, numel) in copies:
        done = 0
        while done < numel:
            if room < piece.itemsize:
                yield batch
                batch, room = [], BATCH_BYTES
            count = min(numel - done, room // piece.itemsize)
            batch.append(
                Copy(
                    piece.narrow(0, done, count),
                    target.narrow(0, done, count),
                    Fragment(group, begin + done, count),
                )
            )
            room -= count * piece.itemsize
            done += count
    if batch:
        yield batch


class CudaLane:
    """Copies in batches, on a stream of torch's.

    In batches the thread of autograd, which is late with its launches, changes streams once for
    many copies. The engine is told of each batch, so that a step begins with the gradients that are
    there.

    The latest gradients wait for the next ones, or for `launch`. The last of a backward, which are
    often the largest, so do not hold up the norm: that comes down behind what is on its way.

    Memory that is not pinned (`pin_memory` false) holds up the thread until a batch has crossed.
    """

    def __init__(self, device: torch.device, engine: _core.OffloadEngine) -> None:
        self._device = device
        self._engine = engine
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads = Reads()
        # What is copied next, all of it made on one stream.
        self._waiting: list[Copy] = []
        self._waiting_nbytes = 0
        self._made_on: torch.cuda.Stream | None = None
        # Backwards copy on autograd's thread, steps launch on others.
        self._lock = threading.RLock()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes copies in the background. Nothing writes to what is copied any more."""
        made_on = torch.cuda.current_stream(self._device)
        with self._lock:
            if self._waiting_nbytes >= BATCH_BYTES or made_on != self._made_on:
                self.launch()
            self._made_on = made_on
            self._waiting += copies
            self._waiting_nbytes += sum(each.piece.nbytes for each in copies)

    def launch(self) -> None:
        """Copies what waits for its batch. The next step of the engine takes what is copied."""
        with self._lock:
            if not self._waiting:
                return
            assert self._made_on is not None
            self._reads.let_go()
            self._stream.wait_stream(self._made_on)
            for batch in _batches(_joined(self._waiting)):
                self._launch(batch)
            # Not before: after Ctrl-C they are copied once more.
            self._waiting, self._waiting_nbytes = [], 0

    @torch.no_grad()
    def _launch(self, batch: Sequence[Copy]) -> None:
        with torch.cuda.stream(self._stream):
            for piece, target, _ in batch:
                target.copy_(piece, non_blocking=True)
        copied = self._stream.record_event()
        # Held, not recorded on the stream: none is freed, nor written by autograd, before.
        for piece, _, _ in batch:
            self._reads.hold(piece, copied)
        parts = [fragment for _, _, fragment in batch]
        self._engine.expect_parts(
            [part.group for part in parts],
            [part.begin for part in parts],
            [part.begin + part.numel for part in parts],
            stream=self._stream.cuda_stream,
        )

    def let_go(self) -> None:
        """Frees what is copied."""
        self._reads.let_go()

    def wait(self) -> None:
        """Waits until all is copied."""
        self.launch()
        self._stream.synchronize()
        self._reads.let_go()

    def drain(self) -> None:
        """The memory that is copied to is unpinned next."""
        self._stream.synchronize()

    def drop(self) -> None:
        """Waits until nothing is copied any more: no step takes it."""
        with self._lock:
            self._waiting, self._waiting_nbytes = [], 0
        self._stream.synchronize()
        self._reads.let_go()


class EngineLane:
    """Copies by the engine, which sees to their order, and holds what is copied."""

    def __init__(self, engine: _core.OffloadEngine) -> None:
        self._engine = engine

    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes copies in the background."""
        for piece, target, _ in copies:
            self._engine.take_part(
                [piece.data_ptr()],
                [view(target)],
                source_owners=[piece.untyped_storage()],
                target_owners=[target.untyped_storage()],
                stream=0,
            )

    def launch(self) -> None:
        """Nothing waits for a batch."""

    def let_go(self) -> None:
        """The engine frees what it has copied."""

    def wait(self) -> None:
        """Waits until all is copied."""
        self._engine.synchronize(stream=0)

    def drain(self) -> None:
        """The memory that is copied to is unpinned next."""
        self.wait()

    def drop(self) -> None:
        """Waits until all is copied: no step takes it. One that has failed says so itself."""
        with contextlib.suppress(OSError):
            self.wait()


Lane: TypeAlias = CudaLane | EngineLane
