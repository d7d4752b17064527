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

    from stepwell import _core

__all__ = ["DEVICE_BYTES", "Adder", "add", "add_to_zero", "assign", "norm_of"]

_SLOTS = 4
_SLOT_BYTES = 32 << 20
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


def norm_of(piece: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient, where it is: a scalar."""
    # Sums of many float32 squares are pairwise on GPUs, and are not on CPUs.
    norm: torch.Tensor = torch.linalg.vector_norm(
        piece, dtype=torch.float64 if piece.is_cpu else torch.float32
    )
    return norm


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
        operation: _Operation,
        target: torch.Tensor,
        grad: torch.Tensor,
        norms: list[torch.Tensor] | None = None,
    ) -> None:
        """Has `operation` done, on a GPU in the background.

        Args:
            operation: one of `assign`, `add` and `add_to_zero`.
            target: flat, in host memory, with as many elements and the dtype of `grad`. It must
                not be used until `finish`. Where it is not pinned, the thread waits for each copy.
            grad: flat and contiguous, on the device. Its memory may be freed from now on, but not
                written.
            norms: is given the norms of all pieces of the new sum, scalars on the device. They are
                there for streams that `norms_to` has ordered.
        """
        if not self._slots:
            operation(target, grad)
            if norms is not None:
                norms.append(norm_of(target))
            return
        self._reads.bound(_UNDER_WAY_BYTES_MAX)
        length = _SLOT_BYTES // grad.itemsize
        made = torch.cuda.current_stream(self._device).record_event()
        self._targets[target.data_ptr()] = target
        # What this restores at the end; no context per piece, which would take longer than a copy.
        with torch.cuda.stream(self._slots[0][0]):
            for piece, part in zip(
                torch.split(target, length), torch.split(grad, length), strict=True
            ):
                # One piece always has the same stream, which keeps its additions in order.
                stream, slot = self._slots[piece.data_ptr() // _SLOT_BYTES % _SLOTS]
                torch.cuda.set_stream(stream)
                stream.wait_event(made)
                total = part
                if operation is not assign:
                    total = slot[: part.nbytes].view(part.dtype)
                    if operation is add:
                        total.copy_(piece, non_blocking=True)
                    operation(total, part)
                if norms is not None:
                    norms.append(norm_of(total))
                    self._normed[stream] = stream.record_event()
                piece.copy_(total, non_blocking=True)
                part.record_stream(stream)
                self._reads.hold(part, stream.record_event())

    def let_go(self) -> None:
        """Waits until no gradient is used any more, and frees those that the caller has freed."""
        self._reads.bound(0)

    def norms_to(self, stream: torch.cuda.Stream) -> None:
        """`stream` waits for the norms that `run` was asked for since the last call."""
        for event in self._normed.values():
            stream.wait_event(event)
        self._normed.clear()

    def order(self, engine: _core.OffloadEngine) -> None:
        """The next step of `engine` begins after all additions."""
        for stream, _ in self._slots:
            engine.take_part([], [], source_owners=[], target_owners=[], stream=stream.cuda_stream)

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
