"""Checksums of tensors on their device: whether a gradient is still what it was, without its copy.

`_core.CHECKSUM_SUMS` sums of 64-bit words, each mixed with its place, by a kernel of the engine
(`Device::checksums` has the formula); and the bytes before the first and behind the last whole
word. Bits are summed, so there is no rounding, and a NaN equals itself. Only a change that is made
for it leaves every sum as it was.

Where the engine has no kernel (`checksum`): 1024 sums, each over a run of words, which do not see
words that change places within a run; of small tensors the bytes themselves.

Cost: one kernel and one read of the tensor; 2 KiB beside it until the comparison, or 64 KiB where
the engine has no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["checksum", "differences", "sums_of"]

_RUNS = 1024
_WORD_BYTES = 8
_KEPT_BYTES = _RUNS * _WORD_BYTES
"""A tensor of less is its own checksum, where the engine has no kernel."""


def sums_of(
    engine: _core.OffloadEngine, tensors: Sequence[torch.Tensor], stream: int
) -> list[torch.Tensor]:
    """The checksums of contiguous tensors on the device of `engine`.

    Each is int64, of one dimension. Those of one size whose memory begins at the same place in a
    word can be compared. The tensors are held until `stream`, which is the current one, has passed
    this.

    Raises:
        OSError: the device cannot compile the kernel, or has failed.
    """
    addresses, sizes = [], []
    ragged: dict[int, tuple[int, int]] = {}
    for at, tensor in enumerate(tensors):
        address, nbytes = tensor.data_ptr(), int(tensor.nbytes)
        begin = min(-address % _WORD_BYTES, nbytes)
        whole = (nbytes - begin) // _WORD_BYTES * _WORD_BYTES
        if whole != nbytes:
            ragged[at] = begin, begin + whole
        # Nothing is read where there is no whole word.
        addresses.append(address + begin if whole else 0)
        sizes.append(whole)
    shape = len(tensors), _core.CHECKSUM_SUMS
    sums = torch.empty(shape, dtype=torch.int64, device=tensors[0].device)
    engine.checksums(addresses, sizes, sums.data_ptr(), stream=stream)
    found = list(sums.unbind())
    for at, (begin, end) in ragged.items():
        memory = _bytes_of(tensors[at])
        found[at] = torch.cat([found[at], memory[:begin].long(), memory[end:].long()])
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not `view(-1)`: that of one element keeps its stride, which may be any.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of any contiguous tensor, without the engine: int64, of one dimension.

    Tensors of one size whose memory begins at the same place in a word can be compared.
    """
    memory = _bytes_of(tensor)
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


def differences(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 for each pair of checksums that differ, else 0.0: float32, on their device.

    There is at least one pair, and the checksums of a pair have one size.
    """
    if len({each.numel() for each in before}) == 1 and before[0].numel():
        return (torch.stack(list(before)) != torch.stack(list(after))).any(1).float()
    differ = (torch.cat(list(before)) != torch.cat(list(after))).float()
    # An empty tensor has an empty checksum, and its largest element is that of a 0.
    pieces = [
        piece if piece.numel() else piece.new_zeros(1)
        for piece in torch.split(differ, [each.numel() for each in before])
    ]
    # The largest of each, by one kernel for all.
    return torch.stack(torch._foreach_norm(pieces, float("inf")))
