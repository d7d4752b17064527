"""What steps the optimizer of a DeepSpeedEngine: decided once, from its configuration, as a value.

A configuration that cannot run on the offload engine is a row of `_OBSTACLES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stepwell import optim
from stepwell.deepspeed.options import Options, options_of
from stepwell.deepspeed.seams import accelerator_name
from stepwell.deepspeed.zero.optimizer_type import StepwellAdam, StepwellAdamW

__all__ = ["Plan", "device_of", "plan"]

_ACCELERATORS = ("cpu", "cuda")
_STAGE_3 = 3

ZeroClass = Literal["OffloadZeroOptimizer", "OffloadZeroOptimizerStage3"]
"""The class of ZeRO's optimizer on the offload engine."""


@dataclass(frozen=True)
class Plan:
    """What steps an optimizer. An engine has it as `stepwell_plan`."""

    zero_class: ZeroClass | None
    """The class on the offload engine; None: DeepSpeed's own class."""
    tier: Literal["ram"] | None
    """Where the engine keeps state; None: that is DeepSpeed's affair."""
    gate: Literal["module", "step"] | None
    """What waits for new weights: forwards for their own, or `step()` for all.

    None: it is not on the engine.
    """
    reasons: tuple[str, ...]
    """Why offloaded state is not on the engine, all of them.

    Empty where it is, or where nothing is offloaded.
    """
    options: Options
    """The block `stepwell` of the DeepSpeed JSON."""


class _Case(NamedTuple):
    """The configuration that the plan is made for."""

    engine: Any
    optimizer: Any
    options: Options
    stage: int
    device: str
    unfit: str | None
    """Why the class does not fit this version of DeepSpeed; None: it does."""

    @property
    def accelerator(self) -> str:
        return accelerator_name()

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def is_optimizer_known(self) -> bool:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        known = (DeepSpeedCPUAdam, StepwellAdam, StepwellAdamW, optim.Adam, optim.AdamW)
        return type(self.optimizer) in known

    @property
    def is_pipeline(self) -> bool:
        from deepspeed.runtime.pipe.module import PipelineModule

        return isinstance(self.engine.module, PipelineModule)

    @property
    def is_model_parallel(self) -> bool:
        mpu = self.engine.mpu
        return mpu is not None and not hasattr(mpu, "initialize_sequence_parallel")

    @property
    def is_autocast(self) -> bool:
        from deepspeed.runtime.torch_autocast import is_autocast_initialized

        return bool(is_autocast_initialized())

    @property
    def is_alone(self) -> bool:
        from deepspeed import comm

        group = self.engine.seq_data_parallel_group
        return bool(comm.get_world_size(group=group) == 1)


class _Obstacle(NamedTuple):
    """A configuration that the offload engine does not run."""

    reason: str
    """A template: `{case.x}` stands for an attribute of the case."""
    is_there: Callable[[_Case], bool]


_OBSTACLES = (
    _Obstacle("offload_optimizer.device is `{case.device}`", lambda case: case.device != "cpu"),
    _Obstacle(
        '"engine" is false in the block `stepwell`',
        lambda case: not case.options.engine,
    ),
    _Obstacle(
        "the accelerator is `{case.accelerator}`",
        lambda case: case.accelerator not in _ACCELERATORS,
    ),
    _Obstacle(
        "the optimizer is `{case.optimizer_name}`",
        lambda case: not case.is_optimizer_known,
    ),
    _Obstacle("ZenFlow is on", lambda case: case.engine.zenflow),
    _Obstacle("SuperOffload is on", lambda case: case.engine.super_offload()),
    # Below stage 3 DeepSpeed does not offload parameters, whatever the JSON says.
    _Obstacle(
        "parameters are offloaded",
        lambda case: (
            case.stage == _STAGE_3 and device_of(case.engine.zero_offload_param()) is not None
        ),
    ),
    _Obstacle(
        "zero_hpz_partition_size is not 1",
        lambda case: case.engine.zero_hpz_partition_size() != 1,
    ),
    _Obstacle(
        "weights are quantized",
        lambda case: (
            case.engine.zero_quantized_weights()
            or case.engine.zero_quantized_nontrainable_weights()
        ),
    ),
    _Obstacle(
        "offload_optimizer.ratio is not 1",
        lambda case: case.engine.zero_partial_offload() != 1.0,
    ),
    _Obstacle("the model has mixtures of experts", lambda case: case.engine.has_moe_layers),
    _Obstacle("the model is a pipeline", lambda case: case.is_pipeline),
    _Obstacle("the model is parallel", lambda case: case.is_model_parallel),
    _Obstacle("torch_autocast is on", lambda case: case.is_autocast),
    _Obstacle("DeepCompile is on", lambda case: case.engine.is_deepcompile_enabled()),
    _Obstacle(
        "the hybrid engine is on",
        lambda case: case.engine._config.hybrid_engine.enabled,
    ),
    _Obstacle("{case.unfit}", lambda case: case.unfit is not None),
)


def device_of(offload: Any) -> str | None:
    """The device of an offload configuration; None: nothing is offloaded."""
    device = None if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if device == "none" else device


def _check_moments(optimizer: Any, options: Options) -> None:
    held = optimizer._moments if isinstance(optimizer, optim.Adam) else "fp32"
    if options.moments not in (None, held):
        raise ValueError(
            f"`stepwell.moments` is `{options.moments}`, but the optimizer is "
            f"`{type(optimizer).__name__}` "
            f"with `{held}`. hint: optimizers of type Adam, AdamW, StepwellAdam and StepwellAdamW "
            "in the "
            "JSON take it from there"
        )


def plan(engine: Any, optimizer: Any, unfit: Callable[[ZeroClass], str | None]) -> Plan:
    """Decides what steps the optimizer of a DeepSpeedEngine with ZeRO.

    Args:
        engine: the DeepSpeedEngine.
        optimizer: the one that ZeRO gets; None: the engine is for inference.
        unfit: says why a class does not fit this version of DeepSpeed; None: it does.

    Raises:
        ValueError: the block `stepwell` cannot be understood, or its `moments` are not those of the
            optimizer.
    """
    options = options_of(engine)
    device = device_of(engine.zero_offload_optimizer())
    if optimizer is None:
        return Plan(None, None, None, (), options)
    _check_moments(optimizer, options)
    if device is None:
        return Plan(None, None, None, (), options)
    stage = engine.zero_optimization_stage()
    zero_class: ZeroClass = (
        "OffloadZeroOptimizerStage3" if stage == _STAGE_3 else "OffloadZeroOptimizer"
    )
    case = _Case(engine, optimizer, options, stage, device, unfit(zero_class))
    reasons = tuple(row.reason.format(case=case) for row in _OBSTACLES if row.is_there(case))
    if reasons:
        return Plan(None, None, None, reasons, options)
    # ZeRO-3 gathers weights by other ways than forwards, and several ranks gather in the step.
    is_gated = options.gate == "module" and stage != _STAGE_3 and case.is_alone
    return Plan(zero_class, "ram", "module" if is_gated else "step", (), options)
