"""Sums of gradients in host memory, to which each backward's are added (`adder`).

The device keeps none.

- A sum is that of the same additions in the same order as on the device, in the gradient's dtype:
  the same bits.
- In the place of a gradient that was taken, the parameter has a marker (`marker`). Code that
  removes or zeroes the marker removes or zeroes the sum. The marker reads as NaN. Code that changes
  it in any other way gets an error.
- The program may hold what was taken, or the buffer that it is a view of, and zero or scale
  gradients there. That never comes to the sum. The version of its memory tells.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from stepwell.offload.adder import Adder, add, add_to_zero, assign
from stepwell.offload.marker import GradMarker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepwell.offload.twins import Twins

__all__ = ["HostSums"]


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


class HostSums:
    """Adds gradients into the host sides of their parameters.

    Args:
        twins: the host sides.
        device: where the parameters are.
    """

    def __init__(self, twins: Twins, device: torch.device) -> None:
        self.device = device
        """Where the parameters are."""
        self._twins = twins
        self._markers: dict[torch.Tensor, GradMarker] = {}
        # Of each marker the first gradient that the program may still hold; and those that are
        # views, by the id of what they are views of.
        self._taken: dict[torch.Tensor, _Taken] = {}
        self._views: dict[int, _Taken] = {}
        # Parameters whose marker was taken away for a gradient of autograd that is to come, and
        # those for which none came.
        self._expecting: set[torch.Tensor] = set()
        self._unknown: set[torch.Tensor] = set()
        self._adder = Adder(device)
        self._nbytes = 0
        self.nbytes = 0
        """Bytes that came down between the last `finish` and the one before."""

    def has(self, param: torch.Tensor) -> bool:
        """Whether the gradient of `param` is here, neither cleared nor replaced."""
        return param in self._markers and param.grad is self._markers[param]

    def watch(self, param: torch.Tensor) -> torch.utils.hooks.RemovableHandle:
        """Has autograd make room before it accumulates a gradient of `param`.

        Until the hook that is returned is removed, or this object is gone.
        """
        sums, watched = weakref.ref(self), weakref.ref(param)

        def make_room(_: torch.Tensor) -> None:
            alive, param = sums(), watched()
            if alive is not None and param is not None and _is_accumulating():
                alive.make_room(param)

        handle: torch.utils.hooks.RemovableHandle = param.register_hook(make_room)  # type: ignore[no-untyped-call]
        return handle

    def make_room(self, param: torch.Tensor) -> None:
        """Before autograd accumulates into `param.grad`."""
        if param in self._expecting:
            # A backward failed in between. The sum may have been cleared since, or not.
            self._unknown.add(param)
        if self.has(param):
            self._expecting.add(param)
            param.grad = None
        else:
            self._markers.pop(param, None)
            self._taken.pop(param, None)

    @property
    def unknown(self) -> list[torch.Tensor]:
        """Parameters whose sum is not known, since a backward failed; until `clear`."""
        return [*self._unknown, *(param for param in self._expecting if param.grad is None)]

    def written(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` whose gradient the program wrote where it was before it came here."""
        return [
            param for param in params if param in self._taken and self._taken[param].is_written()
        ]

    def clear(self) -> None:
        """All gradients were cleared."""
        self._taken.clear()
        self._views.clear()
        self._expecting.clear()
        self._unknown.clear()

    def let_go(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets the sums of `params`."""
        for param in params:
            self._markers.pop(param, None)
            self._taken.pop(param, None)
            self._expecting.discard(param)
            self._unknown.discard(param)

    def zero_where_zeroed(self, params: Iterable[torch.Tensor]) -> None:
        """Sets the sums to zero whose gradients were, since they came here. After `finish`."""
        for param in params:
            if self._markers[param].is_zeroed:
                self._twins.grad(param).zero_()

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the contiguous `grad`, which `param` has, to its sum, and frees it on the device.

        The addition is done in the background.

        Raises:
            ValueError: this is a forked child.
        """
        marker = self._markers.get(param)
        operation = assign if marker is None else add_to_zero if marker.is_zeroed else add
        self._adder.run(operation, self._twins.grad(param).view(-1), grad.view(-1))
        self._nbytes += grad.nbytes
        self._note_taken(param)
        self._markers[param] = GradMarker.of(grad)
        param.grad = self._markers[param]
        self._expecting.discard(param)

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

    def wait(self) -> None:
        """Waits until all is added; more may come."""
        self._adder.finish()

    def finish(self) -> None:
        """Waits until all of a step is added."""
        self.wait()
        self.nbytes, self._nbytes = self._nbytes, 0
