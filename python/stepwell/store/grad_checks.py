"""Whether a step can take a gradient: it lies as its parameter did when that was added.

A copy reads as many bytes as the host side of a parameter has. So gradient and parameter are looked
at before each copy, and those that cannot be stepped are refused with the reason.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from stepwell._grads import checked_grad
from stepwell._sharding import PLAIN, local
from stepwell._tensors import check_memory, contiguous_hint
from stepwell.store.marker import GradMarker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "Known",
    "Label",
    "check_in_place",
    "checked",
    "gradients_of",
    "lies_as",
]

Label: TypeAlias = "Callable[[torch.Tensor], str]"
"""What errors call a parameter."""


class Known(Protocol):
    """What a parameter was when it was added."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> torch.Size:
        """Of this rank's piece of it."""

    @property
    def nbytes(self) -> int:
        """Of the same."""


def gradients_of(
    params: Iterable[torch.Tensor],
    known: Callable[[torch.Tensor], Known | None],
    device: torch.device,
    label: Label,
) -> list[torch.Tensor]:
    """The gradients of `params`, which all have one, as they are stepped.

    Args:
        params: the parameters.
        known: what each was when it was added; None: it never was.
        device: where they are.
        label: what errors call them.

    Raises:
        ValueError: one of them cannot be stepped.
    """
    grads = []
    for param in params:
        was, grad = known(param), param.grad
        # Most are as they should be. What is not plain is looked at by itself.
        is_ready = (
            was is not None
            and grad is not None
            and lies_as(param, was, device)
            and lies_as(grad, was, device)
        )
        if not is_ready:
            check_in_place(param, was, device, label)
            grad = checked(param, label)
        assert grad is not None
        grads.append(grad)
    return grads


def lies_as(tensor: torch.Tensor, known: Known, device: torch.device) -> bool:
    """Whether a plain tensor on `device` is as it is `known`: a copy reads what it has.

    It is in one run, and its memory was not freed under it. False of what is not plain.
    """
    # What `is_run` and `has_memory` ask, in one: a step asks this twice of each parameter. With the
    # dtype and the shape it has the bytes.
    return (
        type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and tensor.dtype == known.dtype
        and tensor.device == device
        and tensor.shape == known.shape
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (
            known.nbytes == 0
            or (
                tensor.data_ptr() != 0
                and tensor.untyped_storage().nbytes()
                >= tensor.storage_offset() * tensor.itemsize + known.nbytes
            )
        )
    )


def check_in_place(
    param: torch.Tensor, known: Known | None, device: torch.device, label: Label
) -> None:
    """Raises ValueError if `param` is not what it was when it was added.

    `known`: that; None: it was never added.
    """
    if known is None:
        raise ValueError(
            f"{label(param)} has a gradient, but is frozen. "
            "hint: parameter.requires_grad_(True), or parameter.grad = None"
        )
    piece = local(param)
    if piece.device != device:
        raise ValueError(
            f"{label(param)} is on `{piece.device}`, expected `{device}`, where it was. "
            "hint: move the model before the optimizer is made"
        )
    if piece.dtype != known.dtype or piece.shape != known.shape:
        raise ValueError(
            f"{label(param)} is `{piece.dtype}` of `{tuple(piece.shape)}`, expected "
            f"`{known.dtype}` of `{tuple(known.shape)}`, as it was. hint: make a new optimizer and "
            "load this one's state_dict()"
        )
    check_memory(piece, partial(label, param))
    if piece.is_neg():
        raise ValueError(
            f"{label(param)} is negated lazily, expected its own elements in memory. "
            "hint: parameter.data = parameter.data.resolve_neg()"
        )
    if not piece.is_contiguous():
        raise ValueError(
            f"{label(param)} is not contiguous any more (strides `{piece.stride()}`), expected "
            f"rows one after the other, as it was. hint: {contiguous_hint(piece)}"
        )


def checked(param: torch.Tensor, label: Label) -> torch.Tensor:
    """The gradient of `param`, which has one, as it is copied.

    Raises:
        ValueError: it cannot be stepped; the message calls the parameter `label(param)`.
    """
    grad = param.grad
    assert grad is not None
    if isinstance(grad, GradMarker):
        raise ValueError(  # noqa: TRY004
            f"the gradient of {label(param)} is not there: an optimizer with `accumulate` `host` "
            "moved it to host memory, and the program put back or shared what was in its place. "
            "hint: accumulate='device' where gradients are stored, restored or used by two "
            "optimizers"
        )
    return checked_grad(param, grad, partial(label, param), takes_any_float=False)
