"""Stands in for a gradient that was moved to host memory: its shape, one element of memory.

- It reads as NaN, or as zero once it was zeroed; so do its views.
- `zero_()` in its various forms (`zero_grad(set_to_none=False)`, `_foreach_zero_`, by way of
  `.data`) sets `is_zeroed`. The holder of the gradient (`host_collector`) zeroes the sum then.
- It may be moved to another device and back, as modules move gradients with their parameters. The
  sum stays where it is.
- A GradScaler that asks whether it is finite hears of the sum, by its norm. The step unscales it.
- Everything else that would change it raises, with a hint: the gradient itself is not there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from stepwell.access.descriptive import DESCRIPTIVE, without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["GradMarker"]

_ZEROING = frozenset([torch.Tensor.zero_, torch.zero_, torch._foreach_zero_])
_FILLING = frozenset([torch.Tensor.fill_, torch.fill_])
# What gives the same gradient under another name.
_SAME = frozenset(
    [
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.detach,
        torch.Tensor.detach_,
        torch.detach,
        torch.detach_,
    ]
)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What gives it on another device: `torch.nn.Module.to` assigns that to `grad.data`.
_MOVING = frozenset([torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda])
# What gives a way to the element that cannot be watched.
_ESCAPING = frozenset([torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__])
# What a GradScaler asks of gradients that the optimizer unscales itself.
_CHECK_FINITE = torch._amp_foreach_non_finite_check_and_unscale_
_ASSIGNING = frozenset(
    ["__setitem__", "__set__", "__delete__", "__setstate__"]
    + [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")]
    + [f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")]
)


class GradMarker(torch.Tensor):
    """Stands in for a gradient."""

    is_zeroed: bool
    """Whether the gradient was set to zero after it had been moved."""
    is_part: bool
    """Whether it is a view of one, or one that was moved."""
    moved_from: GradMarker | None
    """What it has the place of on another device."""
    norms: Callable[[], Sequence[torch.Tensor]]
    """Gives the norms of all pieces of the sum, on the device."""

    @staticmethod
    def of(grad: torch.Tensor, norms: Callable[[], Sequence[torch.Tensor]]) -> GradMarker:
        """A marker with the shape, dtype and device of `grad`."""
        element = torch.full((), math.nan, dtype=grad.dtype, device=grad.device)
        marker = _marker(element.expand(grad.shape), is_part=False)
        marker.norms = norms
        return marker

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with without_waiting():
            if func in DESCRIPTIVE:
                return func(*args, **kwargs)
            if func in _SAME:
                return args[0]
            if func in _ESCAPING:
                return func(args[0].clone(), *args[1:], **kwargs)
            if func in _MOVING and isinstance(args[0], GradMarker):
                return _moved(func, args, kwargs)
            if func is _CHECK_FINITE and _is_only_asked(*args):
                return _check_finite(*args)
            changed = [*_markers(_changed(func, args, kwargs))]
            if func == _SET_DATA and _is_moved(*args):
                changed = []
            is_zeroing = func in _ZEROING or (func in _FILLING and _is_zero(args, kwargs))
            for marker in changed:
                if marker.is_part or not is_zeroing:
                    raise ValueError(
                        "a gradient is changed that is in host memory (`accumulate` is `host`), "
                        f"by `{func.__name__}`. hint: clear it by zero_grad() or zero_(); clip by "
                        "the optimizer's clip_norm (Trainer: stepwell.offload.offload_trainer), "
                        "which needs no GradScaler.unscale_(); for all else accumulate='device', "
                        "and so weights='device'"
                    )
            result = func(*args, **kwargs)
            for marker in changed:
                marker.is_zeroed = True
            return _with_parts(result, list(_markers((args, kwargs))))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with without_waiting():
            copied = memo[id(self)] = self.clone().as_subclass(torch.Tensor)
            return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        with without_waiting():
            copied: Any = self.clone().as_subclass(torch.Tensor)
            return copied.__reduce_ex__(proto)


def _marker(tensor: torch.Tensor, *, is_part: bool) -> GradMarker:
    marker = tensor.as_subclass(GradMarker)
    marker.is_zeroed = False
    marker.is_part = is_part
    marker.moved_from = None
    return marker


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` gives; a marker as small as `args[0]` where only the device is another."""
    marker: GradMarker = args[0]
    extent = torch.empty([0] * marker.dim(), dtype=marker.dtype, device=marker.device)
    place = func(extent, *args[1:], **kwargs)
    if marker.is_part or place.dtype != marker.dtype:
        result: torch.Tensor = func(*args, **kwargs)
        return result if result is marker else result.as_subclass(torch.Tensor)
    if place is extent:
        return marker
    value = 0.0 if marker.is_zeroed else math.nan
    element = torch.full((), value, dtype=place.dtype, device=place.device)
    moved = _marker(element.expand(marker.shape), is_part=True)
    moved.moved_from = marker
    return moved


def _is_only_asked(grads: Sequence[torch.Tensor], _: torch.Tensor, inv_scale: torch.Tensor) -> bool:
    """Whether a GradScaler leaves gradients as they are, of which none is a part of another."""
    return float(inv_scale) == 1 and not any(each.is_part for each in _markers(grads))


def _check_finite(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Sets `found_inf` to 1 if one of `grads` is not finite, or one that a marker stands for."""
    markers = [grad for grad in grads if isinstance(grad, GradMarker)]
    if others := [grad for grad in grads if not isinstance(grad, GradMarker)]:
        _CHECK_FINITE(others, found_inf, inv_scale)
    norms = [norm for each in markers if not each.is_zeroed for norm in each.norms()]
    if norms:
        is_inf = torch.stack(norms).isfinite().all().logical_not()
        found_inf.copy_(torch.maximum(found_inf, is_inf.to(found_inf)))


def _is_moved(marker: torch.Tensor, value: Any) -> bool:
    """Whether `value` is `marker`, or that on another device."""
    return isinstance(value, GradMarker) and (value is marker or value.moved_from is marker)


def _markers(value: Any) -> Iterable[GradMarker]:
    if isinstance(value, GradMarker):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _markers(each)
    elif isinstance(value, dict):
        yield from _markers(list(value.values()))


def _changed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Those of the arguments that `func` writes to."""
    name = func.__name__.partition(".")[0]
    is_in_place = name in _ASSIGNING or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if args else next(iter(kwargs.values()), None)
    return [first if is_in_place else None, kwargs.get("out")]


def _is_zero(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    value = args[1] if len(args) > 1 else kwargs.get("value")
    return isinstance(value, (int, float)) and value == 0


def _with_parts(result: Any, markers: list[GradMarker]) -> Any:
    """`result` in which views of a marker are markers too, which refuse to be changed."""
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_with_parts(each, markers) for each in result)
    if not isinstance(result, torch.Tensor) or any(result is marker for marker in markers):
        return result
    storages = {marker.untyped_storage()._cdata for marker in markers}
    if result.layout == torch.strided and result.untyped_storage()._cdata in storages:
        return _marker(result, is_part=True)
    return result.as_subclass(torch.Tensor)
