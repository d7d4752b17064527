"""The calls of a model's modules that are within no other: programs call parts of a model, too.

There are hooks on all modules but those within a layer of a list, or within compiled code. A call
within another takes the thread 3 microseconds. A forward within a backward, which computes
activations again, is not seen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from stepwell.access.compiled_calls import CompiledCall, is_compiled, is_compiled_in_place
from stepwell.weights.calls import CallHook
from stepwell.weights.fetcher import backward_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["OutermostCalls"]


class OutermostCalls:
    """Each is in a context.

    Args:
        model: the model.
        context: makes that context; None: there is none for this call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        context: Callable[[], AbstractContextManager[object] | None],
    ) -> None:
        self._context = context
        # The module that runs within no other.
        self._module: torch.nn.Module | None = None
        self._entered = contextlib.ExitStack()
        self._handles = [handle for module in _entrances(model) for handle in self._watch(module)]

    def _watch(self, module: torch.nn.Module) -> Iterator[Any]:
        begin, end = (CallHook(each, is_traced=False) for each in (self._begin, self._end))
        if is_compiled_in_place(module):
            yield CompiledCall(module, "outermost", begin, end)
        else:
            yield module.register_forward_pre_hook(begin)
            yield module.register_forward_hook(end, always_call=True)

    def remove(self) -> None:
        """No call has a context any more."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        if module is self._module:
            # Ctrl-C calls no hook of a forward that it ends. Or the module calls itself: what it
            # does behind that has no context.
            self._leave()
        if self._module is None and backward_id() is None:
            context = self._context()
            if context is not None:
                self._module = module
                self._entered.enter_context(context)

    def _end(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self._module:
            self._leave()

    def _leave(self) -> None:
        self._module = None
        self._entered.close()


def _entrances(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that programs call."""
    found: dict[torch.nn.Module, None] = {}
    ahead = [model]
    while ahead:
        module = ahead.pop()
        if module in found:
            continue
        found[module] = None
        children = [] if is_compiled(module) else list(module.children())
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            found.update(dict.fromkeys(children))
        else:
            ahead += children
    return list(found)
