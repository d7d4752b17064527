"""Gradients of ZeRO-3 that wait for their reduction where autograd has put them.

Imports DeepSpeed's accelerator, and is imported late.

DeepSpeed copies each gradient to a buffer, whence the reduction copies it once more. Without that
copy there is no buffer, and each gradient takes a tenth of a millisecond less.

- What waits has its elements in row-major order, and the dtype that DeepSpeed's buffer has.
- A reduction never writes what else uses the memory: autograd, for what is still to be reduced, or
  a program. That of several gradients writes a copy of them; where it would write a gradient in its
  own memory, that is cloned before. One that is larger than a bucket is cloned only where counts
  show another holder of its memory (`_tensors.references`): DeepSpeed, too, reduces it where it is.

Cost: device memory of one gradient, or of one bucket where DeepSpeed quantizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

from stepwell._tensors import has_other_holders, is_run, shares_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["UnreducedGradients"]


class UnreducedGradients:
    """What a reduction needs of gradients that wait for it."""

    def __init__(self) -> None:
        # The streams on which gradients are made.
        self._producers: set[Any] = set()

    def add(self, grad: torch.Tensor, dtype: torch.dtype) -> None:
        """A gradient waits from now on, in `dtype`: where it is, or cloned."""
        if not get_accelerator().resolves_data_dependency():
            self._producers.add(get_accelerator().current_stream())
        # The memory of `bias.grad` in `x + bias.unsqueeze(0)` may be what autograd has for `x`: the
        # reduction would write it, and autograd what is still to be reduced.
        if shares_memory(grad) or dtype != grad.dtype or not is_run(grad):
            whole = grad.detach()
            grad.data = whole.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def order(self, stream: Any) -> None:
        """`stream`, on which gradients are reduced, comes after those on which they are made."""
        for producer in self._producers:
            stream.wait_stream(producer)

    def set_apart(self, grads: Iterable[torch.Tensor], stream: Any, *, numel_max: int) -> None:
        """Has gradients in memory of their own, for a reduction on `stream` that writes there.

        A program may hold the memory in a way that nothing shows.

        Args:
            grads: that wait, and are reduced each in its own memory.
            stream: None: the device has none.
            numel_max: what has more elements is left where it is, unless others hold its memory.
        """
        accelerator = get_accelerator()
        with accelerator.stream(stream):
            for grad in grads:
                if grad.numel() > numel_max and not has_other_holders(grad):
                    continue
                whole = grad.detach()
                if not accelerator.is_synchronized_device():
                    whole.record_stream(accelerator.current_stream())
                grad.data = whole.clone()
