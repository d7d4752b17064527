"""Stepwell inside DeepSpeed.

`register()` fills DeepSpeed's seams, so that its CPU offload runs on Stepwell's kernels.

The only place that imports deepspeed, and only when it is called.
"""

from stepwell.deepspeed.plan import Plan
from stepwell.deepspeed.register import VERSIONS, register, seam_report
from stepwell.deepspeed.seams import Seam
from stepwell.deepspeed.state.decoding import DecodingState
from stepwell.deepspeed.zero.optimizer_type import StepwellAdam, StepwellAdamW

__all__ = [
    "VERSIONS",
    "DecodingState",
    "Plan",
    "Seam",
    "StepwellAdam",
    "StepwellAdamW",
    "register",
    "seam_report",
]
