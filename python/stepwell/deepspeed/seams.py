"""Seams: places in DeepSpeed that Stepwell fills.

The kinds of them, and how they are found by their features.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stepwell.deepspeed import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = [
    "Attribute",
    "Fillable",
    "Member",
    "NativeOp",
    "Overridden",
    "Seam",
    "accelerator_name",
    "op_caches",
]

_BUILDERS = "deepspeed.ops.op_builder.builder"
# A second copy of the same module, where the working directory has DeepSpeed's sources.
_LOCAL_BUILDERS = "op_builder.builder"


@dataclass(frozen=True)
class Seam:
    """A place in DeepSpeed, as `stepwell doctor` shows it."""

    name: str
    """What it is."""
    found: bool
    """Whether the installed DeepSpeed has it."""
    filled: bool
    """Whether Stepwell is in it, in this process."""
    note: str
    """Where it is, and why it is not found or not filled, if so."""


class Fillable(Protocol):
    """A seam that can be looked for and filled."""

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def where(self) -> str:
        """Its dotted path."""

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""

    def unused(self) -> str | None:
        """Why it is left as it is on this machine; None if it is to be filled."""

    def is_filled(self) -> bool:
        """Whether Stepwell is in it. It is there."""

    def fill(self) -> None:
        """Puts Stepwell into it. It is there, and not filled."""


def _import(module: str) -> ModuleType | str:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return f"`{module}` cannot be imported: {error}"


def accelerator_name() -> str:
    """What DeepSpeed runs models on: `cpu`, `cuda` ..."""
    name: str = importlib.import_module("deepspeed.accelerator").get_accelerator()._name
    return name


def op_caches() -> list[dict[str, Any]]:
    """Where DeepSpeed's builders find the ops that were loaded, by name."""
    modules = [importlib.import_module(_BUILDERS)]
    if _LOCAL_BUILDERS in sys.modules:
        modules.append(sys.modules[_LOCAL_BUILDERS])
    return [module.OpBuilder._loaded_ops for module in modules]


def _is_of_another(accelerator: str | None) -> str | None:
    """Why a seam of `accelerator` (None: all) is not used here; None if it is."""
    if accelerator is None or accelerator == accelerator_name():
        return None
    return f"the accelerator is `{accelerator_name()}`, where this is DeepSpeed's own"


@dataclass(frozen=True)
class Attribute:
    """A function, method, class or name of a module that gets another value.

    The value that was there is `stepwell_original` of the one that replaces it, which is also how
    that is recognized.
    """

    name: str
    module: str
    path: str
    replace: Callable[[Any], Any]
    """Its new value, by the one that was there."""
    parameters: tuple[str, ...] | None = None
    """The names of the first parameters that a function must have for the replacement to fit."""
    accelerator: str | None = None
    """The accelerator on which it is replaced; None: all."""

    @property
    def where(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.path}"

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        module = _import(self.module)
        if isinstance(module, str):
            return module
        value: Any = module
        for name in self.path.split("."):
            if not hasattr(value, name):
                return f"`{self.where}` does not exist"
            value = getattr(value, name)
        if self.parameters is None:
            return None
        names = tuple(inspect.signature(value).parameters)[: len(self.parameters)]
        # A replacement may take anything and pass it on.
        if names != self.parameters and not hasattr(value, "stepwell_original"):
            return (
                f"`{self.where}` takes `{', '.join(names)}`, expected {', '.join(self.parameters)}"
            )
        return None

    def unused(self) -> str | None:
        """Why it is left as it is on this machine; None if it is to be filled."""
        return _is_of_another(self.accelerator)

    def _owner(self) -> tuple[Any, str]:
        *owners, name = self.path.split(".")
        owner: Any = importlib.import_module(self.module)
        for each in owners:
            owner = getattr(owner, each)
        return owner, name

    def is_filled(self) -> bool:
        """Whether Stepwell is in it."""
        return hasattr(getattr(*self._owner()), "stepwell_original")

    def fill(self) -> None:
        """Puts Stepwell into it."""
        owner, name = self._owner()
        original = getattr(owner, name)
        replacement = self.replace(original)
        replacement.stepwell_original = original
        setattr(owner, name, replacement)


@dataclass(frozen=True)
class NativeOp:
    """A native op, as DeepSpeed's builders cache it once it is built or loaded."""

    name: str
    op: str
    module: ModuleType
    """Its functions."""
    accelerator: str | None = None
    """The accelerator whose op it replaces; None: all."""

    @property
    def where(self) -> str:
        """Its dotted path."""
        return f"{_BUILDERS}.OpBuilder._loaded_ops[{self.op!r}]"

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        module = _import(_BUILDERS)
        if isinstance(module, str):
            return module
        cache = getattr(getattr(module, "OpBuilder", None), "_loaded_ops", None)
        if not isinstance(cache, dict):
            return f"`{_BUILDERS}.OpBuilder._loaded_ops` is no dict of ops"
        try:
            accelerator_name()
        except (ImportError, AttributeError) as error:
            return f"the name of `deepspeed.accelerator.get_accelerator()` cannot be had: {error}"
        return None

    def unused(self) -> str | None:
        """Why it is left as it is on this machine; None if it is to be filled."""
        return _is_of_another(self.accelerator)

    def is_filled(self) -> bool:
        """Whether Stepwell is in it."""
        return all(cache.get(self.op) is self.module for cache in op_caches())

    def fill(self) -> None:
        """Puts Stepwell into it."""
        for cache in op_caches():
            cache[self.op] = self.module


@dataclass(frozen=True)
class Member:
    """A list that gets more members."""

    name: str
    module: str
    path: str
    members: tuple[Any, ...]

    @property
    def where(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.path}"

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        module = _import(self.module)
        if isinstance(module, str):
            return module
        return (
            None
            if isinstance(getattr(module, self.path, None), list)
            else f"`{self.where}` is no list"
        )

    def unused(self) -> str | None:
        """Why it is left as it is on this machine; None if it is to be filled."""
        return None

    def _list(self) -> list[Any]:
        members: list[Any] = getattr(importlib.import_module(self.module), self.path)
        return members

    def is_filled(self) -> bool:
        """Whether Stepwell is in it."""
        return all(member in self._list() for member in self.members)

    def fill(self) -> None:
        """Puts Stepwell into it."""
        self._list().extend(member for member in self.members if member not in self._list())


@dataclass(frozen=True)
class Overridden:
    """A class in whose place Stepwell makes a subclass of it.

    Where the class is not as in a release that was tested (`fingerprints`), it is used itself: no
    reason to refuse a version.
    """

    name: str
    module: str
    path: str
    ours: str
    """The name of the subclass."""
    maker: Attribute
    """Where the subclass is made."""

    @property
    def where(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.path}"

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        module = _import(self.module)
        if isinstance(module, str):
            return module
        return (
            None
            if isinstance(getattr(module, self.path, None), type)
            else f"`{self.where}` is no class"
        )

    def unused(self) -> str | None:
        """Why it is left as it is with this version of DeepSpeed; None if it is not."""
        return fingerprints.difference(self.ours)

    def is_filled(self) -> bool:
        """Whether Stepwell makes the subclass."""
        return self.maker.missing() is None and self.maker.is_filled()

    def fill(self) -> None:
        """Does nothing: `maker` puts the subclass in its place."""
