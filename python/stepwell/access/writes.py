"""What a step in the background writes: its first use waits for that part of the step.

Between `Writes.protect`, just before the step is submitted, and its first use or the end of the
step, such a tensor has the class `Written`. What leads to its memory (a function of torch that is
given it, `.data`, an operator) asks for `__torch_function__`, which waits. Then it is a plain
tensor again, on all threads. What describes it (shape, dtype, attributes that a program has given
it) does not wait.

- The thread waits until the memory has its final values, and work that is launched from then on
  reads them, on any stream. So a copy to a device comes after the workers' writes without an event.
  On a device it waits for uploads (`ThreadWait`), and not for the program's work: what gathers
  weights reads them on streams that come after no other.
- A DTensor has the class `WrittenShard` meanwhile: its local tensor is asked for by C++ as an
  attribute, which waits too.

Memory may be reached without the tensor, by a view or an array that was taken earlier. The number
of references to its storage shows that (`guard.exposed`); then the step has to wait by itself.

Not seen: raw pointers, and code in C++ that takes a tensor past torch's functions.

Cost per tensor and step: two assignments of a class, two entries of a dict.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from stepwell.access.under_way import DESCRIPTIVE, without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["ThreadWait", "Writes", "Written"]

_Part = TypeVar("_Part")


# What waits for a tensor, by the tensor's id; and all there are.
_WAITING: dict[int, weakref.ref[Writes[Any]]] = {}
_ALL: weakref.WeakSet[Writes[Any]] = weakref.WeakSet()


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
        return _call_after_waiting(func, args, kwargs or {})


@functools.cache
def _written_shard() -> type[torch.Tensor]:
    """Made when it is needed: importing DTensor takes a second."""
    from torch.distributed.tensor import DTensor

    slot: Any = DTensor.__dict__["_local_tensor"]

    class WrittenShard(DTensor):
        """A DTensor that a step writes."""

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Iterable[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            return _call_after_waiting(func, args, kwargs or {})

        @property
        def _local_tensor(self) -> torch.Tensor:
            _wait([self])
            found: torch.Tensor = slot.__get__(self)
            return found

        @_local_tensor.setter
        def _local_tensor(self, value: torch.Tensor) -> None:
            _wait([self])
            slot.__set__(self, value)

    return WrittenShard


def _is_written(tensor: object) -> bool:
    """Whether a step writes `tensor`, and nothing has waited for it."""
    kind = type(tensor)
    return kind is Written or (kind not in _PLAIN and kind in _SHARDS)


# Most of what functions are given; and the class of DTensors, once there are any.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SHARDS: set[type] = set()


def _begin(tensor: torch.Tensor) -> None:
    if type(tensor) is torch.Tensor:
        tensor.__class__ = Written
    else:
        kind = _written_shard()
        _SHARDS.add(kind)
        tensor.__class__ = kind


def _end(tensor: torch.Tensor) -> None:
    _WAITING.pop(id(tensor), None)
    _restore_class(tensor)


def _restore_class(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if kind is Written:
        tensor.__class__ = torch.Tensor
    elif kind in _SHARDS:
        tensor.__class__ = kind.__bases__[0]


def _call_after_waiting(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if func in DESCRIPTIVE:
        with without_waiting():
            return func(*args, **kwargs)
    tensors = [each for each in tree_leaves((args, kwargs)) if _is_written(each)]
    _wait(tensors)
    if not any(map(_is_written, tensors)):
        return func(*args, **kwargs)
    # Their step is being submitted.
    with without_waiting():
        return func(*args, **kwargs)


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
        wait: a method that waits for parts of a step, held weakly. It returns whether these are
            parts of the last step; not so while one is being submitted.
        finish: the thread waits for all of the last step, where the owner of `wait` is gone.
    """

    def __init__(
        self, wait: Callable[[Iterable[_Part]], bool], finish: Callable[[], object]
    ) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._finish = finish
        self._parts: dict[int, tuple[torch.Tensor, _Part]] = {}
        # The tensors of each part, by its id.
        self._together: dict[int, list[torch.Tensor]] = {}
        self._num_steps = 0
        # A thread ends a protection while another begins one; so may a signal's handler within.
        self._lock = threading.RLock()
        _ALL.add(self)
        weakref.finalize(self, _restore, self._parts, self._lock)

    def protect(self, parts: Mapping[torch.Tensor, _Part]) -> None:
        """From now on uses of tensors wait. Call it before the step is submitted.

        Args:
            parts: plain tensors and DTensors, each with the part of the step that writes it. A
                wait for one ends the waits of all that have the same object.
        """
        reference = weakref.ref(self)
        with self._lock:
            self._num_steps += 1
            self._together = {}
            for tensor, part in parts.items():
                self._parts[id(tensor)] = tensor, part
                self._together.setdefault(id(part), []).append(tensor)
                _WAITING[id(tensor)] = reference
                _begin(tensor)

    def close(self) -> None:
        """No step comes any more. What `finish` needs is let go."""
        self._finish = _nothing

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has waited for `tensor` yet."""
        return id(tensor) in self._parts

    def __bool__(self) -> bool:
        """Whether there is a tensor that nothing has waited for."""
        return bool(self._parts)

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for the parts of the step that write `tensors`."""
        with self._lock:
            step = self._num_steps
            found = [self._parts[id(each)] for each in tensors if id(each) in self._parts]
        if not found:
            return
        wait = self._wait()
        if wait is None:
            # Another thread lets go of the optimizer, and may still wait for the step.
            with without_waiting():
                self._finish()
            is_last_step = True
        else:
            is_last_step = wait([part for _, part in found])
        if is_last_step:
            self._end([part for _, part in found], step)

    def wait_for_all(self) -> None:
        """Waits for all parts of the step."""
        self.wait_for([tensor for tensor, _ in list(self._parts.values())])

    @property
    def num_steps(self) -> int:
        """How often tensors were protected."""
        return self._num_steps

    def clear(self, step: int) -> None:
        """All parts of the step are written.

        Args:
            step: `num_steps` as it was before that was waited for.
        """
        self._end([part for _, part in list(self._parts.values())], step)

    def _end(self, parts: Iterable[_Part], step: int) -> None:
        with self._lock:
            # What a step that was begun meanwhile writes stays protected.
            if step == self._num_steps:
                for part in parts:
                    for tensor in self._together.pop(id(part), ()):
                        if self._parts.pop(id(tensor), None) is not None:
                            _end(tensor)


def _wait(tensors: Iterable[torch.Tensor]) -> None:
    by_waiting: dict[Writes[Any] | None, list[torch.Tensor]] = {}
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
                _restore_class(tensor)


def _nothing() -> None:
    pass


def _restore(parts: dict[int, tuple[torch.Tensor, Any]], lock: threading.RLock) -> None:
    """The optimizer is gone, after its last step."""
    with lock:
        for tensor, _ in parts.values():
            _end(tensor)
