"""One Adam update of tensors as DeepSpeed's native ops take them.

It is checked in full, then done by the core, or not at all.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from stepwell import _core
from stepwell._tensors import is_run, view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepwell._hyper import Hyper

__all__ = [
    "NativeTensors",
    "Nonfinite",
    "all_finite",
    "check",
    "following",
    "nonfinite",
    "propagate_in",
    "recorded",
    "set_nonfinite",
    "update",
]

Nonfinite: TypeAlias = Literal["raise", "propagate"]

# What DeepSpeed's own op has kernels for: the moments' dtypes by the parameter's.
_MOMENT_DTYPES = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32, torch.float16),
}


_PROPAGATES = "_stepwell_nonfinite"


class NativeTensors(NamedTuple):
    """One parameter of an update.

    The moments are float32, or of the parameter's dtype and rounded to nearest.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class _Policy:
    """What updates with a non-finite gradient do, and what has been done.

    It is the process's, as DeepSpeed's op is.
    """

    nonfinite: Nonfinite = "raise"
    is_checked: bool = False
    applied: set[int] | None = None


def nonfinite(optimizer: torch.optim.Optimizer | None = None) -> Nonfinite:
    """What an update with a non-finite gradient does: that of an optimizer, or of all."""
    policy: Nonfinite = getattr(optimizer, _PROPAGATES, _Policy.nonfinite)
    return policy


def propagate_in(optimizer: torch.optim.Optimizer) -> None:
    """Has updates of `optimizer` propagate gradients that are not finite, whatever others do."""
    setattr(optimizer, _PROPAGATES, "propagate")


@contextmanager
def following(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Updates inside do what those of `optimizer` do."""
    outer, _Policy.nonfinite = _Policy.nonfinite, nonfinite(optimizer)
    try:
        yield
    finally:
        _Policy.nonfinite = outer


def set_nonfinite(policy: Nonfinite) -> None:
    """Sets what an update with a non-finite gradient does.

    Args:
        policy: "raise" a ValueError, or "propagate" it, as DeepSpeed's op does, which saves
            reading the gradient once more.
    """
    _Policy.nonfinite = policy


@contextmanager
def recorded() -> Iterator[set[int]]:
    """Collects the address of `exp_avg` of each parameter whose update is applied meanwhile."""
    outer, _Policy.applied = _Policy.applied, set()
    try:
        yield _Policy.applied
    finally:
        _Policy.applied = outer


@contextmanager
def _checked() -> Iterator[None]:
    outer, _Policy.is_checked = _Policy.is_checked, True
    try:
        yield
    finally:
        _Policy.is_checked = outer


def check(tensors: NativeTensors) -> None:
    """Raises ValueError for tensors that an update could not be applied to."""
    param = tensors.param
    for name, tensor in tensors._asdict().items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(  # noqa: TRY004
                f"`{name}` is `{type(tensor).__name__}`, expected a tensor. hint: pass the tensors "
                "of one parameter"
            )
        if not tensor.is_cpu:
            raise ValueError(
                f"`{name}` is on `{tensor.device}`, expected the CPU. hint: this optimizer steps "
                "in host memory: set "
                "zero_optimization.offload_optimizer.device to `cpu` in the DeepSpeed JSON"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"`{name}` is `{tensor.layout}`, expected a dense tensor. hint: use dense gradients"
            )
        if tensor.numel() != param.numel():
            raise ValueError(
                f"`{name}` has `{tensor.numel()}` elements, the parameter has {param.numel()}. "
                "hint: state and gradient must be those of this parameter"
            )
        # A gradient is only read, so a copy does; what is written must be written where it is.
        if name != "grad" and not is_run(tensor):
            raise ValueError(
                f"`{name}` is not contiguous (shape `{tuple(tensor.shape)}`, strides "
                f"`{tensor.stride()}`), expected it to "
                "be. hint: use .contiguous(), or stepwell.AdamW, which steps any strides"
            )
    if param.dtype not in _MOMENT_DTYPES:
        raise ValueError(
            f"`param` is `{param.dtype}`, expected float32, bfloat16 or float16. hint: "
            "parameter.to(torch.float32)"
        )
    if tensors.grad.dtype != param.dtype:
        raise ValueError(
            f"`grad` is `{tensors.grad.dtype}`, expected `{param.dtype}`, as the parameter is. "
            "hint: grad.to(param.dtype)"
        )
    dtypes = _MOMENT_DTYPES[param.dtype]
    if tensors.exp_avg.dtype not in dtypes or tensors.exp_avg_sq.dtype != tensors.exp_avg.dtype:
        raise ValueError(
            f"the moments of a `{param.dtype}` parameter are `{tensors.exp_avg.dtype}` and "
            f"`{tensors.exp_avg_sq.dtype}`, "
            f"expected both to be one of {', '.join(f'`{dtype}`' for dtype in dtypes)}. hint: "
            "start from fresh state"
        )


def _views(grads: Sequence[torch.Tensor]) -> list[_core.TensorView]:
    return [view(grad) for grad in grads]


def _runs(tensors: Sequence[NativeTensors]) -> list[torch.Tensor]:
    """The gradients, contiguous; copies live as long as the list does."""
    return [
        each.grad if is_run(each.grad) else each.grad.contiguous().resolve_neg() for each in tensors
    ]


def _check_finite(grads: list[_core.TensorView], pool: _core.Pool | None) -> None:
    """Raises ValueError where a gradient is not finite, and the policy is to raise."""
    if _Policy.is_checked or _Policy.nonfinite == "propagate" or not grads:
        return
    if _core.grad_stats(grads, norm=False, pool=pool).finite:
        return
    raise ValueError(
        "a gradient is not finite; nothing was changed. hint: let DeepSpeed skip such steps "
        "(bf16.check_grad_overflow, "
        "fp16.loss_scale 0), lower lr, or register(nonfinite='propagate')"
    )


@contextmanager
def all_finite(tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Checks (parameter, gradient) pairs of a step in one read.

    Updates inside do not read them for that again.

    Raises:
        ValueError: a gradient is not finite, and the policy is to raise.
    """
    if _Policy.nonfinite != "raise":
        yield
        return
    runs = _runs(
        [NativeTensors(param, grad, param, param) for param, grad in tensors if grad.numel() > 0]
    )
    _check_finite(_views(runs), None)
    with _checked():
        yield


def update(
    tensors: Sequence[NativeTensors], *, step: int, hyper: Hyper, pool: _core.Pool | None = None
) -> None:
    """Updates all `tensors` in place, or none.

    Args:
        tensors: the parameters with gradients and moments.
        step: the number of this update, from 1.
        hyper: hyper-parameters.
        pool: what steps them; the default pool if None.

    Raises:
        ValueError: with nothing changed: tensors or options that do not fit, or a non-finite
            gradient (see `set_nonfinite`).
    """
    for each in tensors:
        check(each)
    stepped = [each for each in tensors if each.param.numel() > 0]
    runs = _runs(stepped)
    grads = _views(runs)
    _check_finite(grads, pool)
    operands = [
        _core.AdamTensor(
            param=view(each.param),
            grad=grad,
            exp_avg=view(each.exp_avg),
            exp_avg_sq=view(each.exp_avg_sq),
        )
        for each, grad in zip(stepped, grads, strict=True)
    ]
    _core.adam_step(operands, steps=[step] * len(operands), hyper=hyper.core(), pool=pool)
    if _Policy.applied is not None:
        _Policy.applied.update(each.exp_avg.data_ptr() for each in tensors)
