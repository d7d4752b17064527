"""Which modules forwards call before there is a gate (`gate`), in a run that is resumed.

A gate is made by the first step, and the run that went on had one before. Where updates are
deferred a look at a weight behind that step counts. The gate tells a look from a forward only if it
knows which modules forwards call.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell.offload.compiled_calls import (
    CompiledCall,
    before_forwards,
    is_compiled,
    something_is_compiled,
)
from stepwell.offload.module_tree import Hook, ModuleTree, living, modules_alive, remove

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Forwards"]

_FORWARDS: weakref.WeakValueDictionary[str, Forwards] = weakref.WeakValueDictionary()
_KEYS = map(str, itertools.count(1))


class Forwards:
    """Notes which modules are called by forwards in training, while there is no gate.

    Args:
        params: the parameters of the gate that will be made.
        called: modules that were called before.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], called: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._params = set(params)
        modules = ModuleTree(self._params, modules_alive()).called
        self._by_id = weakref.WeakValueDictionary({id(module): module for module in modules})
        self._called = {id(module) for module in called}
        self._is_traced = False
        self._handles: list[torch.utils.hooks.RemovableHandle | CompiledCall] = []
        if something_is_compiled() and not any(map(is_compiled, modules)):
            # Nor does a gate have hooks there.
            return
        key = next(_KEYS)
        _FORWARDS[key] = self
        self._handles += before_forwards(modules, _CallHook(key))
        weakref.finalize(self, remove, self._handles)

    def note(self, module: torch.nn.Module) -> None:
        """The forward of `module` is about to begin."""
        if module.training:
            self._called.add(id(module))

    def note_trace(self) -> None:
        """torch.compile has traced a module that has a hook: it was compiled since."""
        self._is_traced = True

    def end(self) -> list[torch.nn.Module]:
        """Notes no more. Returns the modules that were called and are alive."""
        # What was compiled meanwhile has the hooks in it, and would be compiled again.
        traced = self._is_traced
        remove(each for each in self._handles if not traced or isinstance(each, CompiledCall))
        self._handles.clear()
        called = living(self._called, self._by_id)
        if self._is_traced:
            # A forward has called what was compiled since, or it would not have been traced.
            modules = ModuleTree(self._params, modules_alive()).called
            called += [module for module in modules if is_compiled(module) and module.training]
        return called


def _traced(key: str) -> None:
    """Called by torch.compile when it traces a hook, not when the compiled code runs."""
    forwards = _FORWARDS.get(key)
    if forwards is not None:
        forwards.note_trace()


# As in `gate`.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _CallHook(Hook):
    """Of `Forwards`."""

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _traced(self.key)
            return
        if torch._C._is_tracing():
            return
        forwards = _FORWARDS.get(self.key)
        if forwards is not None:
            forwards.note(module)
