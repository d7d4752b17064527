"""Where a parameter lies in what this rank steps. Imports no DeepSpeed."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Fragment"]


class Fragment(NamedTuple):
    """The part of a parameter that lies in this rank's partition of its group."""

    group: int
    """Number of the group."""
    begin: int
    """First element, within the partition."""
    numel: int
    """How many."""
