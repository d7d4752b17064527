"""The round in which ranks add up their norms, and in which one that cannot step says so.

The norm of the gradients is the first that the ranks of a step do together. One that has left
`step()` before by an error would not be there, and the others would wait for it until the timeout
of the process group. So it takes part: with a number beside the sum that says so. Imports no
DeepSpeed.

Ctrl-C is not told: the others may be on their way out, and nothing could end the wait for them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NormRound"]


class NormRound:
    """What this rank has to say beside its norm."""

    def __init__(self) -> None:
        self._has_met = False
        self._cannot_step = False

    @contextlib.contextmanager
    def awaited(
        self,
        add_up: Callable[[torch.Tensor], float],
        device: torch.device,
        *,
        tells_os_errors: bool,
    ) -> Iterator[None]:
        """A context in which this rank comes to the round, where the others wait for it.

        Args:
            add_up: gives the sum over the ranks of a scalar on the device, with what `meet` gives
                beside it, of which the sum goes to `check`.
            device: where norms are.
            tells_os_errors: whether an OSError is told, too: not so where it may be that of a rank
                that is gone, which nothing may wait for.
        """
        self._has_met = False
        try:
            yield
        except Exception as error:
            is_told = tells_os_errors or not isinstance(error, OSError)
            if is_told and not self._has_met:
                self._cannot_step = True
                # The error that this rank raises is its own.
                with contextlib.suppress(Exception):
                    # As norms are, whatever the program has made torch's default.
                    add_up(torch.zeros((), dtype=torch.float32, device=device))
            raise
        finally:
            self._cannot_step = False

    def meet(self) -> float:
        """This rank has come to the round. What it adds: 1 if it cannot step."""
        self._has_met = True
        return float(self._cannot_step)

    def check(self, num_failed: float) -> None:
        """Raises OSError if ranks cannot step, on those that could.

        Args:
            num_failed: the sum of what all ranks have added.
        """
        if num_failed and not self._cannot_step:
            raise OSError(
                f"ranks that cannot take this step: {num_failed:.0f}, so none has taken it and "
                "nothing was changed. hint: the errors of those ranks say why"
            )
