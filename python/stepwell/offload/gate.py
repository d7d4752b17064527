"""Waits in front of module forwards: a forward that needs a weight waits until it has arrived, and for no other.

What is gated is the forward of `torch.nn.Module`s that hold parameters of the optimizer. A module
waits for its own parameters and for those of submodules that it uses without calling them, which a
forward in training mode shows; in evaluation mode, where modules may take short cuts, the first
module called waits for everything beneath it. A weight read by any other way (`parameter.norm()`,
an average of weights) is not seen: that takes `optimizer.synchronize()`, or `gate="step"`. Where
such a read has a part in a loss and the parameter has not been waited for by then, its gradient
gives it away, and the backward raises.

Compiled code has no hooks: where torch.compile traces a gated module, that module is no longer
gated and every step waits for its uploads, which is the same result.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = ["Gate", "Uploads"]

_LOGGER = logging.getLogger(__name__)

_GATES: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()
_KEYS = itertools.count(1)


def _traced(key: int) -> bool:
    """Called by torch.compile when it traces a hook, not when the compiled code runs."""
    gate = _GATES.get(key)
    if gate is not None:
        gate.close()
    return True


# What torch.compiler.assume_constant_result does, which takes seconds to import.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _modules() -> list[torch.nn.Module]:
    """Every module that is alive."""
    # A class of a proxy may lie about itself; isinstance would ask it.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]


def _something_is_compiled() -> bool:
    """Whether torch.compile has traced anything in this process: hooks that are added later would not be called there."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"])


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of `module` go to torch.compile, though it may not have traced anything yet."""
    return (
        module.__dict__.get("_compiled_call_impl") is not None
        or type(module).__name__ == "OptimizedModule"
    )


class Uploads(Protocol):
    """The new weights on their way to the device."""

    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        """The current stream waits for the weights of `params`; whether it is the step's, so that all work after it does too."""

    def finish(self) -> None:
        """The current stream waits for all weights."""


class Gate:
    """Hooks on the modules that hold `params`.

    Args:
        params: the parameters on the device.
        uploads: what makes the current stream wait for their weights.
    """

    def __init__(self, params: Iterable[torch.Tensor], uploads: Uploads) -> None:
        self._params = set(params)
        self._uploads = uploads
        self._called: set[int] = set()
        self._waits: dict[int, list[torch.Tensor]] = {}
        self._num_called = -1
        # Of the last step: what the stream has not waited for, and what no stream has.
        self._left: set[torch.Tensor] = set()
        self._unused: set[torch.Tensor] = set()
        self._uncovered: set[torch.Tensor] = set()
        self._children: dict[int, list[int]] = {}
        self._parents: dict[int, list[int]] = {}
        self._owned: dict[int, list[torch.Tensor]] = {}
        self.is_open = False
        """Whether forwards wait by themselves. If not, whoever steps has to wait for all uploads."""
        self._attach()

    def _attach(self) -> None:
        modules = _modules()
        by_id = {id(module): module for module in modules}
        for module in modules:
            children = [
                child for child in module.__dict__.get("_modules", {}).values() if child is not None
            ]
            self._children[id(module)] = [id(child) for child in children]
            for child in children:
                self._parents.setdefault(id(child), []).append(id(module))
            owned = [
                p
                for p in module.__dict__.get("_parameters", {}).values()
                if p is not None and p in self._params
            ]
            if owned:
                self._owned[id(module)] = owned
        gated = self._reached(self._owned, self._parents)
        unowned = len(self._params.difference(*self._owned.values()))
        if _something_is_compiled():
            why = "torch.compile was used before the first step, and would not see hooks"
        elif compiled := [type(by_id[key]).__name__ for key in gated if _is_compiled(by_id[key])]:
            why = f"`{compiled[0]}` is compiled"
        elif unowned:
            why = f"{unowned} parameters are in no module"
        else:
            self._hook([by_id[key] for key in gated])
            return
        _LOGGER.info("gate='step': %s, so forwards cannot wait by themselves", why)

    def _hook(self, modules: list[torch.nn.Module]) -> None:
        key = next(_KEYS)
        _GATES[key] = self
        forward, state = _ForwardHook(key), _StateHook(key)
        handles = []
        for module in modules:
            # torch has no types for the last two.
            handles += [
                module.register_forward_pre_hook(forward, prepend=True),
                module.register_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
            ]
        weakref.finalize(self, _remove, handles)
        self.is_open = True

    def open(self, params: Iterable[torch.Tensor]) -> None:
        """From now on forwards wait for their share of `params`; the others take `wait_for_uncovered`, after the submit."""
        if self._num_called != len(self._called):
            self._waits = self._share_out()
            self._num_called = len(self._called)
        left = set(params)
        # Nobody has called a module that would wait for these.
        self._uncovered = left.difference(*self._waits.values())
        self._unused = set(left)
        self._left = left

    def wait_for_uncovered(self) -> None:
        """Waits for the weights that no forward is known to wait for."""
        self._wait_for(self._uncovered)
        self._uncovered = set()

    def close(self) -> None:
        """No forward waits any more: compiled code does not call the hooks."""
        if self.is_open:
            _LOGGER.info(
                "gate='step': torch.compile traces a module whose forward would have to wait"
            )
            self.is_open = False
        self._uploads.finish()
        self.clear()

    def clear(self) -> None:
        """All weights have been waited for."""
        self._left = set()
        self._unused = set()
        self._uncovered = set()

    def is_unused(self, param: torch.Tensor) -> bool:
        """Whether nobody has waited for `param` since the last step, so that what was read of it may have been anything."""
        return param in self._unused

    def _share_out(self) -> dict[int, list[torch.Tensor]]:
        """Which module waits for which parameters: those that were called, the nearest above each owner on every way up."""
        waits: dict[int, list[torch.Tensor]] = {}
        for owner, params in self._owned.items():
            ahead, seen = [owner], {owner}
            while ahead:
                key = ahead.pop()
                if key in self._called:
                    waits.setdefault(key, []).extend(params)
                    continue
                above = [parent for parent in self._parents.get(key, []) if parent not in seen]
                seen.update(above)
                ahead += above
        return waits

    def enter(self, module: torch.nn.Module) -> None:
        """The forward of `module` is about to begin."""
        if not module.training:
            self.enter_all(module)
            return
        self._called.add(id(module))
        if self._uncovered:
            # The step was interrupted before it had waited for them.
            self.wait_for_uncovered()
        if self._left:
            self._wait_for(self._waits.get(id(module), ()))

    def enter_all(self, module: torch.nn.Module) -> None:
        """All weights beneath `module` are about to be used."""
        if self._left:
            beneath = self._reached([id(module)], self._children)
            self._wait_for(param for key in beneath for param in self._owned.get(key, ()))

    def _wait_for(self, params: Iterable[torch.Tensor]) -> None:
        left = [param for param in params if param in self._left]
        if left:
            is_step_stream = self._uploads.wait(left)
            self._unused.difference_update(left)
            if is_step_stream:
                self._left.difference_update(left)

    @staticmethod
    def _reached(keys: Iterable[int], steps: dict[int, list[int]]) -> list[int]:
        """Where `steps` lead from `keys`, which are included; in the order of a walk, each once."""
        reached: dict[int, None] = {}
        ahead = list(keys)[::-1]
        while ahead:
            key = ahead.pop()
            if key not in reached:
                reached[key] = None
                ahead += steps.get(key, ())[::-1]
        return list(reached)


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
