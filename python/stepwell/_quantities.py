"""Sizes, rates and counts as people write them: "24GB", "25GB/s", "7B"."""

from __future__ import annotations

import math
import re

__all__ = ["count_of", "flops_of", "nbytes_of", "rate_of", "size_text"]

# As memory and drives are sold and measured: those in 1024s have an `i`.
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d+))?\s*"
_SIZE = re.compile(_NUMBER + r"([kmgtp]?)(i?)b", re.IGNORECASE)
_RATE = re.compile(_NUMBER + r"(?:([kmgtp]?)(i?)b/s)?", re.IGNORECASE)
_COUNT = re.compile(_NUMBER + r"([kmbt]?)", re.IGNORECASE)
_FLOPS = re.compile(_NUMBER + r"(?:([gtp]?)flop(?:s|/s)?)?", re.IGNORECASE)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _number(found: re.Match[str]) -> float:
    return float(found[1]) * 10.0 ** int(found[2] or 0)


def _refused(value: object, what: str, expected: str) -> ValueError:
    return ValueError(f"{what} is `{value}`, expected {expected}")


def _above_0(number: float, said: object, what: str, expected: str) -> float:
    if isinstance(said, bool) or not (math.isfinite(number) and number > 0):
        raise _refused(said, what, expected)
    return number


def nbytes_of(value: str | float, what: str) -> int:
    """Bytes, of a number of them or of a text with a unit.

    Raises:
        ValueError: it is neither.
    """
    expected = "bytes, as 24GB or 22GiB"
    if not isinstance(value, str):
        return int(_above_0(value, value, what, expected))
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise _refused(value, what, expected)
    base = 1024 if found[4] else 1000
    nbytes = _number(found) * base ** _PREFIXES[found[3].lower()]
    return int(_above_0(nbytes, value, what, expected))


def rate_of(value: str | float, what: str) -> float:
    """Bytes per second, of a text with a unit; a number without one is in GB/s.

    Raises:
        ValueError: it is neither.
    """
    expected = "bytes per second, as 25GB/s"
    found = _RATE.fullmatch(str(value).strip())
    if found is None:
        raise _refused(value, what, expected)
    if found[3] is None:
        return _above_0(_number(found), value, what, expected) * 1e9
    base = 1024 if found[4] else 1000
    return _above_0(_number(found) * base ** _PREFIXES[found[3].lower()], value, what, expected)


def flops_of(value: str | float, what: str) -> float:
    """Floating-point operations per second; a number without a unit is in TFLOP/s.

    Raises:
        ValueError: it is neither.
    """
    expected = "operations per second, as 150TFLOPS"
    found = _FLOPS.fullmatch(str(value).strip())
    if found is None:
        raise _refused(value, what, expected)
    power = 4 if found[3] is None else _PREFIXES[found[3].lower()]
    return _above_0(_number(found) * 1000.0**power, value, what, expected)


def count_of(text: str) -> int | None:
    """A number of parameters, as "7B", "1.5b" or "7e9"; None: `text` is none."""
    found = _COUNT.fullmatch(text.strip())
    return None if found is None else round(_number(found) * _COUNTS[found[3].lower()])


def size_text(nbytes: float) -> str:
    """Such as "23.4 GB"."""
    digits = 1 if nbytes < 99.95e9 else 0
    return f"{nbytes / 1e9:.{digits}f} GB"
