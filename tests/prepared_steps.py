"""Optimizers of all kinds whose steps are prepared while the norm is computed, or later."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from resident_models import FIRST, made
from selected_models import loss_of, model_of, train
from stepwell import Deferred
from stepwell.offload.gradients import Gradients
from stepwell.offload.step import OffloadStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
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


@contextlib.contextmanager
def preparing(monkeypatch: pytest.MonkeyPatch, *, is_early: bool) -> Iterator[pytest.MonkeyPatch]:
    """Steps are prepared while the norm is computed, or once it is known, as those of ranks are."""
    with monkeypatch.context() as patched:
        if not is_early:
            norm_of = OffloadStep._norm_of
            patched.setattr(
                OffloadStep,
                "_norm_of",
                lambda self, params, grads, _: norm_of(self, params, grads, None),
            )
        yield patched


def call_behind_the_wait(patched: pytest.MonkeyPatch, handler: Callable[[], object]) -> None:
    """A signal's handler: it runs when the norm has come, before the step is submitted."""
    read_with = Gradients.read_with

    def read(self: Gradients, *args: Any) -> float:
        found = read_with(self, *args)
        handler()
        return found

    patched.setattr(Gradients, "read_with", read)
