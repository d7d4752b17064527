"""What a home of DeepSpeed's state (`deepspeed.state.home`) waits for, and reads, of a partition.

Imports no DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.deepspeed.zero.partition import Fragment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from stepwell.deepspeed.zero.partitions import Partitions
    from stepwell.deepspeed.zero.swapped import SwappedPartitions

__all__ = ["PartitionWork"]


class PartitionWork:
    """The work on one partition that is under way: what its `Home` waits for, and its gradient.

    Also where its state is.

    Args:
        partitions: what steps it.
        group: its number.
        swapped: has the state that is on a volume; None: all is in host memory.
    """

    def __init__(
        self, partitions: Partitions, group: int, swapped: SwappedPartitions | None
    ) -> None:
        self._partitions = partitions
        self._group = group
        self._swapped = swapped

    def finish(self) -> None:
        """Waits until the last step is complete, with all updates."""
        self._partitions.complete()

    def gradient(self, begin: int, numel: int) -> torch.Tensor:
        """As `Gradients.gradient`."""
        return self._partitions.gradients.gradient(Fragment(self._group, begin, numel))

    def set_gradient(self, begin: int, value: torch.Tensor) -> None:
        """As `Gradients.set_gradient`. As DeepSpeed has it, the norm remains what it was."""
        fragment = Fragment(self._group, begin, value.numel())
        self._partitions.gradients.set_gradient(fragment, value, is_norm_kept=True)

    @property
    def is_swapped(self) -> bool:
        """Whether its state is on a volume."""
        return self._swapped is not None and self._group in self._swapped.leases

    def pieces(self, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor] | None:
        """Pieces of the master that are good after every step; None: any view of it is.

        Those that were given out before are used no more.

        Args:
            runs: first element and number of elements of each.
        """
        if self._swapped is None or not self._swapped.has_master(self._group):
            return None
        return self._swapped.leases[self._group].pieces(runs)
