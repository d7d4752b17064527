"""Functions of torch that describe a tensor, and touch no element of it: shape, dtype, grad, hooks.

Of a tensor whose elements have yet to come they wait for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["DESCRIPTIVE", "changes_nothing", "set_grad", "without_waiting"]

without_waiting = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch do not wait: for those that touch no element."""

_DESCRIPTIVE_GETTERS = (
    *("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "names"),
    *("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "output_nr", "name"),
    *("_version", "_cdata", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_nested"),
    *("is_quantized", "is_sparse_csr", "is_mkldnn", "retains_grad", "volatile"),
)
_DESCRIPTIVE_SETTERS = (
    *("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_DESCRIPTIVE_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
    *("is_conj", "is_neg", "is_inference", "get_device", "dim_order", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("retain_grad", "_is_view", "is_same_size", "has_names"),
)


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name))


def _setters(*names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name).__set__ for name in names)


DESCRIPTIVE: frozenset[Any] = frozenset(
    [
        *_getters(*_DESCRIPTIVE_GETTERS),
        *_setters(*_DESCRIPTIVE_SETTERS),
        torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
        *(getattr(torch.Tensor, name, None) for name in _DESCRIPTIVE_METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.is_conj,
        torch.is_neg,
        torch.numel,
        torch._has_compatible_shallow_copy_type,
    ]
)
"""Functions of torch that neither read nor write a tensor's elements, nor hand out a way to."""

(set_grad,) = _setters("grad")
"""Sets the gradient of a tensor, without waiting under `without_waiting`."""

(_set_data,) = _setters("data")
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
)


def changes_nothing(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function of torch only returns the tensor that it is given, or gives it its data.

    So do `model.to` and the like for parameters that are as they are asked to be.
    """
    if func == _set_data:
        return args[0] is args[1]
    if func not in _CONVERSIONS or "memory_format" in kwargs:
        return False
    with without_waiting():
        alike = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return func(alike, *args[1:], **kwargs) is alike
