"""Waits in front of module forwards: a forward that needs a weight waits until it has arrived, and for no other.

What is gated is the forward of `torch.nn.Module`s that hold parameters of the optimizer. A module waits for its own
parameters and for those of submodules that it uses without calling them, which a forward in training mode shows; in
evaluation mode, where modules may take short cuts, the first module called waits for everything beneath it. A weight read
by any other way (`parameter.norm()`, an average of weights) is not seen: that takes `optimizer.synchronize()`, or
`gate="step"`.

Compiled code has no hooks: where torch.compile traces a gated module, that module is no longer gated and every step waits
for its uploads, which is the same result.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Gate"]

_LOGGER = logging.getLogger(__name__)

_GATES: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced(key: int) -> bool:
    """Called by torch.compile when it traces a hook, not when the compiled code runs."""
    gate = _GATES.get(key)
    if gate is not None:
        gate.close()
    return True


def _modules() -> list[torch.nn.Module]:
    """Every module that is alive."""
    # A class of a proxy may lie about itself; isinstance would ask it.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]


def _something_is_compiled() -> bool:
    """Whether torch.compile has traced anything in this process: hooks that are added later would not be called there."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])


class Gate:
    """Hooks on the modules that hold `params`.

    Args:
        params: the parameters on the device.
        wait: makes the current stream wait for the weights of these parameters; whether that is the stream of the step, so
            that they need no more waiting for.
        wait_all: the same for all weights of the step that was opened last.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        wait: Callable[[list[torch.Tensor]], bool],
        wait_all: Callable[[], None],
    ) -> None:
        self._params = set(params)
        self._wait = wait
        self._wait_all = wait_all
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._called: set[int] = set()
        self._waits: dict[int, list[torch.Tensor]] = {}
        self._waits_for = -1
        self._pending: dict[int, list[torch.Tensor]] = {}
        self._left: set[torch.Tensor] = set()
        self._children: dict[int, list[int]] = {}
        self._parents: dict[int, list[int]] = {}
        self._owned: dict[int, list[torch.Tensor]] = {}
        self.is_open = True
        """Whether forwards wait by themselves. If not, whoever steps has to wait for all uploads."""
        if _something_is_compiled():
            _LOGGER.info(
                "gate='step': torch.compile was used before the optimizer was made, and would not see its hooks"
            )
            self.is_open = False
            return
        self._attach()

    def _attach(self) -> None:
        modules = _modules()
        by_id = {id(module): module for module in modules}
        for module in modules:
            children = [child for child in module.__dict__.get("_modules", {}).values() if child is not None]
            self._children[id(module)] = [id(child) for child in children]
            for child in children:
                self._parents.setdefault(id(child), []).append(id(module))
            owned = [p for p in module.__dict__.get("_parameters", {}).values() if p is not None and p in self._params]
            if owned:
                self._owned[id(module)] = owned
        reached: set[int] = set()
        ahead = list(self._owned)
        while ahead:
            key = ahead.pop()
            if key not in reached:
                reached.add(key)
                ahead += self._parents.get(key, [])
        compiled = [
            by_id[key]
            for key in reached
            if by_id[key].__dict__.get("_compiled_call_impl") is not None
            or type(by_id[key]).__name__ == "OptimizedModule"
        ]
        unowned = len(self._params - {param for owned in self._owned.values() for param in owned})
        if compiled or unowned:
            why = (
                f"`{type(compiled[0]).__name__}` is compiled" if compiled else f"{unowned} parameters are in no module"
            )
            _LOGGER.info("gate='step': %s, so its forwards cannot wait by themselves", why)
            self.is_open = False
            return
        _GATES[id(self)] = self
        hooks = _ForwardHook(id(self)), _StateHook(id(self))
        for key in reached:
            module = by_id[key]
            self._handles += [
                module.register_forward_pre_hook(hooks[0], prepend=True),
                module.register_state_dict_pre_hook(hooks[1]),
                module.register_load_state_dict_pre_hook(hooks[1]),
            ]
        weakref.finalize(self, _remove, self._handles)

    def open(self, params: Iterable[torch.Tensor]) -> None:
        """From now on forwards wait for their share of `params`."""
        if self._waits_for != len(self._called):
            self._waits = self._share_out()
            self._waits_for = len(self._called)
        self._left = set(params)
        covered = {param for shared in self._waits.values() for param in shared}
        early = [param for param in self._left if param not in covered]
        if early:
            # Nobody has called a module that would wait for them.
            self._wait_for(early)
        self._pending = dict(self._waits)

    def close(self) -> None:
        """No forward waits any more: compiled code does not call the hooks."""
        if self.is_open:
            _LOGGER.info("gate='step': torch.compile traces a module whose forward would have to wait")
            self.is_open = False
        self._wait_all()
        self.clear()

    def clear(self) -> None:
        """All weights have been waited for."""
        self._pending = {}
        self._left = set()

    def _share_out(self) -> dict[int, list[torch.Tensor]]:
        """Which module waits for which parameters: of those that were called, the nearest above each owner."""
        waits: dict[int, list[torch.Tensor]] = {}
        for owner, params in self._owned.items():
            level = [owner]
            seen: set[int] = set()
            while level:
                called = [key for key in level if key in self._called]
                if called:
                    # Of several parents any may come first.
                    for key in called:
                        waits.setdefault(key, []).extend(params)
                    break
                seen.update(level)
                level = [parent for key in level for parent in self._parents.get(key, []) if parent not in seen]
        return waits

    def enter(self, module: torch.nn.Module) -> None:
        """The forward of `module` is about to begin."""
        key = id(module)
        if module.training:
            self._called.add(key)
            if self._left and (mine := self._pending.get(key)):
                self._wait_for(mine)
        else:
            self.enter_all(module)

    def enter_all(self, module: torch.nn.Module) -> None:
        """All weights beneath `module` are about to be used."""
        if self._left:
            self._wait_for(self._beneath(id(module)))

    def _wait_for(self, params: list[torch.Tensor]) -> None:
        left = [param for param in params if param in self._left]
        if left and self._wait(left):
            self._left.difference_update(left)

    def _beneath(self, key: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        ahead, seen = [key], set()
        while ahead:
            key = ahead.pop()
            if key not in seen:
                seen.add(key)
                found += self._owned.get(key, [])
                ahead += self._children.get(key, [])
        return found


class _Hook:
    """A hook of the gate with this key. A copy of it made by pickle belongs to no gate, as the module that it came with."""

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> tuple[type[_Hook], tuple[int]]:
        return type(self), (0,)


class _ForwardHook(_Hook):
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _traced(self.key)
            return
        gate = _GATES.get(self.key)
        if gate is not None and gate.is_open:
            gate.enter(module)


class _StateHook(_Hook):
    """Before a state dict is made or loaded."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        gate = _GATES.get(self.key)
        if gate is not None and gate.is_open:
            gate.enter_all(module)


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
