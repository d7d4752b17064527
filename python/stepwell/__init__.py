"""Adam(W) over host memory for models that outgrow their GPU."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"stepwell runs on Linux only, this is `{sys.platform}`. "
        "hint: use torch.optim.AdamW here; on Windows, WSL2 is Linux"
    )

try:
    from stepwell._core import __version__, connect
except ImportError as error:
    raise ImportError(
        f"stepwell's native module cannot be loaded: {error}. "
        "hint: pip install --force-reinstall stepwell; in its sources, `make test` builds it"
    ) from error

# Before torch is imported: its OpenMP runtime may narrow this thread's affinity mask.
connect()

if TYPE_CHECKING:
    from stepwell.offload import Deferred, OffloadAdamW, Volume
    from stepwell.optim import Adam, AdamW
    from stepwell.planning import plan

__all__ = ["Adam", "AdamW", "Deferred", "OffloadAdamW", "Volume", "__version__", "plan"]

_EXPORTS = {
    "Adam": "optim",
    "AdamW": "optim",
    "Deferred": "offload",
    "OffloadAdamW": "offload",
    "Volume": "offload",
    "plan": "planning",
}
_SUBMODULES = ("deepspeed", "offload", "optim", "planning")


def _import(name: str) -> Any:
    try:
        return import_module(f"stepwell.{name}")
    except AttributeError as error:
        # `from stepwell import AdamW` would take it for a missing name, and hide what is wrong.
        raise ImportError(f"`stepwell.{name}` cannot be imported: {error}") from error


def __getattr__(name: str) -> Any:
    # Imported when first used: `stepwell --help` needs no torch, `stepwell doctor` runs where torch
    # is broken, and a program that has no DeepSpeed does not import it.
    if name in _EXPORTS:
        value = getattr(_import(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return _import(name)
    raise AttributeError(f"module `stepwell` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBMODULES})
