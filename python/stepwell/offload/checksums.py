"""Checksums of tensors on their device: whether a gradient is still what it was, without its copy.

Of a large tensor: 1024 sums of 64-bit words, each over a run of the tensor, and the bytes that are
left over. Small tensors are kept as they are. A word holds several elements, so a change of signs
counts by its places; only a change that is made for it leaves every sum as it was. Bits are summed,
so there is no rounding, and a NaN equals itself.

Cost: one kernel and one read of the tensor; up to 64 KiB beside it until the comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["checksum", "differences"]

_RUNS = 1024
_WORD_BYTES = 8
_KEPT_BYTES = _RUNS * _WORD_BYTES
"""A tensor of less is its own checksum."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a contiguous tensor: int64, of one dimension, on its device.

    Tensors of one size whose memory begins at the same place in a word can be compared.
    """
    if _is_even(tensor):
        # Most are. Each call takes time of the thread that launches the backward.
        return tensor.detach().view(torch.int64).view(_RUNS, -1).sum(1)
    memory = tensor.detach().view(-1).view(torch.uint8)
    begin = -memory.storage_offset() % _WORD_BYTES
    if memory.numel() - begin < _KEPT_BYTES:
        return memory.long()
    if memory.data_ptr() % _WORD_BYTES != memory.storage_offset() % _WORD_BYTES:
        # Memory that torch did not allocate, which begins amid a word.
        memory, begin = memory.clone(), 0
    length = (memory.numel() - begin) // (_RUNS * _WORD_BYTES)
    end = begin + _RUNS * length * _WORD_BYTES
    sums = memory[begin:end].view(torch.int64).view(_RUNS, length).sum(1)
    if end - begin == memory.numel():
        return sums
    return torch.cat([sums, memory[:begin].long(), memory[end:].long()])


def _is_even(tensor: torch.Tensor) -> bool:
    """Whether each row, and each run, of `tensor` is of whole words that begin where words do."""
    if tensor.dim() == 0 or tensor.numel() == 0 or tensor.nbytes % _KEPT_BYTES:
        return False
    rows, begin = tensor.shape[-1], int(tensor.storage_offset())
    places = (rows * tensor.itemsize, begin * tensor.itemsize, tensor.data_ptr())
    return all(place % _WORD_BYTES == 0 for place in places)


def differences(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 for each pair of checksums that differ, else 0.0: float32, on their device.

    There is at least one pair, and the checksums of a pair have one size.
    """
    differ = (torch.cat(list(before)) != torch.cat(list(after))).float()
    # An empty tensor has an empty checksum, and its largest element is that of a 0.
    pieces = [
        piece if piece.numel() else piece.new_zeros(1)
        for piece in torch.split(differ, [each.numel() for each in before])
    ]
    # The largest of each, by one kernel for all.
    return torch.stack(torch._foreach_norm(pieces, float("inf")))
