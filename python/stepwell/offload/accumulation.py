"""Sums of gradients in host memory: each backward's come down and are added there.

The device keeps none.

- A sum is that of the same additions in the same order as on the device, in the gradient's dtype:
  the same bits.
- In the place of a gradient that was taken, the parameter has a marker (`marker`). Who removes it,
  or zeroes it, does so with the sum; who reads it sees NaN; who changes it otherwise gets an error.
- Memory beside the sums: `STAGING_BYTES`, pinned. Cost: a byte of gradient crosses the bus in each
  backward, and the host's memory five times.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from stepwell.offload.marker import GradMarker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepwell.offload.twins import Twins

__all__ = ["STAGING_BYTES", "HostSums"]

_SLOTS = 4
_SLOT_BYTES = 32 << 20

STAGING_BYTES = _SLOTS * _SLOT_BYTES
"""Pinned memory through which gradients come down."""


class HostSums:
    """Adds gradients into the host sides of their parameters, on a thread of its own.

    Args:
        twins: the host sides.
        device: where the parameters are.
    """

    def __init__(self, twins: Twins, device: torch.device) -> None:
        self._twins = twins
        self._device = device
        self._markers: dict[torch.Tensor, GradMarker] = {}
        # Parameters whose marker was taken away for a gradient of autograd that is to come, and
        # those for which none came.
        self._expecting: set[torch.Tensor] = set()
        self._bereft: set[torch.Tensor] = set()
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        slots = (
            torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(_SLOTS)
        )
        self._slots: deque[tuple[torch.Tensor, Future[None] | None]] = deque(
            (slot, None) for slot in slots
        )
        self._adder = ThreadPoolExecutor(1, "stepwell-accumulate")
        self._process = os.getpid()
        self._nbytes = 0
        self.nbytes = 0
        """Bytes that came down between the last `finish` and the one before."""

    def has(self, param: torch.Tensor) -> bool:
        """Whether the gradient of `param` is here, and nobody has cleared or replaced it."""
        return param in self._markers and param.grad is self._markers[param]

    def watch(self, param: torch.Tensor) -> torch.utils.hooks.RemovableHandle:
        """Has autograd make room before it accumulates a gradient of `param`.

        Until the hook that is returned is removed, or this object is gone.
        """
        sums, watched = weakref.ref(self), weakref.ref(param)

        def make_room(_: torch.Tensor) -> None:
            alive, param = sums(), watched()
            if alive is not None and param is not None:
                alive.make_room(param)

        handle: torch.utils.hooks.RemovableHandle = param.register_hook(make_room)  # type: ignore[no-untyped-call]
        return handle

    def make_room(self, param: torch.Tensor) -> None:
        """Before autograd accumulates into `param.grad`."""
        if param in self._expecting:
            # A backward failed in between: nobody knows whether the sum was cleared since.
            self._bereft.add(param)
        if self.has(param):
            self._expecting.add(param)
            param.grad = None
        else:
            self._markers.pop(param, None)

    @property
    def unknown(self) -> list[torch.Tensor]:
        """Parameters whose sum a failed backward has left in the dark, until `clear`."""
        return [*self._bereft, *(param for param in self._expecting if param.grad is None)]

    def clear(self) -> None:
        """All gradients were cleared."""
        self._expecting.clear()
        self._bereft.clear()

    def zero_where_zeroed(self, params: Iterable[torch.Tensor]) -> None:
        """Sets the sums to zero whose gradients were, since they came here. After `finish`."""
        for param in params:
            if self._markers[param].is_zeroed:
                self._twins.grad(param).zero_()

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the contiguous `grad`, which `param` has, to its sum, and frees it on the device.

        The addition is done in the background.

        Raises:
            ValueError: this is a forked child.
        """
        self._check_process()
        target = self._twins.grad(param).view(-1)
        marker = self._markers.get(param)
        add = _set if marker is None else _add_to_zero if marker.is_zeroed else _add
        self._nbytes += grad.nbytes
        length = _SLOT_BYTES // grad.itemsize
        for piece, part in zip(
            torch.split(target, length), torch.split(grad.view(-1), length), strict=True
        ):
            staging, last_use = self._slots.popleft()
            try:
                if last_use is not None:
                    last_use.result()
                staged = staging[: part.nbytes].view(part.dtype)
                arrived = self._copy(part, staged)
                last_use = self._adder.submit(_run, add, arrived, piece, staged)
            finally:
                self._slots.append((staging, last_use))
        self._markers[param] = GradMarker.of(grad)
        param.grad = self._markers[param]
        self._expecting.discard(param)

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
        """Waits until all is added."""
        self._check_process()
        for _, last_use in list(self._slots):
            if last_use is not None:
                last_use.result()
        self.nbytes, self._nbytes = self._nbytes, 0

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ValueError(
                f"the gradients' sums belong to process `{self._process}`, "
                f"this is `{os.getpid()}`. "
                "hint: make the optimizer after forking"
            )


@torch.no_grad()
def _run(
    add: Callable[[torch.Tensor, torch.Tensor], object],
    arrived: torch.cuda.Event | None,
    target: torch.Tensor,
    staged: torch.Tensor,
) -> None:
    if arrived is not None:
        arrived.synchronize()
    add(target, staged)


def _set(target: torch.Tensor, grad: torch.Tensor) -> None:
    target.copy_(grad)


def _add(target: torch.Tensor, grad: torch.Tensor) -> None:
    target.add_(grad)


def _add_to_zero(target: torch.Tensor, grad: torch.Tensor) -> None:
    # A gradient of -0 becomes 0, as it does on the device.
    torch.add(grad, 0, out=target)
