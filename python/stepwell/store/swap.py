"""How the core's swap is made of a `Volume`: of parameters, and of partitions of ZeRO."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepwell import _core
from stepwell._budget import GIB
from stepwell.store.tuning import shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepwell.store.volume import Volume

__all__ = ["MEMORY_PER_BUFFERS", "Room", "explain", "make_swap", "room_beside_buffers"]

_LOGGER = logging.getLogger(__name__)

_BUFFERS_BYTES_MAX = 1 << 30
MEMORY_PER_BUFFERS = 2
"""Buffers take at most one part in so many of the memory for state and buffers."""


class Room(NamedTuple):
    """Host memory of a swap."""

    ram_nbytes: int
    """For state."""
    buffers_nbytes_max: int
    """The most that buffers may take."""


def room_beside_buffers(
    volume: Volume,
    tensors: Sequence[_core.AdamTensor],
    host_bytes: int,
    *,
    limit: str,
    packed: Sequence[int] = (),
    workers: int | None,
) -> Room:
    """What is left for state of `host_bytes`, beside the buffers that steps of `tensors` take.

    Args:
        volume: what the user has said of it.
        tensors: all that may be on the volume, in their order.
        host_bytes: for state and buffers.
        limit: what errors call the option that says so.
        packed: as the core has it.
        workers: that step; None: as the engine chooses.

    Raises:
        ValueError: there is not even the memory for buffers.
    """
    most = min(host_bytes // MEMORY_PER_BUFFERS, _BUFFERS_BYTES_MAX)
    buffers = _core.swap_buffers_nbytes(
        _folders(volume),
        list(tensors),
        durability=volume.durability,
        packed=list(packed),
        buffers_nbytes_max=most,
        workers=workers,
    )
    if buffers > host_bytes:
        raise ValueError(
            f"the buffers of a volume take `{buffers}` bytes of host memory, `{host_bytes}` are "
            f"left of `{limit}`, expected more"
        )
    return Room(host_bytes - buffers, most)


def make_swap(
    volume: Volume,
    tensors: Sequence[_core.AdamTensor],
    *,
    addresses: _core.AddressSpace,
    identity: str,
    rank: int | None,
    ranks: Sequence[int] | None = None,
    resized_by: str = "",
    nbytes: int,
    room: Room,
    packed: Sequence[int] = (),
    workers: int | None,
    step: int | None,
    run: int,
    counts_each_step: bool,
) -> _core.Swap:
    """The core's swap, as the user has said of `volume`, or as its drives were measured.

    Args:
        volume: what the user has said of it.
        tensors: what is on it.
        addresses: where these are.
        identity: what they are: a volume of others is not resumed.
        rank: of this process, a part of the volume's name; None: it is the only one.
        ranks: those whose volumes are of one run; None: this one's is.
        resized_by: how state gets to another number of ranks, for errors.
        nbytes: bytes of all state.
        room: host memory for it.
        packed: as the core has it; so are the others.
        workers: likewise.
        step: likewise.
        run: likewise.
        counts_each_step: likewise.

    Raises:
        ValueError: an option that cannot work, or a volume of other parameters.
        OSError: a drive is full, or cannot be used.
    """
    shape = shape_of(volume)
    name = volume.name if volume.name is None or rank is None else f"{volume.name}-{rank}"
    try:
        swap = _core.Swap(
            # The program may have another working directory when they are removed.
            [str(Path(path).absolute()) for path in volume.paths],
            list(tensors),
            addresses=addresses,
            name=name,
            weights=shape.weights,
            stripe_bytes=shape.stripe_bytes,
            durability=volume.durability,
            keep=volume.is_kept,
            resume=volume.resume,
            step=step,
            run=run,
            counts_each_step=counts_each_step,
            commit_interval=volume.steps_per_commit,
            identity=int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little"),
            packed=list(packed),
            ram_nbytes=room.ram_nbytes,
            buffers_nbytes_max=room.buffers_nbytes_max,
            workers=workers,
            io_engine=volume.io_engine,
            queue_depth=shape.queue_depth,
            io_timeout=volume.io_timeout,
        )
    except ValueError as error:
        if ranks is not None and rank is not None:
            explain(error, volume, rank, ranks, resized_by)
        raise
    is_all_there = volume.durability == "commit"
    _LOGGER.info(
        "volume `%s`: %.2f GiB of state on %d drives; %.2f GiB of it and %.2f GiB of buffers in "
        "host memory",
        swap.name,
        (nbytes if is_all_there else nbytes - swap.ram_nbytes) / GIB,
        len(volume.paths),
        swap.ram_nbytes / GIB,
        swap.buffers_nbytes / GIB,
    )
    return swap


def explain(
    error: ValueError, volume: Volume, rank: int, ranks: Sequence[int], resized_by: str
) -> None:
    """Raises an error that says more, where other ranks may have made what cannot be resumed.

    Only what lies in this rank's folders is known: others may be those of another host, and a
    group of other ranks may have volumes of the same name.
    """
    if not volume.resume:
        return
    made = _ranks_of(_folders(volume), f"{volume.name}-")
    if rank not in made or made == sorted(ranks):
        # The error says what is wrong.
        return
    raise ValueError(
        f"{error}; `{volume.name}` is there for the ranks `{made}` in the folders of rank "
        f"`{rank}`, and `{list(ranks)}` step together. hint: as many ranks go on from a volume as "
        f"have made it, each with its own drives; {resized_by}"
    ) from error


def _folders(volume: Volume) -> list[str]:
    return [os.fspath(path) for path in volume.paths]


def _ranks_of(folders: Iterable[str], prefix: str) -> list[int]:
    """The ranks whose volumes are in these folders: their numbers come behind `prefix`."""
    names = {member.name for folder in folders for member in _core.list_members(folder)}
    ends = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    return sorted(int(end) for end in ends if end.isdecimal())
