"""DeepSpeed's timers (`wall_clock_breakdown`) after an error. Imports no DeepSpeed."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["stop_all"]


def stop_all(timers: Any) -> None:
    """Stops those that an error has left running, the engine's too: none may be started twice."""
    for timer in timers.get_timers().values():
        if timer.started_:
            # A device that has failed takes no event. The program hears of the failure itself.
            with contextlib.suppress(RuntimeError):
                timer.stop()
