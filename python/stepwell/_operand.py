"""One parameter of a step with its gradient and state, as the core takes them: made once, used while no address changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell._sharding import is_dtensor, local
from stepwell._state import FINGERPRINTS, adam_tensor, part_names, refreshed
from stepwell._tensors import check_grad, check_param, is_run, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell import _core
    from stepwell._state import State
    from stepwell._tensors import Written

__all__ = ["Operand"]


def _signature(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What must be equal for the core to find `tensor` where it was. None: it is no tensor for the core."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()


def _placed_as(param: torch.Tensor, grad: torch.Tensor, label: str) -> torch.Tensor:
    """`grad` sharded as `param` is: tensor parallelism leaves gradients of replicated parameters as partial sums."""
    if is_dtensor(param) != is_dtensor(grad):
        raise ValueError(
            f"only one of {label} and its gradient is a DTensor. hint: distribute both alike"
        )
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


class Operand:
    """A parameter of a step: `take` its gradient, `bind` its state, step `tensor`, call what `write_backs` has.

    Tensors that do not lie as the core reads them (see `is_run`) are copied for each step, and
    written back after it.

    Attributes:
        param: the parameter.
        label: names it in errors.
        grad_view: its gradient, this rank's piece, as the core reads it. Valid from `take` to
            `release`.
        tensor: what the core steps; None where this rank's piece is empty. Valid after `bind`.
        write_backs: calls that finish the step, in any order. Valid from `bind` to `release`.
        moved: whether memory that a step writes lies elsewhere than when the caller last cleared
            this.
        is_exclusive: whether steps alone write the parameter, so that they need not look whether it
            is still theirs.
    """

    def __init__(self, param: torch.Tensor, label: str) -> None:
        self.param = param
        self.label = label
        self.moved = True
        self.is_exclusive = False
        self.tensor: _core.AdamTensor | None = None
        self.write_backs: list[partial[Any]] = []
        self._grad: torch.Tensor | None = None
        self._param_signature: tuple[Any, ...] | None = None
        self._grad_signature: tuple[Any, ...] | None = None
        self._runs: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []
        self._is_bound = False
        self._is_bound_exclusively = False

    def take(self, grad: torch.Tensor) -> None:
        """Takes the gradient of the coming step.

        Raises:
            ValueError: the parameter or its gradient cannot be stepped.
        """
        piece = local(self.param)
        signature = _signature(piece)
        if signature is None or signature != self._param_signature:
            self._is_bound, self._param_signature, self._grad_signature = False, None, None
            check_param(self.param, self.label)
            self._param_signature, self.moved = signature, True
        grad = _placed_as(self.param, grad, self.label)
        signature = _signature(local(grad))
        if signature is None or signature != self._grad_signature:
            self._is_bound, self._grad_signature = False, None
            check_grad(self.param, grad, self.label)
            self._grad_signature = signature
        self._grad = local(grad)
        if not is_run(self._grad):
            self._is_bound = False
            self._grad = torch.empty(self._grad.shape, dtype=self._grad.dtype).copy_(self._grad)
        if not self._is_bound:
            self.grad_view = view(self._grad)

    def check_grad(self, written: Written) -> None:
        """Raises ValueError if the gradient taken lies in memory that the step writes."""
        if not self._is_bound and self._grad is not None:
            written.check_grad(self._grad, self.label)

    def _holds(self, state: State) -> bool:
        """Whether the tensors of `state` are those that are bound, where they were."""
        for name, value, run, address in self._runs:
            if state.get(name) is not value or run.data_ptr() != address:
                return False
        return True

    def check(self, state: State, moments: str) -> State:
        """The state to bind: `state` itself unless the parameter's dtype has changed.

        Raises:
            ValueError: it is not of this parameter.
        """
        if self._holds(state):
            if self._is_bound:
                return state
        else:
            self.moved = True
        return refreshed(self.param, state, moments, self.label)

    def bind(self, state: State, moments: str, key: Callable[[], int]) -> None:
        """Makes `tensor` of the parameter, the gradient taken and `state`, unless it is the same as for the last step."""
        if (
            self._is_bound
            and self._is_bound_exclusively == self.is_exclusive
            and self._holds(state)
        ):
            return
        if not self._runs or not self._holds(state):
            self.moved = True
        self.write_backs = []
        names = part_names(self.param, moments)
        parts = {name: local(state[name]) for name in names}
        self._runs = [(name, state[name], parts[name], parts[name].data_ptr()) for name in names]
        self.tensor = None
        piece = local(self.param)
        if piece.numel() > 0:
            left_out = {FINGERPRINTS} if self.is_exclusive else set()
            runs = {name: self._run(part) for name, part in parts.items() if name not in left_out}
            param = self._run(piece)
            self.tensor = adam_tensor(param, runs, grad=self.grad_view, key=key())
        self._is_bound_exclusively = self.is_exclusive
        self._is_bound = not self.write_backs

    def release(self) -> None:
        """Lets go of the gradient and of copies. A gradient at the same address may follow."""
        self._grad = None
        self.write_backs = []

    def _run(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_run(tensor):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self.write_backs.append(partial(tensor.copy_, copy))
        return copy
