"""The optimizer that a program gives to `deepspeed.initialize`.

DeepSpeed refuses one that is not its own beside CPU offload, since it would be slow, unless the
JSON has `"zero_force_ds_cpu_optimizer": false`. What the offload engine steps is not slow: torch's
Adam and AdamW, and Stepwell's. So the question is put off until it is decided what steps, which is
also when a function of the parameters has made its optimizer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from stepwell import optim
from stepwell.deepspeed.seams import Attribute
from stepwell.deepspeed.zero.operands import is_torchs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SEAMS", "check_client"]

_ENGINE = "deepspeed.runtime.engine"


def _is_put_off(optimizer: object) -> bool:
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    return not is_made or isinstance(optimizer, optim.Adam) or is_torchs(optimizer)


def _forced(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_forced(self: Any) -> bool:
        return not _is_put_off(self.client_optimizer) and original(self)

    return is_forced


def check_client(engine: Any) -> None:
    """Raises DeepSpeed's error for a client optimizer beside CPU offload that nothing steps fast.

    Called when the engine has its `basic_optimizer` and its `stepwell_plan`.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    is_asked = (
        engine.client_optimizer is not None
        and _is_put_off(engine.client_optimizer)
        and engine.zero_use_cpu_optimizer()
        and engine._config.zero_force_ds_cpu_optimizer
    )
    optimizer, plan = engine.basic_optimizer, engine.stepwell_plan
    is_fast = isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion, optim.Adam))
    if not is_asked or is_fast or plan.zero_class is not None:
        return
    raise ZeRORuntimeException(
        f"the optimizer `{type(optimizer).__name__}`, given to deepspeed.initialize, would step "
        f"slowly in host memory. It is not on the offload engine: {'; '.join(plan.reasons)}. hint: "
        'an optimizer in the DeepSpeed JSON, or "zero_force_ds_cpu_optimizer": false there'
    )


SEAMS = (
    Attribute(
        "client optimizer",
        _ENGINE,
        "DeepSpeedEngine.zero_force_ds_cpu_optimizer",
        _forced,
        ("self",),
    ),
)
