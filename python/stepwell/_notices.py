"""What a run is told by itself: what steps, and what will train nothing. Each is said once."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

__all__ = ["Notices", "has_optimizer", "note_optimizer", "tell"]

_LOGGER = logging.getLogger("stepwell")

_has_optimizer = False

# Of an optimizer for each parameter: the others are in the log alone.
_LINES_MAX = 10

_num_lines = 0

# Of all optimizers that are there, which keep their parameters alive: these are known by ids here.
# torch does not swap a tensor that is weakly referred to, as `Module.to` does with DTensors.
_ALL: weakref.WeakSet[Notices] = weakref.WeakSet()


def note_optimizer() -> None:
    """An optimizer of Stepwell's, or one that steps on its kernels, has come to be."""
    global _has_optimizer
    _has_optimizer = True


def has_optimizer() -> bool:
    """Whether `note_optimizer` was called in this process."""
    return _has_optimizer


def tell(line: str) -> None:
    """Says on the first rank what steps: in the log, or on the standard error where that is unset.

    At most ten lines. `logging.getLogger("stepwell").setLevel(logging.WARNING)` silences it.
    """
    global _num_lines
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_one_of_many else int(os.environ.get("RANK") or 0)
    if rank:
        return
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info(line)
    elif _LOGGER.level == logging.NOTSET and _num_lines < _LINES_MAX:
        _num_lines += 1
        sys.stderr.write(f"stepwell: {line}\n")


class Notices:
    """Of one optimizer, what is wrong with how it is used.

    Args:
        optimizer: what is said of; only its class is kept.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._name = type(optimizer).__name__
        self._ids: set[int] = set()
        self._has_rival = False
        self._is_told_of_no_gradient = False

    def note_params(self, params: Iterable[torch.Tensor]) -> None:
        """It steps these, too."""
        ids = set(map(id, params))
        for other in _ALL:
            if other is not self and not other._ids.isdisjoint(ids):
                other._has_rival = True
        self._ids |= ids
        _ALL.add(self)

    def note_made(self, params: Iterable[torch.Tensor]) -> None:
        """It is made, with these."""
        note_optimizer()
        if not any(param.requires_grad for param in params):
            _LOGGER.warning(
                "no parameter of %s requires a gradient, and steps change nothing until one does. "
                "hint: requires_grad_() on what is to be trained",
                self._name,
            )

    def note_step(self, *, has_updates: bool, has_state: bool) -> None:
        """A step is taken.

        Args:
            has_updates: whether any parameter has a gradient.
            has_state: whether any parameter was stepped before.
        """
        if self._has_rival:
            self._has_rival = False
            _LOGGER.warning(
                "%s steps parameters for which another optimizer was made after it: both step "
                "them. hint: del the one that is not used",
                self._name,
            )
        if not has_updates and not has_state and not self._is_told_of_no_gradient:
            self._is_told_of_no_gradient = True
            _LOGGER.warning(
                "step() of %s is called and no parameter has ever had a gradient: nothing is "
                "trained. hint: backward() before step(), with a loss of the parameters that the "
                "optimizer was given",
                self._name,
            )
