"""The sources of DeepSpeed's methods that Stepwell was tested with, as digests.

A subclass of ours depends on more than the names of what it overrides. `fingerprints.json` has the
methods that it overrides or calls and those that call an overridden one, by the class of ours, with
their digests in each release of DeepSpeed that it was tested on. `make fingerprints` makes the file
from DeepSpeed's sources.

Comments, docstrings and layout do not count. A digest is the same in all versions of Python. It is
of the method as it is in this process, so a patch of another library counts.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
from importlib import resources
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["UNTESTED_VARIABLE", "difference", "digest", "digest_of", "releases", "tested"]

UNTESTED_VARIABLE = "STEPWELL_UNTESTED_DEEPSPEED"
"""Environment variable: `1` uses Stepwell's classes also where DeepSpeed's methods have changed."""

_DIGEST_CHARS = 16
# Packages whose decorators leave a method what it is; one of another package is a patch.
_DECORATING = ("deepspeed", "torch", "stepwell")
# How many methods a message names.
_NAMED_MAX = 3

Table = dict[str, dict[str, dict[str, str]]]
"""Release -> class of DeepSpeed (dotted path) -> method -> digest."""


def _normal(value: Any) -> str:
    """A node of a syntax tree, without what differs between versions of Python."""
    if isinstance(value, list):
        return f"[{','.join(map(_normal, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    named = {name: getattr(value, name, None) for name in value._fields}
    if isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        has_docstring = ast.get_docstring(value, clean=False) is not None
        named["body"] = value.body[1:] if has_docstring else value.body
    # Fields that are empty are absent in other versions.
    parts = [
        f"{name}={_normal(part)}"
        for name, part in named.items()
        if part not in (None, []) and name not in ("ctx", "kind", "type_comment")
    ]
    return f"{type(value).__name__}({','.join(parts)})"


def digest(functions: Iterable[ast.AST]) -> str:
    """The digest of the definitions of a method: of a property with a setter there are two."""
    text = "".join(map(_normal, functions))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def _inner(function: Any) -> Any:
    """What a decorator of DeepSpeed's, torch's or Stepwell's is around; None: it is no such."""
    package = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
    if package not in _DECORATING:
        return None
    named = getattr(function, "stepwell_original", None) or getattr(function, "__wrapped__", None)
    if named is not None or "<locals>" not in function.__qualname__:
        return named
    # DeepSpeed's do not say what they are around.
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return next((cell for cell in cells if isinstance(cell, FunctionType)), None)


def _plain(function: Any) -> Any:
    while (inner := _inner(function)) is not None:
        function = inner
    return function


def _definitions(method: Any) -> Iterator[ast.AST]:
    functions = (
        [method.fget, method.fset, method.fdel] if isinstance(method, property) else [method]
    )
    for function in functions:
        if function is not None:
            # Of the code: `getsource` of a function looks through every decorator.
            source = inspect.getsource(_plain(function).__code__)
            tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
            yield tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]


def digest_of(method: Any) -> str | None:
    """The digest of a function or property in this process; None: its source cannot be had."""
    try:
        return digest(_definitions(method))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None


@functools.cache
def tested() -> dict[str, Table]:
    """What is known, by the names of Stepwell's classes."""
    text = resources.files(__package__).joinpath("fingerprints.json").read_text("utf-8")
    tables: dict[str, Table] = json.loads(text)
    return tables


def releases() -> list[str]:
    """The releases that a class of Stepwell's was tested on, from the oldest."""
    return sorted({release for table in tested().values() for release in table})


def _method(owner: str, name: str) -> Any:
    module, _, path = owner.rpartition(".")
    return getattr(getattr(importlib.import_module(module), path), name, None)


def _named(methods: list[str]) -> str:
    more = f" and {len(methods) - _NAMED_MAX} more" if len(methods) > _NAMED_MAX else ""
    return f"`{'`, `'.join(methods[:_NAMED_MAX])}`{more}"


def difference(zero_class: str) -> str | None:
    """How the installed DeepSpeed differs from the nearest release that a class was tested on.

    None: in no method that counts.
    """
    found: dict[tuple[str, str], str | None] = {}

    def digest_found(owner: str, name: str) -> str | None:
        if (owner, name) not in found:
            found[owner, name] = digest_of(_method(owner, name))
        return found[owner, name]

    differing = {
        release: [
            (owner, name)
            for owner, methods in owners.items()
            for name, known in methods.items()
            if digest_found(owner, name) != known
        ]
        for release, owners in tested()[zero_class].items()
    }
    release, methods = min(differing.items(), key=lambda item: len(item[1]))
    installed = importlib.import_module("deepspeed").__version__
    missing = [f"{owner}.{name}" for owner, name in methods if _method(owner, name) is None]
    if missing:
        return f"DeepSpeed {installed} lacks {_named(missing)}"
    if not methods or os.environ.get(UNTESTED_VARIABLE) == "1":
        return None
    changed = _named([f"{owner}.{name}" for owner, name in methods])
    return (
        f"DeepSpeed {installed} differs from {release}, which was tested, in {changed} "
        f"({UNTESTED_VARIABLE}=1 in the environment takes the engine all the same)"
    )
