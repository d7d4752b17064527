"""Partitions whose state is on a volume: masters and moments that are there between steps.

What a program has of one is a lease (`lease.py`).

The master of a bf16 weight that the program cannot write is on the volume as what the weight in
host memory lacks of it (`rust/tier/swap/packed.rs`). In memory it is whole.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from stepwell import _core, _state
from stepwell._budget import GIB, share_of_free_bytes
from stepwell._tensors import view
from stepwell.access.descriptive import without_waiting
from stepwell.deepspeed.zero.lease import Brought, Lease
from stepwell.ranks.collective import Ranks
from stepwell.store.placeholders import MASTER, Placeholders
from stepwell.store.sharded_volume import agree_on_counts
from stepwell.store.state_volume import StateVolume
from stepwell.store.volume_end import end_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.store.volume import Volume

__all__ = ["SwappedPartitions", "commit_last_step", "swapped_on"]

_LOGGER = logging.getLogger(__name__)


class SwappedPartitions:
    """The state of partitions, on one volume of this rank.

    Attributes:
        volume: has it, by the partitions' numbers.
        leases: of the partitions whose state is there. A step steps all of them.
        lock: held while state is brought, which a signal's handler may use, or a step begins.

    Args:
        options: what the user has said of the volume.
        new_state: makes state of a partition that was never stepped, of a tensor like its master,
            with a function that gives memory.
        identity: what the partitions are: a volume of others is not resumed.
        rank: of this process, or None if it is the only one: a part of the volume's name.
        threads: workers that step; None: as the engine chooses.
    """

    def __init__(
        self,
        options: Volume,
        *,
        new_state: Callable[[torch.Tensor, _state.Allocate], _state.State],
        identity: str,
        rank: int | None,
        threads: int | None,
    ) -> None:
        limit = "stepwell.host_bytes_max"
        self.volume: StateVolume[int] = StateVolume(options, limit=limit, workers=threads)
        self.leases: dict[int, Lease] = {}
        self._brought = Brought({}, set())
        self.lock = threading.RLock()
        self._new_state, self._identity, self._rank = new_state, identity, rank
        # Of host sides: the end of the volume holds no lease.
        self._weights: dict[int, torch.Tensor] = {}

    def open(
        self,
        partitions: Sequence[Partition],
        host_bytes: int | None,
        *,
        beside: int,
        finish: Callable[[], None],
    ) -> None:
        """Makes the volume, or finds it again. Partitions without elements have no state there.

        Args:
            partitions: of all groups.
            host_bytes: for state and buffers; None: `share_of_free_bytes`, but for what is taken
                beside.
            beside: bytes of host memory that are taken for other things.
            finish: a method, held weakly, that waits for the step that is under way.

        Raises:
            ValueError: there is not even the memory for buffers; the volume is of other partitions,
                or those of the ranks are not of one run.
            OSError: a drive is full, or cannot be used; or another rank has failed.
        """
        if host_bytes is None:
            host_bytes = max(share_of_free_bytes() - beside, 0)
        volume = self.volume
        between_steps = partial(_between_steps, weakref.WeakMethod(finish), self.lock)
        volume.ranks = None if self._rank is None else Ranks()
        choose = partial(self._choose, partitions, host_bytes)
        volume.open(choose, partial(_view_of, self._weights), rank=self._rank)
        if volume.core is None:
            return
        # Of new volumes none has counts, on all ranks.
        if volume.ranks is not None and (counts := volume.counts) is not None:
            try:
                agree_on_counts(volume.ranks, list(map(counts.get, range(len(partitions)))))
            except BaseException:
                volume.close()
                raise
        for group in volume.placeholders:
            partition = partitions[group]
            self.leases[group] = Lease(
                volume, group, partition, self._brought, between_steps=between_steps
            )
        self._brought.unstepped.update(self.leases)
        self._closing = end_with(self, volume, between_steps)
        self._letting_go = weakref.finalize(self, _let_go, self.leases, self._brought)

    def _choose(self, partitions: Sequence[Partition], host_bytes: int) -> tuple[str, int] | None:
        """What this rank has on its volume; None: there is no state, or all fits."""
        nbytes = sum(
            each.moments_bytes + each.is_rounded * each.master.itemsize * each.weight.numel()
            for each in partitions
        )
        if nbytes == 0:
            return None
        if nbytes <= host_bytes and not self.volume.commits:
            _LOGGER.warning(
                "all optimizer state (%.2f GiB) fits into host memory, and no volume is made. "
                "hint: host_bytes_max in the block `stepwell` says how much memory may be taken",
                nbytes / GIB,
            )
            return None

        def made(partition: Partition, memory: _state.Allocate) -> Placeholders:
            numel = partition.weight.numel()
            weight = memory(numel, partition.weight.dtype)
            if not partition.is_rounded:
                return Placeholders.of(weight, self._new_state(weight, memory))
            master = memory(numel, partition.master.dtype)
            state = {**self._new_state(master, memory), MASTER: master}
            # Offloaded weights are the program's, which may write them.
            is_packed = weight.dtype == torch.bfloat16 and not partition.is_offloaded
            return Placeholders.of(weight, state, is_packed=is_packed)

        stepped = {group: each for group, each in enumerate(partitions) if each.weight.numel()}
        left = self.volume.lay_out(
            lambda memory: {group: made(each, memory) for group, each in stepped.items()},
            host_bytes,
        )
        return self._identity, left

    def begin(self, group: int, weight: torch.Tensor) -> int:
        """The host side of a partition's weights is there, also of a master that is their own.

        It is overwritten where the volume was resumed and has weights. Returns how many updates the
        volume has of the partition.

        Raises:
            OSError: a drive cannot be read.
        """
        self._weights[group] = weight
        counts = self.volume.counts
        if counts is None:
            return 0
        self._brought.unstepped.discard(group)
        self.volume.read_weights(group)
        return counts[group]

    def has_master(self, group: int) -> bool:
        """Whether the master of a partition is on the volume, and not only its moments."""
        return group in self.leases and MASTER in self.leases[group].tensors

    @contextlib.contextmanager
    def stepping(self) -> Iterator[list[Callable[[], object]]]:
        """A context in which a step begins, and nothing is brought.

        It gives what is called when the step has begun, functions of C: all state is away then.
        """
        with self.lock:
            memories, unstepped = self._brought
            # What goes with them goes at the end of this.
            before = list(memories.values())
            yield [memories.clear, unstepped.clear]
            before.clear()

    def close(self) -> None:
        """Ends the use of the volume, when no step is under way.

        Tensors whose state is on it are empty then.
        """
        with self.lock:
            self._letting_go()
            self._closing()
            self.leases.clear()


def swapped_on(
    options: Volume | None,
    params: object,
    new_state: Callable[[torch.Tensor, _state.Allocate], _state.State],
    *,
    threads: int | None,
) -> SwappedPartitions | None:
    """The state of this rank's partitions on a volume; None without one.

    Args:
        options: what the user has said of it.
        params: what the partitions hold: something with a `repr` that says it.
        new_state: as `SwappedPartitions` has it.
        threads: likewise.
    """
    if options is None:
        return None
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return SwappedPartitions(
        options,
        new_state=new_state,
        identity=repr([params, rank, ranks]),
        rank=rank if ranks > 1 else None,
        threads=threads,
    )


def commit_last_step(swapped: SwappedPartitions | None, synchronize: Callable[[], None]) -> None:
    """As `StateVolume.commit`.

    Raises:
        ValueError: there is no volume that commits.
        OSError: the step has failed, or a drive; or another rank has.
    """
    if swapped is None or not swapped.volume.commits:
        raise ValueError(
            "commit() is called and there is no volume that commits, expected offload_optimizer "
            'with the device nvme, and "volume": {"durability": "commit"}'
        )
    swapped.volume.commit(synchronize)


def _view_of(weights: Mapping[int, torch.Tensor], group: int) -> _core.TensorView:
    with without_waiting():
        return view(weights[group])


@contextlib.contextmanager
def _between_steps(
    finish: weakref.WeakMethod[Callable[[], None]], lock: threading.RLock
) -> Iterator[None]:
    """A context that begins when the last step is over, by `finish` if its object lives.

    With `lock` no other begins in it.
    """
    with lock:
        if (found := finish()) is not None:
            found()
        yield


def _let_go(leases: dict[int, Lease], brought: Brought) -> None:
    for lease in leases.values():
        lease.let_go()
    brought.memories.clear()
