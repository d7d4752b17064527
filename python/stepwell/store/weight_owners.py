"""Whose the weights are that lie in host memory.

One optimizer at a time has a parameter. The next one of the same model takes over, and so does any
when that is gone. An optimizer that could not be made leaves weights as plain tensors in host
memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from torch.nn import Parameter

from stepwell.access.writes import is_under_way

if TYPE_CHECKING:
    import torch

__all__ = ["Owner", "check_place", "disown", "own", "take_over"]


class Owner(Protocol):
    """What has the weights of a model."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the optimizer is gone."""

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether they are those of `model`."""

    def let_go(self) -> None:
        """Parameters are plain from now on, and lie in host memory."""


# By the ids of parameters, which an owner holds.
_OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def own(param: torch.Tensor, owner: Owner) -> None:
    """From now on `owner` has the weight of `param`."""
    _OWNERS[id(param)] = owner


def disown(param: torch.Tensor) -> None:
    """The weight of `param` is where it is."""
    _OWNERS.pop(id(param), None)


def check_place(param: torch.Tensor, owner: Owner | None) -> None:
    """Raises ValueError if the weight of `param` cannot be where `owner` has it.

    `owner`: None: it stays where it is.
    """
    if _OWNERS.get(id(param), owner) is not owner:
        raise ValueError(
            f"the weight of a parameter of `{tuple(param.shape)}` is in host memory for another "
            "optimizer, expected none. hint: the same model with weights='host' again; or let go "
            "of that optimizer (del optimizer), of a parameter that models share"
        )
    if owner is not None and not (type(param) is Parameter or is_under_way(param)):
        raise ValueError(
            f"a parameter is a `{type(param).__name__}` and `weights` is `host`, expected "
            "torch.nn.Parameter. hint: weights='device'; FSDP2's CPUOffloadPolicy for its shards"
        )


def take_over(model: torch.nn.Module) -> None:
    """Has the weights of a model that has had an optimizer be plain tensors in host memory.

    Those of another model whose optimizer is there stay.
    """
    for owner in {_OWNERS.get(id(param)) for param in model.parameters()}:
        if owner is not None and (owner.is_abandoned or owner.is_of(model)):
            owner.let_go()
