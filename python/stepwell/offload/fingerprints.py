"""Which fingerprints of a bfloat16 weight a step has to verify, and which are outdated.

A bfloat16 parameter and its trailing bits are one fp32 number (see the core's `state::split`), and
the fingerprints tell whether they still belong together. Steps alone write the host side of a
parameter on a device, with two exceptions: weights that were written on the device by other code
come to the host, and state is loaded. Only the step after those verifies the fingerprints. Other
steps neither verify nor take them, which saves a tenth of the arithmetic of a step with q8 moments.
So fingerprints become outdated by a step, until they are taken: before a weight is replaced, and
before other code sees the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from stepwell._state import State

__all__ = ["FingerprintStatus"]


class FingerprintStatus:
    """The parameters whose fingerprints are unverified, and those whose are outdated."""

    def __init__(self) -> None:
        self._unverified: set[torch.Tensor] = set()
        # With the state that the steps have worked on; None: whichever it is.
        self._outdated: dict[torch.Tensor, State | None] = {}
        self.num_taken = 0
        """How often fingerprints were taken, of one parameter each."""

    def mark_unverified(self, params: Iterable[torch.Tensor]) -> None:
        """The weights of `params`, or their state, were written by something else than a step.

        Their fingerprints are current, and tell what belongs together.
        """
        params = list(params)
        self._unverified.update(params)
        self._drop_outdated(params)

    def is_unverified(self, param: torch.Tensor) -> bool:
        """Whether the next step of `param` has to verify its fingerprints."""
        return param in self._unverified

    def mark_verified(self, params: Iterable[torch.Tensor]) -> None:
        """A step has verified the fingerprints of `params` where it had to."""
        if self._unverified:
            self._unverified.difference_update(params)

    def mark_outdated(self, param: torch.Tensor, state: State | None) -> None:
        """A step writes `param`, and takes fingerprints only where it verifies them.

        `state`: what it works on; None: what the optimizer has may be another object.
        """
        if param not in self._unverified:
            self._outdated[param] = state

    def outdated(
        self, params: Iterable[torch.Tensor], states: Mapping[torch.Tensor, State]
    ) -> list[torch.Tensor]:
        """Those of `params` whose fingerprints have to be taken before they mean anything.

        Not of a state that the program has put in the place of the one that was stepped: its
        fingerprints are those of the weights that it was saved with.
        """
        found = []
        for param in params:
            if param in self._outdated:
                stepped = self._outdated[param]
                if stepped is None or states.get(param) is stepped:
                    found.append(param)
        return found

    def _drop_outdated(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            self._outdated.pop(param, None)

    def mark_current(self, param: torch.Tensor) -> None:
        """The fingerprints of `param` were taken."""
        self.num_taken += 1
        self._outdated.pop(param, None)

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """`params` are stepped no more."""
        params = list(params)
        self._unverified.difference_update(params)
        self._drop_outdated(params)
