"""Finalizers that wait for a step, and threads that a step waits for.

The garbage collector runs on any thread, and calls finalizers there. On a thread that a step waits
for, such a finalizer would wait for ever. So that thread calls it once it has done its work.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["finalize", "postponed"]


class _Postponed(threading.local):
    """What the collector has called on this thread; None: it is called at once."""

    calls: list[partial[Any]] | None = None


_POSTPONED = _Postponed()


def finalize(
    owner: object, function: Callable[..., object], *args: Any
) -> weakref.finalize[..., object]:
    """As weakref.finalize, of a `function` that waits for steps."""
    return weakref.finalize(owner, _call, partial(function, *args))


def _call(function: partial[Any]) -> None:
    if _POSTPONED.calls is None:
        function()
    else:
        _POSTPONED.calls.append(function)


@contextlib.contextmanager
def postponed() -> Iterator[Callable[[], None]]:
    """In this context no finalizer is called on this thread but by the function that it gives.

    Those that are left are called at its end.
    """
    calls: list[partial[Any]] = []

    def call_all() -> None:
        while calls:
            calls.pop(0)()

    _POSTPONED.calls = calls
    try:
        yield call_all
    finally:
        call_all()
        _POSTPONED.calls = None
