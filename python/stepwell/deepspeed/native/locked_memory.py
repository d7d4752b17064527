"""Host memory that is locked in RAM, for DeepSpeed's `new_cpu_locked_tensor`.

One table for the process: what one handle has made, another one knows. DeepSpeed's own table keeps
memory until it is freed, and frees it while tensors still use it. Here memory lives as long as a
tensor on it, and `free` takes it out of the table.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell._tensors import tensor_on

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["allocate", "free", "free_at", "is_locked", "is_pinned"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _LockedMemory:
    """Memory that a tensor lies on, which owns this."""

    buffer: _core.Buffer

    @property
    def address(self) -> int:
        return self.buffer.address

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


# By its first address.
_ALL: MutableMapping[int, _LockedMemory] = weakref.WeakValueDictionary()
_WARNED: set[str] = set()


def allocate(num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """A flat tensor of `num_elem` zeros of the dtype of `example`, from a page on.

    It is locked in RAM where RLIMIT_MEMLOCK lets it be, else there is one warning.

    Raises:
        ValueError: for a negative number.
        OSError: where there is not so much memory.
    """
    if num_elem < 0:
        raise ValueError(f"`num_elem` is `{num_elem}`, expected the number of elements")
    nbytes = int(num_elem) * example.element_size()
    if nbytes == 0:
        return torch.empty(0, dtype=example.dtype)
    try:
        memory = _LockedMemory(_core.Buffer(nbytes, lock=True))
    except OSError as error:
        memory = _LockedMemory(_core.Buffer(nbytes))
        if "lock" not in _WARNED:
            _WARNED.add("lock")
            _LOGGER.warning("host memory for DeepSpeed's files is not locked in RAM: %s", error)
    _ALL[memory.address] = memory
    return tensor_on(memory).view(example.dtype)


def free(tensor: torch.Tensor) -> bool:
    """Takes the memory that begins where `tensor` does out of the table. Whether it was in it."""
    return free_at(tensor.data_ptr())


def free_at(address: int) -> bool:
    """As `free`, by the first address."""
    return _ALL.pop(int(address), None) is not None


def is_locked(tensor: torch.Tensor) -> bool:
    """Whether all of `tensor` is in memory of the table."""
    if tensor.device.type != "cpu":
        return False
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(
        memory.address <= begin and end <= memory.address + memory.nbytes
        for memory in list(_ALL.values())
    )


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is pinned by torch, or in memory of the table."""
    return is_locked(tensor) or bool(tensor.is_pinned())
