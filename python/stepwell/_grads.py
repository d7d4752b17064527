"""A gradient as a step reads it: placed as its parameter is, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell._sharding import is_dtensor, like, local
from stepwell._tensors import FLOATS, check_memory, check_strided, is_run

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["checked_grad"]


def checked_grad(
    param: torch.Tensor, grad: torch.Tensor, label: Callable[[], str], *, takes_any_float: bool
) -> torch.Tensor:
    """The gradient `grad` of `param`, a copy where it is no run.

    Args:
        param: a parameter that can be stepped.
        grad: its gradient.
        label: what errors call the parameter.
        takes_any_float: whether its dtype may be another than the parameter's.

    Raises:
        ValueError: no step can work with it.
    """

    def what() -> str:
        return f"the gradient of {label()}"

    check_strided(
        grad,
        what,
        "use dense gradients (nn.Embedding(sparse=False)), or torch.optim.SparseAdam for these "
        "parameters",
    )
    if is_dtensor(param) != is_dtensor(grad):
        raise ValueError(
            f"only one of {label()} and its gradient is a DTensor. hint: distribute both alike"
        )
    piece, found = local(param), local(grad)
    if found.device != piece.device:
        raise ValueError(
            f"{what()} is on `{found.device}`, expected `{piece.device}`, where the parameter is. "
            "hint: grad.to(parameter.device)"
        )
    dtypes = FLOATS if takes_any_float else (piece.dtype,)
    if found.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{what()} is `{found.dtype}`, expected {expected}. hint: grad.to(parameter.dtype)"
        )
    if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
        # Tensor parallelism leaves gradients of replicated parameters as partial sums.
        grad = grad.redistribute(param.device_mesh, param.placements)
        found = local(grad)
    if found.shape != piece.shape:
        raise ValueError(
            f"{what()} has the shape `{tuple(found.shape)}`, expected `{tuple(piece.shape)}`. "
            "hint: clear stale gradients by zero_grad() after a change of the parameter"
        )
    check_memory(found, what)
    if is_run(found):
        return grad
    # Of a lazy zero, or of a tensor of a class that holds others, a copy has memory.
    copy = torch.empty(found.shape, dtype=found.dtype, device=found.device).copy_(found)
    return like(grad, copy)
