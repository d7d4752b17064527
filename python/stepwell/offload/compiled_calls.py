"""Modules whose calls go to compiled code, and what is called before such a call.

Compiled code has no hooks: it is traced with those that are there, and does not call them. So what
has to come before the forward of a compiled module is called before the compiled code: by a
callable in the place of the compiled call. Modules within a compiled one may have hooks too, for
calls of their own. `in_calls` tells these from what is traced as a part of the compiled one.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

__all__ = [
    "CompiledCall",
    "before_forwards",
    "in_calls",
    "is_compiled",
    "something_is_compiled",
]

# Where the compiled call is: of a module that was compiled in place, of what torch.compile returns.
_IN_PLACE, _WRAPPED = "_compiled_call_impl", "forward"


class _Calls(threading.local):
    """Of this thread: modules whose compiled calls have not returned, by `id`."""

    def __init__(self) -> None:
        self.ids: list[int] = []


_CALLS = _Calls()


def something_is_compiled() -> bool:
    """Whether torch.compile has traced anything in this process.

    Hooks that are added later would not be called there.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of `module` go to code of torch.compile, though nothing may be traced yet."""
    return _place_of(module) is not None


def in_calls() -> Collection[int]:
    """The modules with a `CompiledCall` that this thread is in calls of, by `id`."""
    return _CALLS.ids


def before_forwards(
    modules: Iterable[torch.nn.Module], hook: Callable[[torch.nn.Module, Any], None]
) -> list[torch.utils.hooks.RemovableHandle | CompiledCall]:
    """Has `hook` called before each forward of `modules`, compiled or not.

    Args:
        modules: where one is within a compiled one, the hook is traced with that one's code.
        hook: called with the module and something else.

    Returns:
        What removes it again.
    """
    return [
        CompiledCall(module, place, hook)
        if (place := _place_of(module))
        else module.register_forward_pre_hook(hook, prepend=True)
        for module in modules
    ]


class CompiledCall:
    """In the place of a module's compiled call.

    Copies and pickles of a module have a compiled call of their own, or none, and so not this.
    """

    def __init__(
        self, module: torch.nn.Module, place: str, hook: Callable[[torch.nn.Module, Any], None]
    ) -> None:
        self._module = weakref.ref(module)
        self._place = place
        self._hook: Callable[[torch.nn.Module, Any], None] | None = hook
        self._call: Callable[..., Any] = module.__dict__[place]
        module.__dict__[place] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the hook, then the compiled code."""
        module = self._module()
        if self._hook is not None and module is not None:
            self._hook(module, args)
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        ids = _CALLS.ids
        depth = len(ids)
        try:
            ids.append(id(module))
            return self._call(*args, **kwargs)
        finally:
            del ids[depth:]

    def remove(self) -> None:
        """The hook is not called any more."""
        self._hook = None
        module = self._module()
        call = None if module is None else module.__dict__.get(self._place)
        if module is not None and call is self:
            module.__dict__[self._place] = self._call
        # Another one may have come before it.
        while isinstance(call, CompiledCall):
            if call._call is self:
                call._call = self._call
            call = call._call


def _place_of(module: torch.nn.Module) -> str | None:
    """The attribute of `module` that has its compiled call; None: it has none."""
    if module.__dict__.get(_IN_PLACE) is not None:
        return _IN_PLACE
    is_wrapped = type(module).__name__ == "OptimizedModule" and _WRAPPED in module.__dict__
    return _WRAPPED if is_wrapped else None
