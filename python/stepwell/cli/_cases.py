"""What the cases of `stepwell bench offload` are called.

A case is a system, ` q8` where its moments are, and options: `stepwell q8, deferred=2`. This module
imports no torch, since `--help` has its names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFAULT_CASES", "SYSTEMS", "Case"]


def _is(expected: str, value: str) -> str:
    """The only value that there is; an option without one has the empty one."""
    if value != expected:
        raise ValueError(value)
    return value


_flag = partial(_is, "")
_STEPWELL: dict[str, Callable[[str], Any]] = {
    "no model": _flag,
    "untold": _flag,
    "deferred": int,
    "fraction": float,
    "resident": float,
    "streamed": _flag,
}
_VOLUME: dict[str, Callable[[str], Any]] = {
    "durability": partial(_is, "none"),
    "commit_interval": int,
}
_DEEPSPEED: dict[str, Callable[[str], Any]] = {
    "zenflow": _flag,
    "offload_param": _flag,
    "ratio": float,
    "nvme": _flag,
}

SYSTEMS: dict[str, dict[str, Callable[[str], Any]]] = {
    "torch": {},
    "stepwell": _STEPWELL,
    "stepwell volume": {**_STEPWELL, **_VOLUME},
    "deepspeed": _DEEPSPEED,
    "deepspeed on stepwell": {
        **_DEEPSPEED,
        **_VOLUME,
        "accumulate": partial(_is, "device"),
        "fetch": partial(_is, "deepspeed"),
    },
}
"""Of each system its options, and what reads the value of one. It raises ValueError."""

DEFAULT_CASES = (
    *("torch", "stepwell", "stepwell q8", "stepwell volume", "stepwell volume q8"),
    *("deepspeed", "deepspeed on stepwell"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run, as its name says it."""

    system: str
    """One of `SYSTEMS`."""
    moments: str
    """`fp32` or `q8`."""
    options: dict[str, Any]
    """By name the values of those that are given."""

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a name.

        Raises:
            ValueError: there is none.
        """
        base, *words = name.split(", ")
        system = base.removesuffix(" q8")
        is_q8 = system != base
        known = SYSTEMS.get(system)
        if known is None or (is_q8 and "stepwell" not in system):
            raise ValueError(f"`{base}` has no cases, expected one of {', '.join(SYSTEMS)}")
        options = {}
        for word in words:
            option, _, value = word.partition("=")
            try:
                options[option] = known[option](value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"`{name}` has `{word}`, expected options of `{system}`: "
                    f"{', '.join(known) or 'none'}"
                ) from None
        if "fraction" in options and "deferred" not in options:
            raise ValueError(f"`{name}` has no `deferred`, expected it beside `fraction`")
        return cls(system=system, moments="q8" if is_q8 else "fp32", options=options)

    @property
    def is_on_drives(self) -> bool:
        """Whether its state is."""
        return self.system == "stepwell volume" or "nvme" in self.options
