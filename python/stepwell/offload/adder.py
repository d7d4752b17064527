"""Gradients come down through a few slots of pinned memory, and are added in host memory.

A thread of its own adds. A gradient that the slots cannot take makes the caller wait, so what the
device holds for copies under way is bounded by `STAGING_BYTES` and one gradient. Cost: each byte
crosses the bus once, and the host's memory five times.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STAGING_BYTES", "Adder", "add", "add_to_zero", "assign"]

_SLOTS = 4
_SLOT_BYTES = 32 << 20

STAGING_BYTES = _SLOTS * _SLOT_BYTES
"""Pinned memory through which gradients come down."""

_Operation: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], object]"


def assign(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient of a sum."""
    target.copy_(grad)


def add(target: torch.Tensor, grad: torch.Tensor) -> None:
    """A further gradient: rounded as on the device."""
    target.add_(grad)


def add_to_zero(target: torch.Tensor, grad: torch.Tensor) -> None:
    """The first gradient after the sum was zeroed: -0 becomes 0, as it does on the device."""
    torch.add(grad, 0, out=target)


class Adder:
    """Adds gradients into host memory, in the order of the calls, on a thread of its own.

    Args:
        device: where the gradients are.
        is_pinned: whether memory between a GPU and the sums is pinned. If not, `run` waits for the
            copy to it.
    """

    def __init__(self, device: torch.device, *, is_pinned: bool = True) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        slots = (
            torch.empty(
                _SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_cuda and is_pinned
            )
            for _ in range(_SLOTS)
        )
        self._slots: deque[tuple[torch.Tensor, Future[None] | None]] = deque(
            (slot, None) for slot in slots
        )
        self._thread = ThreadPoolExecutor(1, "stepwell-accumulate")
        self._process = os.getpid()

    def run(self, operation: _Operation, target: torch.Tensor, grad: torch.Tensor) -> None:
        """Has `operation` done in the background.

        Args:
            operation: one of `assign`, `add` and `add_to_zero`.
            target: flat, in host memory, with as many elements and the dtype of `grad`. It must
                not be used until `finish`.
            grad: flat and contiguous, on the device. Its memory may be freed from now on, but not
                written.

        Raises:
            ValueError: this is a forked child.
        """
        self.check_process()
        length = _SLOT_BYTES // grad.itemsize
        for piece, part in zip(torch.split(target, length), torch.split(grad, length), strict=True):
            staging, last_use = self._slots.popleft()
            try:
                if last_use is not None:
                    last_use.result()
                staged = staging[: part.nbytes].view(part.dtype)
                arrived = self._copy(part, staged)
                last_use = self._thread.submit(_run, operation, arrived, piece, staged)
            finally:
                self._slots.append((staging, last_use))

    def _copy(self, part: torch.Tensor, staged: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            staged.copy_(part)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged.copy_(part, non_blocking=True)
            part.record_stream(self._stream)
            arrived: torch.cuda.Event = self._stream.record_event()
            return arrived

    def finish(self) -> None:
        """Waits until all is added.

        Raises:
            ValueError: this is a forked child.
        """
        self.check_process()
        for _, last_use in list(self._slots):
            if last_use is not None:
                last_use.result()

    def check_process(self) -> None:
        """Raises ValueError in a forked child, which has no thread that adds."""
        if self._process != os.getpid():
            raise ValueError(
                f"the gradients' sums belong to process `{self._process}`, "
                f"this is `{os.getpid()}`. "
                "hint: make the optimizer after forking"
            )


@torch.no_grad()
def _run(
    operation: _Operation,
    arrived: torch.cuda.Event | None,
    target: torch.Tensor,
    staged: torch.Tensor,
) -> None:
    if arrived is not None:
        arrived.synchronize()
    operation(target, staged)
