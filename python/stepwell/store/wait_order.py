"""In which order a step goes over its parameters: as the weights of earlier steps were waited for.

A program waits for weights in the order in which it needs them. With DTensors that is not the order
in which it has given them: FSDP2 gathers all parameters of the root before the first layer, and one
of them may be the model's last. So the next step makes first what was waited for first.

What one call waits for keeps its order: an evaluation, which waits for all beneath a module, tells
nothing. What nothing waited for comes last.

No result depends on the order, so ranks need not agree on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WaitOrder"]


class WaitOrder:
    """The order of parameters, which are numbered.

    Args:
        count: how many parameters there are.
    """

    def __init__(self, count: int) -> None:
        # None: as they are given.
        self._places: list[int] | None = None
        self._count = count
        self._waits: dict[int, int] = {}
        self._learned: dict[int, int] = {}
        self._num_waits = 0

    def note(self, indices: Iterable[int]) -> None:
        """One call waits for the weights of these parameters."""
        self._num_waits += 1
        for index in indices:
            self._waits.setdefault(index, self._num_waits)

    def begin(self) -> None:
        """Waits from now on are for weights of another step. `places` comes before."""
        # Another thread may note a wait in the old ones. It is lost.
        self._waits, self._num_waits = {}, 0

    @property
    def places(self) -> list[int] | None:
        """Of each parameter its place in the order; None: they are as they were given."""
        self._learn()
        return self._places

    def _learn(self) -> None:
        waits = dict(self._waits)
        # Waits are the same ones in most steps.
        if waits == self._learned:
            return
        self._learned = waits
        has_order = len(waits) < self._count or len(set(waits.values())) > 1
        if not waits or not has_order:
            return
        before, never = self._places or list(range(self._count)), self._num_waits + 1
        order = sorted(range(self._count), key=lambda at: (waits.get(at, never), before[at]))
        places = [0] * self._count
        for place, index in enumerate(order):
            places[index] = place
        self._places = places
