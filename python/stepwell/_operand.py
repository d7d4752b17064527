"""One parameter of a step with its gradient and its state, as the core takes them.

A step goes through three values, each made from the one before, and none of them changes:
`Operand`, a parameter with a gradient that were checked; `Bound`, these with a state, as the core
steps them; and the `Bound` that the optimizer keeps for the next step, which is used again while
every tensor is where it was. A value holds all memory that it names, so a step may run as long as
its values live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._sharding import PLAIN, is_dtensor, local
from stepwell._state import FINGERPRINTS, adam_tensor, key_of, part_names, refreshed
from stepwell._tensors import check_grad, check_param, is_run, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell._hyper import Hyper
    from stepwell._state import State

__all__ = ["Bound", "BoundUpdate", "Operand", "Rounding", "Update", "bind", "prepare"]


class Rounding(NamedTuple):
    """What the stochastic rounding of a parameter follows from, beside the step."""

    seed: int
    ordinal: int
    """Of the parameter among all parameters of the groups, as in a state dict."""
    first: int = 0
    """Which element of the parameter the first one is, where its rows are dealt out to ranks."""


class _BoundPart(NamedTuple):
    """A tensor of a bound state, and where it was."""

    name: str
    value: torch.Tensor
    piece: torch.Tensor
    """Of this rank."""
    address: int
    dtype: torch.dtype
    shape: torch.Size
    is_run: bool


@dataclass(slots=True)
class Bound:
    """A parameter, its gradient and its state as the core steps them."""

    tensor: _core.AdamTensor | None
    """None: this rank's piece of the parameter is empty."""
    write_backs: tuple[partial[Any], ...]
    """Calls that finish the step.

    A tensor that does not lie as the core reads it was copied, and is copied back.
    """
    param_signature: tuple[Any, ...]
    grad_signature: tuple[Any, ...]
    parts: tuple[_BoundPart, ...]
    rounding: Rounding
    is_exclusive: bool
    """Whether steps alone write the parameter. They then need not look for other writes."""
    grad_view: _core.TensorView
    counter: object
    """`step` of the state, to which steps can add."""
    operand: Operand | None
    """What the next step begins with, if nothing has moved; None: programs move its memory."""

    def has(self, state: State) -> bool:
        """Whether the tensors of `state` are those that are bound, where they were."""
        for name, value, piece, address, dtype, shape, was_run in self.parts:
            if state.get(name) is not value or piece.data_ptr() != address:
                return False
            if piece.dtype != dtype or piece.shape != shape:
                return False
            if was_run and (not piece.is_contiguous() or piece.is_neg()):
                return False
        return True

    def kept(self) -> Bound:
        """What is worth keeping for the next step: not copies, which are made for one step."""
        return (
            replace(self, tensor=None, write_backs=(), grad_signature=(), operand=None)
            if self.write_backs
            else self
        )


@dataclass(slots=True)
class Operand:
    """A parameter and its gradient, checked for the coming step."""

    param: torch.Tensor
    """In host memory."""
    grad: torch.Tensor
    """This rank's piece, in one run."""
    grad_view: _core.TensorView
    param_signature: tuple[Any, ...]
    grad_signature: tuple[Any, ...]
    """Empty: `grad` is a copy."""
    state: State | None
    """None: the parameter was never stepped."""
    is_moved: bool
    """Whether the step writes memory that the last one did not."""
    is_grad_moved: bool
    """Whether the gradient lies elsewhere than at the last step."""
    is_fixed: bool
    """Whether the memory of both is the optimizer's, and no copy for this step."""


@dataclass(slots=True)
class Update:
    """One parameter of a step, checked."""

    param: torch.Tensor
    operand: Operand
    hyper: Hyper
    step: int
    """Which update of the parameter this is, from 1."""
    rounding: Rounding
    state: State | None
    """As the optimizer has it; None: the parameter was never stepped."""
    last: Bound | None
    """What the parameter's last step was bound as, if it is known."""


@dataclass(slots=True)
class BoundUpdate:
    """An update as the core applies it. It holds all memory that the core works with."""

    update: Update
    state: State
    bound: Bound


def _signature(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What must be equal for the core to find `tensor` where it was.

    None: it is no tensor for the core.
    """
    try:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()
    except RuntimeError:
        # What is not dense has no address, or no strides.
        return None


def _placed_as(param: torch.Tensor, grad: torch.Tensor, label: Callable[[], str]) -> torch.Tensor:
    """`grad` sharded as `param` is.

    Tensor parallelism leaves gradients of replicated parameters as partial sums.
    """
    if is_dtensor(param) and is_dtensor(grad):
        is_placed = grad.placements == param.placements
        return grad if is_placed else grad.redistribute(param.device_mesh, param.placements)
    if is_dtensor(param) or is_dtensor(grad):
        raise ValueError(
            f"only one of {label()} and its gradient is a DTensor. hint: distribute both alike"
        )
    return grad


def prepare(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State | None,
    moments: str,
    label: Callable[[], str],
    last: Bound | None,
    *,
    is_fixed: bool = False,
) -> Operand:
    """Checks a parameter with its gradient and its state. What is as in `last` was checked before.

    `is_fixed`: the memory of `param` and `grad` is the optimizer's, which does not move it.

    Raises:
        ValueError: no step could work with them; the message calls the parameter `label()`.
    """
    if is_fixed and last is not None and (known := last.operand) is not None:
        is_known = known.param is param and known.grad is grad and known.state is state
        if is_known and state is not None and last.has(state):
            return known
    # Of two plain tensors there is nothing to place, and most are.
    is_plain = type(param) in PLAIN and type(grad) in PLAIN
    signature = _signature(param if is_plain else local(param))
    is_moved = last is None or signature != last.param_signature
    if is_moved:
        check_param(param, label())
        signature = _signature(local(param))
    assert signature is not None
    piece = grad
    if not is_plain:
        grad = _placed_as(param, grad, label)
        piece = local(grad)
    grad_signature = _signature(piece)
    is_grad_moved = last is None or grad_signature != last.grad_signature
    if is_moved or is_grad_moved:
        check_grad(param, grad, label())
    assert grad_signature is not None
    grad_view = None if last is None or is_grad_moved else last.grad_view
    # A bound gradient was a run, which follows from its signature.
    if grad_view is None and not is_run(piece):
        piece = torch.empty(piece.shape, dtype=piece.dtype, device="cpu").copy_(piece)
        grad_signature = ()
    if state is not None and (is_moved or last is None or not last.has(state)):
        is_moved = True
        state = refreshed(param, state, moments, label())
    return Operand(
        param,
        piece,
        view(piece) if grad_view is None else grad_view,
        signature,
        grad_signature,
        state,
        is_moved,
        is_grad_moved,
        is_fixed and grad_signature != (),
    )


def bind(
    operand: Operand,
    state: State,
    moments: str,
    rounding: Rounding,
    last: Bound | None,
    *,
    is_exclusive: bool = False,
) -> Bound:
    """`operand` with `state`, as the core steps them: `last` itself while nothing has moved."""
    if (
        last is not None
        and not operand.is_moved
        and not operand.is_grad_moved
        and operand.state is state
        and last.rounding == rounding
        and last.is_exclusive == is_exclusive
    ):
        return last
    write_backs: list[partial[Any]] = []

    def run_of(tensor: torch.Tensor) -> torch.Tensor:
        if is_run(tensor):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        write_backs.append(partial(tensor.copy_, copy))
        return copy

    pieces = {name: local(state[name]) for name in part_names(operand.param, moments)}
    tensor = None
    if operand.grad.numel() > 0:
        left_out = {FINGERPRINTS} if is_exclusive else set()
        runs = {name: run_of(piece) for name, piece in pieces.items() if name not in left_out}
        param = run_of(local(operand.param))
        key = key_of(rounding.seed, rounding.ordinal, operand.param)
        tensor = adam_tensor(param, runs, grad=operand.grad_view, key=key, first=rounding.first)
    parts = tuple(
        _BoundPart(
            name, state[name], piece, piece.data_ptr(), piece.dtype, piece.shape, is_run(piece)
        )
        for name, piece in pieces.items()
    )
    # Not of a program's gradient: it would be kept alive.
    is_kept = operand.is_fixed and not write_backs
    return Bound(
        tensor,
        tuple(write_backs),
        operand.param_signature,
        operand.grad_signature,
        parts,
        rounding,
        is_exclusive,
        operand.grad_view,
        state["step"],
        replace(operand, state=state, is_moved=False, is_grad_moved=False) if is_kept else None,
    )
