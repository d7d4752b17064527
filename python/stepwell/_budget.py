"""Host memory that is about to be taken: said in the log, claimed, refused where it is not there.

What was claimed counts as used for other processes of this host until it is taken
(`rust/host/claims.rs`): ranks that begin at the same time do not each count on all that is free.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

from stepwell import _core
from stepwell._sizes import VOLUME_BUFFERS_BYTES_MAX, moments_bytes

__all__ = ["GIB", "announce", "note_pinned", "pinned_bytes", "share_of_free_bytes"]

GIB = 1 << 30

_LOGGER = logging.getLogger(__name__)

# Other parts of the program need memory too.
_FREE_SHARE = 0.75
# Of many small parameters each ends with a block of its own.
_ROUNDED_UP = 1.5

# For each engine of this process, how many bytes it has pinned.
_PINNED: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def announce(
    numel: int,
    *,
    state: int,
    crossing: int,
    limit: int | None,
    moments: int = 0,
    held: int = 0,
    waiting: int = 0,
) -> _core.MemoryClaim:
    """Logs and claims what an optimizer over `numel` parameters takes, in bytes.

    Args:
        numel: elements of all parameters.
        state: bytes of their state.
        crossing: bytes of what crosses the bus: weights and gradients.
        limit: the most that may be taken; None: what is free.
        moments: bytes of `state` that are moments, and could be held in another codec, or on a
            volume.
        held: bytes of these that are taken already, by what will be moved.
        waiting: bytes of `crossing` for gradients that wait of all parameters, also of those that
            the optimizer has already.

    Returns:
        the claim, which lasts until all is taken: `with` it, `end` it, or let go of it.

    Raises:
        ValueError: it is more than that.
    """
    nbytes = crossing + state
    hint = partial(_hint, numel, nbytes, state=state, moments=moments, waiting=waiting)
    if limit is not None and nbytes > limit:
        what = f"`{limit}` are left of `host_bytes_max`"
        raise _refused(numel, nbytes, what, waiting, hint(limit))
    claim = _core.MemoryClaim(nbytes, held_nbytes=held, is_checked=limit is None)
    if claim.is_refused:
        room = (claim.room_nbytes or 0) + held
        what = f"`{room}` are free"
        if claim.others_nbytes:
            what += (
                f" beside `{claim.others_nbytes}` that processes `{claim.others}` of this host "
                "have claimed and not taken yet"
            )
        raise _refused(numel, nbytes, what, waiting, hint(room))
    _LOGGER.info(
        "%.2f GiB of host memory for %d parameters: %.2f GiB of state, %.2f GiB for gradients and "
        "weights",
        nbytes / GIB,
        numel,
        state / GIB,
        crossing / GIB,
    )
    return claim


def _refused(numel: int, nbytes: int, most: str, waiting: int, hint: str) -> ValueError:
    what = f"{numel} parameters"
    if waiting:
        # Of which those that were there before have the greater part.
        what += f" and deferred updates of all (`{waiting}` bytes)"
    return ValueError(f"{what} take `{nbytes}` bytes of host memory, {most}. hint: {hint}")


def _hint(numel: int, nbytes: int, room: int, *, state: int, moments: int, waiting: int) -> str:
    """The placement that would fit into `room` bytes, where another than the one that is set."""
    ways = {}
    coded = moments_bytes([numel], "q8")
    # What is coded in another way does not gain by q8, and what is coded so is.
    if moments > coded * _ROUNDED_UP:
        ways["moments='q8'"] = nbytes - (moments - coded)
    if moments:
        ways["state on drives (docs/volume.md)"] = nbytes - state + VOLUME_BUFFERS_BYTES_MAX
    for way, taken in ways.items():
        if taken <= room:
            return f"{way} takes `{taken}` bytes, which fit"
    fewer = "a smaller interval, with which fewer gradients wait; or " if waiting else ""
    return f"{fewer}`stepwell plan {numel}` says where so many parameters fit"


def share_of_free_bytes() -> int:
    """Host memory for state where nothing limits it: three quarters of what is free.

    Ranks that share the host divide it.
    """
    system: dict[str, Any] = _core.system_info()
    ranks_on_host: int = system["ranks_on_host"]
    return int((_core.free_memory_bytes() or 0) * _FREE_SHARE) // ranks_on_host


def note_pinned(engine: object, nbytes: int) -> None:
    """Says in the log that `engine` has pinned `nbytes`."""
    _LOGGER.info("%.2f GiB of host memory pinned", nbytes / GIB)
    _PINNED[engine] = nbytes


def pinned_bytes() -> int:
    """Bytes that the engines of this process have pinned."""
    return sum(_PINNED.values())
