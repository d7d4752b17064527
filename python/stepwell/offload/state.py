"""The state of an OffloadAdamW as programs see it: after the last step, and in host memory.

What is on a volume or on the device has been read.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _core, _state
from stepwell.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from stepwell.access.gate import Gate
    from stepwell.offload.background import Background
    from stepwell.offload.engine import Engine, Submitted
    from stepwell.offload.host_side import HostSide
    from stepwell.offload.residents import Residents
    from stepwell.offload.twins import Twins

__all__ = ["OffloadState", "StateInMemory"]


class StateInMemory(defaultdict[torch.Tensor, _state.State]):
    """The state of an optimizer that has some elsewhere, as code outside of a step sees it.

    It has no entries of its own. Each call goes to the optimizer's state as it is then, of which
    what is on a volume or on the device has been read into host memory. So it may be kept over
    steps. No step comes between the read and the call.

    Args:
        states: gives that state, and keeps steps away, while it is entered.
    """

    def __init__(
        self,
        states: Callable[[], AbstractContextManager[defaultdict[torch.Tensor, _state.State]]],
    ) -> None:
        super().__init__(dict)
        self._states = states

    def __getitem__(self, param: torch.Tensor) -> _state.State:
        with self._states() as states:
            return states[param]

    def __setitem__(self, param: torch.Tensor, state: _state.State) -> None:
        with self._states() as states:
            states[param] = state

    def __delitem__(self, param: torch.Tensor) -> None:
        with self._states() as states:
            del states[param]

    def __contains__(self, param: object) -> bool:
        with self._states() as states:
            return param in states

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self._states() as states:
            return iter(list(states))

    def __reversed__(self) -> Iterator[torch.Tensor]:
        with self._states() as states:
            return reversed(list(states))

    def __len__(self) -> int:
        with self._states() as states:
            return len(states)

    def __eq__(self, other: object) -> bool:
        with self._states() as states:
            return dict(states) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        with self._states() as states:
            return repr(states)

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Any:
        with self._states() as states:
            return states.copy()

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._states() as states:
            return copy.deepcopy(states, memo)

    def __reduce__(self) -> Any:
        with self._states() as states:
            return states.__reduce__()

    def __or__(self, other: Any) -> Any:
        with self._states() as states:
            return states | other

    def __ror__(self, other: Any) -> Any:
        with self._states() as states:
            return other | states

    def __ior__(self, other: Any) -> Any:
        with self._states() as states:
            states.update(other)
        return self

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """As dict's."""
        with self._states() as states:
            return states.get(param, default)

    def keys(self) -> Any:
        """As those of a copy: a view of dict's may be kept, and would see places later."""
        with self._states() as states:
            return dict(states).keys()

    def values(self) -> Any:
        """Likewise."""
        with self._states() as states:
            return dict(states).values()

    def items(self) -> Any:
        """Likewise."""
        with self._states() as states:
            return dict(states).items()

    def pop(self, *args: Any) -> Any:
        """As dict's."""
        with self._states() as states:
            return states.pop(*args)

    def popitem(self) -> Any:
        """As dict's."""
        with self._states() as states:
            return states.popitem()

    def setdefault(self, param: torch.Tensor, default: Any = None) -> Any:
        """As dict's."""
        with self._states() as states:
            return states.setdefault(param, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As dict's."""
        with self._states() as states:
            states.update(*args, **kwargs)

    def clear(self) -> None:
        """As dict's."""
        with self._states() as states:
            states.clear()


class OffloadState(AdamW):
    """An AdamW whose state is in host memory, on a volume or on the device.

    What is not on the device is stepped in the background.
    """

    _host: HostSide
    _residents: Residents
    _twins: Twins
    _background: Background
    # While a step is decided and submitted, `state` does not settle what is deferred, on the thread
    # that does so.
    _stepping_on: int | None
    # The last step that `_note_submitted` has noted.
    _noted: Submitted | None = None
    # Whether a program may have tensors of the state, or have changed it.
    _is_state_seen = False

    @property
    def _engine(self) -> Engine | None:
        """None: it was not needed yet."""
        return self._background.engine

    @property
    def _store(self) -> _core.Store:
        """The parameters with their states, as they are stepped."""
        return self._background.opened().store if len(self._twins) else self._bare_store

    def _look_anew(self) -> None:
        self._seeds: list[int] = []
        self._new_states = {}
        self._meshes = None
        # For an optimizer whose state is all on the device.
        self._bare_store = _core.Store(is_beside=True)
        if self._engine is not None:
            self._engine.store.unbind()
            self._engine.store.has_left = False

    @property
    def _gate(self) -> Gate | None:
        """None: no model is given, or there is no engine."""
        return self._background.gate

    @property
    def _is_stepping(self) -> bool:
        return self._stepping_on == threading.get_ident()

    @property
    def state(self) -> defaultdict[torch.Tensor, _state.State]:
        """State by parameter, as torch's optimizers have it, after the last step is complete."""
        self._is_state_seen = True
        states = self._read_states()
        if self._is_stepping or (self._host.swapped is None and not len(self._residents)):
            return states
        return StateInMemory(self._states_in_memory)

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, _state.State]) -> None:
        self._is_state_seen = True
        self.__dict__["state"] = state.copy() if isinstance(state, StateInMemory) else state

    @contextlib.contextmanager
    def _states_in_memory(self) -> Iterator[defaultdict[torch.Tensor, _state.State]]:
        """As `_read_states`, with no step while it is entered."""
        with self._background.lock():
            yield self._read_states()

    def _read_states(self) -> defaultdict[torch.Tensor, _state.State]:
        """As `_states`. What is elsewhere is read into host memory, but for the step's own thread.

        That is state on a volume, and on the device.
        """
        with self._background.lock():
            states = self._states
            if len(self._residents) and not self._is_stepping:
                self._residents.read(states)
            swapped = self._host.swapped
            if swapped is not None and not self._is_stepping:
                # In this order: a first step, without an engine yet, may begin on another thread.
                num_noted = swapped.num_noted
                swapped.read(states, num_noted if self._stepping_on is None else None)
            return states

    @property
    def _states(self) -> defaultdict[torch.Tensor, _state.State]:
        """As `state`. What is on a volume or on the device is not read."""
        if self._engine is not None and not self._is_stepping:
            with self._engine.lock:
                self._engine.settle()
                if self._engine.busy:
                    self._background.finish()
        found: defaultdict[torch.Tensor, _state.State] = self.__dict__["state"]
        self._note_submitted()
        return found

    def _note_submitted(self) -> None:
        """Has states and fingerprints be those behind the last step that has begun."""
        submitted = None if self._engine is None else self._engine.submitted
        if submitted is None or submitted is self._noted:
            return
        states = self.__dict__["state"]
        for param, before, state in submitted.swapping:
            if states.get(param) is before:
                states[param] = state
        fingerprints = self._host.fingerprints
        fingerprints.mark_verified(submitted.verified)
        verified = set(map(id, submitted.verified))
        fingerprints.mark_outdated(p for p in submitted.params if id(p) not in verified)
        self._noted = submitted

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        return self._twins.weight(param) if param in self._twins else param
