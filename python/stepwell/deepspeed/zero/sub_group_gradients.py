"""Gradients of ZeRO-3's sub-groups, once they are reduced. Imports no DeepSpeed.

Those of the share that stays on the device are summed there (`zero.device_share`), and the others
go to host memory (`zero.gradients`). What a reduction leaves on this rank lies in a bucket that is
written again, or in memory of all ranks: it is cloned at once, so that is free behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell.deepspeed.zero.adjacent import clones
from stepwell.deepspeed.zero.gradients import Gradients, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.deepspeed.zero.device_share import DeviceShare
    from stepwell.deepspeed.zero.fragment import Fragment

__all__ = ["SubGroupGradients"]


class SubGroupGradients:
    """Reduced gradients, by fragment, wherever they are.

    Args:
        gradients: of the sub-groups in host memory.
        share: of those on the device.
        dtype: in which they are summed.
    """

    def __init__(self, gradients: Gradients, share: DeviceShare, dtype: torch.dtype) -> None:
        self._gradients = gradients
        self._share = share
        self._dtype = dtype

    def _holder(self, fragment: Fragment) -> DeviceShare | Gradients:
        return self._share if fragment.group in self._share else self._gradients

    def gradient(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment, flat: a copy, where the sub-group has its state."""
        return self._holder(fragment).gradient(fragment)

    def set_gradient(self, fragment: Fragment, value: torch.Tensor) -> None:
        """Sets the gradient of a fragment to `value`: flat, as many elements."""
        self._holder(fragment).set_gradient(fragment, value)

    def collect(
        self, fragments: Sequence[Fragment | None], pieces: Sequence[torch.Tensor], *, is_last: bool
    ) -> None:
        """Adds to the gradients of fragments.

        Args:
            fragments: whose gradients; None: there is none, and nothing is added.
            pieces: of each what a reduction has left: as many elements, or fewer at the end of a
                parameter.
            is_last: whether the gradients are complete then.
        """
        flat = [piece.detach().reshape(-1) for piece in pieces]
        is_cloned = all(piece.dtype == self._dtype for piece in flat)
        if is_cloned:
            flat = clones(flat)
        parts: list[Part] = []
        for fragment, piece in zip(fragments, flat, strict=True):
            if fragment is None:
                continue
            grad = piece.to(self._dtype)
            padding = fragment.numel - grad.numel()
            padded = torch.nn.functional.pad(grad, (0, padding)) if padding else grad
            if fragment.group in self._share:
                self._share.add(fragment, padded)
            else:
                is_owned = is_cloned or padded.data_ptr() != piece.data_ptr()
                parts.append(Part(fragment, padded, is_owned))
        self._gradients.collect_all(parts, is_last=is_last)

    def drop_sums(self) -> None:
        """Forgets all gradients that are not complete, and all of the share."""
        self._gradients.drop_sums()
        self._share.drop()
