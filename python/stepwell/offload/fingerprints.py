"""When a step has to look whether trailing bits still belong to their weight.

Seldom: the host memory beside a device is the optimizer's alone.

A bfloat16 parameter and its trailing bits are one fp32 number (see the core's `state::split`), and
the fingerprints tell whether they still belong together. Steps alone write the host side of a
parameter on a device, with two exceptions: weights that the program has written on the device come
to the host, and state is loaded. Only the step after those looks at the fingerprints; others
neither look nor take them, which is a tenth of the arithmetic of a step with q8 moments. So
fingerprints are behind, until they are taken: before a weight is replaced, and before other code
sees the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["Fingerprints"]


class Fingerprints:
    """Which parameters' fingerprints are to be looked at, and which are behind."""

    def __init__(self) -> None:
        self._doubted: set[torch.Tensor] = set()
        self._behind: set[torch.Tensor] = set()

    def doubt(self, params: Iterable[torch.Tensor]) -> None:
        """The weights of `params`, or their state, came from outside the optimizer.

        Their fingerprints say which trailing bits belong to which weights.
        """
        self._doubted.update(params)
        self._behind.difference_update(self._doubted)

    def is_doubted(self, param: torch.Tensor) -> bool:
        """Whether the next step of `param` has to look."""
        return param in self._doubted

    def believe(self, params: Iterable[torch.Tensor]) -> None:
        """A step has looked where it had to."""
        self._doubted.difference_update(params)

    def leave_behind(self, params: Iterable[torch.Tensor]) -> None:
        """A step is about to write `params`."""
        self._behind.update(param for param in params if param not in self._doubted)

    def behind(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` whose fingerprints have to be taken now, and `note`d."""
        return [param for param in params if param in self._behind]

    def note(self, param: torch.Tensor) -> None:
        """The fingerprints of `param` are taken."""
        self._behind.discard(param)
