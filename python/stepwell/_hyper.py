"""The hyper-parameters of a parameter group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from stepwell import _core

__all__ = ["Hyper", "hyper_of"]


class Hyper(NamedTuple):
    """What one call of the core steps its tensors with; equal groups share a call."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    maximize: bool

    def core(self, grad_scale: float = 1.0) -> _core.Hyper:
        """As the core takes it, every gradient multiplied by `grad_scale`."""
        return _core.Hyper(**self._asdict(), grad_scale=grad_scale)


def hyper_of(group: dict[str, Any], where: str) -> Hyper:
    """The hyper-parameters of `group`, checked.

    Raises:
        ValueError: one of them is out of its range, or asks for what this optimizer does not do.
    """
    for key in ("lr", "eps", "weight_decay"):
        if isinstance(group[key], torch.Tensor) and group[key].numel() != 1:
            raise ValueError(
                f"`{key}` of {where} has the shape `{tuple(group[key].shape)}`, expected one number"
            )
        if not 0.0 <= float(group[key]) < math.inf:
            raise ValueError(
                f"`{key}` of {where} is `{group[key]}`, expected a finite number, 0 or more"
            )
    betas = tuple(float(beta) for beta in group["betas"])
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(
            f"`betas` of {where} is `{group['betas']}`, expected two numbers from 0 to below 1"
        )
    if group["amsgrad"]:
        raise ValueError(
            f"`amsgrad` of {where} is set, which is not supported. hint: use torch.optim.AdamW(amsgrad=True)"
        )
    for key in ("capturable", "differentiable"):
        if group[key]:
            raise ValueError(
                f"`{key}` of {where} is set, which is not supported. hint: use torch.optim.AdamW({key}=True)"
            )
    return Hyper(
        lr=float(group["lr"]),
        betas=(betas[0], betas[1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group["bias_correction"]),
        maximize=bool(group["maximize"]),
    )
