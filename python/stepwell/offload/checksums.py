"""Checksums of tensors on their device: whether a gradient is still what it was, without its copy.

`_core.CHECKSUM_SUMS` sums of 64-bit words, each mixed with its place, by a kernel of the engine
(`Device::checksums` has the formula). Bits are summed, so there is no rounding, and a NaN equals
itself. Only a change that is made for it leaves every sum as it was.

Cost: one kernel and one read of the tensor; 2 KiB beside it until the comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["differences", "sums_of"]


def sums_of(
    engine: _core.OffloadEngine, tensors: Sequence[torch.Tensor], stream: int
) -> list[torch.Tensor]:
    """The checksums of contiguous tensors on the device of `engine`.

    Each is int64, of one dimension. Those of one size whose memory begins at the same place in a
    word can be compared. The tensors are held until `stream`, which is the current one, has passed
    this.

    Raises:
        OSError: the device has no kernel for them, or has failed.
    """
    if not tensors:
        return []
    shape = len(tensors), _core.CHECKSUM_SUMS
    sums = torch.empty(shape, dtype=torch.int64, device=tensors[0].device)
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = [int(tensor.nbytes) for tensor in tensors]
    engine.checksums(addresses, sizes, sums.data_ptr(), stream=stream)
    return list(sums.unbind())


def differences(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 for each pair of checksums that differ, else 0.0: float32, on their device.

    There is at least one pair.
    """
    return (torch.stack(list(before)) != torch.stack(list(after))).any(1).float()
