"""The sources of DeepSpeed's methods that Stepwell was tested with, as digests.

A subclass of ours depends on more than the names of what it overrides. `fingerprints.json` has the
methods that it overrides or calls and those that call an overridden one, by the class of ours, with
their digests in each release of DeepSpeed that it was tested on; and the checksums of the files
that these methods are in. `make fingerprints` makes it from DeepSpeed's sources.

Comments, docstrings and layout do not count. A digest is the same in all versions of Python. It is
of the method as it is in this process, so a patch of another library counts. A method whose file is
a release's needs no digest: parsing them all takes half a second of each start.
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
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "UNTESTED_VARIABLE",
    "checksum",
    "difference",
    "digest",
    "digest_of",
    "files",
    "releases",
    "tested",
]

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


def checksum(source: bytes) -> str:
    """The checksum of a file with methods."""
    return hashlib.sha256(source).hexdigest()[:_DIGEST_CHARS]


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


def _codes(method: Any) -> list[CodeType]:
    """The code of a method, and of all that a property has.

    Not of what is around it: `inspect.getsource` of a function looks through every decorator.
    """
    functions = (
        [method.fget, method.fset, method.fdel] if isinstance(method, property) else [method]
    )
    return [_plain(function).__code__ for function in functions if function is not None]


def _definitions(method: Any) -> Iterator[ast.AST]:
    for code in _codes(method):
        source = inspect.getsource(code)
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
        yield tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]


def digest_of(method: Any) -> str | None:
    """The digest of a function or property in this process; None: its source cannot be had."""
    try:
        return digest(_definitions(method))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None


def _is_of_file(method: Any, name: str, known: dict[str, str]) -> bool:
    """Whether a method is the one of that name in a file that is a release's.

    Args:
        method: a function or property.
        name: its name in its class.
        known: the release's checksums of files, by their names within DeepSpeed.
    """
    try:
        codes = _codes(method)
        return bool(codes) and all(
            _is_called(code.co_name, name) and _checksum_of(code.co_filename) in known.values()
            for code in codes
        )
    except (AttributeError, OSError):
        return False


def _is_called(own: str, name: str) -> bool:
    """Whether what is called `own` in its source has `name` in its class."""
    is_private = own.startswith("__") and not own.endswith("__")
    return name == own or (is_private and name.endswith(own))


@functools.cache
def _checksum_of(path: str) -> str:
    return checksum(Path(path).read_bytes())


@functools.cache
def _known() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("fingerprints.json").read_text("utf-8")
    known: dict[str, Any] = json.loads(text)
    return known


def tested() -> dict[str, Table]:
    """What is known, by the names of Stepwell's classes."""
    tables: dict[str, Table] = _known()["methods"]
    return tables


def files() -> dict[str, dict[str, str]]:
    """Release -> module of DeepSpeed -> checksum of its file."""
    found: dict[str, dict[str, str]] = _known()["files"]
    return found


def releases() -> list[str]:
    """The releases that Stepwell's classes were tested on, from the oldest."""
    return list(files())


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

    def is_as_tested(release: str, owner: str, name: str, known: str) -> bool:
        method = _method(owner, name)
        if _is_of_file(method, name, files().get(release, {})):
            return True
        if (owner, name) not in found:
            found[owner, name] = digest_of(method)
        return found[owner, name] == known

    installed = importlib.import_module("deepspeed").__version__
    differing = {}
    # First the installed release, of which no digest is made.
    newest_first = reversed(tested()[zero_class].items())
    for release, owners in sorted(newest_first, key=lambda item: item[0] != installed):
        differing[release] = [
            (owner, name)
            for owner, methods in owners.items()
            for name, known in methods.items()
            if not is_as_tested(release, owner, name, known)
        ]
        if not differing[release]:
            return None
    release, methods = min(differing.items(), key=lambda item: len(item[1]))
    missing = [f"{owner}.{name}" for owner, name in methods if _method(owner, name) is None]
    if missing:
        return f"DeepSpeed {installed} lacks {_named(missing)}"
    if os.environ.get(UNTESTED_VARIABLE) == "1":
        return None
    changed = _named([f"{owner}.{name}" for owner, name in methods])
    return (
        f"DeepSpeed {installed} differs from {release}, which was tested, in {changed} "
        f"({UNTESTED_VARIABLE}=1 in the environment takes the engine all the same)"
    )
