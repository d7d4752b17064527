"""Which release of DeepSpeed is imported, and what not all releases have.

Only what a configuration does not show is asked here: whether a method is as it was in a tested
release is the affair of `fingerprints`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["has_fp32_sums", "release_name"]


def release_name() -> str | None:
    """The version of the DeepSpeed that is imported; None: there is none, or it does not say."""
    name = getattr(sys.modules.get("deepspeed"), "__version__", None)
    return None if name is None else str(name)


def has_fp32_sums() -> bool:
    """Whether ZeRO-1 and -2 sum gradients of 16 bits in fp32, where they are to.

    DeepSpeed 0.19.8 has memory for such sums. The releases before it round them. They also free a
    gradient larger than a bucket when its reduction is launched.
    """
    module: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    return hasattr(module.DeepSpeedZeroOptimizer, "_use_compact_grad_partition_buffer")
