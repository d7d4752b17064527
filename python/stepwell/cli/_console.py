"""Where commands print what is more than lines."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["output"]

# Wider than any table. A program that reads the output would find halves of words.
_WIDTH_OF_NO_TERMINAL = 10_000


def output() -> Console:
    """The standard output. Where that is no terminal nothing is wrapped, and nothing cut."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_NO_TERMINAL)
