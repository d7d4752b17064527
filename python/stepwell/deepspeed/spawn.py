"""What runs in the processes that DeepSpeed spawns.

DeepSpeed's own functions, with Stepwell in their seams.

`register` makes the functions by whose names a spawned process finds these.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from stepwell.deepspeed.native import adam, zenflow

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["superoffload_worker", "zenflow_worker"]


def zenflow_worker(
    registered: Callable[[], Any],
    groups: Any,
    ctrl: torch.Tensor,
    ready: Any,
    zf_affinity: Any,
    adamw_mode: bool,
) -> None:
    """ZenFlow's optimizer process.

    Args:
        registered: calls `register`, and returns DeepSpeed's function.
        groups: as DeepSpeed's function takes it; so are the others.
        ctrl: the control block.
        ready: an event that the training process waits for.
        zf_affinity: CPUs.
        adamw_mode: whether weight decay is AdamW's.
    """
    # Ctrl-C reaches every process of a terminal. The training process decides what it means, and
    # ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        registered()(groups, ctrl, ready, zf_affinity, adamw_mode)
    except BaseException as error:
        # The training process waits minutes for this one to be ready. Its first wait for a step
        # says why it is not.
        zenflow.fail(ctrl.data_ptr(), error)
        ready.set()
        raise


def superoffload_worker(registered: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    """SuperOffload's optimizer process.

    It steps while the backward pass goes on, before all gradients are known to be finite, and is
    told to roll back if one was not. So a step with a non-finite gradient is refused, and its
    rollback has nothing to do.

    Args:
        registered: calls `register`, and returns DeepSpeed's function.
        *args: as DeepSpeed's function takes them.
        **kwargs: likewise.
    """
    original = registered()
    adam.set_nonfinite("refuse")
    original(*args, **kwargs)
