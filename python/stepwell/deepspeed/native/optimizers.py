"""The optimizers that DeepSpeed's native op `cpu_adam` has made in this process.

They go by DeepSpeed's numbers for them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NativeOptimizer", "add", "get", "remove"]


@dataclass
class NativeOptimizer:
    """What the op keeps of an optimizer; updates bring everything else along."""

    decoupled: bool
    """Whether its weight decay is AdamW's."""


_OPTIMIZERS: dict[int, NativeOptimizer] = {}


def add(optimizer_id: int, *, decoupled: bool) -> None:
    """Makes an optimizer, or makes it anew."""
    _OPTIMIZERS[optimizer_id] = NativeOptimizer(decoupled)


def get(optimizer_id: int) -> NativeOptimizer:
    """The optimizer of a number.

    Raises:
        ValueError: there is none.
    """
    try:
        return _OPTIMIZERS[optimizer_id]
    except KeyError:
        raise ValueError(
            f"there is no optimizer `{optimizer_id}`, expected one of {sorted(_OPTIMIZERS)}. "
            "hint: create_adam makes one"
        ) from None


def remove(optimizer_id: int) -> None:
    """Forgets an optimizer, if there is one of that number."""
    _OPTIMIZERS.pop(optimizer_id, None)
