"""Adam(W) over host memory for models that outgrow their GPU."""

import sys

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"stepwell runs on Linux only, this is `{sys.platform}`. hint: use torch.optim.AdamW here; on Windows, WSL2 is Linux"
    )

import logging
from importlib import import_module
from types import ModuleType

from stepwell._core import __version__, connect

# Before torch is imported: its OpenMP runtime may narrow this thread's affinity mask.
connect()

from stepwell.offload import OffloadAdamW
from stepwell.optim import Adam, AdamW

__all__ = ["Adam", "AdamW", "OffloadAdamW", "__version__"]

# What is logged under "stepwell" is the application's to show.
logging.getLogger("stepwell").addHandler(logging.NullHandler())


def __getattr__(name: str) -> ModuleType:
    # `stepwell.deepspeed` without an import of its own, and without its cost for who does not use
    # it.
    if name == "deepspeed":
        return import_module("stepwell.deepspeed")
    raise AttributeError(f"module `stepwell` has no attribute `{name}`")
