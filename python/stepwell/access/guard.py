"""Makes every use of a parameter in Python wait while the parameter's new weight is under way.

It is under way from the call that submits the step until the step's stream has waited for it. As
long as it is, the parameter's class is `UnderWay`, whose uses wait (see `writes`). Within a
forward that the gate sees a use waits for its own weight. Outside of forwards it is a look: the
first one waits for all weights, with all updates. Operations without such a parameter never come
here and cost nothing.

Memory may be reached without the parameter: by a view, `.data`, an array of numpy or a state dict
that was taken earlier. The number of references to the parameter's storage shows that. A parameter
that shares its memory, or whose class is not exactly `torch.nn.Parameter`, is `exposed`: the step
has to wait for it itself.

Cost per parameter and step: two assignments of a class, a look at a counter, two entries of a dict.
"""

from __future__ import annotations

import abc
import threading
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from stepwell._tensors import COUNT_ALONE, COUNT_ALONE_IN_PYTHON, references
from stepwell.access.descriptive import set_grad, without_waiting
from stepwell.access.writes import Writes, is_compiling, is_under_way

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from stepwell.access.writes import Protection

__all__ = ["Forwards", "Uploads", "WeightGuard", "clear_grads", "exposed"]


class Uploads(abc.ABC):
    """The new weights on their way to the device, and what a use of them has to wait for beside."""

    @abc.abstractmethod
    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """The current stream and the step's stream wait for the weights of `params`."""

    @abc.abstractmethod
    def finish(self) -> None:
        """The current stream and the step's stream wait for all weights."""

    def confirm(self) -> None:  # noqa: B027
        """Waits until it is known of all weights whether they are those of the step."""

    def note_waited(self) -> None:  # noqa: B027
        """All weights were waited for."""

    def settle(self) -> None:  # noqa: B027
        """Has updates applied that are deferred."""

    def has_pending(self) -> bool:
        """Whether `settle` would apply any."""
        return False


class Forwards(threading.local):
    """The forward that this thread is in."""

    def __init__(self) -> None:
        self.outermost: int | None = None
        """The `id` of the module whose call the program has made; None: it is in none."""
        self.compiled: list[int] = []
        """Those of compiled modules within it whose calls have begun."""

    def end(self) -> None:
        """The thread is in no forward."""
        self.outermost = None
        self.compiled.clear()


class WeightGuard:
    """Guards the parameters that one optimizer steps.

    Args:
        uploads: their new weights.
        forwards: the forwards that a thread is in; None: none is known.
        finish: waits for all weights, without this guard; None: as `uploads` does.
    """

    def __init__(
        self,
        uploads: Uploads,
        forwards: Forwards | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.uploads = uploads
        self._forwards = Forwards() if forwards is None else forwards
        self._writes: Writes[torch.Tensor] = Writes(
            self.wait, uploads.finish if finish is None else finish, self.use
        )
        self.was_compiled = False
        """Whether torch.compile has traced a use. What it compiles depends on the class."""

    @property
    def num_steps(self) -> int:
        """As `Writes` has it."""
        return self._writes.num_steps

    def protection(
        self,
        params: Iterable[torch.Tensor],
        read: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> Protection:
        """What the call that begins a step does, for uses of `params` to wait from then on.

        Parameters that are not exactly a `torch.nn.Parameter` are left out, see `exposed`.
        `read`: the gradients that the step reads where they are, by their parameters.
        """
        params = list(params)
        own = [param for param in params if type(param) is Parameter]
        return self._writes.protection(own, self.parts(params, read or {}))

    def parts(
        self, params: Iterable[torch.Tensor], read: Mapping[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """The tensors beside plain parameters whose uses wait, with the parameters they are of."""
        return {}

    def exposed_reads(self, read: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of those gradients whose memory can be reached past this guard."""
        return list(read)

    def exposed(
        self,
        params: Iterable[torch.Tensor],
        holders: Iterable[torch.Tensor],
        held: Collection[int] = (),
    ) -> list[torch.Tensor]:
        """Those of `params` whose memory can be reached without a use that this guard sees.

        Args:
            params: what is about to be stepped.
            holders: as `exposed` has it.
            held: likewise.
        """
        return exposed(params, holders, held=held)

    def is_reduced(self, param: torch.Tensor) -> bool:
        """Whether the gradient of the DTensor `param` is final when hooks are called with it."""
        return False

    @property
    def any_under_way(self) -> bool:
        """Whether there is a parameter for which the step's stream has not waited."""
        return bool(self._writes)

    def use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """Waits for `tensors`, which are about to be used; None: for all.

        A use of a plain parameter outside of forwards is a look.
        """
        self.was_compiled |= is_compiling()
        is_in_forward = self._forwards.outermost is not None
        if tensors is None or (not is_in_forward and any(map(is_under_way, tensors))):
            self.look()
        else:
            self.enter(tensors)

    def look(self) -> None:
        """The current stream waits for all weights, with all updates, which a program looks at."""
        self.uploads.settle()
        self.confirm()
        self.finish()

    def confirm(self) -> None:
        """Waits until it is known whether all weights are those of the step.

        A forward in training goes on without it: the step that comes behind it would raise.
        """
        with without_waiting():
            self.uploads.confirm()

    def enter(self, params: Iterable[torch.Tensor]) -> None:
        """The current stream waits for those of `params` that are under way, before a forward.

        In training that reads the weights that have landed, also where updates are deferred.
        """
        self._writes.wait_for(params)

    def wait_for(self, params: Sequence[torch.Tensor]) -> None:
        """The current stream waits for all of `params`, protected or not."""
        self._writes.wait_for_parts(params)

    def wait(self, params: Sequence[torch.Tensor]) -> None:
        """As `Uploads.wait`."""
        self.uploads.wait(params)

    def finish(self) -> None:
        """The current stream waits for all weights."""
        step = self.num_steps
        with without_waiting():
            self.uploads.finish()
        self.clear(step)

    def clear(self, step: int) -> None:
        """All weights of the step have arrived, or the step's stream has waited for them.

        Args:
            step: `num_steps` as it was before that was waited for.
        """
        self._writes.clear(step)


def exposed(
    tensors: Iterable[torch.Tensor],
    holders: Iterable[torch.Tensor],
    kind: type[torch.Tensor] = Parameter,
    held: Collection[int] = (),
) -> list[torch.Tensor]:
    """Those of `tensors` whose memory can be reached without a use that a guard sees.

    Args:
        tensors: what is about to be stepped.
        holders: all tensors that are known to use the memory of `tensors`, these included. No
            element is read or written through them before all have arrived. They are looked at only
            if a tensor shares its memory.
        kind: the class that `tensors` should have.
        held: the ids of those of `tensors` whose storage one reference in Python keeps alive, which
            nothing is read or written through.
    """
    found = [tensor for tensor in tensors if not _is_alone(tensor, kind, held=id(tensor) in held)]
    if not found:
        return []
    with without_waiting():
        known = {id(holder): holder for holder in holders}
        expected = Counter(references(holder)[0] for holder in known.values())
        return [
            tensor
            for tensor in found
            if not _is_among(tensor, kind, expected, held=id(tensor) in held)
        ]


def _is_alone(tensor: torch.Tensor, kind: type[torch.Tensor], *, held: bool) -> bool:
    if type(tensor) is not kind:
        return False
    _, count, count_in_python = references(tensor)
    return count == COUNT_ALONE and count_in_python == COUNT_ALONE_IN_PYTHON + held


def _is_among(
    tensor: torch.Tensor, kind: type[torch.Tensor], expected: Counter[int], *, held: bool
) -> bool:
    """Whether `tensor` is a plain one, and only known tensors use its memory."""
    if type(tensor) is not kind:
        return False
    storage, count, count_in_python = references(tensor)
    is_held_as_expected = count_in_python == COUNT_ALONE_IN_PYTHON + held
    return count - expected[storage] < COUNT_ALONE and is_held_as_expected


def clear_grads(params: Iterable[torch.Tensor]) -> None:
    """Sets the gradients of `params` to None, at little cost for those under way."""
    with without_waiting():
        for param in params:
            set_grad(param, None)
