"""What copies on other streams read: it is held until they have ended.

Autograd adds in place to memory that nothing else refers to. The gradient of a parameter may be a
view of such memory (that of `weight` in `x + weight.view(-1)`). So a gradient whose parameter has
let go of it is referred to here, or autograd would write what is still being copied.

Memory: what was copied is freed by the next call after its copy has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Reads"]


class Reads:
    """Tensors that are being copied, in the order of their copies."""

    def __init__(self) -> None:
        self._held: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._nbytes = 0
        # Backwards hold on autograd's thread, forwards let go on others.
        self._lock = threading.RLock()

    def hold(self, tensor: torch.Tensor, copied: torch.cuda.Event) -> None:
        """Holds `tensor` until `copied` has happened."""
        with self._lock:
            self._held.append((copied, tensor))
            self._nbytes += tensor.nbytes

    def let_go(self) -> None:
        """Lets go of what is copied."""
        with self._lock:
            while self._held and self._held[0][0].query():  # type: ignore[no-untyped-call]
                self._pop()

    def bound(self, nbytes_max: int) -> None:
        """Lets go of what is copied. Waits until no more than `nbytes_max` is held."""
        with self._lock:
            self.let_go()
            while self._held and self._nbytes > nbytes_max:
                self._held[0][0].synchronize()
                self._pop()

    def _pop(self) -> None:
        _, tensor = self._held.popleft()
        self._nbytes -= tensor.nbytes
