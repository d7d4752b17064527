"""Clipping of transformers' Trainer, and of accelerate, folded into the step of an OffloadAdamW."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from stepwell.offload.optimizer import OffloadAdamW

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["fold_clipping"]


def fold_clipping(trainer: Any) -> None:
    """Has the optimizer of `trainer` clip by its `max_grad_norm`.

    The logged norm is the optimizer's, too.

    Without it, Trainer clips by itself, with the same result, in two passes over the gradients
    before the step. The seam is `trainer.accelerator.clip_grad_norm_`. Under fp16's GradScaler it
    is left as it is.

    Args:
        trainer: a transformers.Trainer that was given an OffloadAdamW: `Trainer(...,
            optimizers=(optimizer, None))`.

    Raises:
        ValueError: it has another optimizer.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if not isinstance(optimizer, OffloadAdamW):
        raise ValueError(  # noqa: TRY004
            f"the trainer's optimizer is `{type(optimizer).__name__}`, expected OffloadAdamW. "
            "hint: Trainer(..., optimizers=(optimizer, None)), then fold_clipping(trainer)"
        )
    accelerator = trainer.accelerator
    clip_theirs = accelerator.clip_grad_norm_
    norms: list[torch.Tensor] = []

    def clip(
        parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The norm, as `accelerator.clip_grad_norm_` returns it.

        Its value is there when the optimizer has stepped.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        clipped = {param for param in parameters if param.grad is not None}
        stepped = {
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        }
        if norm_type != 2 or accelerator.scaler is not None or clipped != stepped:
            optimizer.clip_norm = None
            theirs: torch.Tensor | None = clip_theirs(parameters, max_norm, norm_type=norm_type)
            return theirs
        optimizer.clip_norm = max_norm if math.isfinite(max_norm) else None
        norms.append(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
        return norms[-1]

    def tell(stepped: torch.optim.Optimizer, *_: Any) -> None:
        assert isinstance(stepped, OffloadAdamW)
        for norm in norms:
            norm.fill_(math.nan if stepped.grad_norm is None else stepped.grad_norm)
        norms.clear()

    optimizer.register_step_post_hook(tell)
    accelerator.clip_grad_norm_ = clip
