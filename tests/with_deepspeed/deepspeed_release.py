"""Which DeepSpeed is installed."""

import importlib.metadata

import stepwell.deepspeed

RELEASE = importlib.metadata.version("deepspeed")
HAS_ENGINE = RELEASE in stepwell.deepspeed.fingerprints.tested()["OffloadZeroOptimizer"]
"""Whether ZeRO runs on Stepwell's engine with it. If not, `make test-versions` runs these tests."""
