"""DeepSpeed imported without its words on stdout, which belongs to what a command prints."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet_deepspeed"]


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Within it, log messages below errors are dropped, and all else goes to stderr.

    The handlers that DeepSpeed makes within it keep writing to stderr after it.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)
