"""Host memory that is about to be taken: said in the log, and refused where it is not there."""

from __future__ import annotations

import logging

from stepwell import _core

__all__ = ["GIB", "announce"]

GIB = 1 << 30

_LOGGER = logging.getLogger(__name__)


def announce(numel: int, *, state: int, pinned: int, limit: int | None, held: int = 0) -> None:
    """Logs what an optimizer over `numel` parameters takes, in bytes.

    Args:
        numel: elements of all parameters.
        state: bytes of their state.
        pinned: bytes of pinned memory.
        limit: the most that may be taken; None: what is free.
        held: bytes of these that are taken already, by what will be moved.

    Raises:
        ValueError: it is more than that.
    """
    most, what = limit, "are left of `host_bytes_max`"
    if limit is None and (free := _core.free_memory_bytes()) is not None:
        most, what = free + held, "are free"
    if most is not None and pinned + state > most:
        raise ValueError(
            f"{numel} parameters take `{pinned + state}` bytes of host memory, `{most}` {what}. "
            "hint: moments='q8' takes 6 bytes per parameter less than fp32"
        )
    _LOGGER.info(
        "%.2f GiB of host memory for %d parameters: %.2f GiB of state, %.2f GiB pinned for "
        "gradients and weights",
        (pinned + state) / GIB,
        numel,
        state / GIB,
        pinned / GIB,
    )
