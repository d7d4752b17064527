"""What a program sees as the state of an optimizer that has some of it elsewhere."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["StateInMemory"]


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
