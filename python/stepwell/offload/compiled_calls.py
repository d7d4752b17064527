"""Modules whose calls go to compiled code, and what is called before such a call.

Compiled code has no hooks: it is traced with those that are there, and does not call them. So what
has to come before the forward of a compiled module is called before the compiled code. Of what
`torch.compile(module)` returns that is a hook, which torch calls itself. Of a module that was
compiled in place (`module.compile()`) it is a callable in the place of its compiled one.

Modules within a compiled one need no hook, and get none: what is compiled stays as it is.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CompiledCall", "before_forwards", "is_compiled", "something_is_compiled"]

_IN_PLACE = "_compiled_call_impl"


def something_is_compiled() -> bool:
    """Whether torch.compile has traced anything in this process.

    Hooks that are added later would not be called there.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of `module` go to code of torch.compile, though nothing may be traced yet."""
    return module.__dict__.get(_IN_PLACE) is not None or type(module).__name__ == "OptimizedModule"


def before_forwards(
    modules: Iterable[torch.nn.Module], hook: Callable[[torch.nn.Module, Any], None]
) -> list[torch.utils.hooks.RemovableHandle | CompiledCall]:
    """Has `hook` called before each forward of `modules`, compiled or not.

    Args:
        modules: none of them is within a compiled one.
        hook: called with the module and something else.

    Returns:
        What removes it again.
    """
    return [
        CompiledCall(module, hook)
        if module.__dict__.get(_IN_PLACE) is not None
        else module.register_forward_pre_hook(hook, prepend=True)
        for module in modules
    ]


class CompiledCall:
    """In the place of the compiled call of a module that was compiled in place.

    Copies and pickles of a module have no compiled call, and so not this either.
    """

    def __init__(
        self, module: torch.nn.Module, hook: Callable[[torch.nn.Module, Any], None]
    ) -> None:
        self._module = weakref.ref(module)
        self._hook: Callable[[torch.nn.Module, Any], None] | None = hook
        self._call: Callable[..., Any] = module.__dict__[_IN_PLACE]
        module.__dict__[_IN_PLACE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the hook, then the compiled code."""
        module = self._module()
        if self._hook is not None and module is not None:
            self._hook(module, args)
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """The hook is not called any more."""
        self._hook = None
        module = self._module()
        if module is not None and module.__dict__.get(_IN_PLACE) is self:
            module.__dict__[_IN_PLACE] = self._call
