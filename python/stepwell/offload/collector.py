"""How the gradients of a step come to the host sides of their parameters.

`DeviceCollector` leaves gradients on the device, where autograd adds those of several backwards. It
copies each once: during the backward if that is known to be the last before the step, or in the
step. `HostCollector` adds the gradients of every backward to sums in host memory.

A collector is called by hooks of autograd (`on_grad`) and by the step. It holds no engine: it is
given one, whose step has been waited for, where it needs one, and remembers it until the end of a
backward.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from typing_extensions import override

from stepwell._sharding import is_dtensor
from stepwell.offload.accumulation import HostSums
from stepwell.offload.engine import Engine, current_stream
from stepwell.offload.gradients import (
    Gradients,
    Label,
    check_in_place,
    checked,
    gradients_of,
    lies_as,
    may_change_after_backward,
    piece_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed.tensor import DTensor

    from stepwell.offload.host_side import HostSide

__all__ = ["Collector", "DeviceCollector", "HostCollector", "IdleEngine"]

_LOGGER = logging.getLogger(__name__)

IdleEngine: TypeAlias = "Callable[[], Engine]"
"""Gives the engine after its step, if one is running, has been waited for."""


class Collector(abc.ABC):
    """Brings the gradients of a step to the host.

    Args:
        host: the host side of the parameters.
    """

    sums_on_host = False
    """Whether the gradients of several backwards are summed in host memory."""

    def __init__(self, host: HostSide) -> None:
        self._host = host

    def check(self, params: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]) -> None:  # noqa: B027
        """Raises ValueError if gradients of `params`, which are new, could not be collected."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027
        """Takes what it needs beside `device`, where all parameters are from now on."""

    @property
    @abc.abstractmethod
    def wants_hooks(self) -> bool:
        """Whether autograd is to say when it is done with a gradient."""

    def watch(self, param: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks on `param` that it needs beside that which calls `on_grad`."""
        return []

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in it are not the last before the step."""
        return contextlib.nullcontext()

    def is_replaced(self, param: torch.Tensor) -> bool:
        """Whether another gradient of `param` came before than it has, so that all were cleared."""
        return False

    @abc.abstractmethod
    def on_grad(self, param: torch.Tensor, idle_engine: IdleEngine, label: Label) -> None:
        """The gradient of `param` is accumulated, maybe for the last time before the step."""

    @abc.abstractmethod
    def gradients(
        self, params: Sequence[torch.Tensor], idle_engine: IdleEngine, label: Label
    ) -> list[torch.Tensor]:
        """The gradients of `params`, which all have one, as they are stepped.

        Raises:
            ValueError: one of them cannot be stepped.
        """

    @property
    @abc.abstractmethod
    def place(self) -> torch.device:
        """Where `gradients` are."""

    @abc.abstractmethod
    def read(self, scalar: torch.Tensor, flag: torch.Tensor | None) -> tuple[float, bool]:
        """The values of `scalar`, which is where the gradients are, and of `flag`, on the device.

        The thread waits for them. `flag`: None: False.
        """

    def take_missing(  # noqa: B027
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], engine: Engine
    ) -> None:
        """Copies the gradients of the store's last look that are not on the host as they are."""

    @property
    def bytes_downloaded(self) -> int | None:
        """Bytes that came to the host for the last step; None: the engine counts them."""
        return None

    def explain_nan(self) -> str:
        """Why gradients may have a norm of NaN, to go on a message."""
        return ""

    def reset(self) -> bool:
        """The step is over, or its gradients are cleared: what came counts no more.

        Returns whether the engine may have copies that no step has taken.
        """
        return False

    def clear(self) -> None:  # noqa: B027
        """The program has cleared all gradients."""

    def wait(self) -> None:  # noqa: B027
        """Waits until nothing but the engine uses the host sides."""

    def let_go(self, params: Iterable[torch.Tensor]) -> None:  # noqa: B027
        """Forgets `params`, which are in no group any more."""


def _is_placed_alike(param: DTensor, grad: torch.Tensor) -> bool:
    """Whether this rank has of `grad` what it has of `param`, in a plain tensor."""
    return (
        is_dtensor(grad)
        and grad.device_mesh == param.device_mesh
        and grad.placements == param.placements
        and type(piece_of(grad)) is torch.Tensor
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


class DeviceCollector(Collector):
    """Gradients stay on the device, and are copied once.

    Args:
        host: the host side of the parameters.
        accumulation_steps: backwards per step; None: not known.
    """

    def __init__(self, host: HostSide, accumulation_steps: int | None) -> None:
        super().__init__(host)
        self.copies = Gradients(accumulation_steps)
        self._has_warned = False
        # What has copies that no stream has been ordered after, by the number of their backward.
        self._copying: dict[int, Engine] = {}
        # Of plain parameters, asked once per step; None: not yet.
        self._may_change: bool | None = None

    @property
    @override
    def wants_hooks(self) -> bool:
        return self.copies.knows_last

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        # Hooks are wanted from now on, for those of the backwards outside.
        self.copies.knows_last = True
        return self.copies.no_sync()

    @override
    def is_replaced(self, param: torch.Tensor) -> bool:
        copies = self.copies
        return (
            copies.has_counted(param)
            and param.grad is not None
            and copies.is_replaced(param, param.grad)
        )

    @override
    def on_grad(self, param: torch.Tensor, idle_engine: IdleEngine, label: Label) -> None:
        # Autograd's thread launches the backward, and is late with it: what can be left to the
        # batch is left to it.
        grad, copies = param.grad, self.copies
        if not copies.count(param) or grad is None or grad.layout != torch.strided:
            return
        if is_dtensor(param):
            if not _is_placed_alike(param, grad):
                return
        elif self._may_change_after_backward():
            return
        if batch := copies.add(param, grad, current_stream(self._host.device)):
            with torch.no_grad():
                self._copy(batch, idle_engine)

    def _may_change_after_backward(self) -> bool:
        if self._may_change is None:
            self._may_change = may_change_after_backward()
        return self._may_change

    def _copy(
        self, batch: Iterable[tuple[torch.Tensor, torch.Tensor]], idle_engine: IdleEngine
    ) -> None:
        """Copies gradients; those that cannot be are left to the step, which says why."""
        copied = [pair for pair in batch if self._is_copyable(*pair)]
        if not copied:
            return
        if outdated := sum(self.copies.is_outdated(*pair) for pair in copied):
            self._warn_of_outdated(outdated)
        engine = idle_engine()
        # First: what is copied behind a checksum is no older than it. And then no thread hands
        # copies to the driver yet, which the launch would share it with.
        params, grads = zip(*copied, strict=True)
        sums = engine.checksums(list(map(piece_of, grads)))
        engine.take(params, grads)
        self.copies.mark_copied(copied, sums, engine.checksums)
        self._order_at_the_end(engine)

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

    def _is_copyable(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether `grad` is as the host side of `param`: a copy reads no more than it has."""
        twin = self._host.twins.get(param)
        # The model may have been moved.
        return twin is not None and lies_as(piece_of(grad), twin, self._host.device)

    @override
    def gradients(
        self, params: Sequence[torch.Tensor], idle_engine: IdleEngine, label: Label
    ) -> list[torch.Tensor]:
        return gradients_of(params, self._host.twins.get, self._host.device, label)

    @property
    @override
    def place(self) -> torch.device:
        return self._host.device

    @override
    def read(self, scalar: torch.Tensor, flag: torch.Tensor | None) -> tuple[float, bool]:
        numbers = scalar.view(1)
        if flag is not None:
            numbers = torch.cat([numbers, flag.view(1).to(numbers)])
        value, *flags = self.copies.read_with(numbers)
        return value, any(flags)

    @override
    def take_missing(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], engine: Engine
    ) -> None:
        missing = list(range(len(params)))
        if self.copies.is_any_copied:
            pairs = list(zip(params, grads, strict=True))
            missing = [at for at in missing if not self.copies.is_copied(*pairs[at])]
            if outdated := sum(self.copies.is_outdated(*pairs[at]) for at in missing):
                self._warn_of_outdated(outdated)
        if missing:
            engine.take_looked_at(missing)

    def _warn_of_outdated(self, count: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "%d gradients were changed after they had been copied to the host, and cross the "
                "bus again (said once). hint: clip by clip_norm; all backwards but the last before "
                "a step under no_sync(), or accumulation_steps",
                count,
            )

    @override
    def reset(self) -> bool:
        is_any_taken = self.copies.is_any_taken
        self.copies.reset()
        self._copying = {}
        self._may_change = None
        return is_any_taken


class HostCollector(Collector):
    """The gradients of every backward are added to sums in host memory."""

    sums_on_host = True

    def __init__(self, host: HostSide) -> None:
        super().__init__(host)
        self.sums = HostSums(host.twins, host.device)

    @override
    def check(self, params: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]) -> None:
        for param in params:
            if is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is a DTensor, `accumulate` is `host`. "
                    "hint: accumulate='device'"
                )

    @override
    def prepare(self, device: torch.device) -> None:
        if self.sums.device != device:
            # Nothing is summed: parameters are on one device.
            self.sums = HostSums(self._host.twins, device)

    @property
    @override
    def wants_hooks(self) -> bool:
        return True

    @override
    def watch(self, param: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
        return [self.sums.watch(param)]

    @override
    @torch.no_grad()
    def on_grad(self, param: torch.Tensor, idle_engine: IdleEngine, label: Label) -> None:
        if not is_dtensor(param) and may_change_after_backward():
            raise ValueError(
                "`accumulate` is `host`, but other ranks have a part in the gradients. "
                "hint: accumulate='device'"
            )
        # It reads the last sums.
        idle_engine()
        check_in_place(param, self._host.twins.get(param), self._host.device, label)
        self.sums.add(param, checked(param, label))

    @override
    def gradients(
        self, params: Sequence[torch.Tensor], idle_engine: IdleEngine, label: Label
    ) -> list[torch.Tensor]:
        sums, twins, device = self.sums, self._host.twins, self._host.device
        for param in params:
            check_in_place(param, twins.get(param), device, label)
            if not sums.has(param):
                # Not autograd's.
                sums.make_room(param)
                self.on_grad(param, idle_engine, label)
        if unknown := sums.unknown:
            raise ValueError(
                f"a backward failed while it summed the gradient of {label(unknown[0])}. "
                "hint: optimizer.zero_grad(), and the backwards of this step again"
            )
        if written := sums.written(params):
            raise ValueError(
                f"the gradient of {label(written[0])} was written where it was before `accumulate` "
                "`host` moved it to host memory: the program holds that tensor, or a buffer of "
                "which it is a view. hint: clear gradients by optimizer.zero_grad(); "
                "accumulate='device' where they lie in a buffer of the program's"
            )
        sums.finish()
        sums.zero_where_zeroed(params)
        return [twins.grad(param) for param in params]

    @property
    @override
    def place(self) -> torch.device:
        return torch.device("cpu")

    @override
    def read(self, scalar: torch.Tensor, flag: torch.Tensor | None) -> tuple[float, bool]:
        return float(scalar), flag is not None and bool(flag)

    @property
    @override
    def bytes_downloaded(self) -> int | None:
        return self.sums.nbytes

    @override
    def explain_nan(self) -> str:
        return (
            ", maybe because the program made a gradient of one that accumulate='host' had "
            "moved, which reads as NaN (as `parameter.grad = parameter.grad * 2` does)"
        )

    @override
    def clear(self) -> None:
        self.sums.clear()

    @override
    def wait(self) -> None:
        self.sums.wait()

    @override
    def let_go(self, params: Iterable[torch.Tensor]) -> None:
        self.sums.let_go(params)
