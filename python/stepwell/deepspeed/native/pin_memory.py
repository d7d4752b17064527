"""DeepSpeed's native op `pin_memory`: host memory that is locked in RAM."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from stepwell.deepspeed.native import locked_memory

if TYPE_CHECKING:
    import torch

__all__ = ["OP", "pin_handle"]


class pin_handle:  # noqa: N801  # DeepSpeed's name for it
    """Makes tensors in locked memory. All handles have one table of it (`locked_memory`)."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A flat tensor of `num_elem` zeros of the dtype of `example_tensor`, from a page on.

        Raises:
            ValueError: for a negative number.
            OSError: where there is not so much memory.
        """
        return locked_memory.allocate(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was locked memory, which it no longer counts as.

        The memory is freed with the last tensor on it.
        """
        return locked_memory.free(tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As `free_cpu_locked_tensor`, by the address of the first element."""
        return locked_memory.free_at(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor is pinned by torch, or all of it is locked memory."""
        return locked_memory.is_pinned(buffer)


# DeepSpeed loads the file that a module is from as a shared library. This one is from none.
OP = ModuleType("stepwell_pin_memory", __doc__)
OP.pin_handle = pin_handle  # type: ignore[attr-defined]
