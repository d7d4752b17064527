"""The class of a parameter whose new weight is under way: a use of the weight waits.

A parameter has this class for a while, instead of `torch.nn.Parameter`. Each function of torch that
is given the parameter, also by an attribute, a method or an operator, asks for
`__torch_function__`, which waits. Then the parameter is a plain one, and the function goes on with
that. What describes a parameter but does not touch its weight (shape, dtype, grad, hooks) does not
wait.

Not seen: raw pointers, and code in C++ that takes a tensor past torch's functions (torch.tensor,
assignment to `.data`, transforms of torch.func, TorchScript, extensions of pybind).
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "DESCRIPTIVE",
    "Guard",
    "end",
    "is_compiling",
    "set_grad",
    "under_way_of",
    "wait_for",
    "without_waiting",
]

without_waiting = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch do not wait: for those that touch no weight."""


class Guard(Protocol):
    """Waits for parameters that are under way."""

    was_compiled: bool
    """Whether torch.compile has traced a use of one of them."""

    def use(self, params: Iterable[torch.Tensor], /) -> None:
        """Waits for `params`, which are about to be used, and for others where it has to.

        They are plain parameters then, unless a step is being submitted.
        """

    def look(self) -> None:
        """Waits for all parameters of this guard, with all updates."""


@dataclass(eq=False)
class _Waiting:
    """What waits for a parameter that is under way."""

    guard: weakref.ref[Guard]
    finish: Callable[[], None]
    """What waits where the guard is gone, and its finalizer has not been called yet."""


GUARDS: dict[int, _Waiting] = {}
"""By the parameter's id."""


def under_way_of(
    guard: Guard, finish: Callable[[], None]
) -> tuple[type[Parameter], tuple[dict[int, Any], object]]:
    """The class of a parameter of `guard` that is under way; and a registry with what it has of it.

    Args:
        guard: what waits for it.
        finish: waits for all parameters of the guard, without it.
    """
    return UnderWay, (GUARDS, _Waiting(weakref.ref(guard), finish))


def end(param: torch.Tensor) -> None:
    """`param` is a plain parameter again, or what a program has made it meanwhile."""
    GUARDS.pop(id(param), None)
    if type(param) is UnderWay:
        param.__class__ = Parameter  # type: ignore[assignment]


# ---- what does not wait ----

_DESCRIPTIVE_GETTERS = (
    *("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "names"),
    *("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "output_nr", "name"),
    *("_version", "_cdata", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_nested"),
    *("is_quantized", "is_sparse_csr", "is_mkldnn", "retains_grad", "volatile"),
)
_DESCRIPTIVE_SETTERS = (
    *("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_DESCRIPTIVE_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
    *("is_conj", "is_neg", "is_inference", "get_device", "dim_order", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("retain_grad", "_is_view", "is_same_size", "has_names"),
)


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


def _setters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__set__ for name in names)


DESCRIPTIVE: frozenset[Any] = frozenset(
    [
        *_getters(*_DESCRIPTIVE_GETTERS),
        *_setters(*_DESCRIPTIVE_SETTERS),
        torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
        *(getattr(torch.Tensor, name, None) for name in _DESCRIPTIVE_METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.is_conj,
        torch.is_neg,
        torch.numel,
    ]
)
"""Functions of torch that neither read nor write a tensor's elements, nor hand out a way to."""

(set_grad,) = _setters("grad")
"""Sets the gradient of a tensor, without waiting under `without_waiting`."""


# ---- the class ----


class UnderWay(Parameter):
    """A parameter whose new weight is under way."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Parameter:  # type: ignore[misc]
        """`type(parameter)(data)` makes a plain parameter."""
        return Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # No function of this module is to be in the trace.
            _traced()
        elif func not in DESCRIPTIVE:
            params = list(_found((args, kwargs)))
            _wait(params)
            if not any(type(param) is UnderWay for param in params):
                return func(*args, **kwargs)
            # Their step is being submitted.
        with without_waiting():
            return func(*args, **kwargs)


def _found(value: Any) -> Iterator[UnderWay]:
    """The parameters that are under way among the arguments of a function."""
    if type(value) is UnderWay:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _found(each)
    elif isinstance(value, dict):
        yield from _found(list(value.values()))


def wait_for(params: Iterable[torch.Tensor]) -> None:
    """Waits for those of `params` that are under way, as a use of them does."""
    if found := [param for param in params if type(param) is UnderWay]:
        _wait(found)


def _wait(params: Iterable[UnderWay]) -> None:
    by_waiting: dict[_Waiting | None, list[UnderWay]] = {}
    for param in params:
        by_waiting.setdefault(GUARDS.get(id(param)), []).append(param)
    for waiting, own in by_waiting.items():
        if waiting is None:
            # torch.utils.swap_tensors gave another tensor this class, or another thread ended it.
            _wait_for_all()
            for param in own:
                if id(param) not in GUARDS:
                    end(param)
        elif (guard := waiting.guard()) is None:
            # Its optimizer is gone, as another thread has found.
            with without_waiting():
                waiting.finish()
            for param in own:
                end(param)
        else:
            guard.was_compiled |= is_compiling()
            guard.use(own)


def is_compiling() -> bool:
    """Whether torch.compile traces code on this thread, and looks at the parameter."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


def _wait_for_all() -> None:
    for guard in {waiting.guard() for waiting in list(GUARDS.values())}:
        if guard is not None:
            guard.look()


def _traced() -> bool:
    """Called by torch.compile when it traces a use, not when the compiled code runs."""
    for guard in {waiting.guard() for waiting in list(GUARDS.values())}:
        if guard is not None:
            guard.was_compiled = True
    _wait_for_all()
    return True


# What torch.compiler.assume_constant_result does, which takes seconds to import.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
