"""Stepwell inside DeepSpeed: `register()` fills DeepSpeed's seams, so that its CPU offload runs on Stepwell's kernels.

The only place that imports deepspeed, and only when it is called.
"""

from stepwell.deepspeed.optimizer_type import StepwellAdam, StepwellAdamW
from stepwell.deepspeed.register import VERSIONS, register, seam_report
from stepwell.deepspeed.seams import Seam

__all__ = ["VERSIONS", "Seam", "StepwellAdam", "StepwellAdamW", "register", "seam_report"]
