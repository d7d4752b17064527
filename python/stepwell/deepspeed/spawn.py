"""What DeepSpeed's processes run instead of its own functions: the same, after `register`.

A spawned process finds its function by name. These have names here, so importing them is all that
it takes.
"""

from __future__ import annotations

import importlib
import signal
from typing import TYPE_CHECKING, Any

from stepwell.deepspeed import native, zenflow

if TYPE_CHECKING:
    import torch

__all__ = ["superoffload_worker", "zenflow_worker"]


def _original(worker: Any) -> Any:
    """DeepSpeed's function, in this process."""
    from stepwell.deepspeed.register import register

    register()
    importlib.import_module("deepspeed")
    return worker.stepwell_original


def zenflow_worker(
    groups: Any, ctrl: torch.Tensor, ready: Any, zf_affinity: Any, adamw_mode: bool
) -> None:
    """ZenFlow's optimizer process."""
    # Ctrl-C reaches every process of a terminal. The training process decides what it means, and
    # ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _original(zenflow_worker)(groups, ctrl, ready, zf_affinity, adamw_mode)
    except BaseException as error:
        # The training process waits minutes for this one to be ready. Its first wait for a step
        # says why it is not.
        zenflow.fail(ctrl.data_ptr(), error)
        ready.set()
        raise


def superoffload_worker(*args: Any, **kwargs: Any) -> None:
    """SuperOffload's optimizer process.

    It steps while the backward pass goes on, before anyone knows whether all gradients are finite,
    and is told to roll back if one was not. So a step with a non-finite gradient is refused, and
    its rollback has nothing to do.
    """
    original = _original(superoffload_worker)
    native.set_nonfinite("refuse")
    original(*args, **kwargs)
