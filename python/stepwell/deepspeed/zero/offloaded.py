"""What both of Stepwell's ZeRO optimizers have of their state. Imports no DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.deepspeed.state.home import Home
from stepwell.deepspeed.zero.swapped import commit_last_step, swapped_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from stepwell.deepspeed.plan import Plan
    from stepwell.deepspeed.zero.operands import Operands
    from stepwell.deepspeed.zero.partitions import Partitions

__all__ = ["Offloaded"]


class Offloaded:
    """Partitions, where their state is, and what a program asks of it.

    It overrides nothing of DeepSpeed's, in whose optimizers it is mixed.
    """

    optimizer: Any
    _plan: Plan
    _operands: Operands
    _partitions: Partitions

    @property
    def committed_steps(self) -> int | None:
        """How many steps the volume has committed: what a run that is resumed begins with.

        None: there is no volume, or it commits none. Skipped steps do not count.
        """
        self._partitions.finish()
        swapped = self._operands.swapped
        return None if swapped is None else swapped.volume.committed_steps

    def commit(self) -> None:
        """Commits the last step to the volume, where `commit_interval` has not. Collective.

        Raises:
            ValueError: there is no volume that commits.
            OSError: the step failed in the background, or the commit did; or another rank's.
        """
        commit_last_step(self._operands.swapped, self._partitions.finish)

    @property
    def timing(self) -> dict[str, float]:
        """What the last step took in the background, as `OffloadAdamW.timing`."""
        return self._partitions.timing()

    def _name_volume(self, params: list[list[tuple[str | None, tuple[int, ...]]]]) -> None:
        """Partitions that are made next may have their state on a volume.

        Args:
            params: of each group, the names and shapes of its parameters.
        """
        self._operands.swapped = swapped_on(
            self._plan.volume,
            params,
            self._operands.new_state,
            threads=self._plan.options.threads,
        )

    def _homes(self, masters: Sequence[torch.Tensor]) -> list[Home]:
        """Homes of the partitions, which were made."""
        self._operands.forget_unused_volume()
        return [
            Home(self.optimizer, master, self._partitions, group)
            for group, master in enumerate(masters)
        ]
