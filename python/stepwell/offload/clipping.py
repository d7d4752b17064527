"""Clipping by the norm of all gradients, which scales them as they are stepped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stepwell._checks import optional, positive
from stepwell._sharding import greatest
from stepwell.store.norm import CLIP_EPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Clipping"]

_LOGGER = logging.getLogger(__name__)

# Of clip coefficients, relative: devices of several kinds may round one norm differently.
_TOLERANCE = 1e-5


class Clipping:
    """What scales gradients whose norm is too large, as torch.nn.utils.clip_grad_norm_ does.

    Args:
        norm_max: what the norm is clipped to; None: no clipping.
    """

    def __init__(self, norm_max: float | None) -> None:
        self.norm_max = norm_max
        self._has_warned = False

    @property
    def norm_max(self) -> float | None:
        """What the norm is clipped to; None: no clipping."""
        return self._norm_max

    @norm_max.setter
    def norm_max(self, norm_max: float | None) -> None:
        hint = "None for no clipping"
        self._norm_max = optional(positive, norm_max, "`clip_norm`", hint=hint)

    def coefficient(self, norm: float) -> float:
        """What gradients of this norm are scaled by."""
        if self.norm_max is None:
            return 1.0
        # In this order NaN gives 1: the core takes no scale that is not finite.
        return min(1.0, self.norm_max / (norm + CLIP_EPS))

    def compare(self, norm: float, meshes: Sequence[DeviceMesh]) -> None:
        """Warns once where ranks clip pieces of one parameter differently.

        All ranks that hold pieces have to call it.

        Args:
            norm: that of this rank's gradients.
            meshes: those of the ranks that hold pieces.
        """
        coefficient = self.coefficient(norm)
        most, minus_least = greatest(meshes, [coefficient, -coefficient])
        if most + minus_least <= _TOLERANCE * most or self._has_warned:
            return
        self._has_warned = True
        _LOGGER.warning(
            "clip_norm scales gradients by %g on one rank and by %g on another, also those of "
            "pieces of one parameter: parameters that are no DTensors have gradients of each "
            "rank's own. hint: reduce these gradients over the ranks before step(); or shard the "
            "parameters as well; or clip_norm=None",
            -minus_least,
            most,
        )
