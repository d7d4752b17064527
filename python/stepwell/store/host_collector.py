"""Sums of gradients in host memory, to which each backward's are added (`accumulate="host"`).

The device keeps none. The way of a gradient: `watch` puts hooks on its parameter, which call
`make_room` before autograd accumulates, and `on_grad` behind it. That has the gradient checked
(`grad_checks`) and added (`adder`). The step reads the sums where they are.

- A sum is that of the same additions in the same order as on the device, in the gradient's dtype:
  the same bits.
- In the place of a gradient that was taken, the parameter has a marker (`marker`). Code that
  removes or zeroes the marker removes or zeroes the sum. The marker reads as NaN. Code that changes
  it in any other way gets an error.
- The program may hold what was taken, or the buffer that it is a view of, and zero or scale
  gradients there. That never comes to the sum. The version of its memory tells.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch

from stepwell._sharding import local
from stepwell.store.adder import Adder, Operation, add, add_to_zero, assign
from stepwell.store.grad_checks import check_in_place, checked
from stepwell.store.gradients import may_change_after_backward
from stepwell.store.marker import GradMarker
from stepwell.store.norm import float32_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from stepwell.store.background import Background
    from stepwell.store.grad_checks import Label
    from stepwell.store.twins import Twins

__all__ = ["WHY_NAN", "HostCollector"]

WHY_NAN = (
    ", maybe because the program made a gradient of one that accumulate='host' had moved, which "
    "reads as NaN (as `parameter.grad = parameter.grad * 2` does)"
)
"""Why gradients may have a norm of NaN, to go on a message."""


class _Taken:
    """Gradients of one memory that were taken from their parameters, as the program may hold them.

    Args:
        base: the first of them, or what they are views of, with which they share a version.
    """

    def __init__(self, base: torch.Tensor) -> None:
        self._base = weakref.ref(base)
        self._views: dict[int, weakref.ref[torch.Tensor]] = {}
        self._version = base._version

    def add(self, view: torch.Tensor) -> None:
        """One more is taken: until now autograd has written it."""
        self._views[id(view)] = weakref.ref(view)
        self._version = view._version

    @property
    def _alive(self) -> list[torch.Tensor]:
        held = (each() for each in (self._base, *self._views.values()))
        return [each for each in held if each is not None]

    def is_held(self) -> bool:
        """Whether the program may write to them."""
        return bool(self._alive)

    def is_of(self, base: torch.Tensor) -> bool:
        """Whether this is the memory of `base`."""
        return self._base() is base

    def is_written(self) -> bool:
        """Whether the program has written to them."""
        return any(each._version != self._version for each in self._alive)


def _is_accumulating() -> bool:
    """Whether the backward that this is a hook of a parameter of goes on to its gradient.

    torch.autograd.grad calls hooks, too, and gives the gradient to its caller.
    """
    try:
        return torch._C._will_engine_execute_node(torch._C._current_autograd_node())
    except RuntimeError:
        # Of a leaf, in torch.autograd.grad.
        return False


class HostCollector:
    """Adds the gradients of every backward into the host sides of their parameters.

    It has the same calls as `DeviceCollector` (`gradients`).

    Args:
        twins: the host sides of the parameters.
        background: has the engine that steps the sums.
        label: what errors call a parameter.
    """

    wants_hooks = True
    """Whether autograd is to say when it is done with a gradient."""

    def __init__(self, twins: Twins, background: Background, label: Label) -> None:
        self._twins, self._background, self._label = twins, background, label
        self._markers: dict[torch.Tensor, GradMarker] = {}
        # Of each marker the first gradient that the program may still hold; and those that are
        # views, by the id of what they are views of.
        self._taken: dict[torch.Tensor, _Taken] = {}
        self._views: dict[int, _Taken] = {}
        # Parameters whose marker was taken away for a gradient of autograd that is to come, and
        # those for which none came.
        self._expecting: set[torch.Tensor] = set()
        self._unknown: set[torch.Tensor] = set()
        self._device = torch.device("cpu")
        self._adder = Adder(self._device)
        # Of each sum the norms of its pieces, on the device, where the last backward left them.
        self._norms: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._nbytes = 0
        self.nbytes = 0
        """Bytes that came down for the last step."""

    # ---- in the backward ----

    def watch(self, param: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
        """Has autograd make room before it accumulates a gradient of `param`, and move it then.

        Until the hooks that are returned are removed, or this object is gone.
        """
        if local(param).device != self._device:
            # Nothing is summed: parameters are on one device.
            self._device = local(param).device
            self._adder = Adder(self._device)
        collector, watched = weakref.ref(self), weakref.ref(param)

        def make_room(_: torch.Tensor) -> None:
            alive, param = collector(), watched()
            if alive is not None and param is not None and _is_accumulating():
                alive.make_room(param)

        def on_grad(param: torch.Tensor) -> None:
            # It may be what a hook of the program's has returned; torch raises behind all hooks.
            if (alive := collector()) is not None and param is watched():
                alive.on_grad(param)

        # torch has no types for hooks.
        return [
            param.register_post_accumulate_grad_hook(on_grad),  # type: ignore[no-untyped-call]
            param.register_hook(make_room),  # type: ignore[no-untyped-call]
        ]

    def no_sync(self) -> AbstractContextManager[None]:
        """As that of `DeviceCollector`. Every backward is the same here."""
        return contextlib.nullcontext()

    def make_room(self, param: torch.Tensor) -> None:
        """Before autograd accumulates into `param.grad`."""
        if param in self._expecting:
            # A backward failed in between. The sum may have been cleared since, or not.
            self._unknown.add(param)
        if self._has(param):
            self._expecting.add(param)
            param.grad = None
        else:
            self._markers.pop(param, None)
            self._taken.pop(param, None)

    def _has(self, param: torch.Tensor) -> bool:
        """Whether the gradient of `param` is here, neither cleared nor replaced."""
        return param in self._markers and param.grad is self._markers[param]

    @torch.no_grad()
    def on_grad(self, param: torch.Tensor) -> None:
        """The gradient of `param` is accumulated: it is added to its sum, in the background.

        The device may free it.

        Raises:
            ValueError: it cannot be stepped, or this is a forked child.
        """
        if may_change_after_backward():
            raise ValueError(
                "gradients are summed in host memory, but other ranks have a part in them. "
                "hint: accumulate='device' and weights='device'"
            )
        # It reads the last sums.
        self._background.idle()
        check_in_place(param, self._twins.get(param), self._twins.device, self._label)
        grad, marker = checked(param, self._label), self._markers.get(param)
        operation = assign if marker is None else add_to_zero if marker.is_zeroed else add
        self._norms[param] = self._added(operation, self._twins.grad(param).view(-1), grad)
        self._nbytes += grad.nbytes
        self._note_taken(param)
        self._markers[param] = GradMarker.of(grad, self._norms_when_asked(param))
        param.grad = self._markers[param]
        self._expecting.discard(param)

    def _added(
        self, operation: Operation, sums: torch.Tensor, grad: torch.Tensor
    ) -> list[torch.Tensor]:
        """Adds a gradient to its sums. Returns the norms of all pieces of the new sum."""
        if operation is assign or grad.is_cpu:
            whole = grad if operation is assign else sums
            self._adder.run(operation, sums, grad.view(-1))
            return [*float32_norms([whole], grad.device)]
        norms: list[torch.Tensor] = []
        self._adder.run(operation, sums, grad.view(-1), norms)
        return norms

    def _norms_when_asked(self, param: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """What gives the norms of the sum's pieces, in the order of the current stream."""
        collector, norms = weakref.ref(self), self._norms[param]

        def ordered() -> list[torch.Tensor]:
            alive = collector()
            if alive is not None and alive._device.type == "cuda":
                alive._adder.norms_to(torch.cuda.current_stream(alive._device))
            return norms

        return ordered

    def _note_taken(self, param: torch.Tensor) -> None:
        grad, before = param.grad, self._taken.get(param)
        assert grad is not None
        # No version tells of writes to a tensor of inference.
        if grad.is_inference() or (before is not None and before.is_held()):
            return
        base = grad._base
        if base is None:
            self._taken[param] = _Taken(grad)
            return
        taken = self._views.get(id(base))
        if taken is None or not taken.is_of(base):
            taken = self._views[id(base)] = _Taken(base)
        taken.add(grad)
        self._taken[param] = taken

    # ---- in the step ----

    def gradients(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of `params`, which all have one, as they are stepped: the sums.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        for param in params:
            check_in_place(param, self._twins.get(param), self._twins.device, self._label)
            if not self._has(param):
                # Not autograd's.
                self.make_room(param)
                self.on_grad(param)
        if unknown := [*self._unknown, *(each for each in self._expecting if each.grad is None)]:
            raise ValueError(
                f"a backward failed while it summed the gradient of {self._label(unknown[0])}. "
                "hint: optimizer.zero_grad(), and the backwards of this step again"
            )
        taken = ((param, self._taken.get(param)) for param in params)
        if written := [param for param, each in taken if each is not None and each.is_written()]:
            raise ValueError(
                f"the gradient of {self._label(written[0])} was written where it was before "
                "`accumulate` `host` moved it to host memory: the program holds that tensor, or a "
                "buffer of which it is a view. hint: clear gradients by optimizer.zero_grad(); "
                "accumulate='device' where they lie in a buffer of the program's"
            )
        self._adder.finish()
        self.nbytes, self._nbytes = self._nbytes, 0
        for param in params:
            if self._markers[param].is_zeroed:
                self._twins.grad(param).zero_()
        return [self._twins.grad(param) for param in params]

    def norms(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norms of gradients, as `gradient_norm` has them: float32.

        Args:
            params: those of the last `gradients`, and residents.
            grads: theirs.
        """
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        found: list[torch.Tensor] = []
        for param, grad in zip(params, grads, strict=True):
            if param not in self._twins:
                found += float32_norms([grad], grad.device)
                continue
            pieces = [] if self._markers[param].is_zeroed else self._norms[param]
            if len(pieces) < 2:
                found.append(pieces[0].float() if pieces else zero)
            else:
                found.append(torch.stack(pieces).double().square().sum().sqrt().float())
        return torch.stack(found) if found else zero.view(1)[:0]

    def read(self, scalar: torch.Tensor, flag: torch.Tensor | None) -> tuple[float, bool]:
        """The values of `scalar` and of `flag`; None: False."""
        return float(scalar), flag is not None and bool(flag)

    def missing(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[int]:
        """Which of the gradients of a step are not on the host: none."""
        return []

    # ---- what came counts no more ----

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """The program clears all gradients in it."""
        yield
        self._taken.clear()
        self._views.clear()
        self._expecting.clear()
        self._unknown.clear()

    def reset(self) -> None:
        """The step is over. Sums stay until the program clears their gradients."""

    def end_engine(self, leaving: Iterable[torch.Tensor] = ()) -> None:
        """Ends the engine, which unpins the host sides, and forgets the sums of `leaving`.

        Raises:
            OSError: the last step failed in the background.
        """
        self._adder.finish()
        self._background.close()
        for param in leaving:
            self._markers.pop(param, None)
            self._norms.pop(param, None)
            self._taken.pop(param, None)
            self._expecting.discard(param)
            self._unknown.discard(param)
