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
        params = list(itertools.chain.from_iterable(groups))
        super().__init__(model, params, wait_bytes_max=wait_bytes_max)
        self.attach(params, uploads)

    def open_all(self) -> bool:
        """As `open`, of all parameters. False: nothing waits, and the step has to."""
        if self.is_open:
            self.open(itertools.chain.from_iterable(self._groups), self._exposed())
        return self.is_open

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
