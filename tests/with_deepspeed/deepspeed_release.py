"""Which DeepSpeed is installed, and what the releases before the last have otherwise."""

import importlib.metadata
import math

RELEASE = importlib.metadata.version("deepspeed")
IS_OLDER = RELEASE in ("0.19.6", "0.19.7")
"""Whether it is one that `make test-versions` runs these tests on."""
HAS_FP32_SUMS = not IS_OLDER
"""Whether ZeRO-1 and -2 sum 16-bit gradients in fp32 on the engine."""


def fp32_sums(stage):
    """Options of a run that sums gradients in fp32, as far as the engine does with this release."""
    has_sums = HAS_FP32_SUMS or stage == 3
    return {"data_types": {"grad_accum_dtype": "fp32"}} if has_sums else {}


def told_norms(ours, theirs):
    """What DeepSpeed's own path tells, norms among it; those of skipped steps are the engine's.

    Older releases tell others of a gradient that is not finite.
    """
    if not IS_OLDER:
        return theirs
    pairs = zip(ours, theirs, strict=True)
    return [one if isinstance(one, float) and math.isinf(one) else other for one, other in pairs]
