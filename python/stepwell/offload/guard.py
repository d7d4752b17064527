"""Makes every Python access to a parameter wait while the parameter's new weight is under way.

It is under way from `WeightGuard.protect`, just before the step is submitted, until the step's
stream has waited for it. As long as it is, the parameter's class is a subclass of
`torch.nn.Parameter` that has `__torch_function__`. torch then calls that for every operation with
the parameter, from any thread and whatever the operation is: arithmetic, `.data`, a copy, pickle,
an optimizer of someone else, a collective. It waits for the parameter, gives it its class back and
goes on. What describes a parameter but does not touch its weight (shape, dtype, grad, hooks) does
not wait. Operations without such a parameter never come here and cost nothing.

Memory may be reached without the parameter: by a view, `.data`, an array of numpy or a state dict
that was taken earlier. The number of references to the parameter's storage shows that. A parameter
that shares its memory, or whose class is not exactly `torch.nn.Parameter`, is `exposed`: the step
has to wait for it itself.

Not seen: raw pointers, and C++ that takes a tensor without torch's argument parser (TorchScript,
pybind extensions).

Cost per parameter and step: two assignments of a class, a look at a counter, two entries of a dict.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


__all__ = [
    "DESCRIPTIVE",
    "Uploads",
    "WeightGuard",
    "clear_grads",
    "exposed",
    "without_waiting",
]

without_waiting = torch._C.DisableTorchFunctionSubclass
"""A context in which accesses do not wait: for code that touches no weight."""

# Whose guard waits for a parameter that is under way, by the parameter's id.
_GUARDS: dict[int, weakref.ref[WeightGuard]] = {}


class Uploads(Protocol):
    """The new weights on their way to the device."""

    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        """The current stream and the step's stream wait for the weights of `params`.

        Returns whether the weights of the last step are meant, so that nobody has to wait for
        them again; not so while a step is being submitted.
        """

    def finish(self) -> None:
        """The current stream and the step's stream wait for all weights."""


class WeightGuard:
    """Guards the parameters that one optimizer steps.

    Args:
        uploads: makes the current stream wait for weights.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._under_way: dict[int, Parameter] = {}
        self.num_steps = 0
        """How often weights were protected: a wait ends the protection of its own step only."""
        # A thread ends a protection while another begins one; so may a signal's handler within.
        self._lock = threading.RLock()
        weakref.finalize(self, _abandon, self._under_way, uploads)

    def protect(self, params: Iterable[torch.Tensor]) -> None:
        """From now on accesses to `params` wait. Call it before the step is submitted.

        Parameters that are not exactly a `torch.nn.Parameter` are left out, see `exposed`.
        """
        guard = weakref.ref(self)
        with self._lock:
            self.num_steps += 1
            for param in params:
                if type(param) is Parameter:
                    key = id(param)
                    self._under_way[key] = param
                    _GUARDS[key] = guard
                    param.__class__ = _UnderWay

    def is_under_way(self, param: torch.Tensor) -> bool:
        """Whether the step's stream has not waited for `param` yet."""
        return id(param) in self._under_way

    @property
    def any_under_way(self) -> bool:
        """Whether there is a parameter for which the step's stream has not waited."""
        return bool(self._under_way)

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """The current stream waits for those of `params` that are under way and protected."""
        self.wait_for([param for param in params if id(param) in self._under_way])

    def wait_for(self, params: Sequence[torch.Tensor]) -> None:
        """The current stream waits for all of `params`, protected or not."""
        if params:
            step = self.num_steps
            with without_waiting():
                is_last_step = self._uploads.wait(params)
            if is_last_step:
                self._end(params, step)

    def finish(self) -> None:
        """The current stream waits for all weights."""
        step = self.num_steps
        with without_waiting():
            self._uploads.finish()
            is_last_step = self._uploads.wait(())
        if is_last_step:
            self.clear(step)

    def clear(self, step: int) -> None:
        """All weights of the step have arrived, or the step's stream has waited for them.

        Args:
            step: `num_steps` as it was before that was waited for.
        """
        self._end(list(self._under_way.values()), step)

    def _end(self, params: Iterable[torch.Tensor], step: int) -> None:
        with self._lock:
            # Weights of a step that was begun meanwhile stay protected.
            if step == self.num_steps:
                for param in params:
                    _restore(self._under_way, param)


def exposed(params: Iterable[torch.Tensor], holders: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `params` whose weights can be reached without an access that a guard sees.

    Args:
        params: parameters that are about to be stepped.
        holders: all tensors that are known to use the memory of `params`, `params` included. No
            weight is read or written through them before all have arrived. They are looked at only
            if a parameter shares its memory.
    """
    found = [param for param in params if not _is_alone(param)]
    if not found:
        return []
    with without_waiting():
        known = {id(holder): holder for holder in holders}
        expected = Counter(_references(holder)[0] for holder in known.values())
        return [param for param in found if not _is_among(param, expected)]


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of `tensor`, and how many refer to it in C++ and in Python."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return storage._cdata, count, sys.getrefcount(storage)


# Both counts for a tensor that shares its memory with none. They depend on the versions of torch
# and Python.
_, _ALONE, _ALONE_IN_PYTHON = _references(torch.empty(1, device="cpu"))


def _is_alone(param: torch.Tensor) -> bool:
    if type(param) is not Parameter:
        return False
    _, count, count_in_python = _references(param)
    return count == _ALONE and count_in_python == _ALONE_IN_PYTHON


def _is_among(param: torch.Tensor, expected: Counter[int]) -> bool:
    """Whether `param` is a plain parameter, and only known tensors use its memory."""
    if type(param) is not Parameter:
        return False
    storage, count, count_in_python = _references(param)
    return count - expected[storage] < _ALONE and count_in_python == _ALONE_IN_PYTHON


def clear_grads(params: Iterable[torch.Tensor]) -> None:
    """Sets the gradients of `params` to None, at little cost for those under way."""
    with without_waiting():
        for param in params:
            _set_grad(param, None)


def _restore(under_way: dict[int, Parameter], param: torch.Tensor) -> None:
    if under_way.pop(id(param), None) is not None:
        _GUARDS.pop(id(param), None)
        param.__class__ = Parameter


def _abandon(under_way: dict[int, Parameter], uploads: Uploads) -> None:
    """The optimizer is gone: its parameters are plain ones again."""
    if under_way:
        # A step that failed has said so, or nobody asks.
        with contextlib.suppress(OSError, ValueError), without_waiting():
            uploads.finish()
        for param in list(under_way.values()):
            _restore(under_way, param)


# ---- the class of a parameter that is under way ----


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


def _setters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__set__ for name in names)


def _methods(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


DESCRIPTIVE: frozenset[Any] = frozenset(
    [
        *_getters("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "names"),
        *_getters("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "output_nr", "name"),
        *_getters("_version", "_cdata", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *_getters("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_nested"),
        *_getters("is_quantized", "is_sparse_csr", "is_mkldnn", "retains_grad", "volatile"),
        *_setters("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *_methods("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
        *_methods("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *_methods("is_conj", "is_neg", "is_inference", "get_device", "dim_order", "__len__"),
        *_methods("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
        *_methods("retain_grad", "_is_view", "is_same_size", "has_names"),
        torch.is_floating_point,
        torch.is_complex,
        torch.is_conj,
        torch.is_neg,
        torch.numel,
    ]
)
"""Functions of torch that neither read nor write a tensor's elements, nor hand out a way to."""

(_get_grad,) = _getters("grad")
(_set_grad,) = _setters("grad")


class _UnderWayMeta(type(Parameter)):  # type: ignore[misc]
    """Has code that looks at `type(parameter)` take it for torch.nn.Parameter."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Parameter)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Parameter)

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is Parameter

    def __hash__(cls) -> int:
        return hash(Parameter)


class _UnderWay(Parameter, metaclass=_UnderWayMeta):
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
        if func in DESCRIPTIVE:
            with without_waiting():
                return func(*args, **kwargs)
        params: list[_UnderWay] = []
        _find((args, kwargs), params)
        if func is torch.Tensor.detach and _is_called_by(Parameter.__new__):
            # torch.nn.Parameter(parameter) took it for a parameter of another class.
            return _call_after_waiting(_detached_parameter, params, args, kwargs)
        return _call_after_waiting(func, params, args, kwargs)

    # Python code of torch that looks at the type first.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _call_after_waiting(Parameter.__deepcopy__, [self], (self, memo), {})

    def __reduce_ex__(self, proto: Any) -> Any:
        return _call_after_waiting(Parameter.__reduce_ex__, [self], (self, proto), {})

    # Not torch's: it gives an alias without asking the class.

    def as_subclass(self, cls: Any) -> Any:
        return _call_after_waiting(Parameter.as_subclass, [self], (self, cls), {})

    # `zero_grad` asks every parameter. This takes a third of the time of `__torch_function__`.

    @property
    def grad(self) -> torch.Tensor | None:
        with without_waiting():
            found: torch.Tensor | None = _get_grad(self)
            return found

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if type(grad) is _UnderWay:
            _call_after_waiting(_set_grad, [grad], (self, grad), {})
            return
        with without_waiting():
            _set_grad(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


# For code that asks for the name, and for messages.
_UnderWay.__name__, _UnderWay.__qualname__ = Parameter.__name__, Parameter.__qualname__
_UnderWay.__module__ = Parameter.__module__


def _find(value: Any, found: list[_UnderWay]) -> None:
    if type(value) is _UnderWay:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _find(each, found)


def _is_called_by(function: Callable[..., Any]) -> bool:
    """Whether the code that called torch, which called `__torch_function__`, is `function`."""
    return sys._getframe(2).f_code is function.__code__


def _detached_parameter(param: Parameter) -> Parameter:
    return torch.Tensor._make_subclass(Parameter, param.data, False)


def _call_after_waiting(
    func: Callable[..., Any], params: list[_UnderWay], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    for param in params:
        reference = _GUARDS.get(id(param))
        guard = None if reference is None else reference()
        if guard is None:
            # torch.utils.swap_tensors gave another tensor this class.
            _wait_for_all()
            param.__class__ = Parameter  # type: ignore[assignment]
        else:
            guard.wait(params)
    # A step is being submitted, so the old weights are still there, and the protection stays.
    left = [param for param in params if type(param) is _UnderWay]
    for param in left:
        param.__class__ = Parameter  # type: ignore[assignment]
    try:
        return func(*args, **kwargs)
    finally:
        for param in left:
            if id(param) in _GUARDS:
                param.__class__ = _UnderWay


def _wait_for_all() -> None:
    for guard in {reference() for reference in list(_GUARDS.values())}:
        if guard is not None:
            guard.finish()
