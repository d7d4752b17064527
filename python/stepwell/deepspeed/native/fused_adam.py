"""DeepSpeed's native op `fused_adam` on CPU accelerators.

DeepSpeed's FusedAdam calls it where nothing is offloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell._hyper import Hyper
from stepwell.deepspeed.native import adam

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["multi_tensor_adam"]

_MODE_ADAMW = 1


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Updates all parameters in place, or none.

    Args:
        chunk_size: without effect: chunks are the core's affair.
        noop_flag: without effect, as in DeepSpeed's op for CPUs.
        tensor_lists: gradients, parameters, `exp_avg` and `exp_avg_sq`, of equal lengths.
        lr: learning rate.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        epsilon: added to the denominator.
        step: the number of this update, from 1.
        mode: 1 for AdamW, 0 for Adam.
        bias_correction: whether the moments are corrected for their start at 0.
        weight_decay: of the parameters (AdamW) or the gradients (Adam).

    Raises:
        ValueError: with nothing changed.
    """
    if len(tensor_lists) != 4 or len({len(tensors) for tensors in tensor_lists}) != 1:
        raise ValueError(
            f"`tensor_lists` has the lengths `{[len(tensors) for tensors in tensor_lists]}`, "
            "expected four equal ones. "
            "hint: gradients, parameters, exp_avg, exp_avg_sq"
        )
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    hyper = Hyper(
        lr=float(lr),
        betas=(float(beta1), float(beta2)),
        eps=float(epsilon),
        weight_decay=float(weight_decay),
        decoupled=mode == _MODE_ADAMW,
        bias_correction=bool(bias_correction),
        maximize=False,
    )
    quads = zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
    adam.update([adam.NativeTensors(*quad) for quad in quads], step=int(step), hyper=hyper)
