"""How the use of a volume ends: its last step is committed, where it is kept and is behind.

With the optimizer, or with the program. After a kill it does not: then the volume is at its last
commit.

Each rank commits its own last step. At the end another rank may be gone, or at another step; ranks
that go on go back to the last commit that all of their volumes have
(`stepwell.offload.sharded_volume`, SHV-3).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from stepwell.offload.finalizers import finalize

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from stepwell import _core

__all__ = ["end_with", "write_weights_behind"]

_LOGGER = logging.getLogger(__name__)


def end_with(
    owner: object,
    core: _core.Swap,
    weight: Callable[[int], _core.TensorView],
    synchronize: Callable[[], None],
) -> weakref.finalize[..., object]:
    """Has the volume end with its owner, or with the program, whichever is first.

    Args:
        owner: no argument may hold it.
        core: the volume.
        weight: gives the host side of a tensor of the volume, by its number.
        synchronize: waits until the last step is over.

    Returns:
        what ends it now.
    """
    return finalize(owner, _end, core, weight, synchronize, os.getpid())


def write_weights_behind(core: _core.Swap, weight: Callable[[int], _core.TensorView]) -> None:
    """Writes the weights that a commit would lack, between steps.

    Raises:
        OSError: a drive cannot be written.
    """
    for number in core.weights_behind():
        core.write_weights(number, weight(number))


def _end(
    core: _core.Swap,
    weight: Callable[[int], _core.TensorView],
    synchronize: Callable[[], None],
    process: int,
) -> None:
    try:
        # In a forked child the volume is its parent's.
        if process == os.getpid() and core.is_kept:
            synchronize()
            if core.is_behind:
                write_weights_behind(core, weight)
                core.commit()
                _LOGGER.info("volume `%s` ends with a commit of step %s", core.name, core.step)
    except (ValueError, OSError) as error:
        # A record that is kept would hold the frames that the error has come through, and them the
        # volume.
        _LOGGER.warning("the last step cannot be committed: %s", str(error))
    finally:
        core.close()
