"""What a step in the background writes in host memory: its first use waits for that part of it.

Between `Writes.protect`, just before the step is submitted, and its first use or the end of the
step, such a tensor has the class `Written`. What leads to its memory (a function of torch that is
given it, `.data`, an operator) asks for `__torch_function__`, which waits. Then it is a plain
tensor again, on all threads and streams: the memory has its final values, and work that is launched
from then on reads them. So a copy to a device comes after the workers' writes without an event.
What describes it (shape, dtype, attributes that a program has given it) does not wait.

Memory may be reached without the tensor, by a view or an array that was taken earlier. The number
of references to its storage shows that (`guard.exposed`); then the step has to wait by itself.

Not seen: raw pointers, and code in C++ that takes a tensor past torch's functions.

Cost per tensor and step: two assignments of a class, two entries of a dict.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from stepwell.offload.under_way import DESCRIPTIVE, without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Waiting", "Writes", "Written", "forget", "remember"]

_Part = TypeVar("_Part")


class Waiting(Protocol):
    """Waits for tensors of the class `Written`. Those that it has waited for are plain then."""

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for `tensors`, which are its own."""

    def wait_for_all(self) -> None:
        """Waits for all of its own."""


# What waits for a tensor, by the tensor's id; and all there are.
_WAITING: dict[int, weakref.ref[Waiting]] = {}
_ALL: weakref.WeakSet[Waiting] = weakref.WeakSet()


def remember(tensors: Iterable[torch.Tensor], waiting: Waiting) -> None:
    """From now on uses of those of `tensors` that have the class `Written` ask `waiting`.

    They are alive until `forget`.
    """
    reference = weakref.ref(waiting)
    _ALL.add(waiting)
    _WAITING.update((id(tensor), reference) for tensor in tensors)


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Uses of `tensors`, which have another class, ask nothing any more."""
    for tensor in tensors:
        _WAITING.pop(id(tensor), None)


class Written(torch.Tensor):
    """A tensor that a step writes."""

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
        tensors = [each for each in tree_leaves((args, kwargs)) if type(each) is Written]
        _wait(tensors)
        if not any(type(tensor) is Written for tensor in tensors):
            return func(*args, **kwargs)
        # Their step is being submitted.
        with without_waiting():
            return func(*args, **kwargs)


class Writes(Generic[_Part]):
    """The tensors that one optimizer steps in host memory.

    Args:
        wait: a method that waits for parts of a step, held weakly. It returns whether these are
            parts of the last step; not so while one is being submitted.
    """

    def __init__(self, wait: Callable[[Iterable[_Part]], bool]) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._parts: dict[int, tuple[torch.Tensor, _Part]] = {}
        self._num_steps = 0
        # A thread ends a protection while another begins one; so may a signal's handler within.
        self._lock = threading.RLock()
        _ALL.add(self)
        weakref.finalize(self, _restore, self._parts, self._lock)

    def protect(self, parts: Mapping[torch.Tensor, _Part]) -> None:
        """From now on uses of tensors wait. Call it before the step is submitted.

        Args:
            parts: plain tensors, each with the part of the step that writes it.
        """
        reference: weakref.ref[Waiting] = weakref.ref(self)
        with self._lock:
            self._num_steps += 1
            for tensor, part in parts.items():
                self._parts[id(tensor)] = tensor, part
                _WAITING[id(tensor)] = reference
                tensor.__class__ = Written

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for the parts of the step that write `tensors`."""
        with self._lock:
            step = self._num_steps
            found = [self._parts[id(each)] for each in tensors if id(each) in self._parts]
        wait = self._wait()
        if found and (wait is None or wait([part for _, part in found])):
            self._end([tensor for tensor, _ in found], step)

    def wait_for_all(self) -> None:
        """Waits for all parts of the step."""
        self.wait_for([tensor for tensor, _ in list(self._parts.values())])

    def _end(self, tensors: Iterable[torch.Tensor], step: int) -> None:
        with self._lock:
            # What a step that was begun meanwhile writes stays protected.
            if step == self._num_steps:
                for tensor in tensors:
                    if self._parts.pop(id(tensor), None) is not None:
                        _end(tensor)


def _wait(tensors: Iterable[torch.Tensor]) -> None:
    by_waiting: dict[Waiting | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        reference = _WAITING.get(id(tensor))
        by_waiting.setdefault(None if reference is None else reference(), []).append(tensor)
    for waiting, own in by_waiting.items():
        if waiting is not None:
            waiting.wait_for(own)
            continue
        # torch.utils.swap_tensors gave another tensor this class.
        for each in list(_ALL):
            each.wait_for_all()
        for tensor in own:
            if id(tensor) not in _WAITING:
                tensor.__class__ = torch.Tensor


def _end(tensor: torch.Tensor) -> None:
    _WAITING.pop(id(tensor), None)
    tensor.__class__ = torch.Tensor


def _restore(parts: dict[int, tuple[torch.Tensor, Any]], lock: threading.RLock) -> None:
    """The optimizer is gone, after its last step."""
    with lock:
        for tensor, _ in parts.values():
            _end(tensor)
        parts.clear()
