"""`torch.nn.functional.linear` under ZeRO-3, with the bits of DeepSpeed's and less Python.

A graph made by torch's own holds the gathered weight, by a view of it. So DeepSpeed puts a function
of its own in its place, which holds the parameter.

Within an activation checkpoint (`torch.utils.checkpoint`, not reentrant) graphs hold nothing: what
they need is computed again in the backward, and held until it is used, be it a parameter or a view.
So 16-bit layers without bias are torch's own there, forwards and backwards: the same operations, in
half of the time of the thread that launches them. A layer of a Llama has seven.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["linear_for"]

_HALF_DTYPES = frozenset((torch.bfloat16, torch.float16))


@functools.cache
def _device_type() -> str:
    name: str = get_accelerator().device_name()
    return name


def _holds_nothing() -> bool:
    """Whether a checkpoint has what the graph would hold, in the forward and when it is repeated.

    Both say the same of a call: they save as many tensors, of the same shapes.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def linear_for(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What stands in the place of DeepSpeed's function.

    What transforms or compiles functions gets DeepSpeed's, which is made for it.
    """

    @functools.wraps(theirs)
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return theirs(input, weight, bias)
        # With a bias torch's own rounds once. Autocast would hold what it has cast; of other
        # dtypes a backward under autocast would be cast.
        if (
            bias is None
            and weight.dtype in _HALF_DTYPES
            and weight.dtype == input.dtype
            and _holds_nothing()
            and not torch.is_autocast_enabled(_device_type())
        ):
            return torch._C._nn.linear(input, weight)
        return theirs(input, weight, bias)

    return linear
