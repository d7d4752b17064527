"""Partitions whose state is on a volume: masters and moments that are there between steps.

A tensor of such state is on the volume, or it is in memory. While it is on the volume it has the
class `Written` (`stepwell.access.writes`) and lies at addresses that nothing is at. Its first use
brings the state of its partition into memory; so DeepSpeed's accessors, checkpoints and loaders
need not know of it. The next step goes on from that memory and writes it to the volume. So what is
written to such tensors counts, and a view that was taken before a step is a snapshot after it.

A use of a fragment (`narrow` of a flat tensor, or a piece of the master) brings the chunks that it
lies in, and no others. The partition counts as on the volume, unless a fragment was written to by
the time of the next step. Then the rest is brought, and the step goes on from memory.

The master of a bf16 weight that the program cannot write is on the volume as what the weight in
host memory lacks of it (`rust/tier/swap/packed.rs`). In memory it is whole.

The memory is mapped files in the folders of the volume, or in the folder for temporary files where
it is on devices alone: an export takes no host memory that the kernel could not take back, and
space on a drive while it is there.

Cost: nothing per step, beside two assignments for each tensor that was in memory, and a digest of
the chunks that were looked at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core, _state
from stepwell._budget import GIB, share_of_free_bytes
from stepwell._tensors import view
from stepwell.access.under_way import without_waiting
from stepwell.access.writes import Written, forget, remember
from stepwell.deepspeed.zero.mapped import MappedState
from stepwell.ranks.collective import Ranks
from stepwell.store.places import addresses_for
from stepwell.store.sharded_volume import (
    RUN_OF_ONE,
    CommonCommits,
    agree_on_counts,
    close,
    open_together,
)
from stepwell.store.swap import make_swap, room_beside_buffers
from stepwell.store.volume_end import end_with, write_weights_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.store.volume import Volume

__all__ = ["SwappedPartitions", "commit_last_step", "swapped_on"]

_LOGGER = logging.getLogger(__name__)

# The master of a partition, among the names of its state.
_MASTER = "param"


class _Held(NamedTuple):
    """The state of one partition."""

    number: int
    """Of the core's tensors."""
    tensors: dict[str, torch.Tensor]
    """What is on the volume, by name: moments, trailing bits, the master."""
    places: dict[str, torch.Tensor]
    """Where each is while it is on the volume."""
    beside: dict[str, Any]
    """What of the state stays in memory, with a count of no updates."""
    shape: torch.Tensor
    """The weight's place, where the partition has a master; else the parameter's."""
    views: list[tuple[torch.Tensor, int, int]]
    """Pieces of the master that other code has, with first element and number of elements."""
    is_packed: bool
    """Whether the master is on the volume as what the weight in host memory lacks of it."""


class SwappedPartitions:
    """The state of partitions, on one volume of this rank.

    Args:
        volume: what the user has said of it.
        new_state: makes state of a partition that was never stepped, of a tensor like its master,
            with a function that gives memory.
        identity: what the partitions are: a volume of others is not resumed.
        rank: of this process, or None if it is the only one: a part of the volume's name.
    """

    def __init__(
        self,
        volume: Volume,
        *,
        new_state: Callable[[torch.Tensor, _state.Allocate], _state.State],
        identity: str,
        rank: int | None,
    ) -> None:
        self._volume = volume
        self._new_state = new_state
        self._identity = identity
        self._rank = rank
        self._core: _core.Swap | None = None
        self._held: dict[int, _Held] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._group_of: dict[int, int] = {}
        # Of pieces of masters: first element and number of elements.
        self._run_of: dict[int, tuple[int, int]] = {}
        # What was brought of partitions that count as on the volume.
        self._parts: dict[int, MappedState] = {}
        self._on_volume: set[int] = set()
        self._stepped: set[int] = set()
        # A signal's handler may use state while it is brought.
        self._lock = threading.RLock()
        self._finish: weakref.WeakMethod[Callable[[], None]] | None = None
        self._common_commits = CommonCommits()

    @property
    def core(self) -> _core.Swap | None:
        """What the engine steps; None: all state fits into memory."""
        return self._core

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that the volume takes: buffers, and state that fits there."""
        return 0 if self._core is None else self._core.ram_nbytes + self._core.buffers_nbytes

    def __contains__(self, group: int) -> bool:
        return group in self._held

    def has_master(self, group: int) -> bool:
        """Whether the master of a partition is on the volume, and not only its moments."""
        return group in self._held and _MASTER in self._held[group].tensors

    def indices(self, count: int) -> list[int | None]:
        """Which of the core's tensors the first `count` partitions are."""
        return [self._held[group].number if group in self._held else None for group in range(count)]

    # ---- the beginning ----

    def open(
        self,
        partitions: Sequence[Partition],
        host_bytes: int | None,
        *,
        beside: int,
        threads: int | None,
        finish: Callable[[], None],
    ) -> None:
        """Makes the volume, or finds it again. Partitions without elements have no state there.

        Args:
            partitions: of all groups.
            host_bytes: for state and buffers; None: `share_of_free_bytes`, but for what is taken
                beside.
            beside: bytes of host memory that are taken for other things.
            threads: workers that step; None: as the engine chooses.
            finish: a method, held weakly, that waits for the step that is under way.

        Raises:
            ValueError: there is not even the memory for buffers; the volume is of other partitions,
                or those of the ranks are not of one run.
            OSError: a drive is full, or cannot be used; or another rank has failed.
        """
        if host_bytes is None:
            host_bytes = max(share_of_free_bytes() - beside, 0)
        nbytes = sum(
            each.moments_bytes + each.is_rounded * each.master.itemsize * each.weight.numel()
            for each in partitions
        )
        make = partial(self._make, partitions, nbytes, host_bytes, threads)
        if self._rank is None:
            core = make(None, RUN_OF_ONE)
        else:
            core = self._open_together(make, len(partitions))
        self._core = core
        if core is None:
            return
        self._finish = weakref.WeakMethod(finish)
        self._closing = end_with(
            self, core, _host_sides(self._held, self._weights), _behind(self._finish)
        )
        for group, held in self._held.items():
            tensors = list(held.tensors.values())
            self._group_of.update((id(tensor), group) for tensor in tensors)
            remember(tensors, self)
        self._letting_go = weakref.finalize(self, _let_go, self._held)
        for call in self.leaving(self._held):
            call()
        self._stepped.clear()

    def _open_together(
        self, make: Callable[[int | None, int], _core.Swap | None], count: int
    ) -> _core.Swap | None:
        """As `sharded_volume.open_together`, of `count` partitions on each rank."""
        ranks = Ranks()
        core = open_together(ranks, make, commit_interval=self._volume.steps_per_commit)
        # Of new volumes none is at a step, on all ranks.
        if core is not None and core.step is not None:
            counts = core.counts or []
            try:
                mine = [None if nth is None else counts[nth] for nth in self.indices(count)]
                agree_on_counts(ranks, mine)
            except BaseException:
                close(core)
                raise
        return core

    def _make(
        self,
        partitions: Sequence[Partition],
        nbytes: int,
        host_bytes: int,
        threads: int | None,
        step: int | None,
        run: int,
    ) -> _core.Swap | None:
        """The core's swap for state of `nbytes`, at a step that it is resumed from.

        None: there is no state, or all fits.
        """
        volume = self._volume
        if nbytes == 0:
            return None
        if nbytes <= host_bytes and volume.durability == "none":
            _LOGGER.warning(
                "all optimizer state (%.2f GiB) fits into host memory, and no volume is made. "
                "hint: host_bytes_max in the block `stepwell` says how much memory may be taken",
                nbytes / GIB,
            )
            return None
        addresses = self._place(partitions)
        tensors = [self._tensor(held, held.places, held.shape) for held in self._held.values()]
        packed = [held.number for held in self._held.values() if held.is_packed]
        room = room_beside_buffers(
            volume,
            tensors,
            host_bytes,
            limit="stepwell.host_bytes_max",
            packed=packed,
            workers=threads,
        )
        return make_swap(
            volume,
            tensors,
            addresses=addresses,
            identity=self._identity,
            rank=self._rank,
            nbytes=nbytes,
            room=room,
            packed=packed,
            workers=threads,
            step=step,
            run=run,
            counts_each_step=self._rank is not None and volume.durability == "commit",
        )

    def _place(self, partitions: Sequence[Partition]) -> _core.AddressSpace:
        def lay_out(memory: _state.Allocate) -> None:
            for group, each in enumerate(partitions):
                numel = each.weight.numel()
                if numel == 0:
                    continue
                shape = memory(numel, each.weight.dtype)
                flat = memory(numel, each.master.dtype) if each.is_rounded else shape
                state = self._new_state(flat, memory)
                beside = {"step", _state.FINGERPRINTS} & state.keys()
                places = {name: each for name, each in state.items() if name not in beside}
                tensors = {name: _empty(value.dtype) for name, value in places.items()}
                if each.is_rounded:
                    places[_MASTER], tensors[_MASTER] = flat, each.master
                self._held[group] = _Held(
                    len(self._held) if group not in self._held else self._held[group].number,
                    tensors,
                    places,
                    {name: state[name] for name in beside},
                    shape,
                    [],
                    # Offloaded weights are the program's, which may write them.
                    each.is_rounded
                    and each.weight.dtype == torch.bfloat16
                    and not each.is_offloaded,
                )

        return addresses_for(lay_out)

    @staticmethod
    def _tensor(
        held: _Held, memory: Mapping[str, torch.Tensor], weight: torch.Tensor
    ) -> _core.AdamTensor:
        """What the core knows a partition's state by, where it is in `memory`."""
        runs = {name: tensor for name, tensor in memory.items() if name != _MASTER}
        master = memory.get(_MASTER)
        if master is None:
            return _state.adam_tensor(weight, runs)
        return _state.adam_tensor(master, runs, weight_out=view(weight))

    def begin(self, group: int, weight: torch.Tensor) -> int:
        """The host side of a partition's weights is there, also of a master that is their own.

        It is overwritten where the volume was resumed and has weights. Returns how many updates the
        volume has of the partition.

        Raises:
            OSError: a drive cannot be read.
        """
        self._weights[group] = weight
        assert self._core is not None
        number, counts = self._held[group].number, self._core.counts
        if counts is None:
            return 0
        self._stepped.add(group)
        self._core.read_weights(number, view(weight))
        return counts[number]

    @property
    def committed_steps(self) -> int | None:
        """How many steps the volume has committed; None: it commits none."""
        if self._volume.durability == "none":
            return None
        assert self._core is not None
        return self._core.step or 0

    def commit(self, synchronize: Callable[[], None]) -> None:
        """Commits the last step, if it is not. Collective.

        Args:
            synchronize: waits until the last step is over.

        Raises:
            OSError: the step has failed, or a drive; or another rank has.
        """

        def commit() -> None:
            synchronize()
            assert self._core is not None
            write_weights_behind(self._core, _host_sides(self._held, self._weights))
            self._core.commit()

        self._common_commits.make(None if self._rank is None else Ranks(), commit)

    def check(self) -> None:
        """Raises OSError if a commit that ranks make together has failed on one of them."""
        self._common_commits.check()

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that were read from the drives, and written, since the volume was made."""
        assert self._core is not None
        read, written = self._core.bytes_moved
        return {"bytes_read": read, "bytes_written": written}

    def close(self) -> None:
        """Ends the use of the volume, when no step is under way.

        Tensors whose state is on it are empty then.
        """
        with self._lock:
            self._letting_go()
            self._closing()
            self._held.clear()
            self._parts.clear()

    # ---- state ----

    def state(self, group: int) -> _state.State:
        """What the optimizer has of a partition whose state is on the volume; its `step` is 0."""
        held = self._held[group]
        tensors = {name: value for name, value in held.tensors.items() if name != _MASTER}
        return {**held.beside, **tensors}

    def known(self, group: int, known: _state.State | None) -> _state.State | None:
        """State of a partition as the coming step takes it: all on the volume, or all in memory.

        Args:
            group: the partition's number.
            known: what the optimizer has of it; None: nothing.

        Returns:
            the same; or, of a partition that was never stepped, fresh state.

        Raises:
            OSError: a drive cannot be read.
        """
        part = self._parts.get(group)
        if part is not None and part.is_written:
            self._bring(group)
        own = {name: each for name, each in self._held[group].tensors.items() if name != _MASTER}
        if known is None and group not in self._stepped:
            return self.state(group)
        if known is None or any(known.get(name) is not each for name, each in own.items()):
            # Loaded, or deleted: the master goes with it.
            self._bring(group)
        return known

    def placed(self, group: int, state: _state.State) -> _state.State:
        """`state` of a partition, once a step has written it to the volume."""
        own = {name: each for name, each in self._held[group].tensors.items() if name != _MASTER}
        return state if all(state[name] is each for name, each in own.items()) else {**state, **own}

    def in_use(self, groups: Iterable[int]) -> list[torch.UntypedStorage]:
        """Memory that the coming step of these partitions reads, and that is let go of then."""
        with without_waiting():
            return [
                tensor.untyped_storage()
                for group in groups
                if group in self._held and group not in self._on_volume
                for tensor in self._held[group].tensors.values()
            ]

    def leaving(self, groups: Collection[int]) -> list[partial[Any]]:
        """The calls of the coming step after which these partitions' state is on the volume.

        They are made one directly after the other.
        """
        stepped = [group for group in groups if group in self._held]
        calls: list[partial[Any]] = [partial(self._stepped.update, stepped)]
        for group in stepped:
            held = self._held[group]
            # Also what is on the volume now: a thread may bring it, or a part, before these calls.
            calls.append(partial(self._parts.pop, group, None))
            calls.append(partial(self._on_volume.add, group))
            for tensor, place in self._pairs(held, held.places):
                # The class goes first: with the other one the data would be waited for.
                calls.append(partial(setattr, tensor, "__class__", torch.Tensor))
                calls.append(partial(setattr, tensor, "data", place))
                calls.append(partial(setattr, tensor, "__class__", Written))
        return calls

    @staticmethod
    def _pairs(
        held: _Held, memory: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the state, and each view, with what it is in `memory`."""
        pairs = [(tensor, memory[name]) for name, tensor in held.tensors.items()]
        for piece, begin, numel in held.views:
            pairs.append((piece, memory[_MASTER].narrow(0, begin, numel)))
        return pairs

    def pieces(self, group: int, runs: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
        """Pieces of the master of a partition: tensors that go where the master goes.

        Those that were given out before are used no more.

        Args:
            group: the partition's number.
            runs: first element and number of elements of each.
        """
        held = self._held[group]
        with self._lock, without_waiting():
            for piece, _, _ in held.views:
                self._group_of.pop(id(piece), None)
                self._run_of.pop(id(piece), None)
            forget([piece for piece, _, _ in held.views])
            held.views.clear()
            master = held.tensors[_MASTER].detach()
            for begin, numel in runs:
                piece = _empty(master.dtype)
                held.views.append((piece, begin, numel))
                self._group_of[id(piece)] = group
                self._run_of[id(piece)] = begin, numel
                remember([piece], self)
                piece.data = master.narrow(0, begin, numel)
                if group in self._on_volume:
                    piece.__class__ = Written
            return [piece for piece, _, _ in held.views]

    # ---- what is on the volume, and used ----

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Brings what `tensors` are of into memory: pieces alone, or whole partitions."""
        for tensor in tensors:
            group, run = self._group_of[id(tensor)], self._run_of.get(id(tensor))
            if run is None:
                self._bring(group)
            else:
                self._bring_piece(group, tensor, *run)

    def wait_for_all(self) -> None:
        """Brings the state of all partitions into memory."""
        for group in self._held:
            self._bring(group)

    def narrow(self, tensor: torch.Tensor, begin: int, numel: int) -> torch.Tensor | None:
        """A part of a master or moment that is on the volume, once it is in memory."""
        group = self._group_of[id(tensor)]
        held = self._held[group]
        names = [name for name, each in held.tensors.items() if each is tensor]
        # Codes and scales have other numbers of elements, and pieces their own way.
        if not names or held.places[names[0]].numel() != held.shape.numel():
            return None
        with self._lock:
            if group not in self._on_volume:
                return None
            part = self._part(group, begin, begin + numel)
            return part.tensors[names[0]].narrow(0, begin, numel)

    def _bring_piece(self, group: int, piece: torch.Tensor, begin: int, numel: int) -> None:
        with self._lock:
            if group not in self._on_volume:
                return
            there = self._part(group, begin, begin + numel).tensors[_MASTER]
            calls = [
                partial(setattr, piece, "data", there.narrow(0, begin, numel)),
                partial(setattr, piece, "__class__", torch.Tensor),
            ]
            _call_all(calls)

    def _bring(self, group: int) -> None:
        with self._lock:
            if group not in self._on_volume:
                return
            held = self._held[group]
            memory = self._part(group, 0, held.shape.numel()).tensors
            calls: list[partial[Any]] = []
            for tensor_of, there in self._pairs(held, memory):
                calls.append(partial(setattr, tensor_of, "data", there))
                calls.append(partial(setattr, tensor_of, "__class__", torch.Tensor))
            calls.append(partial(self._on_volume.discard, group))
            calls.append(partial(self._parts.pop, group, None))
            _call_all(calls)

    def _part(self, group: int, begin: int, end: int) -> MappedState:
        """Memory for a partition on the volume, with what has elements from `begin` to `end`.

        Raises:
            OSError: a drive fails, or has no room.
        """
        finish = None if self._finish is None else self._finish()
        if finish is not None:
            finish()
        assert self._core is not None
        held = self._held[group]
        numel = held.shape.numel()
        part = self._parts.get(group)
        if part is None:
            part = self._parts[group] = MappedState(self._folder(), held.places, numel)
        with without_waiting():
            tensor = self._tensor(held, part.tensors, self._weights[group])
        for first, last in part.missing(begin, end):
            part.take(first, last)
            self._core.read(held.number, tensor, begin=first, end=last)
            part.note(first, last)
            _LOGGER.info(
                "%d of %d elements of a partition's state are read from the volume into a mapped "
                "file in `%s`",
                last - first,
                numel,
                os.fspath(part.folder),
            )
        return part

    def _folder(self) -> str | os.PathLike[str]:
        """Where exports are: the folder of the volume with the most room, if it has folders."""
        folders = [path for path in self._volume.paths if Path(path).is_dir()]
        return max(
            folders or [tempfile.gettempdir()], key=lambda path: shutil.disk_usage(path).free
        )


def _call_all(calls: Iterable[partial[Any]]) -> None:
    """Not a loop: Ctrl-C does not come between."""
    with without_waiting():
        deque(map(partial.__call__, calls), maxlen=0)


def swapped_on(
    volume: Volume | None,
    params: object,
    new_state: Callable[[torch.Tensor, _state.Allocate], _state.State],
) -> SwappedPartitions | None:
    """The state of this rank's partitions on `volume`; None without one.

    Args:
        volume: what the user has said of it.
        params: what the partitions hold: something with a `repr` that says it.
        new_state: as `SwappedPartitions` has it.
    """
    if volume is None:
        return None
    ranks = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    return SwappedPartitions(
        volume,
        new_state=new_state,
        identity=repr([params, rank, ranks]),
        rank=rank if ranks > 1 else None,
    )


def commit_last_step(swapped: SwappedPartitions | None, synchronize: Callable[[], None]) -> None:
    """As `SwappedPartitions.commit`.

    Raises:
        ValueError: there is no volume that commits.
        OSError: the step has failed, or a drive; or another rank has.
    """
    if swapped is None or swapped.committed_steps is None:
        raise ValueError(
            "commit() is called and there is no volume that commits, expected offload_optimizer "
            'with the device nvme, and "volume": {"durability": "commit"}'
        )
    swapped.commit(synchronize)


def _host_sides(
    partitions: Mapping[int, _Held], weights: Mapping[int, torch.Tensor]
) -> Callable[[int], _core.TensorView]:
    """Gives the host side of the weights of one of the core's tensors, by its number.

    Args:
        partitions: those whose state is on the volume.
        weights: of each partition.
    """

    def find(number: int) -> _core.TensorView:
        (group,) = (group for group, held in partitions.items() if held.number == number)
        with without_waiting():
            return view(weights[group])

    return find


def _behind(
    finish: weakref.WeakMethod[Callable[[], None]],
) -> Callable[[], AbstractContextManager[None]]:
    """Gives a context that begins when the last step is over, by `finish` if its object lives."""

    @contextlib.contextmanager
    def between_steps() -> Iterator[None]:
        if (found := finish()) is not None:
            found()
        yield

    return between_steps


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def _let_go(groups: dict[int, _Held]) -> None:
    """The optimizer is gone, and what is on the volume stays there."""
    with without_waiting():
        for held in groups.values():
            tensors = [*held.tensors.values(), *(piece for piece, _, _ in held.views)]
            forget(tensors)
            for tensor in tensors:
                if type(tensor) is Written:
                    tensor.data = _empty(tensor.dtype)
                    setattr(tensor, "__class__", torch.Tensor)  # noqa: B010
