"""What ranks of ZeRO-3 say beside their norms. Imports no DeepSpeed.

`norm_round` has which of them cannot step. Here are those that have left the last step by an error,
and sums of what each has gathered since (`weights.gather_order`). All go along with the squared
norm, in one collective, and each rank draws its conclusions before anything is stepped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell.weights.gather_order import GatherOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepwell.deepspeed.zero.norm_round import NormRound

__all__ = ["StepRound"]


class StepRound:
    """The rounds of one rank.

    Args:
        norm_round: what this rank has to say of the coming step.
        world_size: how many ranks there are.
        all_reduce: sums a flat tensor over them, in place.
    """

    def __init__(
        self, norm_round: NormRound, world_size: int, all_reduce: Callable[[torch.Tensor], object]
    ) -> None:
        self._norm_round = norm_round
        self._world_size = world_size
        self._all_reduce = all_reduce
        self.has_left = False
        """Whether this rank has not taken a step on which all ranks have decided."""
        self._num_left = 0.0
        # Whether ranks have gathered other weights since the last step.
        self._has_parted = False

    def add_up(self, squares: torch.Tensor, gathered: Sequence[float]) -> float:
        """The sum of this rank's squared norm and those of the others.

        Args:
            squares: this rank's: a scalar on the device.
            gathered: what `GatherOrder.end` gives of this rank; of as many numbers on all ranks.

        Raises:
            OSError: some ranks cannot step, and this one can.
        """
        beside = squares.new_tensor([self._norm_round.meet(), float(self.has_left), *gathered])
        sums = torch.cat((squares.reshape(1), beside))
        self._all_reduce(sums)
        # One copy to the host, for which it waits.
        squared_norm, num_failed, self._num_left, *sums_gathered = sums.tolist()
        self._norm_round.check(num_failed, squared_norm)
        # Of a step that no rank takes there is nothing to say.
        if not num_failed and not GatherOrder.is_common(sums_gathered, self._world_size):
            self._has_parted = True
        return float(squared_norm)

    def check_left(self) -> None:
        """Raises OSError where some ranks have taken a step, and others have left it.

        Where all have left it nothing was changed, and they go on.
        """
        if 0 < self._num_left < self._world_size:
            raise OSError(
                f"{self._num_left:.0f} of {self._world_size} ranks have left a step by an error, "
                "and the others have taken it: the weights are not those of any step. hint: the "
                "error of that rank says why; resume all ranks from a checkpoint"
            )

    def check_gathered(self, forget_order: Callable[[], None]) -> None:
        """Raises RuntimeError where ranks have gathered other weights since the last step.

        Args:
            forget_order: called then: the order of uses is not that of all ranks.
        """
        has_parted, self._has_parted = self._has_parted, False
        if has_parted:
            forget_order()
            raise RuntimeError(
                "ranks have gathered other weights, or in another order, since the last step, so "
                "what they have computed with is mixed up. Nothing was stepped. hint: under ZeRO-3 "
                "all ranks call the same modules in one order, and write partitions alike"
            )
