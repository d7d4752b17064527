"""OffloadAdamW in transformers' Trainer, and in what is made of it (TRL): all in one line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from stepwell.offload.optimizer import OffloadAdamW

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["offload_trainer"]


def offload_trainer(trainer: Any, *, saves_volume: bool = False, **options: Any) -> None:
    """Has a Trainer step by an OffloadAdamW, which is made when training begins.

    Learning rate, betas, eps, the groups of the weight decay, accumulation and clipping are those
    of its arguments. Clipping, and the norm that is logged, are part of the step, where Trainer by
    itself takes two passes over the gradients. Under fp16's GradScaler Trainer clips.

    Args:
        trainer: a transformers.Trainer, or an instance of a class made of it. Where it was given an
            OffloadAdamW (`optimizers=(optimizer, None)`), that stays, and clips.
        saves_volume: whether `optimizer.pt` has what a volume has, see
            `OffloadAdamW.saves_volume`; with several processes it has.
        options: others of OffloadAdamW: `moments`, `deferred`, `tier`, ...

    Raises:
        ValueError: it has another optimizer, or DeepSpeed steps it.
    """
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if isinstance(given, OffloadAdamW) and not options:
        given.saves_volume = saves_volume or trainer.args.world_size > 1
        _fold_clipping(trainer.accelerator, given)
        return
    if given is not None:
        raise ValueError(
            f"the trainer has an optimizer, `{type(given).__name__}`, "
            + (f"and `{', '.join(options)}` are given for another, " if options else "")
            + "expected none. hint: leave `optimizers` of the Trainer out"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "the trainer is on DeepSpeed, which makes the optimizer. hint: "
            "stepwell.deepspeed.register(), or `stepwell run`, in place of this"
        )
    args = trainer.args

    class OptimizerOfTrainer(OffloadAdamW):
        """Which Trainer makes of its groups, once its model is where it stays."""

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, model=trainer.model, **options)
            # Of several ranks one saves, and each has its volume.
            self.saves_volume = saves_volume or args.world_size > 1
            _fold_clipping(trainer.accelerator, self)

    of_arguments = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.world_size == 1:
        # Gradients of several ranks are final after the backward only.
        of_arguments["accumulation_steps"] = args.gradient_accumulation_steps
    if options.get("weights") == "host":
        of_arguments["device"] = args.device
    trainer.optimizer_cls_and_kwargs = (OptimizerOfTrainer, of_arguments | options)


def _fold_clipping(accelerator: Any, optimizer: OffloadAdamW) -> None:
    """Has an optimizer clip in the place of accelerate: its seam is `clip_grad_norm_`."""
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
