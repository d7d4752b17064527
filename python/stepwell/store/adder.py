"""Sums of gradients in host memory: the device adds, and keeps no sum.

On a GPU a sum comes up through a slot of device memory, the gradient is added to it there, and it
goes down again. Each slot has a stream of its own, so both directions of the bus work at once, and
no thread of the host adds. Gradients whose sums lie side by side go together, a slot at a time:
what the host takes to launch this is per slot, not per gradient. On the CPU a gradient is added in
place.

Memory: three slots of 64 MiB on the GPU. Gradients are bounded there as well: those whose copies
are under way by `_UNDER_WAY_BYTES_MAX`, those that wait by `_BATCHES_MAX` slots. Cost: a byte of a
gradient crosses the bus once each way, and the host's memory twice. The first of a sum only goes
down.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, TypeAlias

import torch

from stepwell._sizes import SUMS_BYTES_MAX
from stepwell.store.norm import norm_of, norms_of
from stepwell.store.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepwell import _core

__all__ = ["Adder", "Operation", "add", "add_to_zero", "assign"]

_SLOTS = 3
_SLOT_BYTES = 64 << 20
# Of these each waits for its neighbours. One for each group under ZeRO, one for all without it.
_BATCHES_MAX = 3
# 1 GiB, two layers of 8 B parameters: with less the thread that launches waits for each layer's
# gradients before it launches the next one, and the device for it.
_UNDER_WAY_BYTES_MAX = SUMS_BYTES_MAX - (_SLOTS + _BATCHES_MAX) * _SLOT_BYTES

Operation: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], object]"


def assign(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient of a sum."""
    target.copy_(grad)


def add(target: torch.Tensor, grad: torch.Tensor) -> None:
    """A further gradient."""
    target.add_(grad)


def add_to_zero(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient after the sum was zeroed: -0 becomes 0, as it does on the device."""
    torch.add(grad, 0, out=target)


class _Batch:
    """Gradients of one operation whose sums lie side by side in one tensor; less than a slot."""

    def __init__(
        self, operation: Operation, memory: torch.Tensor, made_on: torch.cuda.Stream
    ) -> None:
        self.operation = operation
        self.memory = memory
        """A sum of it: what the others' are measured from."""
        self.made_on = made_on
        """The stream on which the gradients are made."""
        self.grads: list[torch.Tensor] = []
        self.norms: list[list[torch.Tensor] | None] = []
        self.begin = int(memory.storage_offset())
        self.end = self.begin

    def takes(self, operation: Operation, target: torch.Tensor, made_on: torch.cuda.Stream) -> bool:
        """Whether a gradient goes with those that are here."""
        begin = int(target.storage_offset())
        return (
            operation is self.operation
            and target.dtype == self.memory.dtype
            and made_on == self.made_on
            and (begin == self.end or begin + target.numel() == self.begin)
            and self.nbytes + int(target.nbytes) <= _SLOT_BYTES
        )

    def append(
        self, target: torch.Tensor, grad: torch.Tensor, norms: list[torch.Tensor] | None
    ) -> None:
        """Adds a gradient to those that are here, whose sum lies beside theirs."""
        if target.storage_offset() == self.end:
            self.grads.append(grad)
            self.norms.append(norms)
            self.end += target.numel()
        else:
            self.grads.insert(0, grad)
            self.norms.insert(0, norms)
            self.begin -= target.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its sums."""
        return (self.end - self.begin) * int(self.memory.itemsize)

    def target(self) -> torch.Tensor:
        """Its sums: flat, in host memory."""
        return self.memory.as_strided((self.end - self.begin,), (1,), self.begin)


class Adder:
    """Adds gradients into host memory, in the order of the calls.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of each tensor of sums, by the address of its memory: what waits for its neighbours.
        self._batches: dict[int, _Batch] = {}
        # What copies under way write to is held until they have ended.
        self._targets: dict[int, torch.Tensor] = {}
        self._reads = Reads()
        self._slots: list[tuple[torch.cuda.Stream, torch.Tensor]] = []
        self._next_slot = 0
        # Sums whose way down has not been seen to end: their addresses, and when it ends.
        self._under_way: list[tuple[int, int, torch.cuda.Event]] = []
        # Of each slot's stream, when its last norm is there.
        self._normed: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        if device.type == "cuda":
            self._slots = [
                (
                    torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
                    torch.empty(_SLOT_BYTES, dtype=torch.uint8, device=device),
                )
                for _ in range(_SLOTS)
            ]
            streams = [stream for stream, _ in self._slots]
            weakref.finalize(self, _end, streams, self._targets)

    @torch.no_grad()
    def run(
        self,
        operation: Operation,
        target: torch.Tensor,
        grad: torch.Tensor,
        norms: list[torch.Tensor] | None = None,
    ) -> None:
        """Has `operation` done, on a GPU in the background.

        Args:
            operation: one of `assign`, `add` and `add_to_zero`.
            target: flat, in host memory, with as many elements and the dtype of `grad`. It must
                not be used until `finish`. Where it is not pinned, the thread waits for each copy.
            grad: flat and contiguous, on the device, made on the current stream. Its memory may be
                freed from now on, but not written.
            norms: is given the norms of all pieces of the new sum, scalars on the device, by the
                time that `norms_to` returns. They are there for streams that it has ordered.
        """
        if not self._slots:
            operation(target, grad)
            if norms is not None:
                norms.append(norm_of(target))
            return
        self._reads.bound(_UNDER_WAY_BYTES_MAX)
        made_on = torch.cuda.current_stream(self._device)
        memory = target.untyped_storage().data_ptr()
        self._targets[memory] = target
        length = _SLOT_BYTES // grad.itemsize
        for sums, part in zip(torch.split(target, length), torch.split(grad, length), strict=True):
            batch = self._batches.get(memory)
            if batch is None or not batch.takes(operation, sums, made_on):
                self._launch(memory)
                if len(self._batches) == _BATCHES_MAX:
                    self._launch(next(iter(self._batches)))
                batch = self._batches[memory] = _Batch(operation, sums, made_on)
            batch.append(sums, part, norms)

    def _launch_all(self) -> None:
        for memory in list(self._batches):
            self._launch(memory)

    @torch.no_grad()
    def _launch(self, memory: int) -> None:
        """Begins the additions of the batch, if there is one, to the sums in `memory`."""
        if (batch := self._batches.pop(memory, None)) is None:
            return
        stream, slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % _SLOTS
        sums = batch.target()
        with torch.cuda.stream(stream):
            stream.wait_event(batch.made_on.record_event())
            self._wait_for_earlier(stream, sums)
            total, grads = slot[: sums.nbytes].view(sums.dtype), batch.grads
            totals = torch.split(total, [grad.numel() for grad in grads])
            if batch.operation is add:
                total.copy_(sums, non_blocking=True)
                torch._foreach_add_(totals, grads)
            else:
                torch._foreach_copy_(totals, grads)
                if batch.operation is add_to_zero:
                    total.add_(0)
            if any(norms is not None for norms in batch.norms):
                for norms, norm in zip(batch.norms, norms_of(totals), strict=True):
                    if norms is not None:
                        norms.append(norm)
                self._normed[stream] = stream.record_event()
            sums.copy_(total, non_blocking=True)
            ended = stream.record_event()
        # Held, not recorded on the stream: none is freed before its copy has ended.
        for grad in grads:
            self._reads.hold(grad, ended)
        begin = sums.data_ptr()
        self._under_way.append((begin, begin + sums.nbytes, ended))

    def _wait_for_earlier(self, stream: torch.cuda.Stream, sums: torch.Tensor) -> None:
        """`stream` waits for what is being written to `sums`: another slot's stream may do it."""
        begin, end = sums.data_ptr(), sums.data_ptr() + sums.nbytes
        self._under_way = [each for each in self._under_way if not each[2].query()]  # type: ignore[no-untyped-call]
        for written_begin, written_end, ended in self._under_way:
            if written_begin < end and begin < written_end:
                stream.wait_event(ended)

    def let_go(self) -> None:
        """Waits until no gradient is used any more, and frees those that the caller has freed."""
        self._launch_all()
        self._reads.bound(0)

    def norms_to(self, stream: torch.cuda.Stream) -> None:
        """`stream` waits for the norms that `run` was asked for since the last call."""
        self._launch_all()
        for event in self._normed.values():
            stream.wait_event(event)
        self._normed.clear()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The next step of `engine` begins after all additions."""
        self._launch_all()
        for stream, _ in self._slots:
            engine.take_part([], [], source_owners=[], target_owners=[], stream=stream.cuda_stream)

    def finish(self) -> None:
        """Waits until all is added."""
        self._launch_all()
        for stream, _ in self._slots:
            stream.synchronize()
        self._under_way.clear()
        self._targets.clear()
        self._reads.let_go()


def _end(streams: Iterable[torch.cuda.Stream], targets: dict[int, torch.Tensor]) -> None:
    # What a device that has failed says was said before.
    with contextlib.suppress(RuntimeError):
        for stream in streams:
            stream.synchronize()
    targets.clear()
