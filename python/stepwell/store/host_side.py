"""What stands in host memory for the parameters on a device: their twins, and their state.

- A parameter is admitted once, with memory that is announced before it is taken, and let go of when
  it is in no group any more.
- The weight of a twin is that on the device, except while a step is under way; `reread` makes it so
  again after other code has written the parameter.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from stepwell import _core, _state
from stepwell._budget import GIB, announce, share_of_free_bytes
from stepwell._sharding import is_dtensor, local
from stepwell._sizes import moments_bytes
from stepwell._tensors import Written, check_param
from stepwell.access.shard_guard import are_offloaded
from stepwell.store.deferred import DeferralBytes, Extents, memory_of
from stepwell.store.residents import Residents
from stepwell.store.twins import Twins
from stepwell.store.weight_owners import check_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell.store.deferred import Deferred
    from stepwell.store.host_weights import HostWeights
    from stepwell.store.swapped import Swapped

__all__ = ["HostSide"]

_LOGGER = logging.getLogger(__name__)


class HostSide:
    """The host side of all parameters of one optimizer.

    Args:
        moments: how the moments are held.
        bytes_max: the most host memory that may be taken; None: what is free.
        deferred: which updates are deferred; None: none is.
        swapped: has the state that does not fit into host memory; None: all is there.
        residents: parameters that have no host side.
        sums_on_host: whether the gradients of several backwards are summed in host memory.
    """

    def __init__(
        self,
        moments: str,
        bytes_max: int | None,
        *,
        deferred: Deferred | None,
        swapped: Swapped | None,
        residents: Residents,
        sums_on_host: bool,
    ) -> None:
        self.weights: HostWeights | None = None
        """Brings weights that lie in host memory to modules; None: weights stay on the device."""
        # Beside a volume some of it is pinned, and some is not.
        self.twins = Twins(have_gradients=deferred is None, is_paged=swapped is not None)
        self._residents = residents
        self.deferred = deferred
        """Which updates are deferred; None: none is."""
        self.sums_on_host = sums_on_host
        """Whether the gradients of several backwards are summed in host memory."""
        self._moments = moments
        self._bytes_max = bytes_max
        self.swapped = swapped
        # Where a volume has state, that is given placeholders when all parameters are known.
        self._is_open = swapped is None

    def choose(self, params: Iterable[torch.Tensor], model: torch.nn.Module | None) -> None:
        """Decides whether parameters are their own host sides, by the first ones that come.

        Not beside a volume, which finds what a program has written by comparing, nor where updates
        are deferred: gradients wait in memory of the engine then.
        """
        if not len(self.twins):
            is_plain = self.swapped is None and self.deferred is None
            self.twins.are_params = is_plain and are_offloaded(params, model)

    def is_away(self, param: torch.Tensor) -> bool:
        """Whether the weight of `param`, which is stepped, is on the device between uses alone."""
        return self.weights is not None and param not in self.weights.staying

    @property
    def gated(self) -> list[torch.Tensor]:
        """The parameters whose weights do not come with modules: forwards wait for a step of them.

        In their order.
        """
        return [param for param in self.twins if not self.is_away(param)]

    @property
    def uploaded(self) -> list[torch.Tensor]:
        """Those of them whose weights steps upload: not where they are their own host sides."""
        return [] if self.twins.are_params else self.gated

    def awaited(self, params: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which `params`, which are new, are admitted.

        Where the volume is not open yet, other ranks wait for this one to open it.
        """
        if self.swapped is None or self._is_open:
            return contextlib.nullcontext()
        return self.swapped.awaited([*self.twins, *params])

    def check(self, params: Sequence[torch.Tensor], labels: Mapping[torch.Tensor, str]) -> None:
        """Raises ValueError if `params`, which are new, could not be stepped.

        `labels`: what errors call the parameters of all groups.
        """
        for param in params:
            check_place(param, self.weights)
            check_param(param, labels[param], on_device=True)
        # Refuses tensors that share memory. What is away has it on the host.
        known = [param for param in (*self.twins, *self._residents) if param in labels]
        places = [
            self.twins.weight(param) if param in self.twins and self.is_away(param) else param
            for param in [*known, *params]
        ]
        names = [labels[param] for param in [*known, *params]]
        Written((name, local(place)) for name, place in zip(names, places, strict=True))
        device = self._device_with(params)
        for param in params:
            # Weights in host memory go to their device when they are admitted.
            if self.weights is None and local(param).device != device:
                raise ValueError(
                    f"{labels[param]} is on `{local(param).device}`, others on `{device}`, "
                    "expected one device. hint: an optimizer for each device"
                )
            if self.twins.are_params and not is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is no DTensor, others are shards that FSDP2 keeps in host "
                    "memory, expected the same of all. hint: an optimizer of its own"
                )
            if self.sums_on_host and is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is a DTensor, whose gradients are not summed in host memory. "
                    "hint: accumulate='device' and weights='device'"
                )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.twins.device

    @property
    def hosted_share(self) -> float:
        """Which share of all elements has a host side."""
        numel = sum(local(param).numel() for param in self.twins)
        return numel / max(numel + self._residents.numel, 1)

    def _device_with(self, params: Sequence[torch.Tensor]) -> torch.device:
        is_first = not len(self.twins) and not len(self._residents)
        return local(params[0]).device if params and is_first else self.device

    def announce(
        self,
        params: Sequence[torch.Tensor],
        states: Mapping[torch.Tensor, _state.State],
        *,
        has_engine: bool = False,
    ) -> _core.MemoryClaim:
        """Says in the log what host memory `admit` takes for `params`, and claims it.

        Args:
            params: new ones.
            states: those that the optimizer has.
            has_engine: whether there is an engine, which ends: with it what it has for deferral.

        Returns:
            the claim, which lasts until `admit` has taken it.

        Raises:
            ValueError: it is more than there is.
        """
        if self._is_open and self.swapped is not None and self.swapped.volume.commits:
            raise ValueError(
                "parameters are added to an optimizer whose volume commits its steps, expected all "
                "of them from the beginning. hint: parameters that thaw later need requires_grad "
                "when the optimizer is made, or Volume(..., durability='none')"
            )
        deferral = self._deferral(params)
        fresh = [local(param) for param in params if self._is_open and not states.get(param)]
        on_device = deferral.selected
        if on_device:
            _LOGGER.info("%.2f GiB of device memory for selected channels", on_device / GIB)
        return announce(
            sum(local(param).numel() for param in params),
            state=sum(_state.nbytes(piece, self._moments) for piece in fresh),
            moments=moments_bytes([piece.numel() for piece in fresh], self._moments),
            crossing=self.twins.nbytes(params) + deferral.pinned,
            limit=self._bytes_left(states),
            held=self._held(has_engine=has_engine),
            waiting=deferral.pinned,
        )

    def _bytes_left(self, states: Mapping[torch.Tensor, _state.State]) -> int | None:
        """What is left of `bytes_max` beside weights and state; None: what is free."""
        return None if self._bytes_max is None else self._bytes_max - self.held_bytes(states)

    def held_bytes(self, states: Mapping[torch.Tensor, _state.State]) -> int:
        """Bytes of weights, gradients and state in host memory."""
        held = self.twins.total_nbytes
        fresh = ((twin.param, twin.fresh) for twin in self.twins.values() if twin.fresh is not None)
        for param, state in chain(states.items(), fresh):
            # What is read from a volume or from the device, or loaded over what is there, goes with
            # the next step.
            is_elsewhere = self.swapped is not None and param in self.swapped
            if not is_elsewhere and param not in self._residents:
                held += _state.nbytes_of(state)
        if self.swapped is not None:
            held += self.swapped.volume.memory_bytes
        return held

    def _held(self, *, has_engine: bool) -> int:
        """Bytes of what an engine has for deferral; it gives them back when it ends."""
        return self._deferral(()).pinned if has_engine else 0

    def _deferral(self, params: Sequence[torch.Tensor]) -> DeferralBytes:
        """What deferred updates take, of all parameters with these."""
        if self.deferred is None:
            return DeferralBytes(0, 0, 0, 0)
        return memory_of(Extents.of([*self.twins, *params]), self.deferred)

    def admit(
        self,
        params: Sequence[torch.Tensor],
        states: Mapping[torch.Tensor, _state.State],
    ) -> None:
        """Takes what was announced: no step and no copy is under way.

        Raises:
            OSError: there is no memory for it; nothing was changed.
        """
        self.twins.add(params, None if self.weights is None else self.weights.place)
        try:
            # `state` has it from the first step on, as torch's optimizers have.
            for param in params:
                twin = self.twins[param]
                if states.get(param):
                    # Its trailing bits may not be those of the weight.
                    twin.mark_unverified()
                elif self._is_open:
                    twin.fresh = _state.new(twin.weight, self._moments)
        except BaseException:
            self.twins.remove(params)
            raise

    def open(
        self,
        owner: object,
        states: dict[torch.Tensor, _state.State],
        names: Mapping[torch.Tensor, str],
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Gives the state of all parameters its place, on the volume or in host memory.

        Args:
            owner: with it the volume ends.
            states: those that the optimizer has: none; or what a resumed volume has, afterwards.
            names: of parameters that have one, also in the run that a volume is resumed from.
            between_steps: as `volume_end.end_with` has it.

        Raises:
            ValueError: there is too little memory, or the volume is another model's.
            OSError: a drive is full or cannot be used, or there is no memory.
        """
        swapped = self.swapped
        if swapped is None:
            return
        weights = {param: self.twins.weight(param) for param in self.twins}
        if self._bytes_max is None:
            left = share_of_free_bytes()
        else:
            left = self._bytes_max - self.twins.total_nbytes
        # The engine takes what deferral takes when it is made, which is later.
        left = max(left - self._deferral(()).pinned, 0)
        swapped.open(owner, self.twins, left, names, between_steps)
        self._is_open = True
        for param, weight in weights.items():
            is_there = param in swapped
            fresh = swapped.fresh(param) if is_there else _state.new(weight, self._moments)
            self.twins[param].fresh = fresh
        try:
            resumed = swapped.resumed(weights)
            for param in resumed:
                local(param).copy_(local(weights[param]))
                states[param] = resumed[param]
                self.twins[param].fresh = None
        except BaseException:
            swapped.volume.close()
            raise

    def let_go(
        self, params: Iterable[torch.Tensor], states: Mapping[torch.Tensor, _state.State]
    ) -> None:
        """Forgets `params`, which are in no group any more: no step and no copy is under way.

        State that the optimizer has of them stays, as in torch's, and is good if they come back.
        """
        params = list(params)
        self.take_fingerprints(params, states)
        if self.swapped is not None:
            self.swapped.volume.write_weights(params)
        self.twins.remove(params)

    # ---- state ----

    def write_through(
        self, param: torch.Tensor, state: _state.State, label: str
    ) -> tuple[_state.State, _state.State]:
        """Has the step that comes write state in memory, loaded or looked at, to the volume.

        The state gets a counter and fingerprints of its own: the tensors in memory are a snapshot.

        Args:
            param: whose it is, on the volume.
            state: as the optimizer has it.
            label: what errors call the parameter.

        Returns:
            the state that is stepped, and what it is once the step has begun.
        """
        swapped = self.swapped
        assert swapped is not None
        _state.repair_step(state, _state.step_of(state, lambda: label))
        names = ("step", *swapped.volume.placeholders[param].in_memory)
        stepped = {**state, **{name: state[name].clone() for name in names}}
        return stepped, swapped.with_placeholders(param, stepped)

    def prepare_commit(
        self, stepped: Iterable[torch.Tensor], states: Mapping[torch.Tensor, _state.State]
    ) -> None:
        """A step of these parameters is about to begin, which may commit to the volume.

        Args:
            stepped: the parameters.
            states: those that the optimizer has.
        """
        swapped = self.swapped
        core = None if swapped is None else swapped.volume.core
        if swapped is not None and core is not None and swapped.volume.commits:
            params = set(stepped)
            self._tell_of_uncommitted(params, states)
            if core.commits_next:
                # A step writes its own.
                swapped.volume.write_weights(set(self.twins) - params)

    def commit(
        self,
        states: Callable[[], Mapping[torch.Tensor, _state.State]],
        synchronize: Callable[[], None],
    ) -> None:
        """Commits the last step to the volume, as `StateVolume.commit`.

        Args:
            states: gives those that the optimizer has, once the last step is over.
            synchronize: waits until the last step is over.

        Raises:
            OSError: the step has failed, or a drive; or another rank has.
        """
        assert self.swapped is not None
        self.swapped.volume.commit(synchronize)
        self._tell_of_uncommitted((), states())

    def _tell_of_uncommitted(
        self, stepped: Collection[torch.Tensor], states: Mapping[torch.Tensor, _state.State]
    ) -> None:
        """Warns where the program has changed what only a parameter's own step would commit."""
        swapped = self.swapped
        assert swapped is not None
        others = [param for param in self.twins if param in swapped and param not in stepped]
        in_memory = [
            param
            for param in others
            if self.twins[param].fresh is None
            and not (param in states and swapped.is_placeholder(param, states[param]))
            and not (param in states and swapped.is_as_read(param, states[param]))
        ]
        if in_memory:
            _LOGGER.warning(
                "the state of %d parameters that are not stepped now is in memory, loaded or "
                "changed, or was deleted, and is on the volume from their next step on; a crash "
                "before that loses it",
                len(in_memory),
            )

    def drop_fresh(self, params: Iterable[torch.Tensor]) -> None:
        """The optimizer has state of `params` now."""
        for param in params:
            if twin := self.twins.get(param):
                twin.fresh = None

    def note_load(self, *, has_state: bool) -> None:
        """A state dict is about to be loaded.

        `has_state`: it has state; what was set aside is not kept beside that.
        """
        for twin in self.twins.values():
            if has_state:
                twin.fresh = None
            twin.mark_unverified()

    # ---- weights ----

    def note_master(self, param: torch.Tensor, state: _state.State) -> None:
        """A step of `param` is to work with `state`, in memory.

        The program may have put it in the place of another one: the step verifies whether what it
        has of the master belongs to the weight.
        """
        twin, master = self.twins[param], _state.master_of(state)
        before, twin.master = twin.master, master
        if before is None or _are(before, master):
            return
        stepped = twin.stepped if twin.is_outdated else None
        if stepped is not None and _are(before, _state.master_of(stepped)):
            # The program may have kept that one.
            _state.take_fingerprints(twin.weight, stepped, self._moments)
        twin.mark_unverified()

    def reread(
        self, written: Sequence[torch.Tensor], states: Mapping[torch.Tensor, _state.State]
    ) -> None:
        """Copies parameters to the host that the program has written on the device.

        Args:
            written: of those that are stepped, what `Contents` has found.
            states: the states of parameters.
        """
        _LOGGER.debug(
            "%d parameters were written since the last step, and are read again", len(written)
        )
        self.take_fingerprints(written, states)
        if self.swapped is not None:
            # Whether or not a step follows: else a commit would have the program's weights beside
            # the state of the last step.
            self.swapped.volume.write_weights(written)
        for param in written:
            twin, state = self.twins[param], states.get(param)
            on_volume = self.swapped is not None and param in self.swapped
            belongs = not twin.is_unverified and not twin.is_outdated and not on_volume
            # First: Ctrl-C may come before the copy has ended.
            twin.mark_unverified()
            weight = local(twin.weight)
            before = weight.clone() if state and belongs else None
            weight.copy_(local(param))
            if state and before is not None:
                moments = self._moments
                twin.is_unverified = not _state.drop_written(weight, before, state, moments)

    def take_fingerprints(
        self, params: Iterable[torch.Tensor], states: Mapping[torch.Tensor, _state.State]
    ) -> None:
        """Takes the fingerprints of those of `params` that steps have outdated.

        Not of a state that the program has put in the place of the one that was stepped: its
        fingerprints are those of the weights that it was saved with.
        """
        for param in params:
            twin = self.twins.get(param)
            if twin is None or not twin.is_outdated:
                continue
            state = states.get(param)
            if twin.stepped is None or state is twin.stepped:
                # The program may have deleted it: what is made next has new fingerprints.
                if state:
                    _state.take_fingerprints(twin.weight, state, self._moments)
                twin.is_outdated, twin.stepped = False, None


def _are(tensors: tuple[object, ...], others: tuple[object, ...]) -> bool:
    """Whether these are the same objects."""
    return all(map(operator.is_, tensors, others))
