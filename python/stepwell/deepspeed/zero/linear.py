"""`torch.nn.functional.linear` under ZeRO-3, with the bits of DeepSpeed's and less Python.

A graph made by torch's own holds the gathered weight, by a view of it. So DeepSpeed puts a function
of its own in its place, which holds the parameter. That one asks for a signature, the accelerator
and the state of autocast in each call: 80 microseconds, of which 10 are left here. A layer of a
Llama has seven, and calls each twice with activation checkpoints.

Within such a checkpoint (`torch.utils.checkpoint`, not reentrant) graphs hold nothing: what they
need is computed again in the backward, and held until it is used, be it a parameter or a view. So
16-bit layers without bias are torch's own there, forwards and backwards: the same operations.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LinearFunction", "linear_for"]

_MATRIX_DIM = 2
_HALF_DTYPES = frozenset((torch.bfloat16, torch.float16))


@functools.cache
def _device_type() -> str:
    name: str = get_accelerator().device_name()
    return name


class LinearFunction(torch.autograd.Function):
    """In the place of DeepSpeed's `LinearFunctionForZeroStage3`; the same operations."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> torch.Tensor:
        """Of an input of one or more dimensions."""
        ctx.save_for_backward(input, weight)
        is_autocast = torch.is_autocast_enabled(_device_type())
        ctx.autocast_dtype = torch.get_autocast_dtype(_device_type()) if is_autocast else None
        if bias is None:
            return torch.matmul(input, weight.t())
        if input.dim() == _MATRIX_DIM:
            return torch.addmm(bias, input, weight.t())
        # Rounded twice, as DeepSpeed's.
        return torch.matmul(input, weight.t()).add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Under autocast as the forward was, whatever it is now."""
        dtype, kind = ctx.autocast_dtype, _device_type()
        if dtype is None and not torch.is_autocast_enabled(kind):
            return _gradients(ctx, grad)
        with torch.autocast(kind, enabled=dtype is not None, dtype=dtype):
            return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    """The gradients of input, weight and bias."""
    # With activation checkpoints this computes the forward again.
    inputs, weight = ctx.saved_tensors
    is_gathered_here = getattr(weight, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
    if is_gathered_here:
        weight.all_gather()
    try:
        of_input = of_weight = of_bias = None
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_input:
            of_input = grad.matmul(weight)
        if needs_weight and grad.dim() == 1:
            of_weight = grad.unsqueeze(-1) * inputs.unsqueeze(0)
        elif needs_weight:
            of_weight = _rows(grad).t().matmul(_rows(inputs))
        if needs_bias:
            of_bias = grad if grad.dim() == 1 else grad.sum(list(range(grad.dim() - 1)))
        return of_input, of_weight, of_bias
    finally:
        if is_gathered_here:
            weight.partition()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == _MATRIX_DIM else tensor.reshape(-1, tensor.shape[-1])


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
        return LinearFunction.apply(input, weight, bias)

    return linear
