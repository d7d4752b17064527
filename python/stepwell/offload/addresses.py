"""Where the weights and gradients of a step lie, as long as a program may give them other memory.

A step is checked, waits for the norm of its gradients, and is submitted by the addresses of then. A
signal's handler or another thread may assign to `.data` in between. What lies as before there is
stepped; all else would have the step read or write memory that is not the tensor's.

Cost: an address per tensor before the wait and behind it, .1 us each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell._sharding import PLAIN, local
from stepwell.offload.gradients import check_in_place, lies_as

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepwell.offload.gradients import Known, Label

__all__ = ["Addresses"]


class Addresses(NamedTuple):
    """Those of parameters and their gradients when these were checked."""

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    found: list[int]
    """Of the parameters, then of the gradients."""

    @classmethod
    def of(cls, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Addresses:
        """Where these are now."""
        return cls(params, grads, [*_addresses(params), *_addresses(grads)])

    def check(self, known: Callable[[torch.Tensor], Known | None], label: Label) -> None:
        """Checks what was given other memory since.

        Args:
            known: what each parameter was when it was added.
            label: what errors call it.

        Raises:
            ValueError: a parameter or a gradient is not as it was.
        """
        now = Addresses.of(self.params, self.grads).found
        if now == self.found:
            return
        tensors = [*self.params, *self.grads]
        moved = [one for one, was, at in zip(tensors, self.found, now, strict=True) if was != at]
        keys = set(map(id, moved))
        for param, grad in zip(self.params, self.grads, strict=True):
            device, was = local(grad).device, known(param)
            if id(param) in keys:
                check_in_place(param, was, local(param).device, label)
            if id(grad) in keys and (was is None or not lies_as(local(grad), was, device)):
                raise ValueError(
                    f"the gradient of {label(param)} was given other memory during the step, and "
                    f"is `{grad.dtype}` of `{tuple(grad.shape)}`, expected it as it was when the "
                    "step began. hint: assign to gradients before step(), or write them in place"
                )


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where tensors begin, or this rank's pieces of them."""
    is_plain = all(kind in PLAIN for kind in set(map(type, tensors)))
    return list(map(torch.Tensor.data_ptr, tensors if is_plain else map(local, tensors)))
