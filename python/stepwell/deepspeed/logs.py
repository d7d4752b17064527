"""What Stepwell says to users of DeepSpeed, through DeepSpeed's logger too."""

from __future__ import annotations

import importlib
import logging
import os

__all__ = ["warn"]

_LOGGER = logging.getLogger(__name__)


def warn(message: str) -> None:
    """Warns once, on rank 0, where people look: among what DeepSpeed says.

    The logger `stepwell` gets it as well, if it has a handler. Without one Python would print it a
    second time.
    """
    comm = importlib.import_module("deepspeed.comm")
    rank = comm.get_rank() if comm.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank != 0:
        return
    theirs = importlib.import_module("deepspeed.utils").logger
    is_said = theirs.isEnabledFor(logging.WARNING)
    theirs.warning("stepwell: %s", message, stacklevel=2)
    if _LOGGER.hasHandlers() or not is_said:
        _LOGGER.warning(message, stacklevel=2)
