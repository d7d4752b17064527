"""DeepSpeed's native op `utils`: tensors as bytes, for its FastFileWriter."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cast_to_byte_tensor"]


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast_to_byte_tensor(src_tensor: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


def cast_to_byte_tensor(
    src_tensor: torch.Tensor | Sequence[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor]:
    """A flat uint8 tensor on the memory of `src_tensor`, or one for each of several.

    One of a byte or less is returned as it is, as by DeepSpeed's own op. One that is not contiguous
    is copied.
    """
    if not isinstance(src_tensor, torch.Tensor):
        return [cast_to_byte_tensor(each) for each in src_tensor]
    if src_tensor.nbytes <= 1:
        return src_tensor
    return src_tensor.detach().reshape(-1).view(torch.uint8)
