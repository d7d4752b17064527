"""Weights of a flat group that are reached past the guard. Imports no DeepSpeed.

Under ZeRO-1 and -2 all parameters of a group lie on one memory, so none of them can be looked at by
itself. If the memory has more holders than DeepSpeed made, a view or `.data` of some parameter is
alive, and all of the group wait in `step()`. The least that was ever seen is what DeepSpeed made:
it only lets go of views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell._tensors import references

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Exposure"]


class Exposure:
    """Which weights can be reached without an access that the gate's guard sees.

    Args:
        flats: the weights of each group, while no program has a view of them.
    """

    def __init__(self, flats: Iterable[torch.Tensor]) -> None:
        # How many refer to the memory in C++, and in Python.
        self._known = [references(flat)[1:] for flat in flats]

    def exposed(
        self, flats: Iterable[torch.Tensor], groups: Iterable[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The parameters that can be.

        Args:
            flats: the weights of each group.
            groups: its parameters, which lie on them.
        """
        exposed: list[torch.Tensor] = []
        for nth, (flat, params) in enumerate(zip(flats, groups, strict=True)):
            _, count, count_in_python = references(flat)
            least, least_in_python = self._known[nth]
            is_held = count > least or count_in_python > least_in_python
            exposed += [
                param for param in params if is_held or type(param) is not torch.nn.Parameter
            ]
            self._known[nth] = min(count, least), min(count_in_python, least_in_python)
        return exposed
