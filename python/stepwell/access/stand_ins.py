"""Tensors that stand for memory which is had when they are used.

A stand-in lies at addresses that nothing is at. What describes it (shape, dtype, grad, hooks) is
its own. Every other function of torch is called with what it stands for then, a plain tensor that
nothing moves: so whoever lets go of that memory need not know who still reads it. A function that
returns what it was called with, as those in place do, returns the stand-in.

Not seen: raw pointers, and code in C++ that takes a tensor past torch's functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from stepwell.access.descriptive import DESCRIPTIVE, without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Source", "StandIn", "begin", "end"]

# Of `narrow`: the tensor, dimension, first element, number of elements.
_NARROW_ARGS = 4


class Source(Protocol):
    """Has what a flat stand-in stands for."""

    def whole(self) -> torch.Tensor:
        """What it stands for: the same object as long as the program's writes to it count."""

    def part(self, begin: int, numel: int) -> torch.Tensor | None:
        """A view of a part of it, though nothing else may be there; None: that cannot be had."""


class StandIn(torch.Tensor):
    """A tensor that stands for another."""

    source: Source

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in DESCRIPTIVE:
            with without_waiting():
                return func(*args, **kwargs)
        if func is torch.Tensor.narrow and len(args) == _NARROW_ARGS:
            part = _narrowed(*args)
            if part is not None:
                return part
        stand_ins: dict[int, torch.Tensor] = {}

        def there(tensor: StandIn) -> torch.Tensor:
            found = tensor.source.whole().requires_grad_(tensor.requires_grad)
            stand_ins[id(found)] = tensor
            return found

        args, kwargs = tree_map_only(StandIn, there, (args, kwargs))
        result = func(*args, **kwargs)
        return stand_ins.get(id(result), result)


def begin(tensor: torch.Tensor, place: torch.Tensor, source: Source) -> None:
    """Has a plain tensor be a stand-in, at `place`, for what `source` has."""
    tensor.data = place
    tensor.source = source  # type: ignore[attr-defined]
    tensor.__class__ = StandIn


def end(tensor: torch.Tensor, there: torch.Tensor) -> None:
    """Has a stand-in be a plain tensor, where `there` is."""
    tensor.__class__ = torch.Tensor
    del tensor.source  # type: ignore[attr-defined]
    tensor.data = there


def _narrowed(tensor: Any, dim: Any, begin: Any, numel: Any) -> torch.Tensor | None:
    """`Source.part`; None: the call is another one."""
    is_plain_call = isinstance(begin, int) and isinstance(numel, int) and dim in (0, -1)
    if type(tensor) is not StandIn or not is_plain_call or tensor.dim() != 1:
        return None
    is_within = 0 <= begin <= begin + numel <= tensor.numel()
    return tensor.source.part(begin, numel) if is_within else None
