"""What a program has of a partition's state on a volume: tensors whose use brings it into memory.

A tensor of such state is on the volume, or it is in memory. While it is on the volume it has the
class `Written` (`stepwell.access.writes`) and lies at addresses that nothing is at. Its first use
brings the state of its partition into memory; so DeepSpeed's accessors, checkpoints and loaders
need not know of it. The next step goes on from that memory and writes it to the volume. So what is
written to such tensors counts, and a view that was taken before a step is a snapshot after it.

A use of a fragment (`narrow` of a flat tensor, or a piece of the master) brings the chunks that it
lies in, and no others. The partition counts as on the volume, unless a fragment was written to by
the time of the next step. Then the rest is brought, and the step goes on from memory.

Cost: nothing per step, beside two assignments for each tensor that was in memory, and a digest of
the chunks that were looked at.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell.access.under_way import without_waiting
from stepwell.access.writes import Written, forget, remember
from stepwell.deepspeed.zero.mapped import MappedState
from stepwell.store.places import MASTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from stepwell import _state
    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.store.state_volume import StateVolume

__all__ = ["Lease"]


class Lease:
    """The state of one partition, as a program has it.

    Attributes:
        tensors: what is on the volume, by name: moments, trailing bits, the master.
        is_away: whether the state is on the volume. Of what was brought of it a part may be used.
        was_stepped: whether the optimizer has state of it, unless the program has deleted that.

    Args:
        volume: has the state, which has its places there.
        group: the partition's number.
        partition: the partition.
        between_steps: gives a context that begins when the last step is over, in which none begins.
    """

    def __init__(
        self,
        volume: StateVolume[int],
        group: int,
        partition: Partition,
        *,
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._volume, self._group, self._numel = volume, group, partition.weight.numel()
        self._between_steps = between_steps
        _, self._places, self._in_memory, _ = volume.places[group]
        self.tensors = {name: _empty(place.dtype) for name, place in self._places.items()}
        if MASTER in self.tensors:
            self.tensors[MASTER] = partition.master
        # What of them the optimizer has.
        self._own = {name: each for name, each in self.tensors.items() if name != MASTER}
        # Pieces of the master that other code has, by id: first element and number of elements.
        self._pieces: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.was_stepped = self.is_away = False
        # What was brought of it while it is away.
        self._memory: MappedState | None = None
        remember(self.tensors.values(), self)

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
        if self._memory is not None and self._memory.is_written:
            self.wait_for_all()
        if known is None and not self.was_stepped:
            return self.state()
        if known is None or any(known.get(name) is not each for name, each in self._own.items()):
            # Loaded, or deleted: the master goes with it.
            self.wait_for_all()
        return known

    def stepped(self, state: _state.State) -> _state.State:
        """`state`, once a step has written it to the volume."""
        is_own = all(state[name] is each for name, each in self._own.items())
        return state if is_own else {**state, **self._own}

    def leaving(self) -> list[partial[Any]]:
        """The calls of the coming step after which the state is on the volume.

        They are made one directly after the other.
        """
        calls = [
            partial(setattr, self, "was_stepped", True),
            # Also where it is away now: a thread may bring it, or a part, before these calls.
            partial(setattr, self, "_memory", None),
            partial(setattr, self, "is_away", True),
        ]
        for tensor, place in self._pairs(self._places):
            # The class goes first: with the other one the data would be waited for.
            calls.append(partial(setattr, tensor, "__class__", torch.Tensor))
            calls.append(partial(setattr, tensor, "data", place))
            calls.append(partial(setattr, tensor, "__class__", Written))
        return calls

    def _pairs(self, memory: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the state, and each piece, with what it is in `memory`."""
        pairs = [(tensor, memory[name]) for name, tensor in self.tensors.items()]
        for piece, begin, numel in self._pieces.values():
            pairs.append((piece, memory[MASTER].narrow(0, begin, numel)))
        return pairs

    def pieces(self, runs: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
        """Pieces of the master: tensors that go where the master goes.

        Those that were given out before are used no more.

        Args:
            runs: first element and number of elements of each.
        """
        with self._between_steps(), without_waiting():
            dtype = self.tensors[MASTER].dtype
            found = [(_empty(dtype), begin, numel) for begin, numel in runs]
            forget(piece for piece, _, _ in self._pieces.values())
            self._pieces = {id(each[0]): each for each in found}
            pieces = [piece for piece, _, _ in found]
            remember(pieces, self)
            master = self.tensors[MASTER].detach()
            for piece, begin, numel in found:
                piece.data = master.narrow(0, begin, numel)
                if self.is_away:
                    piece.__class__ = Written
            return pieces

    def let_go(self) -> None:
        """The optimizer is gone, and what is on the volume stays there."""
        self._memory = None
        tensors = [*self.tensors.values(), *(piece for piece, _, _ in self._pieces.values())]
        forget(tensors)
        _move((each, _empty(each.dtype)) for each in tensors if type(each) is Written)

    # ---- what is on the volume, and used, as `stepwell.access.writes.Waiting` has it ----

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Brings what `tensors` are of into memory: pieces alone, or all of the partition."""
        for tensor in tensors:
            if id(tensor) not in self._pieces:
                self.wait_for_all()
                continue
            with self._between_steps():
                _, begin, numel = self._pieces[id(tensor)]
                if (memory := self._brought(begin, begin + numel)) is not None:
                    _move([(tensor, memory.tensors[MASTER].narrow(0, begin, numel))])

    def wait_for_all(self) -> None:
        """Brings the state into memory."""
        with self._between_steps():
            if (memory := self._brought(0, self._numel)) is not None:
                # Where Ctrl-C comes between, a step brings the rest.
                memory.is_lent = True
                _move(self._pairs(memory.tensors))
                self.is_away, self._memory = False, None

    def narrow(self, tensor: torch.Tensor, begin: int, numel: int) -> torch.Tensor | None:
        """A part of a master or moment that is on the volume, once it is in memory."""
        name = next((name for name, each in self.tensors.items() if each is tensor), None)
        # Codes and scales have other numbers of elements, and pieces their own way.
        if name is None or self._places[name].numel() != self._numel:
            return None
        with self._between_steps():
            memory = self._brought(begin, begin + numel)
            return None if memory is None else memory.tensors[name].narrow(0, begin, numel)

    def _brought(self, begin: int, end: int) -> MappedState | None:
        """Memory that has what is on the volume, from `begin` to `end`; None: nothing is there.

        Raises:
            OSError: a drive fails, or has no room.
        """
        if not self.is_away:
            return None
        if self._memory is None:
            self._memory = MappedState(self._volume.options.paths, self._places, self._numel)
        memory = self._memory
        memory.bring(begin, end, partial(self._volume.read, self._group, memory.tensors))
        return memory


def _move(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Has tensors be plain, and where others are. Other threads see them so, or as they were."""
    with without_waiting():
        for tensor, there in pairs:
            tensor.data = there
            tensor.__class__ = torch.Tensor


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")
