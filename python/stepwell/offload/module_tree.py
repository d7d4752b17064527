"""Modules that are alive: which hold parameters, and what is above and beneath them.

Modules are found, not given: an optimizer gets parameters, as torch's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell.offload.compiled_calls import is_compiled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from stepwell.offload.compiled_calls import CompiledCall

__all__ = [
    "Hook",
    "ModuleTree",
    "living",
    "modules_alive",
    "reached",
    "remove",
]


def modules_alive() -> list[torch.nn.Module]:
    """Every module that is alive."""
    return _core.instances_alive(_classes())


def _classes() -> list[type]:
    """The class of modules, and all beneath it."""
    # By their ids: one of another metaclass may have no hash.
    found: dict[int, type] = {}
    ahead: list[type] = [torch.nn.Module]
    while ahead:
        one = ahead.pop()
        if id(one) not in found:
            found[id(one)] = one
            ahead += type.__subclasses__(one)
    return list(found.values())


def living(keys: Iterable[int], by_id: Mapping[int, torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules with these ids, as far as `by_id`, which holds them weakly, still has them."""
    found = (by_id.get(key) for key in keys)
    return [module for module in found if module is not None]


class ModuleTree:
    """Modules that hold parameters, and what is above and beneath them.

    Args:
        params: the parameters.
        modules: all modules.
    """

    def __init__(
        self, params: Collection[torch.Tensor], modules: Iterable[torch.nn.Module]
    ) -> None:
        self.children: dict[int, list[int]] = {}
        self.parents: dict[int, list[int]] = {}
        self.owned: dict[int, list[torch.Tensor]] = {}
        """The parameters that a module holds itself."""
        by_id = {id(module): module for module in modules}
        for module in by_id.values():
            children = [
                child for child in module.__dict__.get("_modules", {}).values() if child is not None
            ]
            self.children[id(module)] = [id(child) for child in children]
            for child in children:
                self.parents.setdefault(id(child), []).append(id(module))
            owned = [
                p
                for p in module.__dict__.get("_parameters", {}).values()
                if p is not None and p in params
            ]
            if owned:
                self.owned[id(module)] = owned
        self.gated = [by_id[key] for key in reached(self.owned, self.parents)]
        """Those that hold parameters, and all above them."""
        compiled = [id(module) for module in self.gated if is_compiled(module)]
        beneath = {key for one in compiled for key in reached(self.children[one], self.children)}
        self.called = [module for module in self.gated if id(module) not in beneath]
        """Those of `gated` that are not within one whose calls go to compiled code."""
        self.within = [module for module in self.gated if id(module) in beneath]
        """Those that are."""


def reached(keys: Iterable[int], steps: dict[int, list[int]]) -> list[int]:
    """Where `steps` lead from `keys`, which are included; in the order of a walk, each once."""
    reached: dict[int, None] = {}
    ahead = list(keys)[::-1]
    while ahead:
        key = ahead.pop()
        if key not in reached:
            reached[key] = None
            ahead += steps.get(key, ())[::-1]
    return list(reached)


class Hook:
    """A hook on modules, of the gate, or of what notes forwards for it, with this key.

    A copy of it that pickle made belongs to none, like the module that it was copied with.
    """

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile the hook that waits for the weights of an optimizer. "
            "hint: script the module before the first step and before a state dict is loaded, or "
            "use gate='step'"
        )

    def __init__(self, key: str) -> None:
        # No number: torch.compile would take one that differs for a size that varies.
        self.key = key

    def __reduce__(self) -> tuple[type[Hook], tuple[str]]:
        return type(self), ("",)


def remove(handles: Iterable[torch.utils.hooks.RemovableHandle | CompiledCall]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()
