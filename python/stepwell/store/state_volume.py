"""A volume with state of this rank: how it is made of a `Volume`, what it has, and its commits.

What the state is of, parameters or partitions of ZeRO, is a key here. What a program gets of it is
in `store/swapped.py` and `deepspeed/zero/lease.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from stepwell import _core, _state
from stepwell._budget import GIB
from stepwell._notices import tell
from stepwell._sharding import local
from stepwell._sizes import VOLUME_BUFFERS_BYTES_MAX
from stepwell._tensors import view
from stepwell.store.placeholders import MASTER, Placeholders, lay_out
from stepwell.store.sharded_volume import RUN_OF_ONE, close, explain, open_together
from stepwell.store.tuning import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from stepwell.ranks.collective import Ranks
    from stepwell.store.volume import Volume

__all__ = ["MEMORY_PER_BUFFERS", "StateVolume"]

_Key = TypeVar("_Key")

_LOGGER = logging.getLogger(__name__)

MEMORY_PER_BUFFERS = 2
"""Buffers take at most one part in so many of the memory for state and buffers."""


class StateVolume(Generic[_Key]):
    """The state of some tensors, on a volume.

    Attributes:
        core: what the engine steps; None: all state fits into memory, or none was laid out yet.
        placeholders: where the weight of each is, and its state, in their order.
        ranks: those whose volumes are of one run; None: this one's is.

    Args:
        options: what the user has said of it.
        limit: what errors call the option that bounds host memory.
        workers: that step; None: as the engine chooses.
        resized_by: how state gets to another number of ranks, for errors that say so.
    """

    def __init__(
        self, options: Volume, *, limit: str, workers: int | None, resized_by: str | None = None
    ) -> None:
        self.options = options
        self.core: _core.Swap | None = None
        self.placeholders: dict[_Key, Placeholders] = {}
        self.ranks: Ranks | None = None
        self._limit, self._workers, self._resized_by = limit, workers, resized_by
        self._addresses: _core.AddressSpace
        self._buffers_nbytes_max = 0
        self._numbers: dict[_Key, int] = {}
        self._weight: Callable[[_Key], _core.TensorView]
        # Why a commit that the program has asked for has failed, on any of the ranks.
        self._failed_commit: str | None = None

    def __contains__(self, key: _Key) -> bool:
        return key in self._numbers

    @property
    def commits(self) -> bool:
        """Whether a crash leaves the last commit."""
        return self.options.durability == "commit"

    @property
    def committed_steps(self) -> int | None:
        """How many steps the volume has committed; None: it commits none, or there is none."""
        return (self.core.step or 0) if self.core is not None and self.commits else None

    @property
    def counts(self) -> dict[_Key, int] | None:
        """Of a volume that was resumed: how many updates each has seen. None: it is new."""
        counts = None if self.core is None else self.core.counts
        return None if counts is None else dict(zip(self._numbers, counts, strict=True))

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that the volume takes: buffers, and state that fits there."""
        return 0 if self.core is None else self.core.ram_nbytes + self.core.buffers_nbytes

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that the drives have read and written since the volume was made, if there is one.

        With the keys of `OffloadAdamW.timing`.
        """
        moved = () if self.core is None else self.core.bytes_moved
        return dict(zip(("bytes_read", "bytes_written"), moved, strict=False))

    def tier(self, keys: Iterable[_Key]) -> dict[str, object] | None:
        """What an engine of `keys` takes; None: there is no volume."""
        if self.core is None:
            return None
        return {"swap": self.core, "swapped": [self._numbers.get(key) for key in keys]}

    # ---- the beginning ----

    def lay_out(
        self, make: Callable[[_state.Allocate], dict[_Key, Placeholders]], host_bytes: int
    ) -> int:
        """Gives placeholders to what may be on the volume, of which some may be taken out then.

        Args:
            make: makes them, as `placeholders.lay_out` has it.
            host_bytes: for state and buffers.

        Returns:
            what is left of `host_bytes` for state, beside the buffers that steps take.

        Raises:
            ValueError: there is not even the memory for buffers.
        """
        self._addresses, self.placeholders = lay_out(make)
        self._buffers_nbytes_max = min(host_bytes // MEMORY_PER_BUFFERS, VOLUME_BUFFERS_BYTES_MAX)
        buffers = _core.swap_buffers_nbytes(
            [os.fspath(path) for path in self.options.paths],
            self._tensors(),
            durability=self.options.durability,
            packed=self._packed(),
            buffers_nbytes_max=self._buffers_nbytes_max,
            workers=self._workers,
        )
        if buffers > host_bytes:
            raise ValueError(
                f"the buffers of a volume take `{buffers}` bytes of host memory, `{host_bytes}` "
                f"are left of `{self._limit}`, expected more"
            )
        return host_bytes - buffers

    def open(
        self,
        choose: Callable[[], tuple[str, int] | None],
        weight: Callable[[_Key], _core.TensorView],
        *,
        rank: int | None,
    ) -> None:
        """Makes the volume, or finds it again. Collective where there are `ranks`.

        Args:
            choose: calls `lay_out`. Gives what is there, in words, for a volume of others is not
                resumed, and bytes of memory for some of it; None: this rank needs no volume.
            weight: gives the host side of a weight.
            rank: of this process, a part of the volume's name; None: it is the only one.

        Raises:
            ValueError: as `lay_out`; an option cannot work; the volume is of others, or those of
                the ranks are not of one run.
            OSError: a drive is full, or cannot be used; or another rank has failed.
        """
        self._weight = weight

        def make(step: int | None, run: int) -> _core.Swap | None:
            chosen = choose()
            if chosen is None:
                return None
            self._numbers = {key: number for number, key in enumerate(self.placeholders)}
            try:
                return self._made(*chosen, rank, step, run)
            except ValueError as error:
                if self.ranks is not None and rank is not None and self._resized_by is not None:
                    explain(error, self.options, rank, self.ranks.ranks, self._resized_by)
                raise

        if self.ranks is None:
            self.core = make(None, RUN_OF_ONE)
        else:
            interval = self.options.steps_per_commit
            self.core = open_together(self.ranks, make, commit_interval=interval)
        if self.core is not None and self.core.counts is not None:
            tell(f"volume `{self.core.name}` goes on from step {self.core.step}")

    def _made(
        self, identity: str, ram_nbytes: int, rank: int | None, step: int | None, run: int
    ) -> _core.Swap:
        """The core's swap, as the user has said of it, or as its drives were measured."""
        volume, shape = self.options, shape_of(self.options)
        digest = hashlib.sha256(identity.encode()).digest()[:8]
        name = volume.name if volume.name is None or rank is None else f"{volume.name}-{rank}"
        # The program may have another working directory when they are removed.
        drives = [str(Path(path).absolute()) for path in volume.paths]
        make = partial(
            _core.Swap,
            _in_order(drives, name) if volume.resume and name is not None else drives,
            self._tensors(),
            addresses=self._addresses,
            name=name,
            weights=shape.weights,
            stripe_bytes=shape.stripe_bytes,
            durability=volume.durability,
            step=step,
            run=run,
            counts_each_step=self.ranks is not None and self.commits,
            commit_interval=volume.steps_per_commit,
            identity=int.from_bytes(digest, "little"),
            packed=self._packed(),
            ram_nbytes=ram_nbytes,
            buffers_nbytes_max=self._buffers_nbytes_max,
            workers=self._workers,
            io_engine=volume.io_engine,
            queue_depth=shape.queue_depth,
            io_timeout=volume.io_timeout,
        )
        try:
            swap = make(keep=volume.is_kept, resume=volume.resume)
        except FileExistsError as error:
            raise _is_there(error, drives, name, make) from None
        nbytes = sum(_state.nbytes_of(each.state) for each in self.placeholders.values())
        _LOGGER.info(
            "volume `%s`: %.2f GiB of state on %d drives; %.2f GiB of it and %.2f GiB of buffers "
            "in host memory",
            swap.name,
            (nbytes - (0 if self.commits else swap.ram_nbytes)) / GIB,
            len(volume.paths),
            swap.ram_nbytes / GIB,
            swap.buffers_nbytes / GIB,
        )
        return swap

    def _tensors(self) -> list[_core.AdamTensor]:
        return [self._tensor(key, each.state) for key, each in self.placeholders.items()]

    def _tensor(self, key: _Key, state: _state.State) -> _core.AdamTensor:
        """What the core knows state by, where it is in `state`."""
        weight, own, *_ = self.placeholders[key]
        runs = {name: local(state[name]) for name in own}
        if MASTER not in runs:
            return _state.adam_tensor(weight, runs)
        weight_out = view(weight) if state is own else self._weight(key)
        return _state.adam_tensor(runs.pop(MASTER), runs, weight_out=weight_out)

    def _packed(self) -> list[int]:
        return [number for number, each in enumerate(self.placeholders.values()) if each.is_packed]

    def close(self) -> None:
        """Ends a volume from which the optimizer cannot begin; a resumed one stays."""
        close(self.core)

    # ---- between steps ----

    def read(self, key: _Key, to: _state.State, begin: int = 0, end: int | None = None) -> None:
        """Copies state to memory, or the chunks of it with elements from `begin` to `end`.

        Raises:
            OSError: a drive cannot be read.
        """
        assert self.core is not None
        self.core.read(self._numbers[key], self._tensor(key, to), begin=begin, end=end)

    def read_weights(self, key: _Key) -> None:
        """Copies the weights that a resumed volume has to their host side.

        Raises:
            OSError: a drive cannot be read.
        """
        assert self.core is not None
        self.core.read_weights(self._numbers[key], self._weight(key))

    def write_weights(self, keys: Collection[_Key] | None = None) -> None:
        """Writes the weights that a commit would lack, since steps without one have changed them.

        Args:
            keys: whose they are; None: all.

        Raises:
            OSError: a drive cannot be written.
        """
        if self.core is not None and (behind := self.core.weights_behind()):
            numbers = self._numbers
            found = numbers if keys is None else [key for key in keys if key in numbers]
            for key in found:
                if numbers[key] in behind:
                    self.core.write_weights(numbers[key], self._weight(key))

    def commit(self, synchronize: Callable[[], None]) -> None:
        """Commits the last step, if it is not. Collective.

        Where it fails on a rank, none takes another step (`check`): that would write over the
        commit that others are at.

        Args:
            synchronize: waits until the last step is over.

        Raises:
            ValueError: the step has failed.
            OSError: likewise, or a drive has; or another rank has failed.
        """
        ranks = self.ranks
        try:
            with contextlib.nullcontext() if ranks is None else ranks.awaited():
                synchronize()
                self.write_weights()
                if self.core is not None:
                    self.core.commit()
            if ranks is not None:
                # No rank goes on before all have committed.
                ranks.meet()
        except (ValueError, OSError) as error:
            if ranks is not None:
                self._failed_commit = str(error)
            raise

    def check(self) -> None:
        """Raises OSError if a write to the volume, or a commit of any rank, has failed."""
        if self._failed_commit is not None:
            raise OSError(f"a commit failed before: {self._failed_commit}")
        if self.core is not None:
            self.core.check()


def _in_order(drives: Sequence[str], name: str) -> list[str]:
    """The drives in the order of the members of volume `name`, where each has one of them."""
    members = [
        (member.member, drive)
        for drive in drives
        for member in _core.list_members(drive)
        if member.name == name
    ]
    if sorted(number for number, _ in members) != list(range(len(drives))):
        # What is wrong is found where it is opened.
        return list(drives)
    return [drive for _, drive in sorted(members)]


def _is_there(
    error: FileExistsError, drives: Sequence[str], name: str | None, make: Callable[..., _core.Swap]
) -> OSError:
    """Why no new volume is made: one is there. What it has, and both ways on."""
    away = f"`stepwell volume rm {' '.join(drives)} --name {name}`, or another name, begins anew"
    try:
        there = make(keep=True, resume=True)
    except (OSError, ValueError) as why:
        reason, _, _ = str(why).partition("\nhint")
        what, hint = f"cannot be gone on from: {reason}", away
    else:
        step = there.step
        there.close(keep=True)
        what = "has no committed step" if step is None else f"has committed step `{step}`"
        hint = f"Volume(..., name=..., resume=True) goes on from it; {away}"
    return FileExistsError(error.errno, f"volume `{name}` is there, and {what}. hint: {hint}")
