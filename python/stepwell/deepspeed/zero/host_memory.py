"""Host memory of ZeRO's partitions: what is announced, taken, and pinned. Imports no DeepSpeed.

Of each partition there is a master, a twin of the weights where the master has another dtype, and,
unless updates are deferred, a gradient. All of it is announced before any is taken.

DeepSpeed copies weights that it offloads from the device to memory of `torch.empty`, whose pages
the copy then touches for the first time, one by one: 1.4 s for 2.5 GB. A `_core.Buffer` is touched
by all cores at once (`TouchedMemory`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from stepwell import _core
from stepwell._budget import GIB, announce
from stepwell._tensors import tensor_on
from stepwell.store.deferred import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.deepspeed.zero.swapped import SwappedPartitions
    from stepwell.store.deferred import Deferred, Extents
    from stepwell.store.engine import Engine

__all__ = ["HostMemory", "TouchedMemory", "announced", "bytes_beside_state"]

_LOGGER = logging.getLogger(__name__)

_TOUCHED_NBYTES_MIN = 1 << 20
"""Of a tensor that is worth a job of the pool."""


class HostMemory:
    """Takes the memory of the partitions that an engine steps.

    Attributes:
        copies: offloaded weights with the masters that they are copies of.
        resumed: of partitions that a resumed volume has: how many updates they have seen.

    Args:
        engine: pins it.
        swapped: has the state that is on a volume; None: none is.
    """

    def __init__(self, engine: Engine, swapped: SwappedPartitions | None) -> None:
        self._engine, self._swapped = engine, swapped
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.resumed: dict[int, int] = {}

    def take(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
        """Memory of its own for so many elements; zeros."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        buffer = _core.Buffer(numel * dtype.itemsize)
        if is_pinned:
            self._engine.core.pin(buffer)
        return tensor_on(buffer).view(dtype)

    def move(self, group: int, partition: Partition, *, is_pinned: bool) -> torch.Tensor | None:
        """Takes host memory for the master and the weights of a partition, and moves them there.

        Returns the host side of its weights; None: the master is.
        """
        master, weight, _, _, is_offloaded = partition
        numel, swapped = weight.numel(), self._swapped
        if swapped is not None and swapped.has_master(group):
            twin = weight
            if not is_offloaded:
                twin = self.take(numel, weight.dtype, is_pinned=is_pinned).copy_(weight)
            self._begin(group, twin, weight)
            return twin
        is_same = not partition.is_rounded
        is_upload = is_same and not is_offloaded
        moved = self.take(numel, master.dtype, is_pinned=is_pinned and is_upload)
        if is_same:
            host_side = None
            self.copies += [(weight, master)] if is_offloaded else []
        else:
            host_side = weight
            if not is_offloaded:
                host_side = self.take(numel, weight.dtype, is_pinned=is_pinned)
        if master.numel() == numel:
            moved.copy_(master.detach())
        elif host_side is None or is_offloaded:
            moved.copy_(weight)
        else:
            # By way of pinned memory, and widened by all cores.
            moved.copy_(host_side.copy_(weight))
        master.data = moved
        if swapped is not None and group in swapped.leases:
            self._begin(group, master.detach(), weight)
        return host_side

    def _begin(self, group: int, host_side: torch.Tensor, weight: torch.Tensor) -> None:
        """The volume is told of the host side of a partition's weights.

        Both are overwritten where it was resumed.
        """
        assert self._swapped is not None
        if count := self._swapped.begin(group, host_side):
            self.resumed[group] = count
            weight.copy_(host_side)


def bytes_beside_state(partition: Partition) -> int:
    """What a partition takes in host memory where all its state is on a volume."""
    master, weight, grad_dtype, _, is_offloaded = partition
    is_same = weight.dtype == master.dtype
    weights = (0 if is_offloaded else weight.nbytes) + (
        weight.nbytes if is_same and is_offloaded else 0
    )
    return weights + weight.numel() * grad_dtype.itemsize


def announced(
    partitions: Sequence[Partition],
    host_bytes_max: int | None,
    swapped: SwappedPartitions | None,
    deferred: Deferred | None,
    extents: Extents,
) -> tuple[_core.MemoryClaim, int | None]:
    """Announces what partitions take.

    Returns the claim of it, which lasts until all is taken, and what is left of `host_bytes_max`.
    """
    state = moments = crossing = held = waiting = 0
    for group, (master, weight, grad_dtype, moments_bytes, is_offloaded) in enumerate(partitions):
        numel, is_same = weight.numel(), weight.dtype == master.dtype
        # Then the master itself is what is uploaded.
        is_upload = is_same and not is_offloaded
        # Gradients that wait for their turn are the engine's.
        crossing += weight.nbytes + (numel * grad_dtype.itemsize if deferred is None else 0)
        held += weight.nbytes if is_offloaded else 0
        if swapped is None or group not in swapped.leases:
            state += moments_bytes
            moments += moments_bytes
        if swapped is None or not swapped.has_master(group):
            state += 0 if is_upload else numel * master.dtype.itemsize
            held += master.nbytes
    if swapped is not None:
        state += swapped.volume.memory_bytes
        held += swapped.volume.memory_bytes
    if deferred is not None:
        memory = memory_of(extents, deferred)
        waiting = memory.pinned
        if memory.selected:
            _LOGGER.info("%.2f GiB of device memory for selected channels", memory.selected / GIB)
    claim = announce(
        sum(partition.weight.numel() for partition in partitions),
        state=state,
        crossing=crossing + waiting,
        limit=host_bytes_max,
        moments=moments,
        held=held,
        waiting=waiting,
    )
    return claim, None if host_bytes_max is None else host_bytes_max - state - crossing


class TouchedMemory(TorchFunctionMode):
    """While it is entered `torch.empty` gives large tensors on the CPU memory of a `Buffer`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As torch's, but for `torch.empty(numel, dtype=, device="cpu")` of 1 MiB or more."""
        kwargs = kwargs or {}
        if (
            func is torch.empty
            and len(args) == 1
            and isinstance(args[0], int)
            and kwargs.keys() == {"dtype", "device"}
            and kwargs["device"] == "cpu"
        ):
            (numel,), dtype = args, kwargs["dtype"]
            nbytes = numel * dtype.itemsize
            if nbytes >= _TOUCHED_NBYTES_MIN:
                return tensor_on(_core.Buffer(nbytes)).view(dtype)
        return func(*args, **kwargs)
