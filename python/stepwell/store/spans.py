"""What the steps of one optimizer work with: spans of the core's store, wherever their state is.

A step looks at all gradients by one call of the store. What has moved since the last step is
checked here, and bound anew: the gradient, the state, and where both are. All else goes on as it
was.

| state | weight that is stepped | bound by |
|---|---|---|
| in host memory | the twin | `Spans` |
| on a volume | the twin; placeholders stand for the state | `Spans` |
| in host memory, and so is the shard of FSDP2 | the shard | `Spans` |
| on the device | the parameter | `Residents` |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from stepwell import _core, _state
from stepwell._binding import Rounding, bind
from stepwell._sharding import PLAIN, piece_of
from stepwell.store.grad_checks import check_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    import torch

    from stepwell._spans import Labelled
    from stepwell.store.background import Background
    from stepwell.store.gradients import DeviceCollector
    from stepwell.store.host_collector import HostCollector
    from stepwell.store.host_side import HostSide
    from stepwell.store.residents import Residents

__all__ = ["Looked", "Spans"]


class Looked(NamedTuple):
    """The gradients of a step, all of them checked."""

    groups: list[int]
    """Of each parameter with a gradient its group."""
    params: list[torch.Tensor]
    """These parameters, in the order of the groups."""
    grads: list[torch.Tensor]
    """Of each the gradient, as it is stepped."""
    numbers: list[int]
    """Of each which update it is, from 1."""
    on_device: list[int]
    """The positions of those that the device steps. The host steps the others."""
    swapping: list[tuple[torch.Tensor, _state.State, _state.State]]
    """State that the step writes to the volume: of each parameter as it is, and as it is then."""

    @property
    def number(self) -> int:
        """Which update it is of the parameter that has seen most; 0: there is none."""
        return max(self.numbers, default=0)

    @property
    def hosted(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters that the host steps, and their gradients."""
        if not self.on_device:
            return self.params, self.grads
        others = set(self.on_device)
        positions = [at for at in range(len(self.params)) if at not in others]
        return [self.params[at] for at in positions], [self.grads[at] for at in positions]


class Spans:
    """The spans of one optimizer.

    Args:
        host: the host side of its parameters.
        residents: those whose state is on the device.
        collector: brings gradients to the host.
        background: what steps.
        moments: how moments in host memory and on volumes are held.
    """

    def __init__(
        self,
        host: HostSide,
        residents: Residents,
        collector: DeviceCollector | HostCollector,
        background: Background,
        *,
        moments: str,
    ) -> None:
        self._host, self._residents = host, residents
        self._collector, self._background = collector, background
        self._moments = moments
        # For an optimizer whose state is all on the device.
        self._bare_store = _core.Store(is_beside=True)

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._host.twins or param in self._residents

    def __len__(self) -> int:
        return len(self._host.twins) + len(self._residents)

    @property
    def store(self) -> _core.Store:
        """The core's store. Makes the engine, where the host steps anything."""
        has_engine = len(self._host.twins) > 0
        return self._background.opened().store if has_engine else self._bare_store

    def unbind(self) -> None:
        """Has the next step look at everything as if it were the first."""
        engine = self._background.engine
        for store in (self._bare_store, *([] if engine is None else [engine.store])):
            store.unbind()
            store.has_left = False

    def look(
        self,
        groups: Sequence[dict[str, Any]],
        states: Mapping[torch.Tensor, _state.State],
        new_states: dict[torch.Tensor, _state.State],
        labelled: Labelled,
        follow: Callable[[], None],
    ) -> Looked:
        """The gradients of the coming step, and all that it works with, checked in full.

        Args:
            groups: of the optimizer.
            states: those that it has.
            new_states: gets those that it has once the step is taken.
            labelled: names parameters.
            follow: called where groups were edited: admits what has come, and lets go of the rest.

        Raises:
            ValueError: the step cannot be done.
        """
        look = self._look_at(groups, states)
        if look.num_seen != len(self) or look.has_unknown:
            follow()
            look = self._look_at(groups, states)

        def label(param: torch.Tensor) -> str:
            return dict(labelled())[param]

        if look.has_unknown:
            has_grad = (param for param, _ in labelled() if param.grad is not None)
            frozen = next(param for param in has_grad if param not in self)
            check_in_place(frozen, None, self._host.device, label)
        looked = Looked(look.groups, look.params, look.grads, [], look.on_device, [])
        moved: Sequence[int] = look.moved
        if self._host.sums_on_host:
            moved = range(len(looked.params))
        bind_each = partial(self._bind_each, looked, groups, states, new_states, labelled)
        if moved:
            on_device = set(look.on_device)
            residents = [at for at in moved if at in on_device]
            hosted = [at for at in moved if at not in on_device]
            params = looked.params
            found = self._residents.gradients([params[at] for at in residents], label)
            found += self._collector.gradients([params[at] for at in hosted])
            bind_each(dict(sorted(zip([*residents, *hosted], found, strict=True))))
        if overlapping := self.store.overlapping():
            # The step reads some gradients when other weights are there already.
            bind_each({at: looked.grads[at].clone() for at in overlapping})
        return looked._replace(numbers=self.store.numbers())

    def _look_at(
        self, groups: Sequence[dict[str, Any]], states: Mapping[torch.Tensor, _state.State]
    ) -> _core.Look:
        store, seeds = self.store, [group["seed"] for group in groups]
        self._residents.tell(store)
        return store.look([group["params"] for group in groups], states, seeds)

    def _bind_each(
        self,
        looked: Looked,
        groups: Sequence[dict[str, Any]],
        states: Mapping[torch.Tensor, _state.State],
        new_states: dict[torch.Tensor, _state.State],
        labelled: Labelled,
        found: Mapping[int, torch.Tensor],
    ) -> None:
        """Gives the store what it has to know anew of the coming step.

        `found`: by the position in the look the gradient that is stepped, which takes the place of
        the look's.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        labels = dict(labelled())
        ordinals = {id(param): at for at, param in enumerate(labels)}
        for at, grad in found.items():
            param, is_own = looked.params[at], grad is looked.grads[at]
            looked.grads[at] = grad
            known = new_states.get(param) or states.get(param) or None
            if param in self._residents:
                state = self._residents.bind(
                    self.store,
                    at,
                    param,
                    grad,
                    state=known,
                    is_kept=is_own,
                    label=labels.__getitem__,
                )
            else:
                known = known or self._host.twins[param].fresh
                state, is_kept = self._state_to_step(looked, param, known, labels[param])
                self._bind_hosted(
                    at,
                    param,
                    grad,
                    state=state,
                    rounding=Rounding(groups[looked.groups[at]]["seed"], ordinals[id(param)]),
                    label=partial(labels.__getitem__, param),
                    is_kept=is_kept and is_own,
                )
            if states.get(param) is not state:
                new_states[param] = state

    def _bind_hosted(
        self,
        at: int,
        param: torch.Tensor,
        grad: torch.Tensor,
        *,
        state: _state.State,
        rounding: Rounding,
        label: Callable[[], str],
        is_kept: bool,
    ) -> None:
        twin, is_away = self._host.twins[param], self._host.is_away(param)
        is_own = self._host.twins.are_params
        bind(
            self.store,
            at,
            weight=twin.weight,
            grad=piece_of(grad),
            grad_view=None if is_own else twin.grad_view,
            piece=None if is_away or type(param) in PLAIN else piece_of(param),
            # Behind the step each forward fetches its own.
            target=0 if is_away or is_own else None,
            state=state,
            moments=self._moments,
            rounding=rounding,
            label=label,
            is_kept=is_kept,
        )

    def _state_to_step(
        self, looked: Looked, param: torch.Tensor, known: _state.State | None, label: str
    ) -> tuple[_state.State, bool]:
        """The state that a step of `param` works with, and whether the next one may go on with it.

        `known`: what there is; None: none.

        Raises:
            ValueError: what the optimizer has does not fit the parameter.
        """
        swapped, weight = self._host.swapped, self._host.twins.weight(param)
        state = _state.new(weight, self._moments) if known is None else known
        state = _state.refreshed(weight, state, self._moments, label)
        if swapped is None or param not in swapped:
            self._host.note_master(param, state)
            # The step goes on in the background, and works on the state itself.
            _state.make_dense(weight, state, self._moments)
            return state, True
        swapped.note_placeholders()
        if swapped.is_placeholder(param, state):
            return state, True
        # What is stepped has copies of them.
        self._host.take_fingerprints([param], {param: state})
        state, coming = self._host.write_through(param, state, label)
        looked.swapping.append((param, state, coming))
        return state, False
