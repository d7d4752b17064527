"""What the steps of an optimizer in host memory work with: spans of the core's store.

`store/spans.py` has those beside a device. A step looks at all gradients by one call of the store.
What has moved since the last step is checked here, and bound anew. All else goes on as it was.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell import _core, _state
from stepwell._binding import bind
from stepwell._grads import checked_grad
from stepwell._sharding import PLAIN, local
from stepwell._tensors import Written, check_param

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from stepwell._binding import Rounding

__all__ = ["Labelled", "Spans"]

Labelled: TypeAlias = "Callable[[], Iterable[tuple[torch.Tensor, str]]]"
"""Gives every parameter of the groups, in their order, with what errors call it."""


class Spans:
    """The spans of one optimizer.

    Args:
        moments: how moments are held.
    """

    def __init__(self, moments: str) -> None:
        self.store = _core.Store()
        """The core's store."""
        self._moments = moments

    def look(
        self,
        groups: Sequence[dict[str, Any]],
        states: Mapping[torch.Tensor, _state.State],
        new_states: dict[torch.Tensor, _state.State],
        labelled: Labelled,
        memory: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        rounding: Callable[[int, dict[str, Any], torch.Tensor], Rounding],
    ) -> _core.Look:
        """The gradients of the coming step, and all that it works with, checked in full.

        Args:
            groups: of the optimizer.
            states: those that it has.
            new_states: gets those that it has once the step is taken.
            labelled: names parameters.
            memory: gives all that a step may write, with its name.
            rounding: of a parameter what its stochastic rounding follows from, by its place among
                all parameters and its group.

        Raises:
            ValueError: the step cannot be done.
        """
        look = self.store.look(
            [group["params"] for group in groups], states, [group["seed"] for group in groups]
        )
        if look.moved:
            self._bind_each(look, groups, states, new_states, labelled, rounding)
            # Raises where two of them share memory.
            Written(memory())
        for position in self.store.overlapping():
            param, grad = look.params[position], local(look.grads[position])
            owner = Written(memory()).owner_of(grad) or "what a step writes"
            raise ValueError(
                f"the gradient of {dict(labelled())[param]} shares memory with {owner}. "
                "hint: grad.clone()"
            )
        return look

    def _bind_each(
        self,
        look: _core.Look,
        groups: Sequence[dict[str, Any]],
        states: Mapping[torch.Tensor, _state.State],
        new_states: dict[torch.Tensor, _state.State],
        labelled: Labelled,
        rounding: Callable[[int, dict[str, Any], torch.Tensor], Rounding],
    ) -> None:
        """Gives the store what it has to know anew of the coming step.

        Raises:
            ValueError: one of these cannot be stepped.
        """
        labels = dict(labelled())
        ordinals = {id(param): at for at, param in enumerate(labels)}
        params, grads = look.params, look.grads
        for position in look.moved:
            param, label = params[position], labels[params[position]]
            named = partial(labels.__getitem__, param)
            check_param(param, label)
            grad = local(checked_grad(param, grads[position], named, takes_any_float=True))
            known = states.get(param) or None
            state = (
                _state.new(param, self._moments)
                if known is None
                else _state.refreshed(param, known, self._moments, label)
            )
            bind(
                self.store,
                position,
                weight=param,
                grad=grad,
                piece=None if type(param) in PLAIN else local(param),
                state=state,
                moments=self._moments,
                rounding=rounding(ordinals[id(param)], groups[look.groups[position]], param),
                label=named,
                is_kept=grad is grads[position],
            )
            if state is not known:
                new_states[param] = state
