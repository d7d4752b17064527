"""Steps of DeepSpeed's CPU optimizers, all or nothing.

DeepSpeed counts a step before it calls the native op, parameter by parameter. So what is wrong with
the gradients of a step is found before its first update, and where an update fails all the same,
its count is taken back.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from stepwell.deepspeed.native import adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["counting_applied_steps", "whole"]


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every (parameter, gradient) of a step, checked with the moments that are there already."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param) or {}
            moments = [state.get(name, param) for name in ("exp_avg", "exp_avg_sq")]
            adam.check(adam.NativeTensors(param.detach(), param.grad.detach(), *moments))
            yield param.detach(), param.grad.detach()


def counting_applied_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, which on its way out by an exception leaves counted only what was applied."""

    @functools.wraps(step)
    def guarded(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        counts = {key: _copy(state.get("step", 0)) for key, state in self.state.items()}
        with adam.following(self), adam.recorded() as applied:
            try:
                return step(self, *args, **kwargs)
            except BaseException:
                for key, state in self.state.items():
                    if "exp_avg" in state and state["exp_avg"].data_ptr() not in applied:
                        state["step"] = counts.get(key, 0)
                raise

    return guarded


def _copy(count: Any) -> Any:
    return count.clone() if isinstance(count, torch.Tensor) else count


def whole(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, which updates all parameters that have a gradient or, if it raises, none."""
    signature = inspect.signature(step)
    counting = counting_applied_steps(step)

    @functools.wraps(step)
    def guarded(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        # The closure makes the gradients.
        closure = call.arguments.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), adam.following(self), adam.all_finite(list(_gradients(self))):
            counting(*call.args, **call.kwargs)
        return loss

    return guarded
