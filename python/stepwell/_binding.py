"""One parameter of a step with its gradient and its state, as the core's store takes them.

A store goes on with what it was given as long as every tensor is where it was. So this is called
for the first step of a parameter, and where something has moved: other memory, another state, a
gradient that is no dense run. It checks all that a step has to rely on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._sharding import local
from stepwell._state import adam_tensor, key_of, part_names, repair_step, step_of
from stepwell._tensors import is_run, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell._state import State

__all__ = ["Rounding", "bind"]


class Rounding(NamedTuple):
    """What the stochastic rounding of a parameter follows from, beside the step."""

    seed: int
    ordinal: int
    """Of the parameter among all parameters of the groups, as in a state dict."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def bind(
    store: _core.Store,
    position: int,
    *,
    weight: torch.Tensor,
    grad: torch.Tensor,
    grad_view: _core.TensorView | None = None,
    piece: torch.Tensor | None,
    target: int | None = None,
    state: State,
    moments: str,
    rounding: Rounding,
    label: Callable[[], str],
    is_kept: bool,
) -> None:
    """Has `store` step what is at `position` of its last look with these.

    Args:
        store: the store.
        position: in the lists of its look.
        weight: in host memory: the parameter itself, or what stands for it there.
        grad: this rank's piece of the gradient, in one run.
        grad_view: where it is read in host memory; None: where it is.
        piece: what is stepped of the parameter where it is, if that is not all of it.
        target: as `Store.bind` has it.
        state: which fits `weight`. Its count gets the form that steps can add to.
        moments: how its moments are held.
        rounding: what the rounding follows from.
        label: what errors call the parameter.
        is_kept: whether the next step may go on with it, if it looks the same.

    Raises:
        ValueError: the state counts no updates.
    """
    repair_step(state, step_of(state, label))
    write_backs: list[partial[Any]] = []

    def run_of(tensor: torch.Tensor) -> torch.Tensor:
        if is_run(tensor):
            return tensor
        copy = _copy(tensor)
        write_backs.append(partial(tensor.copy_, copy))
        return copy

    pieces = {name: local(state[name]) for name in part_names(weight, moments)}
    tensor = None
    if local(weight).numel() > 0:
        runs = {name: run_of(piece) for name, piece in pieces.items()}
        tensor = adam_tensor(
            run_of(local(weight)),
            runs,
            grad=view(grad) if grad_view is None else grad_view,
            key=key_of(rounding.seed, rounding.ordinal, weight),
        )
    store.bind(
        position,
        tensor,
        grad,
        state=state,
        parts=[(name, state[name], piece) for name, piece in pieces.items()],
        piece=piece,
        target=target,
        is_kept=is_kept and piece is None and not write_backs,
        write_backs=write_backs,
    )
