"""Checks of options: one function per kind, called when the option is given.

Each returns the value as the type that it stands for, so that what comes from NumPy is Python's own
from there on. `what` is how errors call the option, in backticks: "`threads`". All raise ValueError
with the value and what was expected.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from stepwell._quantities import nbytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "COUNT_MAX",
    "choice",
    "count",
    "counts",
    "flag",
    "fraction",
    "integer",
    "nbytes",
    "number",
    "optional",
    "positive",
]

COUNT_MAX = (1 << 63) - 1
"""Of counts that only have to fit into the core's integers."""

T = TypeVar("T")
P = ParamSpec("P")


def _refused(value: object, what: str, expected: str, hint: str = "") -> ValueError:
    return ValueError(
        f"{what} is `{value!r}`, expected {expected}" + (f". hint: {hint}" if hint else "")
    )


def optional(
    check: Callable[Concatenate[object, P], T], value: object, *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """What `check` makes of `value`; None stays None."""
    return None if value is None else check(value, *args, **kwargs)


def integer(value: object, what: str, *, expected: str = "an integer", hint: str = "") -> int:
    """An integer, also one of NumPy's; as for torch, a bool is none."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            pass
    raise _refused(value, what, expected, hint)


def count(
    value: object, what: str, *, least: int = 1, most: int = COUNT_MAX, hint: str = ""
) -> int:
    """An integer from `least` to `most`."""
    expected = f"an integer, {least} or more"
    if most != COUNT_MAX:
        expected = f"an integer, {least} to {most}"
    found = integer(value, what, expected=expected, hint=hint)
    if least <= found <= most:
        return found
    if most == COUNT_MAX and found > most:
        expected = f"an integer, {most} at most"
    raise _refused(value, what, expected, hint)


def counts(values: object, what: str, *, most: int = COUNT_MAX, hint: str = "") -> list[int]:
    """A list of integers from 1 to `most`."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise _refused(values, what, "a list of integers", hint)
    return [count(value, f"an entry of {what}", most=most, hint=hint) for value in values]


def nbytes(value: object, what: str) -> int:
    """A number of bytes, 0 or more, or a text with a unit: "40GB", "1.5 GiB"."""
    if isinstance(value, str):
        found = nbytes_of(value, what)
    else:
        expected = "bytes, an integer, 0 or more; or a text with a unit, as '40GB'"
        found = integer(value, what, expected=expected)
    if 0 <= found <= COUNT_MAX:
        return found
    raise _refused(value, what, f"bytes, 0 to {COUNT_MAX}", "")


def number(value: object, what: str) -> float:
    """A number, also of a tensor of one element; not what `float` would parse."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{what} has the shape `{tuple(value.shape)}`, expected one number")
    # Schedulers calculate with it.
    if hasattr(value, "__float__") and not (isinstance(value, torch.Tensor) and value.is_complex()):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ValueError(f"{what} is `{value!r}` (`{type(value).__name__}`), expected a number")


def positive(
    value: object, what: str, *, unit: str = "a number", most: float = math.inf, hint: str = ""
) -> float:
    """A number above 0, `most` at most."""
    found = number(value, what)
    if not found > 0:
        raise _refused(value, what, f"{unit} above 0", hint)
    if found > most:
        raise _refused(value, what, f"{unit}, {most:g} at most", hint)
    return found


def fraction(value: object, what: str) -> float:
    """A number from 0 to 1."""
    found = number(value, what)
    if not 0 <= found <= 1:
        raise _refused(value, what, "0 to 1")
    return found


def flag(value: object, what: str, *, expected: str = "True or False") -> bool:
    """A bool, also one of NumPy's."""
    if isinstance(value, bool):
        return value
    if getattr(value, "dtype", None) == bool and getattr(value, "shape", None) == ():
        return bool(value)
    raise _refused(value, what, expected)


def choice(value: object, what: str, known: Iterable[str]) -> str:
    """One of `known`."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f"{what} is `{value}`, expected one of {', '.join(known)}")
