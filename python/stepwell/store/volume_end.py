"""How the use of a volume ends: its last step is committed, where it is kept and is behind.

With the optimizer, or with the program. After a kill it does not: then the volume is at its last
commit. A new volume that has none yet cannot be gone on from, and is removed.

Signals stay the program's. A commit is one call of the core, behind which their handlers run. So
Ctrl-C here leaves the volume at this commit or at the one before, and is dropped, as Python drops
whatever a finalizer raises.

Each rank commits its own last step. At the end another rank may be gone, or at another step; ranks
that go on go back to the last commit that all of their volumes have
(`stepwell.store.sharded_volume`, SHV-3).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from stepwell.access.finalizers import finalize

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from stepwell import _core
    from stepwell.store.state_volume import StateVolume

__all__ = ["end_with"]

_LOGGER = logging.getLogger(__name__)


def end_with(
    owner: object,
    volume: StateVolume[Any],
    between_steps: Callable[[], AbstractContextManager[None]],
) -> weakref.finalize[..., object]:
    """Has a volume that is open end with its owner, or with the program, whichever is first.

    Args:
        owner: no argument may hold it.
        volume: the volume.
        between_steps: gives a context that begins when the last step is over, and in which none
            begins.

    Returns:
        what ends it now.
    """
    ends = finalize(owner, _end, volume, between_steps, os.getpid())
    if multiprocessing.parent_process() is not None:
        # Where it was forked, the program ends without what `weakref` would do then.
        Finalize(None, ends, exitpriority=0)
    return ends


def _end(
    volume: StateVolume[Any],
    between_steps: Callable[[], AbstractContextManager[None]],
    process: int,
) -> None:
    if process != os.getpid():
        # In a forked child the volume is its parent's.
        return
    core = volume.core
    assert core is not None
    try:
        if core.is_kept:
            with between_steps():
                if core.is_behind:
                    volume.write_weights()
                    core.commit()
                    said = "volume `%s` ends with a commit of step %s"
                    _LOGGER.info(said, core.name, core.step)
    # Nobody could catch it: Python drops what a finalizer raises, and where the program ends, the
    # finalizers that are left as well. So what a signal's handler raises stays here too.
    except BaseException as error:  # noqa: BLE001
        # As text: a record that is kept would hold the frames that the error has come through, and
        # them the volume.
        said = f"{type(error).__name__} {error}"
        _LOGGER.warning("the last step may not be committed: %s", said)
    finally:
        core.close(keep=False if _is_new(core) else None)


def _is_new(core: _core.Swap) -> bool:
    """Whether nothing was committed."""
    with contextlib.suppress(ValueError, OSError):
        return core.step is None
    # It was closed before.
    return False
