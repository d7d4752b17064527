"""DeepSpeed's native op `cpu_adam`, function for function, over the core.

DeepSpeed calls these positionally, with numbers that may be ints where floats are meant. Unlike its
own op they raise ValueError, with nothing changed, for whatever they cannot do. The functions of
ZenFlow are those of DeepSpeed's own op.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stepwell._hyper import Hyper
from stepwell._notices import note_optimizer
from stepwell.deepspeed.native import adam, compiled_adam, optimizers

if TYPE_CHECKING:
    from typing import Any

    import torch

__all__ = ["adam_update", "create_adam", "destroy_adam"]

_LOGGER = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """What ZenFlow asks of the op where it starts its process, which has DeepSpeed's own."""
    if not name.startswith("zenflow_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(compiled_adam.load(), name)


def create_adam(
    optimizer_id: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    should_log: bool = False,
) -> int:
    """Makes the optimizer `optimizer_id`, or makes it anew. Returns 0.

    Of the hyper-parameters only `adamw_mode` (decoupled weight decay) is kept: updates bring the
    others along.
    """
    note_optimizer()
    optimizers.add(optimizer_id, decoupled=bool(adamw_mode))
    if should_log:
        _LOGGER.info(
            "optimizer %d: lr %g, betas (%g, %g), eps %g, weight_decay %g, %s",
            *(optimizer_id, lr, beta1, beta2, eps, weight_decay, "AdamW" if adamw_mode else "Adam"),
        )
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forgets the optimizer `optimizer_id`, if there is one. Returns 0."""
    optimizers.remove(optimizer_id)
    return 0


def _step_of(step: int | torch.Tensor) -> int:
    count = int(step)
    if count < 1 or count != step:
        raise ValueError(
            f"`step` is `{step}`, expected the number of the update, from 1. hint: count before "
            "the update"
        )
    return count


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """Updates a parameter and its moments in place. Returns 0.

    Args:
        optimizer_id: as given to `create_adam`.
        step: the number of this update of the parameter, from 1.
        lr: learning rate.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        eps: added to the denominator.
        weight_decay: of the parameter (AdamW) or the gradient (Adam).
        bias_correction: whether the moments are corrected for their start at 0.
        params: float32, bfloat16 or float16, contiguous.
        grads: of the parameter's dtype.
        exp_avg: float32 or of the parameter's dtype, contiguous.
        exp_avg_sq: as `exp_avg`.

    Raises:
        ValueError: with nothing changed; also for a non-finite gradient (see
            `adam.set_nonfinite`).
    """
    optimizer = optimizers.get(optimizer_id)
    tensors = adam.NativeTensors(params, grads, exp_avg, exp_avg_sq)
    hyper = _hyper(optimizer, lr, beta1, beta2, eps, weight_decay, bias_correction)
    adam.update([tensors], step=_step_of(step), hyper=hyper)
    return 0


def _hyper(
    optimizer: optimizers.NativeOptimizer,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> Hyper:
    return Hyper(
        lr=float(lr),
        betas=(float(beta1), float(beta2)),
        eps=float(eps),
        weight_decay=float(weight_decay),
        decoupled=optimizer.decoupled,
        bias_correction=bool(bias_correction),
        maximize=False,
    )
