"""A signal's handler at a given line of a step."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell import OffloadAdamW


def step_with_handler(optimizer: OffloadAdamW, line: int, handler: Callable[[], object]) -> bool:
    """Steps, and calls the handler in that line, counted from 1 as Python goes over them.

    Returns whether there was that line.
    """
    left = line

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            left = -1
            sys.settrace(None)
            handler()
            return None
        return trace

    # Libraries have code called by collections, out of which nothing is raised.
    gc.disable()
    sys.settrace(trace)
    try:
        optimizer.step()
    finally:
        sys.settrace(None)
        gc.enable()
    return left < 0


def interrupted_at(optimizer: OffloadAdamW, line: int) -> bool:
    """Whether Ctrl-C came in that line of a step."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        step_with_handler(optimizer, line, interrupt)
    except KeyboardInterrupt:
        return True
    return False
