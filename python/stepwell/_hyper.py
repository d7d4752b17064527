"""The hyper-parameters of a parameter group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from stepwell import _core
from stepwell._checks import integer, number

__all__ = ["Hyper", "hyper_of"]

_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "bias_correction",
)


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
    if missing := [key for key in _KEYS if key not in group]:
        raise ValueError(
            f"`{missing[0]}` of {where} is missing. hint: add groups by optimizer.add_param_group()"
        )
    lr, eps, weight_decay = (
        number(group[key], f"`{key}` of {where}") for key in ("lr", "eps", "weight_decay")
    )
    for key, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(
                f"`{key}` of {where} is `{value}`, expected a finite number, 0 or more"
            )
    betas = group["betas"]
    if isinstance(betas, str) or not hasattr(betas, "__iter__"):
        raise ValueError(
            f"`betas` of {where} is `{betas!r}`, expected two numbers from 0 to below 1. "
            "hint: betas=(0.9, 0.999)"
        )
    betas = tuple(number(beta, f"`betas` of {where}") for beta in betas)
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(
            f"`betas` of {where} is `{group['betas']}`, expected two numbers from 0 to below 1"
        )
    if group["amsgrad"]:
        raise ValueError(
            f"`amsgrad` of {where} is set, which is not supported. hint: use "
            "torch.optim.AdamW(amsgrad=True)"
        )
    integer(group.get("seed", 0), f"`seed` of {where}")
    for key in ("capturable", "differentiable"):
        if group[key]:
            raise ValueError(
                f"`{key}` of {where} is set, which is not supported. hint: use "
                f"torch.optim.AdamW({key}=True)"
            )
    return Hyper(
        lr=lr,
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group["bias_correction"]),
        maximize=bool(group["maximize"]),
    )
