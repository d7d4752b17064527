"""The class of a parameter whose new weight is under way: whatever leads to the weight waits.

A parameter has this class for a while, instead of `torch.nn.Parameter`. An access is seen in one of
three places, and waits there, on any thread:

- An attribute that leads to the weight waits: `.data`, a method when it is called, an operator.
- A function of torch that is given the parameter asks for `__torch_function__`, which waits.
- All other code in C++ (torch.tensor, assignment to `.data`, transforms of torch.func, TorchScript,
  pybind extensions) asks whether its argument is a torch.Tensor before it unpacks it. Python looks
  at the order of base classes first, and at the attribute `__class__` where that says no. So
  torch.Tensor is left out of the order of this class, and `__class__` waits, then says yes.

The class stays until a forward or `synchronize()` has waited, so that writes by `.data` are noticed
too (see `UnderWay.data`), but not where C++ or a tracer asked for it.

What describes a parameter but does not touch its weight (shape, dtype, grad, hooks) does not wait,
nor does `isinstance(parameter, torch.nn.Parameter)`. `isinstance(parameter, torch.Tensor)` does: it
cannot be told from the question of C++.

Not seen: raw pointers; methods of torch.Tensor that are not looked up on the parameter
(`torch.Tensor.clone(parameter)`) where other code has disabled `__torch_function__`.
"""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import sys
import threading
import weakref
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "DESCRIPTIVE",
    "Guard",
    "as_plain",
    "begin",
    "end",
    "is_compiling",
    "set_grad",
    "under_way_of",
    "without_waiting",
]

without_waiting = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch do not wait: for those that touch no weight."""


class Guard(Protocol):
    """Waits for parameters that are under way."""

    was_compiled: bool
    """Whether torch.compile has traced an access to one of them."""

    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """The current stream waits for those of `params` that this guard knows.

        They are plain parameters again, unless a step is being submitted.
        """

    def wait_and_keep(self, params: Iterable[torch.Tensor], /) -> None:
        """The current stream waits for those of `params` that this guard knows.

        They keep their class.
        """

    def finish(self) -> None:
        """The current stream waits for all parameters of this guard."""


class _Waiting(NamedTuple):
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

    `finish`: as `begin` has it.
    """
    return UnderWay, (GUARDS, _Waiting(weakref.ref(guard), finish))


def begin(params: Iterable[Parameter], guard: Guard, finish: Callable[[], None]) -> None:
    """From now on accesses to `params`, whose class is exactly `torch.nn.Parameter`, wait.

    Args:
        params: of one guard.
        guard: what waits for them.
        finish: waits for all of them, without the guard.
    """
    _, (_, waiting) = under_way_of(guard, finish)
    for param in params:
        GUARDS[id(param)] = waiting  # type: ignore[assignment]
        param.__class__ = UnderWay


def end(param: torch.Tensor) -> None:
    """`param` is a plain parameter again, or what a program has made it meanwhile."""
    GUARDS.pop(id(param), None)
    if type(param) is UnderWay:
        _set_class(param, Parameter)


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
        *(getattr(torch.Tensor, name, None) for name in _DESCRIPTIVE_METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.is_conj,
        torch.is_neg,
        torch.numel,
    ]
)
"""Functions of torch that neither read nor write a tensor's elements, nor hand out a way to."""

(_get_grad,) = _getters("grad")
(set_grad,) = _setters("grad")
"""Sets the gradient of a tensor, without waiting under `without_waiting`."""


# ---- the class ----


class _LikeParameter(type(Parameter)):  # type: ignore[misc]
    """Has code that looks at a class take it for torch.nn.Parameter."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Parameter)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Parameter)

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is Parameter

    def __hash__(cls) -> int:
        return hash(Parameter)


class _WithoutTensor(_LikeParameter):
    """Leaves torch.Tensor out of the order in which base classes are searched."""

    def __init__(cls, *args: Any) -> None:
        # It insists on torch.Tensor.
        super().__init__(*args)
        cls.is_made = True
        cls.__bases__ = (Parameter,)

    def mro(cls) -> list[type]:
        order: list[type] = super().mro()
        if "is_made" in cls.__dict__:
            order.remove(torch.Tensor)
        return order


class _Describing(threading.local):
    """A context in which a function runs that touches no weight."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_DESCRIBING = _Describing()


class _Attribute:
    """An attribute of torch.nn.Parameter that waits for the parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, param: UnderWay | None, _: type) -> Any:
        if param is None:
            return getattr(Parameter, self._name)
        return _call_after_waiting(getattr, [param], (param, self._name), {})

    def __set__(self, param: UnderWay, value: Any) -> None:
        _call_after_waiting(setattr, [param], (param, self._name, value), {})

    def __delete__(self, param: UnderWay) -> None:
        _call_after_waiting(delattr, [param], (param, self._name), {})


class _Method:
    """A method of torch.nn.Parameter that waits for the parameter when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, param: UnderWay | None, _: type) -> Any:
        if param is None:
            return getattr(Parameter, self._name)
        if _is_traced():
            # No function of this module is to be in the trace.
            _wait([param])
            if type(param) is not UnderWay:
                return getattr(param, self._name)
        return partial(self._call, param)

    def _call(self, param: UnderWay, *args: Any, **kwargs: Any) -> Any:
        method = getattr(Parameter, self._name)
        return _call_after_waiting(method, [param], (param, *args), kwargs)


class _Landed(Parameter, metaclass=_LikeParameter):
    """What a parameter says that its class is, after it has waited and is a plain one.

    Python believes an answer only where it differs from the real class, which is
    torch.nn.Parameter by then.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Parameter:  # type: ignore[misc]
        return Parameter(*args, **kwargs)


class UnderWay(Parameter, metaclass=_WithoutTensor):
    """A parameter whose new weight is under way. Attributes that wait are added below."""

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
            with without_waiting(), _DESCRIBING:
                return func(*args, **kwargs)
        params: list[UnderWay] = []
        _find((args, kwargs), params)
        return _call_after_waiting(func, params, args, kwargs)

    @property
    def __class__(self) -> type:
        if not _DESCRIBING.depth and sys._getframe(1).f_code is not _IS_PARAMETER:
            _wait([self], keep=False)
        return Parameter if type(self) is UnderWay else _Landed

    @__class__.setter
    def __class__(self, cls: type) -> None:
        _call_after_waiting(_set_class, [self], (self, cls), {})

    @property
    def data(self) -> torch.Tensor:
        """As a plain parameter's, but a write to it is one to the parameter: the next step sees it.

        Autograd sees no difference, since the step itself has counted as a write.
        """
        found: torch.Tensor = _call_after_waiting(Parameter.detach, [self], (self,), {})
        return found

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        _call_after_waiting(setattr, [self], (self, "data", data), {})

    @property
    def detach(self) -> Callable[[], torch.Tensor]:  # type: ignore[override]
        """As a plain parameter's, which waits."""
        if sys._getframe(1).f_code is Parameter.__new__.__code__:
            # torch.nn.Parameter(parameter) took it for a parameter of another class, and compares
            # that with the class of the result.
            _wait([self], keep=False)
            return partial(_call_after_waiting, _detached_parameter, [self], (self,), {})
        found: Callable[[], torch.Tensor] = _Method("detach").__get__(self, UnderWay)
        return found

    __dict__ = _Attribute("__dict__")

    # `zero_grad` asks every parameter. This takes a third of the time of `__torch_function__`.

    @property
    def grad(self) -> torch.Tensor | None:
        """As a plain parameter's: it does not wait."""
        with without_waiting():
            found: torch.Tensor | None = _get_grad(self)
            return found

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        with without_waiting():
            # A gradient that is itself a parameter under way is asked for its class.
            set_grad(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __getattr__(self, name: str) -> Any:
        # It is on torch.Tensor since this module was imported, or nowhere.
        if not hasattr(Parameter, name):
            raise AttributeError(f"'Parameter' object has no attribute '{name}'")
        return _call_after_waiting(getattr, [self], (self, name), {})


# For code that asks for the name, and for messages.
for _class in (UnderWay, _Landed):
    _class.__name__, _class.__qualname__ = Parameter.__name__, Parameter.__qualname__
    _class.__module__ = Parameter.__module__


def _as_parameter(_: _LikeParameter) -> tuple[Any, ...]:
    return itemgetter(0), ((Parameter,),)


# torch.multiprocessing pickles the class of a parameter that goes to another process.
for _metaclass in (_WithoutTensor, _LikeParameter):
    copyreg.pickle(_metaclass, _as_parameter)


def _add_attributes() -> None:
    """Gives `UnderWay` each attribute of torch.nn.Parameter that it does not define itself."""
    descriptive = {*_DESCRIPTIVE_GETTERS, *_DESCRIPTIVE_METHODS, "__hash__"}
    # By the last one C++ exchanges tensors past all of the above.
    own = {*vars(UnderWay), "__dlpack_c_exchange_api__"}
    for name in dir(Parameter):
        found = inspect.getattr_static(Parameter, name)
        if name in own or found is inspect.getattr_static(object, name, None):
            continue
        if name in descriptive or not hasattr(found, "__get__"):
            setattr(UnderWay, name, found)
        else:
            setattr(UnderWay, name, (_Attribute if hasattr(found, "__set__") else _Method)(name))


_add_attributes()

_set_class = object.__dict__["__class__"].__set__
# Asks whether the parameter is a torch.Tensor, for isinstance(parameter, torch.nn.Parameter).
_IS_PARAMETER = type(Parameter).__instancecheck__.__code__


def _suspend(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Makes those of `params` plain that are under way, and returns them."""
    own: list[torch.Tensor] = [param for param in params if type(param) is UnderWay]
    for param in own:
        _set_class(param, Parameter)
    return own


def _resume(own: Iterable[torch.Tensor]) -> None:
    """Those of `own` that are still under way wait again."""
    for param in own:
        if id(param) in GUARDS and type(param) is Parameter:
            _set_class(param, UnderWay)


@contextlib.contextmanager
def as_plain(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """In this context accesses to `params` do not wait."""
    own = _suspend(params)
    try:
        yield
    finally:
        _resume(own)


# ---- waiting ----


def _find(value: Any, found: list[UnderWay]) -> None:
    if type(value) is UnderWay:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _find(each, found)


def _detached_parameter(param: Parameter) -> Parameter:
    return torch.Tensor._make_subclass(Parameter, param.data, False)


def _wait(params: list[UnderWay], *, keep: bool = True) -> None:
    """Waits for `params`, which `keep` their class, but where code is traced that sees it."""
    keep = keep and not _is_traced()
    by_guard: dict[Guard | None, list[UnderWay]] = {}
    for param in params:
        waiting = GUARDS.get(id(param))
        guard = None if waiting is None else waiting.guard()
        if waiting is not None and guard is None:
            # The optimizer is gone, as another thread has found.
            with without_waiting():
                waiting.finish()
        by_guard.setdefault(guard, []).append(param)
    for guard, own in by_guard.items():
        if guard is None:
            # torch.utils.swap_tensors gave another tensor this class, or its optimizer is gone.
            _wait_for_all()
            for param in own:
                _set_class(param, Parameter)
        elif keep:
            guard.wait_and_keep(own)
        else:
            guard.was_compiled |= is_compiling()
            guard.wait(own)


def _is_traced() -> bool:
    """Whether what happens on this thread is traced, so that the parameter's class is seen."""
    return is_compiling() or torch._C._is_tracing()


def is_compiling() -> bool:
    """Whether torch.compile traces code on this thread, and looks at the parameter."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


def _call_after_waiting(
    func: Callable[..., Any], params: list[UnderWay], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _wait(params)
    own = _suspend(params)
    try:
        return func(*args, **kwargs)
    finally:
        _resume(own)


def _wait_for_all() -> None:
    for guard in {waiting.guard() for waiting in list(GUARDS.values())}:
        if guard is not None:
            # Also what is deferred.
            guard.wait(())
            guard.finish()
