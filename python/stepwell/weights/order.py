"""In which order modules use their weights, as it was in the pass before.

A pass is from one forward of the model, or of its parts, to the next, with the backward in between.
There is one order for training and one for evaluation. Cost: an entry of a list per use, of which
there are `_USES_MAX` at most; per use of a new order, once, a walk over what follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.weights.weight import Weight

__all__ = ["Order", "Use"]


# A program that calls parts of a model in a loop may begin no pass.
_USES_MAX = 1 << 16


class Use(NamedTuple):
    """A use of a module: its forward or its backward."""

    module: torch.nn.Module
    weights: Sequence[Weight]
    """What it needs."""


class Order:
    """The uses of this pass, and what follows them if it is as the pass before.

    Args:
        reuse_numel_max: how many elements of later uses count as soon.
        repeats: whether the pass behind this one counts as well, which is expected to be alike.
    """

    def __init__(self, reuse_numel_max: int, *, repeats: bool = False) -> None:
        self._reuse_numel_max, self._repeats = reuse_numel_max, repeats
        self._known: dict[bool, list[Use]] = {}
        self._soon: dict[bool, dict[int, frozenset[Weight]]] = {}
        self._mode = True
        self._expected: list[Use] = []
        self._uses: list[Use] = []
        # Whether this pass has been as expected, and the use whose weights are looked at next.
        self._is_followed = False
        self._next_ahead = 0

    def begin(self) -> None:
        """A pass begins. What the one before was is what is expected of the next of its mode."""
        if self._uses and not (self._is_followed and len(self._uses) == len(self._expected)):
            self._known[self._mode] = self._uses
            self._soon[self._mode] = {}
        self._mode = torch.is_grad_enabled()
        self._expected = self._known.get(self._mode, [])
        self._uses = []
        self._is_followed = bool(self._expected)
        self._next_ahead = 0

    def note(self, module: torch.nn.Module, weights: Sequence[Weight]) -> None:
        """A use begins."""
        if len(self._uses) == _USES_MAX:
            self.begin()
        position = len(self._uses)
        self._uses.append(Use(module, weights))
        if self._is_followed and not (
            position < len(self._expected) and self._expected[position].module is module
        ):
            self._is_followed = False
        self._next_ahead = max(self._next_ahead, position + 1)

    def next_ahead(self) -> Use | None:
        """The first use after this one that was not given yet; None: none is expected."""
        if not self._is_followed or self._next_ahead >= len(self._expected):
            return None
        self._next_ahead += 1
        return self._expected[self._next_ahead - 1]

    def put_back(self) -> None:
        """The use that `next_ahead` has given is given again."""
        self._next_ahead -= 1

    def used_soon(self) -> frozenset[Weight]:
        """The weights that are expected to be used again before many others are.

        Or before those that were given ahead: they have passed over them, since they were there.
        """
        if not self._is_followed:
            return frozenset()
        position, soon = len(self._uses), self._soon[self._mode]
        if position not in soon:
            soon[position] = self._used_from(position)
        return soon[position]

    def _used_from(self, position: int) -> frozenset[Weight]:
        numel = 0
        found: set[Weight] = set()
        expected = self._expected
        for index in range(position, (2 if self._repeats else 1) * len(expected)):
            if numel >= self._reuse_numel_max and index >= self._next_ahead:
                break
            weights = expected[index % len(expected)].weights
            numel += sum(weight.numel for weight in weights)
            found.update(weights)
        return frozenset(found)
