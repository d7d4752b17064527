"""A flat partition, what this rank steps of one group, and where parameters lie in it.

Imports no DeepSpeed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Fragment", "Partition", "without_data"]


class Fragment(NamedTuple):
    """The part of a parameter that lies in this rank's partition of its group."""

    group: int
    """Number of the group."""
    begin: int
    """First element, within the partition."""
    numel: int
    """How many."""


class Partition(NamedTuple):
    """A partition as the optimizer has it."""

    master: torch.Tensor
    """What is stepped: flat, in host memory; or empty, and then it begins as a copy of the weights.

    Its data is moved to memory that suits the engine. The tensor object stays.
    """
    weight: torch.Tensor
    """Flat, as many elements: on the device, or in host memory."""
    grad_dtype: torch.dtype
    """Of its gradients."""
    moments_bytes: int
    """Of its moments, which the caller will take."""
    is_offloaded: bool = False
    """Whether `weight` is in host memory."""

    @property
    def is_rounded(self) -> bool:
        """Whether the weights are a rounded copy of the master."""
        return self.master.dtype != self.weight.dtype


def without_data(shape: torch.Tensor) -> torch.Tensor:
    """A master that begins as a copy of the weights, in the dtype of `shape`."""
    return torch.empty(0, dtype=shape.dtype, device="cpu", requires_grad=True)
