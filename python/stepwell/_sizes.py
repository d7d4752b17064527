"""Bytes that the library takes, as the core lays state out; sizes that it is bounded by.

What asks before there is an optimizer goes by them too (`planning`, hints, benchmarks): no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "AHEAD_NUMEL",
    "COMMIT_INTERVAL",
    "SUMS_BYTES_MAX",
    "TWIN_ALIGN_BYTES",
    "VOLUME_BUFFERS_BYTES_MAX",
    "moments_bytes",
    "moved_bytes",
    "resident_bytes",
    "residents",
    "run_bytes",
    "state_bytes",
]

TWIN_ALIGN_BYTES = 64
"""Where each weight and each gradient begins: what vectors and the device's copies like."""
VOLUME_BUFFERS_BYTES_MAX = 1 << 30
"""Of host memory, for reads and writes of a volume."""
# With q8 moments a commit takes a quarter of a step longer: every eighth step, that is 3 % of the
# run, and a crash costs seven steps at most. The interval that loses least time, sqrt(2 * cost *
# time between failures) (J. W. Young, 1974, "A first order approximation to the optimum checkpoint
# interval"), is longer: 90 steps of 5 s where a machine fails once a day.
COMMIT_INTERVAL = 8
"""Which steps a volume commits, unless that is given."""
# Some milliseconds of a bus. With twice as many a forward and backward of 8 B parameters took 2 %
# less.
AHEAD_NUMEL = 192 << 20
"""Elements of weights that are fetched ahead of their use."""
SUMS_BYTES_MAX = 1408 << 20
"""Of device memory, for sums that lie in host memory and for gradients on their way there
(`store/adder.py`)."""

_ITEMSIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint8": 1}


def _bytes_of(numels: Iterable[int], parts: Sequence[_core.StatePart]) -> int:
    return sum(
        _ITEMSIZES[part.dtype] * (numel if part.per_element else part.length(numel))
        for numel in numels
        for part in parts
    )


def moments_bytes(numels: Iterable[int], moments: str) -> int:
    """Of the moments of parameters with so many elements each."""
    return _bytes_of(numels, _core.moments_parts(moments))


def state_bytes(numels: Iterable[int], dtype: str, moments: str) -> int:
    """Of the moments, and of what parameters of `dtype` lack of their masters."""
    return _bytes_of(numels, [*_core.moments_parts(moments), *_core.master_parts(dtype)])


def resident_bytes(numel: int) -> int | None:
    """Of device memory, for the state of a parameter that is stepped there; None: it cannot be."""
    return _core.DeviceSteps.state_nbytes(numel) if numel else None


def residents(numels: Iterable[int], bytes_max: int) -> dict[int, int]:
    """Which parameters are stepped on the device: in their order, each that has room.

    Those that come first are used first by a forward, and have their gradients last: theirs is the
    state that a step waits for.

    Args:
        numels: elements of each.
        bytes_max: of device memory, for their state.

    Returns:
        by their numbers, the bytes of each.
    """
    found: dict[int, int] = {}
    for index, numel in enumerate(numels):
        nbytes = resident_bytes(numel)
        if nbytes is not None and nbytes <= bytes_max:
            found[index] = nbytes
            bytes_max -= nbytes
    return found


def run_bytes(numels: Iterable[int], itemsize: int) -> int:
    """Of tensors that lie side by side, as twins do."""
    return sum(-(-numel * itemsize // TWIN_ALIGN_BYTES) * TWIN_ALIGN_BYTES for numel in numels)


def moved_bytes(dtype: str, moments: str) -> float:
    """Per parameter of `dtype`, that a step reads and writes in host memory.

    State and weight are read and written, and the gradient is read.
    """
    numel = 1 << 20
    state, itemsize = state_bytes([numel], dtype, moments) / numel, _ITEMSIZES[dtype]
    return 2 * (state + itemsize) + itemsize
