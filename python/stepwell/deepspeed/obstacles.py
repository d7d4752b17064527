"""The configurations of DeepSpeed that the offload engine does not run: a row for each.

Each row says what to change. `plan.py` warns of them, or raises where an optimizer of Stepwell's
could not step at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stepwell.deepspeed.case import STAGE_3, Case

__all__ = ["OBSTACLES", "Obstacle"]

_ACCELERATORS = ("cpu", "cuda")


class Obstacle(NamedTuple):
    """A configuration that the offload engine does not run."""

    reason: str
    """A template: `{case.x}` stands for an attribute of the case."""
    hint: str
    """What a user can change so that the obstacle is gone."""
    is_there: Callable[[Case], bool]
    stops_ours: bool = False
    """Whether an optimizer of Stepwell's does not step on DeepSpeed's own path there either."""
    is_early: bool = True
    """Whether it is known before the optimizer is made."""


OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        "optimizer state is on `{case.accelerator}`",
        '"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}',
        lambda case: case.accelerator != "cpu" and (case.device is None or not case.is_zero),
        stops_ours=True,
    ),
    Obstacle(
        "zero_optimization.elastic_checkpoint cannot cut the state of `{case.optimizer_name}`",
        "universal checkpoints change the number of ranks",
        lambda case: case.is_ours and case.engine.zero_elastic_checkpoint(),
        stops_ours=True,
    ),
    Obstacle(
        "zero_optimization.stage is `{case.stage}`, at which DeepSpeed offloads nothing",
        'set "stage": 2',
        lambda case: not case.is_zero,
    ),
    Obstacle(
        '"engine" is false in the block `stepwell`',
        'leave out "engine": false',
        lambda case: not case.options.engine,
    ),
    Obstacle(
        "the accelerator is `{case.accelerator}`",
        "DS_ACCELERATOR=cuda, where there is such a device",
        lambda case: case.accelerator not in _ACCELERATORS,
    ),
    Obstacle(
        "{case.optimizer_obstacle}",
        "optimizer type Adam or AdamW in the JSON, or a plain torch.optim.AdamW or stepwell.AdamW "
        "given to deepspeed.initialize",
        lambda case: case.optimizer_obstacle is not None,
        is_early=False,
    ),
    Obstacle(
        "zero_optimization.zenflow is on{case.why_zenflow}",
        "leave out zenflow",
        lambda case: case.engine.zenflow,
        stops_ours=True,
        is_early=False,
    ),
    Obstacle(
        "moments of `{case.optimizer_name}` are not fp32",
        "moments fp32",
        lambda case: case.zenflow is not None and case.has_coded_moments,
        is_early=False,
    ),
    Obstacle(
        "offload_optimizer.super_offload is on",
        "leave out super_offload",
        lambda case: case.engine.super_offload(),
        stops_ours=True,
    ),
    Obstacle(
        "offload_param.device is `nvme`",
        "device `cpu`, where the host has 2 bytes of memory more per parameter of a rank",
        lambda case: case.is_param_on_nvme,
    ),
    Obstacle(
        "weights are quantized, by an op that the engine is not tested with",
        "leave out zero_quantized_weights and zero_quantized_nontrainable_weights",
        lambda case: (
            case.engine.zero_quantized_weights()
            or case.engine.zero_quantized_nontrainable_weights()
        ),
    ),
    Obstacle(
        # It gives parameters other memory, which DeepSpeed's own step takes from them again.
        "compression_training quantizes or prunes weights behind steps",
        "leave out compression_training",
        lambda case: case.is_compressed,
    ),
    Obstacle(
        # DeepSpeed has another optimizer for it.
        "weights are sharded in groups of ranks with mics_shard_size",
        "leave out mics_shard_size",
        lambda case: case.is_sharded_in_groups,
    ),
    Obstacle(
        "gradients are quantized with zeropp_loco_param",
        "leave out zeropp_loco_param",
        lambda case: case.corrects_quantized,
    ),
    Obstacle(
        "gradients of a 16-bit model are summed in fp32, and this release of DeepSpeed rounds them",
        "pip install 'deepspeed=={case.tested_release}', or the model's dtype as "
        "data_types.grad_accum_dtype",
        lambda case: case.rounds_fp32_sums,
    ),
    Obstacle(
        "offload_optimizer.ratio is `{case.ratio}`, and `{case.optimizer_name}` steps in host "
        "memory only",
        "leave out ratio",
        lambda case: case.is_twin_flow and case.is_ours and not case.options.engine,
        stops_ours=True,
    ),
    Obstacle(
        # Experts are partitioned over groups of their own, over which DeepSpeed averages norms.
        "the model has mixtures of experts, and there are several ranks or it is ZeRO-3",
        "a model without deepspeed.moe layers, or one rank and ZeRO-2",
        lambda case: case.engine.has_moe_layers and (case.stage == STAGE_3 or not case.is_alone),
    ),
    Obstacle(
        # Gradients are reduced by another call, and tied weights are in the norm once.
        "the model is a pipeline",
        "a model that is no PipelineModule, under ZeRO-3",
        lambda case: case.is_pipeline,
    ),
    Obstacle(
        "the model is parallel",
        "ZeRO-3 instead of an mpu or tensor_parallel",
        lambda case: case.is_model_parallel,
    ),
    Obstacle(
        # Its GradScaler calls the optimizer's step, sub-group by sub-group.
        "torch_autocast is in float16",
        'torch_autocast in bfloat16, or "fp16": {{"enabled": true}} in its place',
        lambda case: case.is_autocast_fp16,
    ),
    Obstacle(
        # Its passes reduce gradients by themselves, without the calls that the engine takes.
        "DeepCompile is on",
        "leave out compile.deepcompile",
        lambda case: case.engine.is_deepcompile_enabled(),
    ),
    Obstacle(
        "the hybrid engine is on",
        "leave out hybrid_engine",
        lambda case: case.engine._config.hybrid_engine.enabled,
    ),
    Obstacle(
        "{case.unfit}",
        "pip install 'deepspeed=={case.tested_release}'",
        lambda case: case.unfit is not None,
    ),
)
