"""Undoing an update of 16-bit parameters that have no float32 master.

The inverse is computed in double precision and rounded to what holds it. Then the update is done
again with the core: if what comes out is not what stands there, to within `_ULPS_MAX` roundings of
the dtype, the update cannot be undone, and nothing is changed. What is restored is the state before
the update but for a rounding of the dtype. Beside the tensors it takes the memory of a second
parameter and its moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell._tensors import view
from stepwell.deepspeed.native.adam import NativeTensors

if TYPE_CHECKING:
    from stepwell._hyper import Hyper

__all__ = ["undo"]

# The roundings of one forward and one inverse update.
_ULPS_MAX = 4.0
_PIECE = 1 << 20


def undo(tensors: NativeTensors, *, step: int, hyper: Hyper) -> None:
    """Undoes an update of one parameter.

    Args:
        tensors: that an update fits (`adam.check`): the parameter of 16 bits, flat pieces of
            memory.
        step: the number of the update, from 1.
        hyper: that it was done with.

    Raises:
        ValueError: it cannot be undone; nothing was changed.
    """
    if 0.0 in hyper.betas:
        raise ValueError(
            f"betas are `{hyper.betas}`, expected both above 0: an update without memory cannot "
            "be undone. hint: keep a copy of what is to be restored"
        )
    flat = NativeTensors(*(tensor.detach().reshape(-1) for tensor in tensors))
    pieces = [
        NativeTensors(*parts)
        for parts in zip(*(torch.split(tensor, _PIECE) for tensor in flat), strict=True)
    ]
    undone = [_inverse(piece, step, hyper) for piece in pieces]
    lost = sum(
        _differing(piece, before, step, hyper) for piece, before in zip(pieces, undone, strict=True)
    )
    if lost:
        raise ValueError(
            f"the step cannot be undone: `{lost}` elements do not follow from this gradient and "
            "step count; nothing was changed. hint: a step whose gradient was not finite must not "
            "be taken in the first place"
        )
    for piece, before in zip(pieces, undone, strict=True):
        piece.param.copy_(before.param)
        piece.exp_avg.copy_(before.exp_avg)
        piece.exp_avg_sq.copy_(before.exp_avg_sq)


def _rate(step: int, hyper: Hyper) -> tuple[float, float]:
    """What multiplies exp_avg, and the root of exp_avg_sq, in an update."""
    if not hyper.bias_correction:
        return hyper.lr, 1.0
    beta1, beta2 = hyper.betas
    return hyper.lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5


def _inverse(after: NativeTensors, step: int, hyper: Hyper) -> NativeTensors:
    """What stood there before the update; its gradient is that of the update."""
    beta1, beta2 = hyper.betas
    lr, root_scale = _rate(step, hyper)
    param, grad, exp_avg, exp_avg_sq = (tensor.double() for tensor in after)
    keep = 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
    denom = exp_avg_sq.sqrt() * root_scale + hyper.eps
    rounded = ((param + lr * exp_avg / denom) / keep).to(after.param.dtype)
    if not hyper.decoupled:
        grad = grad + hyper.weight_decay * rounded.double()
    exp_avg = (exp_avg - (1.0 - beta1) * grad) / beta1
    # The rounding of the update may leave a little less than nothing.
    exp_avg_sq = ((exp_avg_sq - (1.0 - beta2) * grad.square()) / beta2).clamp(min=0.0)
    return NativeTensors(
        rounded,
        after.grad,
        exp_avg.to(after.exp_avg.dtype),
        exp_avg_sq.to(after.exp_avg_sq.dtype),
    )


def _differing(after: NativeTensors, before: NativeTensors, step: int, hyper: Hyper) -> int:
    """Elements for which the update of `before` does not lead to `after`."""
    again = NativeTensors(*(tensor.clone() for tensor in before))
    operand = _core.AdamTensor(
        param=view(again.param),
        grad=view(again.grad),
        exp_avg=view(again.exp_avg),
        exp_avg_sq=view(again.exp_avg_sq),
    )
    _core.adam_step([operand], steps=[step], hyper=hyper.core())
    beta1, beta2 = hyper.betas
    l2 = 0.0 if hyper.decoupled else hyper.weight_decay
    # An L2 decay carries the rounding of the parameter into the gradient.
    param = l2 * before.param.double().abs()
    grad_slack = torch.finfo(after.param.dtype).eps * param
    grad = after.grad.double().abs() + param
    lr, root_scale = _rate(step, hyper)
    moment = ((1.0 - beta1) * grad).maximum(before.exp_avg.double().abs())
    # The update moves with the roundings of exp_avg, whose terms may cancel.
    update = lr * moment / (after.exp_avg_sq.double().sqrt() * root_scale + hyper.eps)
    is_same = (
        _is_repeated(again.param, after.param, before.param, update)
        & _is_repeated(
            again.exp_avg, after.exp_avg, before.exp_avg, moment, (1.0 - beta1) * grad_slack
        )
        & _is_repeated(
            again.exp_avg_sq,
            after.exp_avg_sq,
            before.exp_avg_sq,
            (1.0 - beta2) * grad.square(),
            2.0 * (1.0 - beta2) * grad * grad_slack,
        )
    )
    return int((~is_same).sum())


def _is_repeated(
    again: torch.Tensor,
    stands: torch.Tensor,
    before: torch.Tensor,
    added: torch.Tensor,
    slack: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Whether each element is what stands there.

    To within the rounding of the largest magnitude that was added up, and `slack` more.
    """
    info = torch.finfo(stands.dtype)
    largest = stands.double().abs().maximum(before.double().abs()).maximum(added)
    unit = (largest * info.eps).clamp(min=info.smallest_normal * info.eps)
    # False for a NaN, and for an infinity beside anything.
    return (again.double() - stands.double()).abs() <= _ULPS_MAX * (unit + slack)
