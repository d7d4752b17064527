"""What DeepSpeed's processes run instead of its own functions: the same, after `register`.

A spawned process finds its function by name. These have names here, so importing them is all that it takes.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any

from stepwell.deepspeed import native

__all__ = ["superoffload_worker", "zenflow_worker"]


def _original(worker: Any) -> Any:
    """DeepSpeed's function, in this process."""
    from stepwell.deepspeed.register import register

    register()
    importlib.import_module("deepspeed")
    return worker.stepwell_original


def zenflow_worker(*args: Any, **kwargs: Any) -> None:
    """ZenFlow's optimizer process."""
    # Ctrl-C reaches every process of a terminal. The training process decides what it means, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _original(zenflow_worker)(*args, **kwargs)


def superoffload_worker(*args: Any, **kwargs: Any) -> None:
    """SuperOffload's optimizer process.

    It steps while the backward pass goes on, before anyone knows whether all gradients are finite, and is told to roll back
    if one was not. So a step with a non-finite gradient is refused, and its rollback has nothing to do.
    """
    original = _original(superoffload_worker)
    native.set_nonfinite("refuse")
    original(*args, **kwargs)
