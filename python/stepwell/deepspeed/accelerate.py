"""Stepwell's optimizers under accelerate, which would replace them by DeepSpeed's.

With an `offload_optimizer` in the DeepSpeed JSON, `accelerate.prepare` makes a DeepSpeedCPUAdam
of the optimizer that it is given. One of Stepwell's would lose `moments`, `seed` and
the decoupled weight decay, since it is no `torch.optim.AdamW`.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from stepwell import optim
from stepwell.deepspeed.after_import import after_import
from stepwell.offload.optimizer import OffloadAdamW

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["keep_optimizers"]

_MODULE = "accelerate.utils.deepspeed"
_FUNCTION = "map_pytorch_optim_to_deepspeed"
# Modules that have the function by the same name.
_IMPORTERS = ("accelerate.utils", "accelerate.accelerator")

_LOGGER = logging.getLogger(__name__)


def keep_optimizers() -> None:
    """Has accelerate keep Stepwell's optimizers, as soon as it is imported."""
    if _MODULE in sys.modules:
        _replace()
    else:
        after_import(_MODULE, _replace)


def _replace() -> None:
    module = sys.modules[_MODULE]
    original = getattr(module, _FUNCTION, None)
    if original is None:
        _LOGGER.warning(
            "`%s.%s` does not exist: this version of accelerate may put DeepSpeed's optimizer in "
            "the "
            "place of Stepwell's. hint: name the optimizer in the DeepSpeed JSON, "
            '"optimizer": {"type": "StepwellAdamW"}',
            _MODULE,
            _FUNCTION,
        )
        return
    if hasattr(original, "stepwell_original"):
        return
    replacement = _kept(original)
    setattr(module, _FUNCTION, replacement)
    for name in _IMPORTERS:
        importer = sys.modules.get(name)
        if getattr(importer, _FUNCTION, None) is original:
            setattr(importer, _FUNCTION, replacement)


def _kept(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        if isinstance(optimizer, OffloadAdamW):
            raise ValueError(  # noqa: TRY004
                "the optimizer is `OffloadAdamW`, which offloads by itself, beside "
                "`offload_optimizer` in the "
                "DeepSpeed JSON. hint: stepwell.AdamW under DeepSpeed, which steps its partitions"
            )
        return optimizer if isinstance(optimizer, optim.Adam) else original(optimizer)

    map_pytorch_optim_to_deepspeed.stepwell_original = original  # type: ignore[attr-defined]
    return map_pytorch_optim_to_deepspeed
