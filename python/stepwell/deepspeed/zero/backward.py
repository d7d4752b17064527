"""What a backward or a step that raised has left behind is never stepped. Imports no DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepwell.deepspeed.zero.timers import stop_all

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Backward"]

_HINT = (
    "hint: engine.optimizer.zero_grad() after the exception drops all gradients since the last step"
)


class Backward:
    """The current backward, as DeepSpeed's calls of its optimizer show it.

    A backward that raises does not reach its end. Its gradients are partial, and some of them have
    been added to those of earlier micro-batches. So the next backward and the next step raise,
    until the gradients are dropped.
    """

    def __init__(self) -> None:
        self._is_running = self._has_gradients = self._has_failed = False
        self.has_left_step = False
        """Set where an exception leaves a step, until its gradients are dropped."""
        # Why they could not be. Text: an exception would hold what its frames do.
        self._drop_failure: str | None = None
        self._has_ended = self._is_cleared = False

    @property
    def is_unended(self) -> bool:
        """Whether a backward has begun that has not ended, or a step."""
        return self._is_running or self.has_left_step

    def announce(self) -> None:
        """`engine.backward` is called. Raises ValueError if what came before it has failed."""
        self.check()
        self._is_running = True

    def begin(self) -> None:
        """Autograd has reached the outputs of a forward.

        One backward may begin at several forwards.
        """
        self._is_running = True

    def note_cleared(self) -> None:
        """`zero_grad` is called. Gradients stay for a step, and leave with the next gradient.

        Not those of a backward that goes on, or that a loss function has run in the forward.
        """
        self._is_cleared = self._is_cleared or self._has_ended

    def pop_cleared(self) -> bool:
        """Whether `zero_grad` was called behind a backward, and no gradient has come since."""
        is_cleared, self._is_cleared = self._is_cleared, False
        return is_cleared

    def note_forward(self) -> None:
        """A forward of the engine begins: a backward that is not running by now has failed."""
        # Activation checkpoints run forwards within a backward.
        if self._has_gradients and torch._C._current_graph_task_id() == -1:
            self._has_failed = True

    def note_gradient(self) -> None:
        """A gradient is there. Raises ValueError if the backward, or step, before has failed."""
        if self._has_failed or self.has_left_step:
            self.check()
        self._has_ended = False
        # Some loss functions run a backward of their own in the forward, which no call ends.
        self._has_gradients = self._is_running

    def end(self) -> None:
        """All gradients of the backward are there."""
        self._has_ended = True
        self._is_running = self._has_gradients = False

    def leave_step(
        self, settle: Callable[[], None], drop_gradients: Callable[[], None], timers: Any
    ) -> None:
        """An exception leaves a step, behind `has_left_step`: none runs and no gradient is left.

        Why gradients could not be dropped is not raised, in the place of that exception: the next
        backward or step says it.

        Args:
            settle: waits for the step, if it was submitted.
            drop_gradients: drops all gradients since the last step, and calls `reset` then.
            timers: DeepSpeed's.
        """
        settle()
        try:
            drop_gradients()
        except Exception as error:  # noqa: BLE001
            self._drop_failure = f"{type(error).__name__}: {error}"
            # Some of them may be gone, and the rest said to be.
            self.has_left_step = True
        stop_all(timers)

    def check(self) -> None:
        """Raises ValueError if there are gradients of a backward, or a step, that has failed."""
        if self.has_left_step:
            why = self._drop_failure
            raise ValueError(
                "a step was left by an exception, and its gradients could not be dropped: "
                f"{'another exception came meanwhile' if why is None else f'`{why}`'}. {_HINT}"
            )
        if self._has_gradients:
            raise ValueError(
                "a backward has not ended, so its gradients are partial: it raised, and the "
                f"exception was caught. {_HINT}"
            )

    def reset(self) -> None:
        """The gradients of the backward have been dropped."""
        self._has_ended = self._is_cleared = False
        self._is_running = self._has_gradients = self._has_failed = False
        self.has_left_step = False
        self._drop_failure = None
