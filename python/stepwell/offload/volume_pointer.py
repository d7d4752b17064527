"""State dicts that say which step of a volume they are of, in place of what the volume has."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from stepwell.store.state_volume import StateVolume

__all__ = ["check_pointer", "is_pointer", "pointer_to"]

_LOGGER = logging.getLogger(__name__)

_KEY = "volume"


def pointer_to(volume: StateVolume[Any], param_groups: list[dict[str, Any]]) -> StateDict:
    """The state dict that says which step of a volume it is of.

    Args:
        volume: its last step is committed.
        param_groups: those of the optimizer.
    """
    number = itertools.count()
    groups = [{**each, "params": [next(number) for _ in each["params"]]} for each in param_groups]
    return {"state": {}, "param_groups": groups, _KEY: _place_of(volume)}


def is_pointer(state_dict: StateDict) -> bool:
    """Whether `pointer_to` has made it."""
    return _KEY in state_dict


def check_pointer(state_dict: StateDict, volume: StateVolume[Any] | None) -> None:
    """Raises ValueError if it points to another volume, or to a step that this one is not at yet.

    Args:
        state_dict: it `is_pointer`.
        volume: that of the optimizer; None: it has none.
    """
    said, found = state_dict[_KEY], None if volume is None else _place_of(volume)
    if found is None or found["name"] != said["name"] or found["step"] < said["step"]:
        raise ValueError(
            f"the state dict is of step `{said['step']}` of volume `{said['name']}`, whose state "
            f"it does not have, and the optimizer has the volume `{found}`. hint: "
            f"tier=Volume([DRIVE, ...], name={said['name']!r}, resume=True), with the drives of "
            "that run"
        )
    if found["step"] > said["step"]:
        _LOGGER.warning(
            "the state dict is of step %d of volume `%s`, which has gone on to step %d: weights "
            "and state are those of the latter. hint: a commit_interval as long as the steps from "
            "one checkpoint to the next",
            said["step"],
            said["name"],
            found["step"],
        )


def _place_of(volume: StateVolume[Any]) -> dict[str, Any]:
    return {"name": volume.options.name, "step": volume.committed_steps or 0}
