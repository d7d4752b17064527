"""Waits for weights that lie on the flat memory of their group. Imports no DeepSpeed.

Under ZeRO-1 and -2 all parameters of a group lie on one memory, so none of them can be looked at by
itself. If the memory has more holders than DeepSpeed made, a view or `.data` of some parameter is
alive, and all of the group wait in `step()`. The least that was ever seen is what DeepSpeed made:
it only lets go of views.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from stepwell._tensors import references
from stepwell.access.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.access.guard import Uploads
    from stepwell.access.writes import Protection

__all__ = ["FlatGate"]


class FlatGate(Gate):
    """A gate whose parameters lie on flat memory.

    Args:
        model: as `Gate` has it.
        groups: the parameters of each group.
        flats: the weights of each group, while no program has a view of them.
        uploads: what brings new weights.
        wait_bytes_max: as `Gate` has it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Sequence[Sequence[torch.Tensor]],
        flats: Sequence[torch.Tensor],
        uploads: Uploads,
        *,
        wait_bytes_max: int = 0,
    ) -> None:
        self._groups, self._flats = groups, flats
        # How many refer to each memory in C++, and in Python.
        self._holders = [references(flat)[1:] for flat in flats]
        self._all = list(itertools.chain.from_iterable(groups))
        super().__init__(model, self._all, wait_bytes_max=wait_bytes_max)
        self.attach(self._all, uploads)

    def opening_all(self) -> Protection | None:
        """As `opening`, of all parameters. None: nothing waits, and the step has to."""
        return self.opening(self._all, self._exposed()) if self.is_open else None

    def not_covered_of_all(self) -> list[torch.Tensor]:
        """As `not_covered`, of all parameters."""
        return self.not_covered(self._all, self._exposed())

    def _exposed(self) -> list[torch.Tensor]:
        """Parameters whose weights can be reached without a use that the guard sees."""
        exposed: list[torch.Tensor] = []
        for nth, (flat, params) in enumerate(zip(self._flats, self._groups, strict=True)):
            _, count, count_in_python = references(flat)
            least, least_in_python = self._holders[nth]
            is_held = count > least or count_in_python > least_in_python
            exposed += [
                param for param in params if is_held or type(param) is not torch.nn.Parameter
            ]
            self._holders[nth] = min(count, least), min(count_in_python, least_in_python)
        return exposed
