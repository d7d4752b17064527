"""Optimizers of all kinds whose steps are prepared while the norm is computed, or later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resident_models import FIRST, made
from selected_models import loss_of, model_of, train
from stepwell import Deferred

if TYPE_CHECKING:
    from stepwell import OffloadAdamW
    from torch import nn

BEFORE = 3

# With residents, with selected channels, with both, and coded.
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "residents": {"device_bytes_max": FIRST},
    "deferred": {"deferred": Deferred(interval=2)},
    "selected": {"deferred": Deferred(interval=2, fraction=0.3, reselect=2)},
    "both": {
        "device_bytes_max": FIRST,
        "deferred": Deferred(interval=2, fraction=0.3, reselect=2),
    },
    "q8": {"device_bytes_max": FIRST, "deferred": Deferred(interval=2), "moments": "q8"},
}


def made_as(kind: str, **options: Any) -> tuple[nn.Module, OffloadAdamW]:
    """A model and its optimizer."""
    return made(model_of(), **{"device_bytes_max": 0, **KINDS[kind], **options})


def begun(kind: str) -> tuple[nn.Module, OffloadAdamW]:
    """A run of `BEFORE` steps, which has the gradients of its next one."""
    model, optimizer = run = made_as(kind)
    train(*run, range(BEFORE))
    optimizer.zero_grad()
    loss_of(model, BEFORE).backward()
    return run
