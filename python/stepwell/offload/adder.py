"""Sums of gradients in host memory: the device adds, and keeps no sum.

On a GPU a sum comes up through a slot of device memory, the gradient is added to it there, and it
goes down again. Each slot has a stream of its own, so both directions of the bus work at once, and
no thread of the host adds. On the CPU a gradient is added in place.

Memory: `DEVICE_BYTES` on the GPU. What the GPU holds of gradients whose copies are under way is
bounded as well, by `_UNDER_WAY_BYTES_MAX` and one gradient. Cost: a byte of gradient crosses the
bus once each way, and the host's memory twice. The first of a sum only goes down.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, TypeAlias

import torch

from stepwell.offload.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["DEVICE_BYTES", "Adder", "add", "add_to_zero", "assign"]

_SLOTS = 4
_SLOT_BYTES = 16 << 20
_UNDER_WAY_BYTES_MAX = 256 << 20

DEVICE_BYTES = _SLOTS * _SLOT_BYTES
"""Memory of a GPU through which sums come and go."""

_Operation: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], object]"


def assign(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient of a sum."""
    target.copy_(grad)


def add(target: torch.Tensor, grad: torch.Tensor) -> None:
    """A further gradient."""
    target.add_(grad)


def add_to_zero(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient after the sum was zeroed: -0 becomes 0, as it does on the device."""
    torch.add(grad, 0, out=target)


class Adder:
    """Adds gradients into host memory, in the order of the calls.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What copies under way write to is held until they have ended.
        self._targets: dict[int, torch.Tensor] = {}
        self._reads = Reads()
        self._slots: list[tuple[torch.cuda.Stream, torch.Tensor]] = []
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
    def run(self, operation: _Operation, target: torch.Tensor, grad: torch.Tensor) -> None:
        """Has `operation` done, on a GPU in the background.

        Args:
            operation: one of `assign`, `add` and `add_to_zero`.
            target: flat, in host memory, with as many elements and the dtype of `grad`. It must
                not be used until `finish`. Where it is not pinned, the thread waits for each copy.
            grad: flat and contiguous, on the device. Its memory may be freed from now on, but not
                written.
        """
        if not self._slots:
            operation(target, grad)
            return
        length = _SLOT_BYTES // grad.itemsize
        current = torch.cuda.current_stream(self._device)
        self._targets[target.data_ptr()] = target
        for piece, part in zip(torch.split(target, length), torch.split(grad, length), strict=True):
            # One piece always has the same stream, which keeps its additions in order.
            stream, slot = self._slots[piece.data_ptr() // _SLOT_BYTES % _SLOTS]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                if operation is assign:
                    piece.copy_(part, non_blocking=True)
                else:
                    staged = slot[: part.nbytes].view(part.dtype)
                    if operation is add:
                        staged.copy_(piece, non_blocking=True)
                    operation(staged, part)
                    piece.copy_(staged, non_blocking=True)
                part.record_stream(stream)
                self._reads.bound(_UNDER_WAY_BYTES_MAX)
                self._reads.hold(part, stream.record_event())

    def finish(self) -> None:
        """Waits until all is added."""
        for stream, _ in self._slots:
            stream.synchronize()
        self._targets.clear()
        self._reads.let_go()


def _end(streams: Iterable[torch.cuda.Stream], targets: dict[int, torch.Tensor]) -> None:
    # What a device that has failed says was said before.
    with contextlib.suppress(RuntimeError):
        for stream in streams:
            stream.synchronize()
    targets.clear()
