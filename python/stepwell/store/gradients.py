"""Gradients that stay on the device, and come to the host once (`accumulate="device"`).

The way of one: `watch` puts a hook on its parameter, which calls `on_grad`. The gradients of a
backward that is known to be the last are set aside, and copied in batches (`_copy`), as far as they
lie as their host sides do (`grad_checks`). The engine hands them to the core (`Engine.take`). All
others are copied by the step (`missing`).

A gradient that is copied during the backward may still be changed before the step (clipping,
another backward). It is then copied again. A copy counts only while the gradient is the same tensor
at the same version, and has the checksum that it had when it was copied: writes through `.data` do
not change the version. Of a DTensor all of this is said of its local tensor.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell._sharding import is_dtensor, piece_of
from stepwell._streams import current_stream
from stepwell._tensors import is_run
from stepwell.store.grad_checks import gradients_of, lies_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed.tensor import DTensor

    from stepwell.store.background import Background
    from stepwell.store.engine import Engine
    from stepwell.store.grad_checks import Label
    from stepwell.store.twins import Twins

__all__ = ["DeviceCollector", "may_change_after_backward"]

_LOGGER = logging.getLogger(__name__)

BATCH_BYTES = 256 << 20
"""Of gradients that are copied by one call: 5 ms of the bus. Less costs more calls of the thread
that launches the backward; more leaves more of them to the step."""


class DeviceCollector:
    """Brings the gradients of a step to the host: a copy of each, in the backward or in the step.

    Autograd adds those of several backwards on the device. `HostCollector` has the same calls
    (`host_collector`).

    Args:
        twins: the host sides of the parameters.
        background: has the engine that copies.
        label: what errors call a parameter.
        accumulation_steps: backwards per step; None: not known.
    """

    def __init__(
        self, twins: Twins, background: Background, label: Label, accumulation_steps: int | None
    ) -> None:
        self._twins, self._background, self._label = twins, background, label
        self._accumulation_steps = accumulation_steps or 1
        # Whether the user says which backward is the last, and has not said that this one is not.
        self._knows_last = accumulation_steps is not None
        self._is_last = True
        self._has_warned = False
        # Of plain parameters, asked once per step; None: not yet.
        self._may_change: bool | None = None
        # By the parameter's id (`twins`). They are forgotten before its twin is.
        self._backwards: dict[int, int] = {}
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._waiting_stream = 0
        self._waiting_nbytes = 0
        # The memory of the latest, if it is a DTensor's.
        self._waiting_memory: int | None = None
        self._copied: dict[int, _Copied] = {}
        # What has copies that no stream has been ordered after, by the number of their backward.
        self._copying: dict[int, Engine] = {}

    # ---- in the backward ----

    @property
    def wants_hooks(self) -> bool:
        """Whether autograd is to say when it is done with a gradient."""
        return self._knows_last

    def watch(self, param: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
        """Has autograd call `on_grad` when it is done with a gradient of `param`.

        Until the hooks that are returned are removed, or this object is gone.
        """
        collector = weakref.ref(self)

        def on_grad(param: torch.Tensor) -> None:
            if (alive := collector()) is not None:
                alive.on_grad(param)

        # torch has no types for hooks.
        return [param.register_post_accumulate_grad_hook(on_grad)]  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in it are not the last before the step."""
        # Hooks are wanted from now on, for those of the backwards outside.
        self._knows_last = True
        return self._not_last()

    @contextlib.contextmanager
    def _not_last(self) -> Iterator[None]:
        before, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = before

    def on_grad(self, param: torch.Tensor) -> None:
        """The gradient of `param` is accumulated, maybe for the last time before the step."""
        # Autograd's thread launches the backward, and is late with it: what can be left to the
        # batch is left to it.
        key = id(param)
        if key not in self._twins.ids:
            # What a hook of the program's has returned; torch raises behind all hooks.
            return
        if is_dtensor(param) and not self._is_reduced(param):
            return
        grad = param.grad
        if grad is not None and self._is_replaced(param, grad):
            # The model has cleared the gradients.
            self._forget()
        count = self._backwards[key] = self._backwards.get(key, 0) + 1
        is_last = self._knows_last and self._is_last and count >= self._accumulation_steps
        if not is_last or grad is None or grad.layout != torch.strided:
            return
        if is_dtensor(param):
            if not _is_placed_alike(param, grad):
                return
        elif self._may_change_after_backward():
            return
        if batch := self._set_aside(param, grad):
            with torch.no_grad():
                self._copy(batch)

    def _is_reduced(self, param: DTensor) -> bool:
        """Whether hooks of `param` are called where FSDP2 has reduced its gradient.

        The stream is current then that it did so on. Copies and checksums come after that. FSDP2
        has the training stream come after what is on this one at the end of the backward, and so
        the norm and the second checksums. Nothing has to be recorded for the allocator: the engine
        holds the memory until it is copied, and this object until the step has waited for its norm.

        Not before the first step: an engine is not made in a backward, where modules have unsharded
        parameters, so that none would be found that holds a sharded one.
        """
        guard = None if self._background.gate is None else self._background.gate.guard
        return guard is not None and guard.is_reduced(param)

    def _is_replaced(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether another tensor than `grad` was copied or set aside for `param`."""
        copied, waiting = self._copied.get(id(param)), self._waiting.get(id(param))
        return (copied is not None and copied.grad is not grad) or (
            waiting is not None and waiting[1] is not grad
        )

    def _may_change_after_backward(self) -> bool:
        if self._may_change is None:
            self._may_change = may_change_after_backward()
        return self._may_change

    def _set_aside(
        self, param: torch.Tensor, grad: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sets a last gradient aside, and returns those that are to be copied now.

        Each comes with its parameter.

        They are copied in batches, since each copy costs a call. All gradients of a batch were made
        on the current stream: copies are ordered after no other. Where it changes, what was set
        aside is left to the step.

        The latest is never among them. The last of all is so left to the step, whose norm it would
        hold up: that comes down behind what is on its way. Nor are DTensors that share its memory:
        FSDP2 reduces those of a group into one tensor, so they come together, and have one version,
        which an addition to each of them changes.
        """
        stream = current_stream(self._twins.device)
        if stream != self._waiting_stream:
            self._waiting, self._waiting_stream, self._waiting_nbytes = {}, stream, 0
        piece, memory = piece_of(grad), None
        if piece is not grad:
            memory = piece.untyped_storage().data_ptr()
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_of_group = memory is not None and memory == self._waiting_memory
        if self._waiting_nbytes >= BATCH_BYTES and not is_of_group:
            batch = list(self._waiting.values())
            self._waiting, self._waiting_nbytes = {}, 0
        self._waiting_memory = memory
        key = id(param)
        if key not in self._waiting:
            self._waiting_nbytes += piece.nbytes
        self._waiting[key] = param, grad
        return batch

    def _copy(self, batch: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies gradients; those that cannot be are left to the step, which says why."""
        copied = [pair for pair in batch if self._is_copyable(*pair)]
        if not copied:
            return
        self._warn_of_outdated(copied)
        engine = self._background.idle()
        # First: what is copied behind a checksum is no older than it. And then no thread hands
        # copies to the driver yet, which the launch would share it with.
        params, grads = zip(*copied, strict=True)
        sums = engine.checksums(list(map(piece_of, grads)))
        engine.take(params, grads)
        for param, grad, found in zip(params, grads, sums, strict=True):
            self._copied[id(param)] = _Copied.of(grad, found)
        self._order_at_the_end(engine)

    def _is_copyable(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether `grad` is as the host side of `param`: a copy reads no more than it has."""
        twin = self._twins.get(param)
        # The model may have been moved.
        return twin is not None and lies_as(piece_of(grad), twin, self._twins.device)

    def _order_at_the_end(self, engine: Engine) -> None:
        """Has the backward that this is a hook of come to `_order_after_copies` when it ends."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._copying:
            self._copying[backward] = engine
            _at_the_end_of_the_backward(partial(self._order_after_copies, backward))

    def _order_after_copies(self, backward: int) -> None:
        """A backward has ended: what the program does to gradients next comes after their copies.

        It may scale them and scale them back, of which no checksum would tell, while a copy reads
        them; or free them.
        """
        engine = self._copying.pop(backward, None)
        if engine is None:
            return
        outer = _current_node()
        # One within another, which goes on, would wait again and again. What comes next there has
        # the other wait, at its end.
        if outer is None or not _before_the_next_of(outer, partial(self._order_at_the_end, engine)):
            engine.order_after_copies()

    # ---- in the step ----

    def gradients(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of `params`, which all have one, as they are stepped: on the device.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        return gradients_of(params, self._twins.get, self._twins.device, self._label)

    def read(self, scalar: torch.Tensor, flag: torch.Tensor | None) -> tuple[float, bool]:
        """The values of `scalar` and of `flag`, on the device. The thread waits for them.

        On the way, in the same transfer, it looks whether gradients that were copied have changed.
        `flag`: None: False.
        """
        numbers = [scalar.view(1)]
        if flag is not None:
            numbers.append(flag.view(1).to(scalar))
        copied = {key: each for key, each in self._copied.items() if each.is_current}
        # `grad.data = ...` gives it other memory.
        changed = {key for key, each in copied.items() if not each.is_in_place}
        compared = [key for key in copied if key not in changed]
        if compared:
            now = self._background.opened().checksums([copied[key].piece for key in compared])
            before = torch.stack([copied[key].checksum for key in compared])
            numbers.append((before != torch.stack(now)).any(1).to(scalar))
        found: list[float] = torch.cat(numbers).tolist()
        value, *differ = found
        is_set = flag is not None and bool(differ.pop(0))
        changed.update(key for key, differs in zip(compared, differ, strict=True) if differs)
        for key in changed:
            self._copied[key] = copied[key]._replace(version=_CHANGED)
        return value, is_set

    def missing(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[int]:
        """Which of the gradients of a step are not on the host as they were in `read`."""
        missing = list(range(len(params)))
        if self._copied:
            pairs = list(zip(params, grads, strict=True))
            missing = [at for at in missing if not self._is_copied(*pairs[at])]
            self._warn_of_outdated(pairs[at] for at in missing)
        return missing

    def _is_copied(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        copied = self._copied.get(id(param))
        return copied is not None and copied.grad is grad and copied.is_current

    def _warn_of_outdated(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Warns once if gradients of these parameters were copied that these are not any more."""
        if self._has_warned or not self._copied:
            return
        count = sum(id(pair[0]) in self._copied and not self._is_copied(*pair) for pair in pairs)
        if count:
            self._has_warned = True
            _LOGGER.warning(
                "%d gradients were changed after they had been copied to the host, and cross the "
                "bus again (said once). hint: clip by clip_norm; all backwards but the last before "
                "a step under no_sync(), or accumulation_steps",
                count,
            )

    # ---- what came counts no more ----

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """The program clears all gradients in it. Waits for copies that no step has taken."""
        # Ctrl-C may have ended the step before it did.
        self._background.release()
        self._forget()
        yield

    @property
    def is_any_taken(self) -> bool:
        """Whether a gradient was copied or set aside since the last step."""
        return bool(self._copied or self._waiting)

    def _forget(self) -> None:
        """The gradients are cleared: their backwards do not count, their copies are let go."""
        is_any_taken = self.is_any_taken
        # First: Ctrl-C in the wait does not make the engine remember them.
        self.reset()
        if is_any_taken:
            self._background.discard()

    def reset(self) -> None:
        """The step is over: what came counts no more."""
        self._backwards = {}
        self._waiting = {}
        self._waiting_nbytes = 0
        self._copied = {}
        self._copying = {}
        self._may_change = None

    def end_engine(self, leaving: Iterable[torch.Tensor] = ()) -> None:
        """Ends the engine, and forgets what it has copied; also of parameters that are `leaving`.

        Raises:
            OSError: the last step failed in the background.
        """
        self._background.close()
        self.reset()


# No tensor has this version.
_CHANGED = -1


class _Copied(NamedTuple):
    """A gradient as it was when it was copied."""

    grad: torch.Tensor
    piece: torch.Tensor
    version: int
    memory: tuple[torch.Size, torch.device, int]
    checksum: torch.Tensor

    @staticmethod
    def of(grad: torch.Tensor, checksum: torch.Tensor) -> _Copied:
        """As it is now, in the order of the current stream."""
        piece = piece_of(grad)
        memory = piece.shape, piece.device, piece.data_ptr()
        return _Copied(grad, piece, piece._version, memory, checksum)

    @property
    def is_current(self) -> bool:
        """Whether no write was seen."""
        return self.version == self.piece._version and piece_of(self.grad) is self.piece

    @property
    def is_in_place(self) -> bool:
        """Whether it is where it was, in one run."""
        piece = self.piece
        return is_run(piece) and self.memory == (piece.shape, piece.device, piece.data_ptr())


def _is_placed_alike(param: DTensor, grad: torch.Tensor) -> bool:
    """Whether this rank has of `grad` what it has of `param`, in a plain tensor."""
    return (
        is_dtensor(grad)
        and grad.device_mesh == param.device_mesh
        and grad.placements == param.placements
        and type(piece_of(grad)) is torch.Tensor
    )


def may_change_after_backward() -> bool:
    """Whether other ranks may still add to the gradient of a plain parameter after autograd (DDP).

    Hooks of a DTensor are called where FSDP2 has reduced its gradient.
    """
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _at_the_end_of_the_backward(call: Callable[[], None]) -> None:
    """Has autograd call it when the backward that this is a hook of has ended.

    The current stream is that of the caller of the backward then. A backward within another one
    (reentrant checkpointing) calls it, too.
    """
    engine = torch.autograd.Variable._execution_engine
    try:
        # FSDP2 and DDP use it as well.
        engine.queue_callback(call)
    except RuntimeError:
        # Not within a backward.
        call()


def _current_node() -> torch.autograd.graph.Node | None:
    """What autograd is computing on this thread."""
    return torch._C._current_autograd_node()


def _before_the_next_of(node: torch.autograd.graph.Node, call: Callable[[], None]) -> bool:
    """Has autograd call it before it goes on behind `node`, which it is computing: if it does."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def ask(_: object) -> None:
        for handle in handles:
            handle.remove()
        if handles:
            handles.clear()
            call()

    handles += [each.register_prehook(ask) for each, _ in node.next_functions if each is not None]
    return bool(handles)
