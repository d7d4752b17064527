"""State of parameters on a volume: which parameters' it is, what stands for it, how it is read.

In the optimizer's state a `Placeholder` stands for a tensor that is on the volume, and only names
what the core has. No code outside of a step meets one: a program that asks for `state` gets tensors
in memory, with copies of what the volume has (`Swapped.read`). The step after that goes on from
those tensors, and placeholders stand for the state again. So a state dict is a snapshot, and what
is written to `state`, or loaded, counts.

Fingerprints, of which a parameter has 4 bytes per 65,536 elements, stay in memory.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _core, _state
from stepwell._budget import GIB
from stepwell._sharding import cut_of, like, local, meshes
from stepwell._tensors import view
from stepwell.store.placeholders import Placeholders
from stepwell.store.sharded_volume import agree_on_counts, ranks_of
from stepwell.store.state_volume import StateVolume
from stepwell.store.volume_end import end_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from stepwell.store.twins import Twins
    from stepwell.store.volume import Volume

__all__ = ["Swapped"]

_LOGGER = logging.getLogger(__name__)


class Swapped:
    """The state of some parameters, on a volume.

    Args:
        options: what the user has said of it.
        moments: how the moments are held.
        threads: workers that step; None: as the engine chooses.
    """

    def __init__(self, options: Volume, moments: str, threads: int | None) -> None:
        self.volume: StateVolume[torch.Tensor] = StateVolume(
            options,
            limit="host_bytes_max",
            workers=threads,
            resized_by="state of float32 parameters gets to another number by "
            "torch.distributed.checkpoint",
        )
        self._moments = moments
        self.num_noted = 0
        """How often state may have become placeholders."""
        # The `num_noted` of the last look at the state, which has left no placeholder.
        self._looked_at: int | None = None
        # Of state that was read: its tensors, which are not kept alive, with their versions.
        self._as_read: dict[torch.Tensor, dict[str, tuple[weakref.ref[torch.Tensor], int]]] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self.volume

    # ---- the beginning ----

    def awaited(self, params: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which others wait for this rank to `open` the volume. Collective.

        Where an error ends it, they are told of that.

        Args:
            params: those that are known so far.

        Raises:
            ValueError: their ranks cannot step together.
            OSError: another rank is gone.
        """
        self._meet(params)
        ranks = self.volume.ranks
        return contextlib.nullcontext() if ranks is None else ranks.awaited()

    def _meet(self, params: Iterable[torch.Tensor]) -> None:
        volume = self.volume
        volume.ranks = ranks_of(params, commits=volume.commits, known=volume.ranks)

    def open(
        self,
        owner: object,
        twins: Twins,
        host_bytes: int,
        names: Mapping[torch.Tensor, str],
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Makes the volume, or finds it again, for as much state as does not fit into memory.

        Args:
            owner: with it, or with the program, the volume ends.
            twins: the host sides of all parameters, in the order in which the forward uses them.
            host_bytes: for state and buffers.
            names: of parameters that have one: a volume of other names or shapes is not resumed.
            between_steps: as `volume_end.end_with` has it.

        Raises:
            ValueError: there is not even the memory for buffers; the volume is another model's, or
                those of the ranks are not of one run.
            OSError: a drive is full, or cannot be used; or another rank has failed.
        """
        self._meet(twins)
        weights = {param: twins.weight(param) for param in twins}
        has_rank = torch.distributed.is_initialized()
        self.volume.open(
            partial(self._choose, weights, host_bytes, names),
            lambda param: view(local(twins.weight(param))),
            rank=torch.distributed.get_rank() if has_rank else None,
        )
        if self.volume.core is not None:
            end_with(owner, self.volume, between_steps)

    def _choose(
        self,
        weights: Mapping[torch.Tensor, torch.Tensor],
        host_bytes: int,
        names: Mapping[torch.Tensor, str],
    ) -> tuple[str, int] | None:
        """What this rank has on its volume; None: it needs none."""
        weights = {param: weight for param, weight in weights.items() if local(weight).numel()}
        sizes = {param: _state.nbytes(weight, self._moments) for param, weight in weights.items()}
        if sum(sizes.values()) <= host_bytes and not self.volume.commits:
            _LOGGER.info("all state fits into host memory, and no volume is made")
            return None
        left, placeholders = self.lay_out(weights, host_bytes), self.volume.placeholders
        for param in [] if self.volume.commits else self._first_fit(sizes, left):
            left -= sizes[param]
            del placeholders[param]
        # Fingerprints and codes are of a shard: this rank's rows.
        identity = [
            (names.get(param), tuple(param.shape), *cut_of(param)) for param in placeholders
        ]
        return repr(identity), left

    def lay_out(self, weights: Mapping[torch.Tensor, torch.Tensor], host_bytes: int) -> int:
        """Gives state placeholders. Returns what buffers leave for it of `host_bytes` of memory.

        Args:
            weights: of all parameters with elements, in their order.
            host_bytes: for state and buffers.

        Raises:
            ValueError: there is not even the memory for buffers.
        """

        def made(weight: torch.Tensor, memory: _state.Allocate) -> Placeholders:
            piece = local(weight)
            own = memory(piece.numel(), piece.dtype)
            return Placeholders.of(own, _state.placed(weight, self._moments, memory))

        return self.volume.lay_out(
            lambda memory: {param: made(weight, memory) for param, weight in weights.items()},
            host_bytes,
        )

    def _first_fit(self, sizes: Mapping[torch.Tensor, int], nbytes: int) -> list[torch.Tensor]:
        """The parameters whose state goes into memory of `nbytes`.

        First small ones, of which a record would be mostly padding; then the first of the others,
        with which steps begin.
        """
        found = []
        for is_small in (True, False):
            for param, size in sizes.items():
                if (
                    self.volume.placeholders[param].weight.numel() < _core.CHUNK_LEN
                ) is not is_small:
                    continue
                if size > nbytes:
                    break
                nbytes -= size
                found.append(param)
        return found

    def resumed(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, Any]:
        """State of the parameters that a resumed volume has; `weights` are overwritten.

        Parameters without elements have none there. They count as updated with the others.

        Raises:
            OSError: a drive cannot be read.
        """
        own_counts = self.volume.counts
        if own_counts is None:
            return {}
        self.note_placeholders()
        states: dict[torch.Tensor, Any] = {}
        ranks = self.volume.ranks
        with contextlib.nullcontext() if ranks is None else ranks.awaited():
            for param, count in own_counts.items():
                if count:
                    states[param] = self._resumed(param, weights[param])
        counts = dict.fromkeys(weights, 0) | own_counts
        if ranks is not None:
            # Of plain parameters beside DTensors each rank has its own, and its own updates.
            common = [param for param in counts if meshes([param])]
            mine = [own_counts.get(param) for param in common]
            counts.update(zip(common, agree_on_counts(ranks, mine), strict=True))
        steps = max(counts.values(), default=0)
        for param, weight in weights.items():
            if count := counts[param] if param.numel() else steps:
                if param not in states:
                    # This rank has none of its rows.
                    states[param] = _state.new(weight, self._moments)
                states[param]["step"] = _state.step_tensor(count)
        return states

    def _resumed(self, param: torch.Tensor, weight: torch.Tensor) -> _state.State:
        """The placeholders of the state of a parameter, whose `weight` is read from the volume."""
        self.volume.read_weights(param)
        state = self.fresh(param)
        _state.take_fingerprints(weight, state, self._moments)
        return state

    # ---- state ----

    def fresh(self, param: torch.Tensor) -> _state.State:
        """The placeholders of the state of `param`, as a state that was never stepped."""
        found = self.volume.placeholders[param]
        return {"step": _state.step_tensor(0), **found.state, **found.in_memory}

    def is_placeholder(self, param: torch.Tensor, state: _state.State) -> bool:
        """Whether `state`, of `param`, is on the volume."""
        known = self.volume.placeholders
        own = known[param].state if param in known else {}
        return bool(own) and all(state.get(name) is each for name, each in own.items())

    def with_placeholders(self, param: torch.Tensor, state: _state.State) -> _state.State:
        """`state`, of `param`, once a step has written it to the volume."""
        self._as_read.pop(param, None)
        return {**state, **self.volume.placeholders[param].state}

    def note_placeholders(self) -> None:
        """The optimizer's state may have placeholders from now on, or once a step is submitted."""
        self.num_noted += 1

    def read(self, states: dict[torch.Tensor, _state.State], settled_at: int | None = None) -> None:
        """Replaces placeholders in `states` by memory with what the volume has.

        Args:
            states: those of the optimizer.
            settled_at: the `num_noted` after which no step was under way; None: one is. After a
                look at them, another one before the next step costs nothing.

        Raises:
            ValueError: there is no memory for it; nothing was changed.
            OSError: a drive cannot be read.
        """
        if self._looked_at == self.num_noted:
            return
        found = [param for param, state in states.items() if self.is_placeholder(param, state)]
        nbytes = sum(_state.nbytes_of(self.volume.placeholders[param].state) for param in found)
        free = _core.free_memory_bytes()
        if free is not None and nbytes > free:
            raise ValueError(
                f"state on the volume takes `{nbytes}` bytes of host memory as tensors, `{free}` "
                "are free. hint: a volume with durability='commit' and a name is a checkpoint by "
                "itself (keep=True, resume=True)"
            )
        if found:
            said = "%.2f GiB of host memory for state that is read from the volume"
            _LOGGER.info(said, nbytes / GIB)
        for param in found:
            own = self.volume.placeholders[param].state
            memory = {name: _memory_like(each) for name, each in own.items()}
            state = {**states[param], **memory}
            self.volume.read(param, state)
            states[param] = state
            self._as_read[param] = {
                name: (weakref.ref(each), each._version)
                for name, each in state.items()
                if isinstance(each, torch.Tensor)
            }
        self._looked_at = settled_at

    def is_as_read(self, param: torch.Tensor, state: _state.State) -> bool:
        """Whether `state` is in memory as it was read, and the volume has the same.

        A write that no version tells of is not seen.
        """
        read = self._as_read.get(param, {})
        return read.keys() == state.keys() and all(
            found() is state[name] and state[name]._version == version
            for name, (found, version) in read.items()
        )


def _memory_like(placeholder: torch.Tensor) -> torch.Tensor:
    piece = local(placeholder)
    return like(placeholder, _state.zeros(piece.numel(), piece.dtype).view(piece.shape))
