"""The share of ZeRO-3's optimizer state that stays on the device: `offload_optimizer.ratio` < 1.

That is DeepSpeed's Twin-Flow. The first sub-groups have their fp32 masters, gradients and moments
on the device: 16 bytes per parameter of theirs. torch's fused Adam steps them while the engine
steps the others in host memory, with one norm, one clip coefficient and one decision for all.

DeepSpeed steps this share by an optimizer of its own. That is AdamW whatever the JSON says, keeps
the lr of the beginning for the first parameter group, and is in no checkpoint. Here the options are
those of the parameter group, and the state is the base optimizer's, so checkpoints have it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell.store.norm import wide_squares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.deepspeed.zero.partition import Fragment

__all__ = ["DeviceShare"]

# Of bias correction nothing is left after so many steps, for all betas that float32 tells from 1.
_NO_CORRECTION_STEP = 2.0**40


class DeviceShare:
    """Gradients and steps of the sub-groups on the device.

    Args:
        masters: by the number of their sub-group: flat, float32, on the device.
    """

    def __init__(self, masters: Mapping[int, torch.Tensor]) -> None:
        self._grads = {
            group: torch.zeros_like(master, requires_grad=False)
            for group, master in masters.items()
        }
        # Fragments that have a gradient since the last step.
        self._written: set[Fragment] = set()
        # Fragments in whose place a gradient of some step is.
        self._stale: set[Fragment] = set()
        # What a program has set since a fragment's gradient arrived.
        self._values_set: dict[Fragment, torch.Tensor] = {}

    def __bool__(self) -> bool:
        """Whether any sub-group is on the device."""
        return bool(self._grads)

    def __contains__(self, group: object) -> bool:
        return group in self._grads

    def _grad(self, fragment: Fragment) -> torch.Tensor:
        group, begin, numel = fragment
        return self._grads[group].narrow(0, begin, numel)

    def add(self, fragment: Fragment, piece: torch.Tensor) -> None:
        """Adds `piece`, flat, to the gradient of a fragment.

        What a program has set since the last one is dropped, as `Gradients` has it.
        """
        self._values_set.pop(fragment, None)
        if fragment in self._written:
            self._grad(fragment).add_(piece)
        else:
            self._put(fragment, piece)

    def _put(self, fragment: Fragment, value: torch.Tensor) -> None:
        self._grad(fragment).copy_(value)
        self._written.add(fragment)
        self._stale.add(fragment)

    def gradient(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment: a copy.

        After a step, until the next gradient arrives: as it was stepped, unscaled and clipped.
        """
        found = self._values_set.get(fragment)
        return self._grad(fragment).clone() if found is None else found.clone()

    def set_gradient(self, fragment: Fragment, value: torch.Tensor) -> None:
        """Sets the gradient of a fragment to `value`, flat; norms are of what was set."""
        grad = self._grad(fragment)
        self._values_set[fragment] = value.detach().to(grad.device, grad.dtype, copy=True)

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self._written.clear()
        self._values_set.clear()

    def end(self) -> None:
        """Frees the memory of gradients. No sub-group is on the device from now on."""
        self.drop()
        self._stale.clear()
        self._grads.clear()

    def squares(self) -> torch.Tensor | float:
        """The sum of the squares of all gradients; an element that got none is 0 from now on."""
        for fragment, value in self._values_set.items():
            self._put(fragment, value)
        self._values_set.clear()
        for fragment in self._stale - self._written:
            self._grad(fragment).zero_()
        self._stale &= self._written
        grads = list(self._grads.values())
        return wide_squares(grads, grads[0].device) if grads else 0.0

    def step_of(
        self, group: int, operand: Operand, weight: torch.Tensor, grad_scale: float
    ) -> list[partial[Any]]:
        """The calls that step a sub-group, after `squares`, without grad mode.

        Args:
            group: number of the sub-group.
            operand: its state and options.
            weight: what the new master is rounded into.
            grad_scale: what its gradient is multiplied by, in place.
        """
        master, hyper = operand.master.detach(), operand.hyper
        number = operand.state["step"] + 1
        count = float(number) if hyper.bias_correction else _NO_CORRECTION_STEP
        fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        beta1, beta2 = hyper.betas
        step = partial(
            fused,
            [master],
            [self._grads[group]],
            [operand.state["exp_avg"]],
            [operand.state["exp_avg_sq"]],
            [],
            [torch.full((), count, dtype=torch.float32, device=master.device)],
            lr=hyper.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
        )
        grad = self._grads[group]
        # No function in Python: Ctrl-C would come where it begins, behind a part of the step.
        scale = [] if grad_scale == 1.0 else [partial(grad.mul_, grad_scale)]
        counted = partial(operand.state.__setitem__, "step", number)
        return [*scale, step, partial(weight.copy_, master), counted]
