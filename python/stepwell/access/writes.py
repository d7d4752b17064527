"""What a step in the background writes: its first use waits for that part of the step.

From the call that begins the step until its first use or the end of the step, such a tensor has
another class: a parameter `UnderWay`, a plain tensor `Written`, a DTensor one that is made of its
own. What leads to its memory (a function of torch that is given it, `.data`, an operator) asks for
`__torch_function__`, which waits. Then it has its own class again, on all threads. What describes
it (shape, dtype, attributes that a program has given it) does not wait. Other tensors cost nothing.

- How a use waits is its owner's matter. Of what the owner does not have a guard for, the thread
  waits until the memory has its final values, and work that is launched from then on reads them, on
  any stream. On a device it waits for uploads (`ThreadWait`), and not for the program's work: what
  gathers weights reads them on streams that come after no other.
- The local tensor of a DTensor is asked for by C++ as an attribute, which waits too.

Memory may be reached without the tensor, by a view or an array that was taken earlier. The number
of references to its storage shows that (`guard.exposed`); then the step has to wait by itself.

Not seen: raw pointers, and code in C++ that takes a tensor past torch's functions (torch.tensor,
assignment to `.data`, transforms of torch.func, TorchScript, extensions of pybind).

Cost per tensor and step: two assignments of a class, a few entries of dicts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from stepwell.access.descriptive import DESCRIPTIVE, changes_nothing, without_waiting
from stepwell.access.finalizers import finalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "LOCK",
    "Protection",
    "ThreadWait",
    "Waiting",
    "Writes",
    "Written",
    "begin",
    "end",
    "forget_when_gone",
    "is_compiling",
    "is_under_way",
    "wait_for",
]

_Part = TypeVar("_Part")


class Waiting(Protocol):
    """What waits for tensors of these classes."""

    def use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Waits for tensors of its own that are about to be used; None: for all."""

    def note_result(self, tensors: Sequence[torch.Tensor], result: object) -> None:
        """A function of torch has used tensors that were waited for, and returned a result."""


# What waits for a tensor, by the tensor's id.
_WAITING: dict[int, Waiting] = {}

LOCK = threading.RLock()
"""A thread has it that begins a step, or that ends waits. So may a signal's handler within."""


class Protection(NamedTuple):
    """What the call that begins a step does, for uses of tensors to wait from then on."""

    entries: list[tuple[dict[Any, Any], dict[Any, Any]]]
    """Dicts, each with what is put into it."""
    classes: list[tuple[type[torch.Tensor], list[torch.Tensor]]]
    """Classes, each with the tensors that get it."""


# ---- the classes ----


def _waits(
    cls: type[torch.Tensor],
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The `__torch_function__` of what a step writes."""
    kwargs = kwargs or {}
    if torch.compiler.is_compiling():
        # No function of this module is to be in the trace.
        _traced()
    elif func not in DESCRIPTIVE and not changes_nothing(func, args, kwargs):
        waited = _wait(filter(_is_written, tree_leaves((args, kwargs))))
        # Where a step has begun meanwhile, that is waited for.
        result = func(*args, **kwargs)
        for waiting, tensors in waited.items():
            if waiting is not None:
                waiting.note_result(tensors, result)
        return result
    with without_waiting():
        return func(*args, **kwargs)


class Written(torch.Tensor):
    """A tensor that a step writes."""

    __torch_function__ = classmethod(_waits)


class UnderWay(Parameter):
    """A parameter whose new weight is under way."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Parameter:  # type: ignore[misc]
        """`type(parameter)(data)` makes a plain parameter."""
        return Parameter(*args, **kwargs)

    __torch_function__ = classmethod(_waits)


@functools.cache
def _written_shard() -> type[torch.Tensor]:
    """Made when it is needed: importing DTensor takes a second."""
    from torch.distributed.tensor import DTensor

    slot: Any = DTensor.__dict__["_local_tensor"]

    class WrittenShard(DTensor):
        """A DTensor that a step writes."""

        __torch_function__ = classmethod(_waits)

        @property
        def _local_tensor(self) -> torch.Tensor:
            _wait([self])
            found: torch.Tensor = slot.__get__(self)
            return found

        @_local_tensor.setter
        def _local_tensor(self, value: torch.Tensor) -> None:
            _wait([self])
            slot.__set__(self, value)

    _CLASSES.add(WrittenShard)
    return WrittenShard


# With that of DTensors, once there are any.
_CLASSES: set[type] = {Written, UnderWay}


def _is_written(value: object) -> bool:
    """Whether a step writes a tensor, and nothing has waited for it."""
    return type(value) in _CLASSES


def is_under_way(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter that is no DTensor, and its new weight is under way."""
    return type(tensor) is UnderWay


def _class_of(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """What tensors of a class become when a step writes them."""
    if kind in _CLASSES:
        return kind
    if kind is torch.Tensor:
        return Written
    return UnderWay if kind is Parameter else _written_shard()


def _restore_class(tensor: torch.Tensor) -> None:
    # Not what a program has made it meanwhile.
    if _is_written(tensor):
        tensor.__class__ = type(tensor).__bases__[0]


def begin(param: torch.Tensor, waiting: Waiting) -> None:
    """From now on uses of a parameter ask `waiting`, until `end`: also where no step writes it."""
    with LOCK:
        _WAITING[id(param)] = waiting
        param.__class__ = _class_of(type(param))


def end(param: torch.Tensor) -> None:
    """Uses of a parameter ask nothing any more."""
    with LOCK:
        _WAITING.pop(id(param), None)
        _restore_class(param)


def forget_when_gone(param: torch.Tensor) -> None:
    """What `begin` notes of a parameter goes with it."""
    weakref.finalize(param, _WAITING.pop, id(param), None).atexit = False


# ---- uses ----


def wait_for(values: Iterable[Any]) -> None:
    """Waits for those of `values` that are tensors which steps write, as a use of them does."""
    _wait([each for each in values if _is_written(each)])


def _wait(tensors: Iterable[torch.Tensor]) -> Mapping[Waiting | None, list[torch.Tensor]]:
    by_writes: dict[Waiting | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_writes.setdefault(_WAITING.get(id(tensor)), []).append(tensor)
    for writes, own in by_writes.items():
        if writes is not None:
            writes.use(own)
            continue
        # torch.utils.swap_tensors gave another tensor this class, or another thread ended it.
        _wait_for_all()
        for tensor in own:
            if id(tensor) not in _WAITING:
                _restore_class(tensor)
    return by_writes


def _wait_for_all() -> None:
    # Other threads end waits meanwhile.
    for writes in set(_WAITING.copy().values()):
        writes.use(None)


def is_compiling() -> bool:
    """Whether torch.compile traces code on this thread, and looks at a tensor."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


def _traced() -> bool:
    """Called by torch.compile when it traces a use, not when the compiled code runs."""
    _wait_for_all()
    return True


# What torch.compiler.assume_constant_result does, which takes seconds to import.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- the tensors of an optimizer ----


class ThreadWait:
    """Waits until weights are on the device, for all streams.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What the current stream waits for in this context, the thread waits for at its end."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class Writes(Generic[_Part]):
    """The tensors that one optimizer steps.

    Args:
        wait: a method that waits for parts of the last step, held weakly.
        finish: the thread waits for all of the last step, where the owner of `wait` is gone.
        use: a method, held weakly, that waits for tensors which are about to be used, and for
            others where it has to; of None for all. Without it a use waits for the tensor's part.
    """

    def __init__(
        self,
        wait: Callable[[Sequence[_Part]], object],
        finish: Callable[[], object],
        use: Callable[[Sequence[torch.Tensor] | None], None] | None = None,
    ) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._finish = finish
        self._use = None if use is None else weakref.WeakMethod(use)
        # Those that nothing has waited for, and the parts of those that are not their own; by ids.
        self._tensors: dict[int, torch.Tensor] = {}
        self._parts: dict[int, _Part] = {}
        # The tensors of each of these parts, by its id.
        self._together: dict[int, list[torch.Tensor]] = {}
        self.num_steps = 0
        """How many have begun: a wait ends the protection of its own step only."""
        finalize(wait.__self__, self._abandon)  # type: ignore[attr-defined]

    def protection(
        self, own: Iterable[torch.Tensor], parts: Mapping[torch.Tensor, _Part]
    ) -> Protection:
        """What the call that begins a step does, for uses of tensors to wait from then on.

        Args:
            own: parameters that are parts of the step by themselves.
            parts: plain tensors and DTensors, each with the part of the step that writes it. A wait
                for one ends the waits of all that have the same object.
        """
        own = list(own)
        together: dict[int, list[torch.Tensor]] = {}
        by_class: dict[type[torch.Tensor], list[torch.Tensor]] = {Parameter: own}
        for tensor, part in parts.items():
            together.setdefault(id(part), []).append(tensor)
            by_class.setdefault(type(tensor), []).append(tensor)
        tensors = {id(tensor): tensor for tensor in (*own, *parts)}
        return Protection(
            [
                (self._tensors, tensors),
                (self._parts, {id(tensor): part for tensor, part in parts.items()}),
                (self._together, together),
                (_WAITING, dict.fromkeys(tensors, self)),
                (vars(self), {"num_steps": self.num_steps + 1}),
            ],
            [(_class_of(kind), each) for kind, each in by_class.items()],
        )

    def close(self) -> None:
        """No step comes any more. What `finish` needs is let go."""
        self._finish = _nothing

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has waited for `tensor` yet."""
        return id(tensor) in self._tensors

    def __bool__(self) -> bool:
        """Whether there is a tensor that nothing has waited for."""
        return bool(self._tensors)

    def use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Waits for tensors of its own that are about to be used; None: for all."""
        use = None if self._use is None else self._use()
        if use is not None:
            use(tensors)
        else:
            self.wait_for(list(self._tensors.values()) if tensors is None else tensors)

    def note_result(self, tensors: Sequence[torch.Tensor], result: object) -> None:
        """They are plain now."""

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for the parts of the step that write `tensors`, where nothing has."""
        with LOCK:
            step = self.num_steps
            parts = [self._part(each) for each in tensors if self.holds(each)]
        if parts:
            self._wait_for(parts, step)

    def wait_for_parts(self, parts: Sequence[_Part]) -> None:
        """Waits for parts, in any case."""
        self._wait_for(parts, self.num_steps)

    def clear(self, step: int) -> None:
        """All parts of the step are written.

        Args:
            step: `num_steps` as it was before that was waited for.
        """
        self._end([self._part(each) for each in list(self._tensors.values())], step)

    def _part(self, tensor: Any) -> _Part:
        found: _Part = self._parts.get(id(tensor), tensor)
        return found

    def _wait_for(self, parts: Sequence[_Part], step: int) -> None:
        wait = self._wait()
        with without_waiting():
            if wait is None:
                # Another thread lets go of the optimizer, and may still wait for the step.
                self._finish()
            else:
                wait(parts)
        self._end(parts, step)

    def _end(self, parts: Iterable[_Part], step: int) -> None:
        with LOCK:
            # What a step that was begun meanwhile writes stays protected.
            if step == self.num_steps:
                for part in parts:
                    for tensor in self._together.get(id(part), [part]):
                        self._restore(tensor)
                    # Behind it: after Ctrl-C the next wait finds them.
                    self._together.pop(id(part), None)

    def _restore(self, tensor: Any) -> None:
        if id(tensor) in self._tensors:
            # In this order, wherever Ctrl-C comes: a use of what waits for nothing gets its class.
            _WAITING.pop(id(tensor), None)
            _restore_class(tensor)
            # While it is among the tensors its part is known.
            self._tensors.pop(id(tensor), None)
            self._parts.pop(id(tensor), None)

    def _abandon(self) -> None:
        """The optimizer is gone: its tensors are plain again when they have landed."""
        if self._tensors:
            # A step that failed has raised its error already, or no caller is left.
            with contextlib.suppress(OSError, ValueError), without_waiting():
                self._finish()
            for tensor in list(self._tensors.values()):
                self._restore(tensor)


def _nothing() -> None:
    pass
