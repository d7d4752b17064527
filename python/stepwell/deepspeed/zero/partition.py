"""A flat partition, what this rank steps of one group; where parameters and spans lie in it.

Imports no DeepSpeed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Fragment", "Partition", "Run", "Source", "runs_of", "without_data"]


class Fragment(NamedTuple):
    """The part of a parameter that lies in this rank's partition of its group."""

    group: int
    """Number of the group."""
    begin: int
    """First element, within the partition."""
    numel: int
    """How many."""


class Source(NamedTuple):
    """Where a fragment lies in its parameter."""

    first: int
    """Its first element there."""
    row_len: int
    """Elements of a row of the parameter; 0: it is no matrix."""


class Run(NamedTuple):
    """A span of the engine."""

    group: int
    """Number of the group."""
    begin: int
    """First element, within the partition."""
    numel: int
    """How many."""
    row_len: int
    """Elements of a row; 0: it is no matrix."""


def runs_of(fragment: Fragment, source: Source) -> list[Run]:
    """The whole rows of a fragment, and what is cut of a row before and behind them."""
    group, begin, numel = fragment
    row_len = source.row_len
    if not row_len:
        return [Run(group, begin, numel, 0)] if numel else []
    head = min(-source.first % row_len, numel)
    whole = (numel - head) // row_len * row_len
    parts = ((head, 0), (whole, row_len), (numel - head - whole, 0))
    runs = []
    for count, length in parts:
        if count:
            runs.append(Run(group, begin, count, length))
        begin += count
    return runs


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
