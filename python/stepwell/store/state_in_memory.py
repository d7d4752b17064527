"""What a program sees as the state of an optimizer that has some of it elsewhere."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state

if TYPE_CHECKING:
    from collections.abc import Callable
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

    def __eq__(self, other: object) -> bool:
        with self._states() as states:
            return dict(states) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._states() as states:
            return copy.deepcopy(states, memo)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # `__or__` has other types
        self.update(other)
        return self


def _method(name: str, *, of_copy: bool) -> Callable[..., Any]:
    def call(self: StateInMemory, /, *args: Any, **kwargs: Any) -> Any:
        with self._states() as states:
            return getattr(states.copy() if of_copy else states, name)(*args, **kwargs)

    return call


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__repr__"),
    *("__copy__", "__reduce__", "__or__", "__ror__"),
    *("clear", "copy", "get", "pop", "popitem", "setdefault", "update"),
):
    setattr(StateInMemory, _name, _method(_name, of_copy=False))
# What these give may be kept, and would see placeholders later.
for _name in ("__iter__", "__reversed__", "items", "keys", "values"):
    setattr(StateInMemory, _name, _method(_name, of_copy=True))
