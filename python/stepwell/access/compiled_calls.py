"""Modules whose calls go to compiled code, and what is called around such a call.

Compiled code has no hooks: it is traced with those that are there, which leave nothing in it. What
torch.compile returns has hooks of its own, around the code. A module that was compiled in place has
none: there a callable is put in the place of the compiled call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CompiledCall", "is_compiled", "is_compiled_in_place"]

_PLACE = "_compiled_call_impl"


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module.__dict__.get(_PLACE) is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of `module` go to code of torch.compile, though nothing may be traced yet."""
    is_wrapped = type(module).__name__ == "OptimizedModule" and "forward" in module.__dict__
    return is_wrapped or is_compiled_in_place(module)


class CompiledCall:
    """In the place of the compiled call of a module that was compiled in place.

    Copies and pickles of a module have a compiled call of their own, or none, and so not this.

    Args:
        module: the module.
        key: whose it is.
        before: called as a forward pre-hook, before the compiled code.
        behind: called as a forward hook when that has ended; with None where it has raised.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        key: str,
        before: Callable[..., Any],
        behind: Callable[..., Any],
    ) -> None:
        self._key = key
        self._module = weakref.ref(module)
        self._before: Callable[..., Any] | None = before
        self._behind = behind
        self._call: Callable[..., Any] = module.__dict__[_PLACE]
        module.__dict__[_PLACE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled code."""
        module = self._module()
        if self._before is None or module is None or torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        changed, output = self._before(module, args), None
        try:
            output = self._call(*(args if changed is None else changed), **kwargs)
            return output
        finally:
            self._behind(module, args, output)

    @staticmethod
    def keys_of(module: torch.nn.Module) -> list[str]:
        """Whose there are in the place of this module's compiled call."""
        call, keys = module.__dict__.get(_PLACE), []
        while isinstance(call, CompiledCall):
            keys.append(call._key)
            call = call._call
        return keys

    def remove(self) -> None:
        """Nothing is called any more around the compiled code."""
        self._before = None
        module = self._module()
        call = None if module is None else module.__dict__.get(_PLACE)
        if module is not None and call is self:
            module.__dict__[_PLACE] = self._call
        # Another one may have come before it.
        while isinstance(call, CompiledCall):
            if call._call is self:
                call._call = self._call
            call = call._call
