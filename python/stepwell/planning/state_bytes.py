"""Bytes of host memory that the library takes: as the core lays state out, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TWIN_ALIGN_BYTES", "run_bytes", "state_bytes", "step_bytes"]

TWIN_ALIGN_BYTES = 64
"""Where each weight and each gradient begins (`store/twins.py`)."""

_ITEMSIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1}


def state_bytes(numels: Sequence[int], dtype: str, moments: str) -> int:
    """Of the moments, and of what parameters of `dtype` lack of their masters."""
    parts = [*_core.moments_parts(moments), *_core.master_parts(dtype)]
    return sum(
        _ITEMSIZES[part.dtype] * (numel if part.per_element else part.length(numel))
        for numel in numels
        for part in parts
    )


def run_bytes(numels: Sequence[int], itemsize: int) -> int:
    """Of tensors that lie side by side, as twins do."""
    return sum(-(-numel * itemsize // TWIN_ALIGN_BYTES) * TWIN_ALIGN_BYTES for numel in numels)


def step_bytes(dtype: str, moments: str) -> float:
    """That a step reads and writes in host memory, per parameter.

    State and weight are read and written, and the gradient is read; then the weight is read once
    more, as it goes up.
    """
    numel = 1 << 20
    itemsize = _ITEMSIZES[dtype]
    state = state_bytes([numel], dtype, moments) / numel
    return 2 * (state + itemsize) + itemsize + itemsize
