"""What a program has of a partition's state on a volume: tensors whose use brings it into memory.

They are stand-ins (`stepwell.access.stand_ins`), at the placeholders of that state. Their first use
brings the state of the partition into memory, and every use is one of that memory; so DeepSpeed's
accessors, checkpoints and loaders need not know of it. The next step goes on from that memory and
writes it to the volume. So what is written to such tensors counts. From then on a use brings the
state anew. What a call has that began before the step, or a view, is a snapshot.

A use of a fragment (`narrow` of a flat tensor, or a piece of the master) brings the chunks that it
lies in, and no others. The partition counts as on the volume, unless a fragment was written to by
the time of the next step. Then the rest is brought, and the step goes on from memory.

Cost: nothing per step, beside a digest of the chunks that were looked at.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell.access import stand_ins
from stepwell.deepspeed.zero.mapped import MappedState
from stepwell.store.placeholders import MASTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from stepwell import _state
    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.store.state_volume import StateVolume

__all__ = ["Brought", "Lease"]


class Brought(NamedTuple):
    """What was brought of partitions. A step empties both when it has begun."""

    memories: dict[int, MappedState]
    """By the partition's number: what a use of its state uses since the last step."""
    unstepped: set[int]
    """The partitions of which the optimizer cannot have state yet."""


class Lease:
    """The state of one partition, as a program has it.

    Attributes:
        tensors: what is on the volume, by name: moments, trailing bits, the master.

    Args:
        volume: has the state, which has placeholders there.
        group: the partition's number.
        partition: the partition.
        brought: of all partitions.
        between_steps: gives a context that begins when the last step is over, in which none begins.
    """

    def __init__(
        self,
        volume: StateVolume[int],
        group: int,
        partition: Partition,
        brought: Brought,
        *,
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._volume, self._group, self._numel = volume, group, partition.weight.numel()
        self._brought, self._between_steps = brought, between_steps
        _, self._placeholders, self._in_memory, _ = volume.placeholders[group]
        self.tensors = {
            name: partition.master if name == MASTER else _empty(each.dtype)
            for name, each in self._placeholders.items()
        }
        for name, tensor in self.tensors.items():
            stand_ins.begin(tensor, self._placeholders[name], _Tensor(self, name))
        # What of them the optimizer has.
        self._own = {name: each for name, each in self.tensors.items() if name != MASTER}
        # Of the master: other code has them.
        self._pieces: list[torch.Tensor] = []

    @property
    def is_away(self) -> bool:
        """Whether the state is on the volume. Of what was brought of it a part may be used."""
        memory = self._brought.memories.get(self._group)
        return memory is None or not memory.is_lent

    # ---- the optimizer's state, and steps ----

    def state(self) -> _state.State:
        """What the optimizer has of the partition while it is on the volume; its `step` is 0."""
        return {**self._in_memory, **self._own}

    def known(self, known: _state.State | None) -> _state.State | None:
        """State as the coming step takes it: all on the volume, or all in memory.

        Args:
            known: what the optimizer has of it; None: nothing.

        Returns:
            the same; or, of a partition that was never stepped, fresh state.

        Raises:
            OSError: a drive cannot be read.
        """
        memory = self._brought.memories.get(self._group)
        if memory is not None and memory.is_written:
            self.all()
        if known is None and self._group in self._brought.unstepped:
            return self.state()
        if known is None or any(known.get(name) is not each for name, each in self._own.items()):
            # Loaded, or deleted: the master goes with it.
            self.all()
        return known

    def stepped(self, state: _state.State) -> _state.State:
        """`state`, once a step has written it to the volume."""
        is_own = all(state[name] is each for name, each in self._own.items())
        return state if is_own else {**state, **self._own}

    def runs(self, runs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the coming step works with: of the state that `known` gave, and the master.

        Each is where it is in memory; or at its placeholder, where all of it is away.

        Args:
            runs: what it works with of the state, by the core's names.
        """
        if MASTER in self.tensors:
            runs = {**runs, MASTER: self.tensors[MASTER]}
        memory = self._placeholders if self.is_away else self._brought.memories[self._group].tensors
        where = {id(tensor): memory[name] for name, tensor in self.tensors.items()}
        return {name: where.get(id(run), run).detach() for name, run in runs.items()}

    def pieces(self, runs: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
        """Pieces of the master: tensors that go where the master goes.

        Those that were given out before are used no more.

        Args:
            runs: first element and number of elements of each.
        """
        whole, self._pieces = self._placeholders[MASTER], []
        for begin, numel in runs:
            piece = _empty(whole.dtype)
            source = _Piece(self, begin, numel)
            stand_ins.begin(piece, whole.narrow(0, begin, numel), source)
            self._pieces.append(piece)
        return list(self._pieces)

    def let_go(self) -> None:
        """The optimizer is gone, and what is on the volume stays there."""
        memory = None if self.is_away else self._brought.memories[self._group]
        for tensor in (*self.tensors.values(), *self._pieces):
            there = _empty(tensor.dtype) if memory is None else tensor.detach()
            stand_ins.end(tensor, there)

    # ---- what is on the volume, and used ----

    def all(self) -> dict[str, torch.Tensor]:
        """The state in memory, by name: that of the last step, and what was written to it since.

        Raises:
            OSError: a drive fails, or has no room.
        """
        return self._bring(0, self._numel, is_lent=True).tensors

    def part(self, name: str, begin: int, numel: int) -> torch.Tensor | None:
        """A part of one of these; None: it has not as many elements as the partition.

        Raises:
            OSError: as `all`.
        """
        # Codes and scales.
        if self._placeholders[name].numel() != self._numel:
            return None
        whole = self._bring(begin, begin + numel, is_lent=False).tensors[name]
        return whole.detach().narrow(0, begin, numel)

    def _bring(self, begin: int, end: int, *, is_lent: bool) -> MappedState:
        """Memory that has the state from `begin` to `end`."""
        memory = self._brought.memories.get(self._group)
        if memory is not None and memory.is_lent:
            return memory
        with self._between_steps():
            memory = self._brought.memories.get(self._group)
            if memory is None:
                memory = MappedState(self._volume.options.paths, self._placeholders, self._numel)
                self._brought.memories[self._group] = memory
            memory.bring(begin, end, partial(self._volume.read, self._group, memory.tensors))
            memory.is_lent |= is_lent
            return memory


class _Tensor(NamedTuple):
    """What one of a lease's tensors stands for."""

    lease: Lease
    name: str

    def whole(self) -> torch.Tensor:
        return self.lease.all()[self.name]

    def part(self, begin: int, numel: int) -> torch.Tensor | None:
        return self.lease.part(self.name, begin, numel)


class _Piece(NamedTuple):
    """What a piece of the master stands for."""

    lease: Lease
    begin: int
    numel: int

    def whole(self) -> torch.Tensor:
        found = self.lease.part(MASTER, self.begin, self.numel)
        assert found is not None
        return found

    def part(self, begin: int, numel: int) -> torch.Tensor | None:
        return self.lease.part(MASTER, self.begin + begin, numel)


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")
