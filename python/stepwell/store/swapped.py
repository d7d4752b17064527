"""State that is on a volume: which parameters' it is, what stands for it, and how it is read.

In the optimizer's state a tensor that is on the volume is a *place*: a tensor at addresses that
nothing is at, which only names what the core has (`Place`). No code outside of a step meets one: a
program that asks for `state` gets tensors in memory, with copies of what the volume has
(`Swapped.read`). The step after that goes on from those tensors, and the places stand for the state
again. So a state dict is a snapshot, and what is written to `state`, or loaded, counts.

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
from stepwell.store.places import addresses_for
from stepwell.store.sharded_volume import (
    RUN_OF_ONE,
    CommonCommits,
    agree_on_counts,
    close,
    open_together,
    ranks_of,
)
from stepwell.store.swap import make_swap, room_beside_buffers
from stepwell.store.volume_end import end_with

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell.ranks.collective import Ranks
    from stepwell.store.swap import Room
    from stepwell.store.twins import Twins
    from stepwell.store.volume import Volume

__all__ = ["Swapped"]

_LOGGER = logging.getLogger(__name__)


class Swapped:
    """The state of some parameters, on a volume.

    Args:
        volume: what the user has said of it.
        moments: how the moments are held.
        threads: workers that step; None: as the engine chooses.
    """

    def __init__(self, volume: Volume, moments: str, threads: int | None) -> None:
        self.volume = volume
        # Those whose volumes are of one run; None: this one's is.
        self._ranks: Ranks | None = None
        self._moments = moments
        self._threads = threads
        self._core: _core.Swap | None = None
        self._indices: dict[torch.Tensor, int] = {}
        # For each parameter the places of its state, and of itself.
        self._places: dict[torch.Tensor, _state.State] = {}
        self._weights: dict[torch.Tensor, torch.Tensor] = {}
        self._common_commits = CommonCommits()
        self.num_noted = 0
        """How often state may have become places."""
        # The `num_noted` of the last look at the state, which has left no place.
        self._looked_at: int | None = None
        # Of state that was read: its tensors, which are not kept alive, with their versions.
        self._as_read: dict[torch.Tensor, dict[str, tuple[weakref.ref[torch.Tensor], int]]] = {}

    @property
    def core(self) -> _core.Swap | None:
        """What the engine steps; None: all state fits into memory, or none was placed yet."""
        return self._core

    @property
    def commits(self) -> bool:
        """Whether a crash leaves the last commit."""
        return self.volume.durability == "commit"

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that the volume takes: buffers, and state that fits there."""
        return 0 if self._core is None else self._core.ram_nbytes + self._core.buffers_nbytes

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._indices

    def indices(self, params: Iterable[torch.Tensor]) -> list[int | None]:
        """Which of the core's tensors the parameters are."""
        return [self._indices.get(param) for param in params]

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
        return contextlib.nullcontext() if self._ranks is None else self._ranks.awaited()

    def _meet(self, params: Iterable[torch.Tensor]) -> None:
        self._ranks = ranks_of(params, commits=self.commits, known=self._ranks)

    def open(
        self,
        owner: object,
        weights: Mapping[torch.Tensor, torch.Tensor],
        host_bytes: int,
        names: Mapping[torch.Tensor, str],
        twins: Twins,
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> list[torch.Tensor]:
        """Makes the volume, or finds it again, for as much state as does not fit into memory.

        Args:
            owner: with it, or with the program, the volume ends.
            weights: of all parameters, in the order in which the forward uses them, their host
                sides.
            host_bytes: for state and buffers.
            names: of parameters that have one: a volume of other names or shapes is not resumed.
            twins: the host sides of parameters at the end.
            between_steps: as `volume_end.end_with` has it.

        Returns:
            the parameters whose state is in memory of their own.

        Raises:
            ValueError: there is not even the memory for buffers; the volume is another model's, or
                those of the ranks are not of one run.
            OSError: a drive is full, or cannot be used; or another rank has failed.
        """
        make = partial(self._open, weights, host_bytes, names)
        self._meet(weights)
        if self._ranks is None:
            self._core = make(None, RUN_OF_ONE)
        else:
            self._core = open_together(
                self._ranks, make, commit_interval=self.volume.steps_per_commit
            )
        if self._core is not None:
            params = list(self._indices)

            def weight(number: int) -> _core.TensorView:
                return view(local(twins.weight(params[number])))

            end_with(owner, self._core, weight, between_steps)
        return [param for param in weights if param not in self._indices]

    def _open(
        self,
        weights: Mapping[torch.Tensor, torch.Tensor],
        host_bytes: int,
        names: Mapping[torch.Tensor, str],
        step: int | None,
        run: int,
    ) -> _core.Swap | None:
        """The volume of this rank, at a step that it is resumed from; None: it needs none."""
        self._indices, self._places, self._weights = {}, {}, {}
        params = [param for param, weight in weights.items() if local(weight).numel()]
        sizes = {param: _state.nbytes(weights[param], self._moments) for param in params}
        if sum(sizes.values()) <= host_bytes and not self.commits:
            _LOGGER.info("all state fits into host memory, and no volume is made")
            return None
        room = self.room({param: weights[param] for param in params}, host_bytes)
        left = room.ram_nbytes
        in_memory = [] if self.commits else self._first_fit(params, sizes, left)
        left -= sum(sizes[param] for param in in_memory)
        for param in in_memory:
            del self._places[param], self._weights[param]
        swapped = list(self._places)
        self._indices = {param: index for index, param in enumerate(swapped)}
        # Fingerprints and codes are of a shard.
        return make_swap(
            self.volume,
            [self._tensor(param, self._places[param]) for param in swapped],
            addresses=self._addresses,
            identity=self._identity(swapped, names),
            rank=torch.distributed.get_rank() if torch.distributed.is_initialized() else None,
            ranks=None if self._ranks is None else self._ranks.ranks,
            resized_by="state of float32 parameters gets to another number by "
            "torch.distributed.checkpoint",
            nbytes=sum(sizes[param] for param in swapped),
            room=room._replace(ram_nbytes=left),
            workers=self._threads,
            step=step,
            run=run,
            counts_each_step=self._ranks is not None and self.commits,
        )

    def room(self, weights: Mapping[torch.Tensor, torch.Tensor], host_bytes: int) -> Room:
        """What is left for state of `host_bytes` of memory, beside the buffers of a volume.

        Args:
            weights: of all parameters with elements, in their order. Their state gets its places.
            host_bytes: for state and buffers.

        Raises:
            ValueError: there is not even the memory for buffers.
        """
        self._place(weights)
        return room_beside_buffers(
            self.volume,
            [self._tensor(param, places) for param, places in self._places.items()],
            host_bytes,
            limit="host_bytes_max",
            workers=self._threads,
        )

    def _place(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        def lay_out(memory: _state.Allocate) -> None:
            for param, weight in weights.items():
                piece = local(weight)
                self._weights[param] = memory(piece.numel(), piece.dtype)
                self._places[param] = _state.placed(weight, self._moments, memory)

        self._addresses = addresses_for(lay_out)

    def _tensor(self, param: torch.Tensor, state: _state.State) -> _core.AdamTensor:
        runs = {
            name: local(state[name]) for name in self._places[param] if name != _state.FINGERPRINTS
        }
        return _state.adam_tensor(self._weights[param], runs)

    def _identity(self, params: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str]) -> str:
        """What names, shapes and this rank's rows say."""
        return repr([(names.get(param), tuple(param.shape), *cut_of(param)) for param in params])

    def _first_fit(
        self, params: Sequence[torch.Tensor], sizes: Mapping[torch.Tensor, int], nbytes: int
    ) -> list[torch.Tensor]:
        """Those of `params` whose state goes into memory of `nbytes`.

        First small ones, of which a record would be mostly padding; then the first of the others,
        with which steps begin.
        """
        found = []
        for is_small in (True, False):
            for param in params:
                if (self._weights[param].numel() < _core.CHUNK_LEN) is not is_small:
                    continue
                if sizes[param] > nbytes:
                    break
                nbytes -= sizes[param]
                found.append(param)
        return found

    def close(self) -> None:
        """Ends a volume from which the optimizer cannot begin; a resumed one stays."""
        close(self._core)

    def resumed(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, Any]:
        """State of the parameters that a resumed volume has; `weights` are overwritten.

        Parameters without elements have none there. They count as updated with the others.

        Raises:
            OSError: a drive cannot be read.
        """
        core_counts = None if self._core is None else self._core.counts
        if core_counts is None:
            return {}
        self.note_places()
        states: dict[torch.Tensor, Any] = {}
        ranks = self._ranks
        with contextlib.nullcontext() if ranks is None else ranks.awaited():
            for param, count in zip(self._indices, core_counts, strict=True):
                if count:
                    states[param] = self._resumed(param, weights[param])
        counts = dict.fromkeys(weights, 0) | dict(zip(self._indices, core_counts, strict=True))
        if ranks is not None:
            # Of plain parameters beside DTensors each rank has its own, and its own updates.
            common = [param for param in counts if meshes([param])]
            mine = [counts[param] if param in self._indices else None for param in common]
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
        """The places of the state of a parameter, whose `weight` is read from the volume."""
        assert self._core is not None
        self._core.read_weights(self._indices[param], view(local(weight)))
        state = self.fresh(param)
        _state.take_fingerprints(weight, state, self._moments)
        return state

    # ---- state ----

    def fresh(self, param: torch.Tensor) -> _state.State:
        """The places of the state of `param`, as a state that was never stepped."""
        return {"step": _state.step_tensor(0), **self._places[param]}

    def is_place(self, param: torch.Tensor, state: _state.State) -> bool:
        """Whether `state`, of `param`, is on the volume."""
        places = self._places.get(param)
        return (
            bool(places)
            and bool(state)
            and all(
                state.get(name) is place
                for name, place in (places or {}).items()
                if name != _state.FINGERPRINTS
            )
        )

    def kept_names(self, param: torch.Tensor) -> list[str]:
        """What of the state of `param` stays in memory."""
        return ["step", *({_state.FINGERPRINTS} & self._places[param].keys())]

    def placed(self, param: torch.Tensor, state: _state.State) -> _state.State:
        """`state`, of `param`, once a step has written it to the volume."""
        self._as_read.pop(param, None)
        places = self._places[param]
        names = places.keys() - {_state.FINGERPRINTS}
        return {**state, **{name: places[name] for name in names}}

    def write_weights(
        self, stepped: Collection[torch.Tensor], weight: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Writes the weights that a commit would lack, before it, and between steps.

        Those that have changed since the last commit, in steps without one.

        Args:
            stepped: what the step of the commit steps, whose weights it writes itself.
            weight: gives the host side of a parameter.

        Raises:
            OSError: a drive cannot be written.
        """
        self._write_weights((param for param in self._indices if param not in stepped), weight)

    def keep_weights(
        self,
        params: Iterable[torch.Tensor],
        weight: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Writes the weights of `params` that a commit would lack, before their host side changes.

        Without that a commit would have a weight of the program's beside the state of the last
        step. Call it between steps, without grad mode.

        Args:
            params: the parameters.
            weight: gives the host side of one.

        Raises:
            OSError: a drive cannot be written.
        """
        if self._core is not None and self.volume.steps_per_commit > 1:
            self._write_weights(params, weight)

    def _write_weights(
        self,
        params: Iterable[torch.Tensor],
        weight: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Writes those of `params` that are behind."""
        assert self._core is not None
        behind = set(self._core.weights_behind())
        for param in params:
            index = self._indices.get(param)
            if index in behind:
                self._core.write_weights(index, view(local(weight(param))))

    def check(self) -> None:
        """Raises OSError if a write to the volume, or a commit of any rank, has failed."""
        self._common_commits.check()
        if self._core is not None:
            self._core.check()

    def commit(
        self, weight: Callable[[torch.Tensor], torch.Tensor], synchronize: Callable[[], None]
    ) -> None:
        """Commits the last step, if it is not. Collective where ranks step together.

        Args:
            weight: gives the host side of a parameter.
            synchronize: waits until the last step is over.

        Raises:
            ValueError: the step has failed.
            OSError: likewise, or a drive has; or another rank has failed.
        """

        def commit() -> None:
            synchronize()
            if self._core is not None:
                self.write_weights((), weight)
                self._core.commit()

        self._common_commits.make(self._ranks, commit)

    def note_places(self) -> None:
        """The optimizer's state may have places from now on, or once a step is submitted."""
        self.num_noted += 1

    def read(self, states: dict[torch.Tensor, _state.State], settled_at: int | None = None) -> None:
        """Replaces places in `states` by memory with what the volume has.

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
        found = [param for param, state in states.items() if self.is_place(param, state)]
        if found:
            self._read(found, states)
        self._looked_at = settled_at

    def _read(
        self, found: Sequence[torch.Tensor], states: dict[torch.Tensor, _state.State]
    ) -> None:
        assert self._core is not None
        nbytes = sum(_nbytes(self._places[param]) for param in found)
        free = _core.free_memory_bytes()
        if free is not None and nbytes > free:
            raise ValueError(
                f"state on the volume takes `{nbytes}` bytes of host memory as tensors, `{free}` "
                "are free. hint: a volume with durability='commit' and a name is a checkpoint by "
                "itself (keep=True, resume=True)"
            )
        _LOGGER.info("%.2f GiB of host memory for state that is read from the volume", nbytes / GIB)
        for param in found:
            memory = {
                name: _memory_like(place)
                for name, place in self._places[param].items()
                if name != _state.FINGERPRINTS
            }
            state = {**states[param], **memory}
            self._core.read(self._indices[param], self._tensor(param, state))
            states[param] = state
            self._as_read[param] = {
                name: (weakref.ref(each), each._version)
                for name, each in state.items()
                if isinstance(each, torch.Tensor)
            }

    def is_as_read(self, param: torch.Tensor, state: _state.State) -> bool:
        """Whether `state` is in memory as it was read, and the volume has the same.

        A write that no version tells of is not seen.
        """
        read = self._as_read.get(param, {})
        return read.keys() == state.keys() and all(
            found() is state[name] and state[name]._version == version
            for name, (found, version) in read.items()
        )


def _memory_like(place: torch.Tensor) -> torch.Tensor:
    piece = local(place)
    return like(place, _state.zeros(piece.numel(), piece.dtype).view(piece.shape))


def _nbytes(places: _state.State) -> int:
    return sum(local(place).nbytes for name, place in places.items() if name != _state.FINGERPRINTS)
