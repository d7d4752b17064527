"""What a backward or a step that raised has left behind is never stepped. Imports no DeepSpeed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from stepwell.deepspeed.zero.timers import stop_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Backward"]

_HINT = (
    "hint: engine.optimizer.zero_grad() after the exception drops all gradients since the last step"
)


class Backward:
    """Whether the gradients since the last step are whole, and whether they are left out.

    A backward that raises does not reach its end. Its gradients are partial, and some of them have
    been added to those of earlier micro-batches. So the next backward and the next step raise,
    until the gradients are dropped.

    How many backwards have begun and not ended DeepSpeed counts (`_backward_active_depth`): `depth`
    here. One backward of the outputs of several forwards counts for each of them, and none does of
    outputs in which DeepSpeed finds no tensor.
    """

    def __init__(self) -> None:
        # Set while a step is decided, and after an exception there until gradients are dropped.
        self._is_in_step = False
        # Of autograd: the backward that began last.
        self._graph_task = -1
        self._has_ended = self._is_cleared = False

    def is_left(self, depth: int) -> bool:
        """Whether an exception has ended a backward or a step; asked in neither."""
        return depth > 0 or self._is_in_step

    def check(self, depth: int) -> None:
        """Raises ValueError if there are gradients of a backward, or a step, that has failed."""
        if self._is_in_step:
            raise ValueError(
                "a step was left by an exception, and its gradients could not be dropped. " + _HINT
            )
        if depth > 0:
            raise ValueError(
                "a backward has not ended, so its gradients are partial: it raised, and the "
                f"exception was caught. {_HINT}"
            )

    def begin(self, depth: int) -> None:
        """Autograd has reached the outputs of a forward. Raises as `check`."""
        graph_task = torch._C._current_graph_task_id()
        if depth == 0 or graph_task != self._graph_task:
            self.check(depth)
        self._graph_task = graph_task

    def end(self) -> None:
        """All gradients of the backward are there."""
        self._has_ended = True

    def note_cleared(self) -> None:
        """`zero_grad` is called. Gradients stay for a step, and leave with the next gradient.

        Not those that a loss function has made in the forward.
        """
        self._is_cleared = self._is_cleared or self._has_ended

    def pop_cleared(self) -> bool:
        """A gradient is there: whether `zero_grad` was called between it and a backward before."""
        is_cleared, self._is_cleared, self._has_ended = self._is_cleared, False, False
        return is_cleared

    @contextlib.contextmanager
    def stepping(
        self, settle: Callable[[], None], drop_gradients: Callable[[], None], timers: Any
    ) -> Iterator[None]:
        """A step. When an exception leaves it, none runs, and no gradient is left.

        Args:
            settle: waits for the step, if it was submitted.
            drop_gradients: drops all gradients since the last step, and calls `reset` then.
            timers: DeepSpeed's.
        """
        self._is_in_step = True
        try:
            yield
        except BaseException:
            settle()
            # The next backward or step says that they could not be dropped.
            with contextlib.suppress(Exception):
                drop_gradients()
            stop_all(timers)
            raise
        self._is_in_step = False

    def reset(self) -> None:
        """All gradients since the last step have been dropped."""
        self._has_ended = self._is_cleared = self._is_in_step = False
