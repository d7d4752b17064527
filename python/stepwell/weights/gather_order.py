"""Whether all ranks have gathered the same weights in the same order.

A gather takes what each rank brings. Ranks whose programs part, of which one calls a module that
the others leave out, would get other weights, or wait for ever. So each rank has a digest of what
it has gathered since the last step, and sums of digests go along with the norm of the gradients:
before weights are changed, all ranks know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["GatherOrder"]

# Parts of a digest, and their bits: squares of as many ranks add up exactly in the 24 bits of fp32.
# More are not compared.
_NUM_PARTS = 4
_PART_BITS = 6
_RANKS_MAX = 1 << 24 - 2 * _PART_BITS


class GatherOrder:
    """What this rank has gathered since the last step."""

    def __init__(self) -> None:
        self._digest = 0

    def note(self, keys: Iterable[int]) -> None:
        """The weights of such keys are gathered together."""
        # The hash of integers is the same in all processes.
        self._digest = hash((self._digest, *keys))

    def end(self) -> list[float]:
        """What ranks add up, number by number, for `is_common`; begins anew."""
        digest, self._digest = self._digest, 0
        parts = [digest >> nth * _PART_BITS & (1 << _PART_BITS) - 1 for nth in range(_NUM_PARTS)]
        return [float(value) for part in parts for value in (part, part * part)]

    @staticmethod
    def is_common(sums: Sequence[float], num_ranks: int) -> bool:
        """Whether the numbers of which `sums` are made were the same on all ranks.

        By the inequality of Cauchy and Schwarz: of n numbers the square of the sum is at most n
        times the sum of the squares, and is that only where all are equal.
        """
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return num_ranks > _RANKS_MAX or all(
            total * total == num_ranks * squares for total, squares in pairs
        )
