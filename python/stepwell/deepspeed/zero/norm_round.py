"""The round in which ranks add up their norms, and in which one that cannot step says so.

The norm of the gradients is the first that the ranks of a step do together. One that has left
`step()` before by an error would not be there, and the others would wait for it until the timeout
of the process group. So it takes part: with a number beside the sum that says so. Where the sum is
not finite, all add up a second time (`Gradients.norm`), and a rank that fails between the two says
so in the second round. Imports no DeepSpeed.

Ctrl-C is not told: the others may be on their way out, and nothing could end the wait for them.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NORM_DTYPE", "WIDE_NORM_DTYPE", "NormRound"]

# Of what ranks add up, and of what they add up again where that is not finite.
NORM_DTYPE, WIDE_NORM_DTYPE = torch.float32, torch.float64


class NormRound:
    """What this rank has to say beside its norm."""

    def __init__(self) -> None:
        # What the others add up next with this rank has this dtype; None: they wait for it no more.
        self._awaited_as: torch.dtype | None = None
        self._has_met_as: torch.dtype | None = None
        self._cannot_step = False

    @contextlib.contextmanager
    def awaited(
        self, add_up: Callable[[torch.Tensor], float], device: torch.device, *, is_alone: bool
    ) -> Iterator[None]:
        """A context in which this rank comes to the round, where the others wait for it.

        An error that ends it before that is told to them. It must not be that of a rank that is
        gone, for which nothing may wait.

        Args:
            add_up: gives the sum over the ranks of a scalar on the device, with what `meet` gives
                beside it, of which the sum goes to `check`.
            device: where norms are.
            is_alone: whether there are no others.
        """
        self._awaited_as = None if is_alone else NORM_DTYPE
        try:
            yield
        except Exception:
            if self._awaited_as is not None:
                self._cannot_step = True
                # The error that this rank raises is its own.
                with contextlib.suppress(Exception):
                    # As the others, whatever the program has made torch's default.
                    add_up(torch.zeros((), dtype=self._awaited_as, device=device))
            raise
        finally:
            self._awaited_as = None
            self._cannot_step = False

    def meet(self) -> float:
        """This rank has come to the round. What it adds: 1 if it cannot step."""
        self._has_met_as, self._awaited_as = self._awaited_as, None
        return float(self._cannot_step)

    def check(self, num_failed: float, squared_norm: float) -> None:
        """Raises OSError if ranks cannot step, on those that could.

        Args:
            num_failed: the sum of what all ranks have added.
            squared_norm: the sum that they have come for.
        """
        if num_failed:
            if not self._cannot_step:
                raise OSError(
                    f"ranks that cannot take this step: {num_failed:.0f}, so none has taken it and "
                    "nothing was changed. hint: the errors of those ranks say why"
                )
        elif self._has_met_as is NORM_DTYPE and not math.isfinite(squared_norm):
            self._awaited_as = WIDE_NORM_DTYPE
