"""Hooks of modules, as a copy of the module, a pickle and torch.jit find them."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["Hook"]


class Hook:
    """A hook on modules.

    In a copy of its module, or a pickle, there is what does nothing in its place, and needs no
    Stepwell.
    """

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile the hook that waits for the weights of an optimizer. "
            "hint: script the module before the optimizer is made"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
