"""What steps the optimizer of a DeepSpeedEngine: decided once, from its configuration, as a value.

A configuration that cannot run on the offload engine is a row of `_OBSTACLES`. Each row says what
to change. What a user who asked for offload is not getting is in `Plan.warning`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from stepwell import optim
from stepwell.deepspeed import fingerprints, zenflow
from stepwell.deepspeed.options import Options, options_of, said, written
from stepwell.deepspeed.seams import accelerator_name
from stepwell.deepspeed.zero.operands import obstacle_of
from stepwell.offload.volume import Volume

__all__ = ["Plan", "device_of", "inference_plan", "plan", "zenflow_plan"]

_ACCELERATORS = ("cpu", "cuda")
_STAGE_2, _STAGE_3 = 2, 3
# Of the block `stepwell`: what only the offload engine reads.
_ENGINE_KEYS = ("gate", "accumulate", "fetch", "threads", "host_bytes_max")
_VOLUME_KEYS = ("nvme_paths", "volume")
# Of `offload_optimizer` with device `nvme`: what only DeepSpeed's own swapper reads.
_SWAPPER_KEYS = ("buffer_count", "pipeline_read", "pipeline_write", "fast_init")

ZeroClass = Literal["OffloadZeroOptimizer", "OffloadZeroOptimizerStage3"]
"""The class of ZeRO's optimizer on the offload engine."""

# What fetches weights in the place of DeepSpeed's classes.
_FETCHING_CLASSES = ("ModuleHooks", "Fetcher")


@dataclass(frozen=True)
class Plan:
    """What steps an optimizer. An engine has it as `stepwell_plan`."""

    zero_class: ZeroClass | None
    """The class on the offload engine; None: DeepSpeed's own class."""
    tier: Literal["ram", "volume"] | None
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
    warning: str | None = None
    """What the user asked for and does not get, with what to change; None: nothing."""
    is_pinned: bool = True
    """Whether what crosses the bus is pinned. Not so if the JSON says `pin_memory: false`."""
    propagates: bool = False
    """Whether gradients that are not finite are stepped: the JSON says so."""
    fetch: Literal["stepwell", "deepspeed"] = "deepspeed"
    """What has partitioned weights on the device while a module uses them."""
    zenflow: zenflow.ZenFlow | None = None
    """Which updates are deferred, as the block `zenflow` says; None: none is by the engine."""
    volume: Volume | None = None
    """What the volume is, with tier "volume"."""

    @property
    def threads(self) -> int | None:
        """Workers that step; None: most physical cores of this process."""
        if self.options.threads is not None or self.zenflow is None:
            return self.options.threads
        return self.zenflow.threads

    @property
    def is_resumed(self) -> bool:
        """Whether weights and state come from a volume that is there."""
        return self.volume is not None and self.volume.resume


class _Case(NamedTuple):
    """The configuration that the plan is made for."""

    engine: Any
    optimizer: Any
    options: Options
    stage: int
    device: str | None
    is_zero: bool
    """Whether DeepSpeed makes an optimizer of ZeRO of it."""
    unfit: str | None
    """Why the class does not fit this version of DeepSpeed; None: it does."""

    @property
    def tested_release(self) -> str:
        return fingerprints.releases()[-1]

    @property
    def accelerator(self) -> str:
        return accelerator_name()

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def ratio(self) -> float:
        return float(self.engine.zero_partial_offload())

    @property
    def is_twin_flow(self) -> bool:
        return self.ratio != 1.0

    @property
    def has_16_bit_masters(self) -> bool:
        engine = self.engine
        return bool(
            engine.bf16_master_weights_and_gradients() or engine.fp16_master_weights_and_gradients()
        )

    @property
    def is_ours(self) -> bool:
        return isinstance(self.optimizer, optim.Adam)

    @property
    def optimizer_obstacle(self) -> str | None:
        """Why the engine does not take this optimizer's steps; None: it does."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        from stepwell.deepspeed.zero.optimizer_type import StepwellAdam, StepwellAdamW

        known = (DeepSpeedCPUAdam, StepwellAdam, StepwellAdamW, optim.Adam, optim.AdamW)
        return obstacle_of(self.optimizer, known)

    @property
    def is_param_on_nvme(self) -> bool:
        # Below stage 3 DeepSpeed does not offload parameters, whatever the JSON says.
        return self.stage == _STAGE_3 and device_of(self.engine.zero_offload_param()) == "nvme"

    @property
    def is_on_nvme(self) -> bool:
        return self.device == "nvme"

    @property
    def is_on_swapper(self) -> bool:
        # Below stage 3 DeepSpeed holds the state in host memory, whatever the JSON says.
        return self.stage == _STAGE_3 and self.is_on_nvme

    @property
    def is_pipeline(self) -> bool:
        from deepspeed.runtime.pipe.module import PipelineModule

        return isinstance(self.engine.module, PipelineModule)

    @property
    def is_model_parallel(self) -> bool:
        mpu = self.engine.mpu
        return mpu is not None and not hasattr(mpu, "initialize_sequence_parallel")

    @property
    def is_autocast_fp16(self) -> bool:
        from deepspeed.runtime.torch_autocast import get_autocast_dtype, is_autocast_initialized

        return bool(is_autocast_initialized()) and get_autocast_dtype() == torch.float16

    @property
    def is_alone(self) -> bool:
        from deepspeed import comm

        group = self.engine.seq_data_parallel_group
        return bool(comm.get_world_size(group=group) == 1)

    @property
    def why_step_waits(self) -> str | None:
        """Why a step waits for all weights, whatever the gate is; None: it need not."""
        if self.engine.wall_clock_breakdown():
            # Timers are to time the step.
            return "with wall_clock_breakdown"
        if self.is_alone:
            # DeepSpeed computes with the partitions themselves.
            is_on_device = device_of(self.engine.zero_offload_param()) != "cpu"
            waits = self.stage == _STAGE_3 and is_on_device
            return "under ZeRO-3 without offload_param on one rank" if waits else None
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            # Collectives of two threads wait for each other where ranks launch them in two orders.
            return "with CUDA_DEVICE_MAX_CONNECTIONS=1 and several ranks"
        # What is deferred is gathered with a later step.
        return None if self.zenflow is None else "under zenflow with several ranks"

    @property
    def zenflow(self) -> zenflow.ZenFlow | None:
        """What the offload engine was given of the block `zenflow`."""
        return zenflow.asked(self.engine)

    @property
    def why_zenflow(self) -> str:
        """Why ZenFlow is DeepSpeed's own, behind a colon; empty: it is not known."""
        why = vars(self.engine).get("stepwell_zenflow_obstacle")
        return "" if why is None else f": {why}"

    @property
    def has_coded_moments(self) -> bool:
        """Whether moments are held in another form than fp32."""
        if self.is_ours:
            return bool(self.optimizer._moments != "fp32")
        return not getattr(self.optimizer, "fp32_optimizer_states", True)

    @property
    def why_deepspeed_fetches(self) -> str | None:
        """Why DeepSpeed's hooks fetch weights; None: those of Stepwell do."""
        if self.stage != _STAGE_3:
            return "below ZeRO-3"
        if self.is_alone:
            if device_of(self.engine.zero_offload_param()) != "cpu":
                return "without offload_param under ZeRO-3 on one rank"
        elif self.why_deepspeed_gathers is not None:
            return self.why_deepspeed_gathers
        return None if self.options.fetch == "stepwell" else "as the JSON says"

    @property
    def why_deepspeed_gathers(self) -> str | None:
        """What of DeepSpeed's gathers Stepwell's are not, on several ranks; None: nothing."""
        from deepspeed.runtime.torch_autocast import is_autocast_initialized

        zero = self.engine._config.zero_config
        found = {
            "parameters on NVMe": self.is_param_on_nvme,
            # Weights may be gathered in another dtype.
            "torch_autocast": bool(is_autocast_initialized()),
            # Parameters have partitions in a second group.
            "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
            # Gone since DeepSpeed 0.19.8.
            "mics_shard_size": getattr(zero, "mics_shard_size", 0) > 0,
            "stage3_use_all_reduce_for_fetch_params": zero.use_all_reduce_for_fetch_params,
        }
        why = next((name for name, is_there in found.items() if is_there), None)
        return None if why is None else f"with {why} and several ranks"

    @property
    def idle_keys(self) -> list[str]:
        """Keys of the block `stepwell` that only the offload engine reads."""
        return [key for key in (*_ENGINE_KEYS, *_VOLUME_KEYS) if key in written(self.engine)]

    @property
    def swapper_keys(self) -> list[str]:
        """What the JSON says to DeepSpeed's own swapper, which does not exist on the engine."""
        zero = ("zero_optimization", "offload_optimizer")
        keys = [key for key in _SWAPPER_KEYS if said(self.engine, *zero, key) is not None]
        # Parameters may be on its drives as well.
        has_aio = said(self.engine, "aio") is not None and not self.is_param_on_nvme
        return [*(f"offload_optimizer.{key}" for key in keys), *(["aio"] if has_aio else [])]

    @property
    def is_pinned(self) -> bool:
        return (
            said(self.engine, "zero_optimization", "offload_optimizer", "pin_memory") is not False
        )

    @property
    def propagates(self) -> bool:
        # A word of the optimizer's is nearer to it.
        if self.is_ours and "nonfinite" in (self.engine.optimizer_params() or {}):
            return False
        blocks = ("bf16", "bfloat16")
        return self.engine.bfloat16_enabled() and any(
            said(self.engine, block, "check_grad_overflow") is False for block in blocks
        )

    @property
    def stepper(self) -> str:
        """What steps the optimizer where the offload engine does not."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if not self.is_zero:
            path = "DeepSpeed without ZeRO"
        elif self.engine.zenflow:
            path = "DeepSpeed's ZenFlow"
        elif self.engine.super_offload():
            path = "DeepSpeed's SuperOffload"
        elif self.is_on_swapper:
            path = "DeepSpeed's NVMe swapper"
        elif self.is_twin_flow:
            path = "DeepSpeed's Twin-Flow: the share in host memory"
        else:
            path = "DeepSpeed's own path"
        if self.is_on_nvme and not self.is_on_swapper:
            path += ", with the state in host memory"
        if self.is_ours or isinstance(self.optimizer, DeepSpeedCPUAdam):
            return f"{path}, on Stepwell's kernels"
        is_torchs = type(self.optimizer).__module__.startswith("torch.")
        owner = "torch's " if is_torchs else ""
        return f"{path}, with {owner}`{self.optimizer_name}`"


class _Obstacle(NamedTuple):
    """A configuration that the offload engine does not run."""

    reason: str
    """A template: `{case.x}` stands for an attribute of the case."""
    hint: str
    """What a user can change so that the obstacle is gone."""
    is_there: Callable[[_Case], bool]
    stops_ours: bool = False
    """Whether an optimizer of Stepwell's does not step on DeepSpeed's own path there either."""
    is_early: bool = True
    """Whether it is known before the optimizer is made."""


_OBSTACLES = (
    _Obstacle(
        "optimizer state is on `{case.accelerator}`",
        '"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}',
        lambda case: case.accelerator != "cpu" and (case.device is None or not case.is_zero),
        stops_ours=True,
    ),
    _Obstacle(
        "zero_optimization.elastic_checkpoint cannot cut the state of `{case.optimizer_name}`",
        "universal checkpoints change the number of ranks",
        lambda case: case.is_ours and case.engine.zero_elastic_checkpoint(),
        stops_ours=True,
    ),
    _Obstacle(
        "zero_optimization.stage is `{case.stage}`, at which DeepSpeed offloads nothing",
        'set "stage": 2',
        lambda case: not case.is_zero,
    ),
    _Obstacle(
        '"engine" is false in the block `stepwell`',
        'leave out "engine": false',
        lambda case: not case.options.engine,
    ),
    _Obstacle(
        "the accelerator is `{case.accelerator}`",
        "DS_ACCELERATOR=cuda, where there is such a device",
        lambda case: case.accelerator not in _ACCELERATORS,
    ),
    _Obstacle(
        "{case.optimizer_obstacle}",
        "optimizer type Adam or AdamW in the JSON, or a plain torch.optim.AdamW or stepwell.AdamW "
        "given to deepspeed.initialize",
        lambda case: case.optimizer_obstacle is not None,
        is_early=False,
    ),
    _Obstacle(
        "zero_optimization.zenflow is on{case.why_zenflow}",
        "leave out zenflow",
        lambda case: case.engine.zenflow,
        stops_ours=True,
        is_early=False,
    ),
    _Obstacle(
        "moments of `{case.optimizer_name}` are not fp32",
        "moments fp32",
        lambda case: case.zenflow is not None and case.has_coded_moments,
        is_early=False,
    ),
    _Obstacle(
        "offload_optimizer.super_offload is on",
        "leave out super_offload",
        lambda case: case.engine.super_offload(),
        stops_ours=True,
    ),
    _Obstacle(
        "offload_param.device is `nvme`",
        "device `cpu`, where the host has 2 bytes of memory more per parameter of a rank",
        lambda case: case.is_param_on_nvme,
    ),
    _Obstacle(
        "weights are quantized, by an op that the engine is not tested with",
        "leave out zero_quantized_weights and zero_quantized_nontrainable_weights",
        lambda case: (
            case.engine.zero_quantized_weights()
            or case.engine.zero_quantized_nontrainable_weights()
        ),
    ),
    _Obstacle(
        "offload_optimizer.ratio is `{case.ratio}`, and `{case.optimizer_name}` steps in host "
        "memory only",
        "leave out ratio",
        lambda case: case.is_twin_flow and case.is_ours,
        stops_ours=True,
    ),
    _Obstacle(
        "offload_optimizer.ratio is `{case.ratio}`, and offload_optimizer.device is `nvme`",
        "leave out ratio",
        lambda case: case.is_twin_flow and case.is_on_nvme,
    ),
    _Obstacle(
        "offload_optimizer.ratio is `{case.ratio}`, and masters are in 16 bits",
        "leave out ratio, or bf16_master_weights_and_grads and fp16_master_weights_and_grads",
        lambda case: case.is_twin_flow and not case.is_ours and case.has_16_bit_masters,
    ),
    _Obstacle(
        # Experts are partitioned over groups of their own, over which DeepSpeed averages norms.
        "the model has mixtures of experts, and there are several ranks or it is ZeRO-3",
        "a model without deepspeed.moe layers, or one rank and ZeRO-2",
        lambda case: case.engine.has_moe_layers and (case.stage == _STAGE_3 or not case.is_alone),
    ),
    _Obstacle(
        # Gradients are reduced by another call, and tied weights are in the norm once.
        "the model is a pipeline",
        "a model that is no PipelineModule, under ZeRO-3",
        lambda case: case.is_pipeline,
    ),
    _Obstacle(
        "the model is parallel",
        "ZeRO-3 instead of an mpu or tensor_parallel",
        lambda case: case.is_model_parallel,
    ),
    _Obstacle(
        # Its GradScaler calls the optimizer's step, sub-group by sub-group.
        "torch_autocast is in float16",
        'torch_autocast in bfloat16, or "fp16": {{"enabled": true}} in its place',
        lambda case: case.is_autocast_fp16,
    ),
    _Obstacle(
        # Its passes reduce gradients by themselves, without the calls that the engine takes.
        "DeepCompile is on",
        "leave out compile.deepcompile",
        lambda case: case.engine.is_deepcompile_enabled(),
    ),
    _Obstacle(
        "the hybrid engine is on",
        "leave out hybrid_engine",
        lambda case: case.engine._config.hybrid_engine.enabled,
    ),
    _Obstacle(
        "{case.unfit}",
        "pip install 'deepspeed=={case.tested_release}'",
        lambda case: case.unfit is not None,
    ),
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


def _check_steps(case: _Case, found: list[_Obstacle]) -> None:
    """Raises ValueError where an optimizer of Stepwell's could not step."""
    # DeepSpeed's swapper wants optimizers whose state it knows.
    stopping = [row for row in found if row.stops_ours or case.is_on_swapper]
    if not case.is_ours or not stopping:
        return
    hints = [row.hint.format(case=case) for row in stopping]
    raise ValueError(
        f"optimizer `{case.optimizer_name}` steps in host memory and as a whole, but "
        f"{'; '.join(row.reason.format(case=case) for row in stopping)}. "
        f"hint: {'; '.join(hints)}; or type `AdamW`, which is DeepSpeed's own optimizer"
    )


def _without_effect(keys: list[str]) -> str:
    return f"without effect in the block `stepwell`: {', '.join(f'`{key}`' for key in keys)}"


def _fallback_warning(case: _Case, reasons: tuple[str, ...], hints: list[str]) -> str | None:
    """What to say where state is offloaded and the engine does not step it."""
    idle = case.idle_keys
    # A user who has turned the engine off knows.
    is_chosen = not case.options.engine or (case.engine.zenflow and not case.options.zenflow)
    if is_chosen and not idle:
        return None
    text = (
        f"not on the offload engine: {'; '.join(reasons)}. What steps: {case.stepper}. "
        f"hint: {'; '.join(hints)}"
    )
    if idle:
        text += f". {_without_effect(idle)}"
    if not is_chosen:
        text += '. "stepwell": {"engine": false} in the JSON keeps it so without this warning'
    return text


def _engine_warning(case: _Case, gate: str, unfetched: str | None) -> str | None:
    """What to say of keys that the engine does not follow."""
    remarks = []
    if case.is_on_nvme and (keys := case.swapper_keys):
        remarks.append(
            f"without effect, since the state is on Stepwell's volume and not on DeepSpeed's "
            f"swapper: {', '.join(f'`{key}`' for key in keys)}"
        )
    volume_keys = [key for key in _VOLUME_KEYS if key in written(case.engine)]
    if volume_keys and not case.is_on_nvme:
        remarks.append(f'{_without_effect(volume_keys)}. hint: offload_optimizer.device "nvme"')
    if "gate" in written(case.engine) and case.options.gate != gate:
        remarks.append(
            f"`stepwell.gate` is `{case.options.gate}`, but {case.why_step_waits} `engine.step()` "
            "waits for all "
            'weights. hint: "gate": "step" says so'
        )
    why_theirs = case.why_deepspeed_fetches
    if "fetch" in written(case.engine) and case.options.fetch == "stepwell" and why_theirs:
        remarks.append(f"`stepwell.fetch` is `stepwell`, but {why_theirs} DeepSpeed fetches")
    if unfetched is not None:
        remarks.append(
            f'DeepSpeed\'s hooks fetch weights: {unfetched}. hint: "fetch": "deepspeed" says so'
        )
    if "accumulate" in written(case.engine) and case.stage < _STAGE_2:
        remarks.append(f"under ZeRO-{case.stage} {_without_effect(['accumulate'])}")
    if case.zenflow is not None:
        remarks += case.zenflow.remarks
        if "accumulate" in written(case.engine) and case.options.accumulate == "host":
            remarks.append(
                "`stepwell.accumulate` is `host`, but gradients whose updates are deferred are "
                'summed on the GPU. hint: "accumulate": "device" says so'
            )
        if not case.is_pinned:
            remarks.append("pin_memory is false, but memory for deferred updates is pinned")
    return "; ".join(remarks) or None


def zenflow_plan(
    engine: Any, unfit: Callable[[ZeroClass], str | None]
) -> tuple[zenflow.ZenFlow | None, str | None]:
    """Decides whether the block `zenflow` of a DeepSpeedEngine runs on the offload engine.

    The engine has no optimizer yet, and has not looked at the block.

    Args:
        engine: the DeepSpeedEngine. Its block is there.
        unfit: as `plan` has it.

    Returns:
        What the block asks for, or None and why DeepSpeed's own ZenFlow keeps it.

    Raises:
        ValueError: the block `stepwell` cannot be understood, or a value of `zenflow` is out of
            range.
    """
    options, stage = options_of(engine), engine.zero_optimization_stage()
    if (obstacle := zenflow.obstacle_of(engine, options)) is not None:
        return None, obstacle
    device = device_of(engine.zero_offload_optimizer())
    if device != "cpu":
        return None, (
            "nothing is offloaded" if device is None else "deferred updates are of state in RAM"
        )
    case = _Case(engine, None, options, stage, device, True, unfit("OffloadZeroOptimizer"))
    found = [row for row in _OBSTACLES if row.is_early and row.is_there(case)]
    if found:
        return None, "; ".join(row.reason.format(case=case) for row in found)
    return zenflow.zenflow_of(engine), None


def _check_zenflow(case: _Case, found: list[_Obstacle]) -> None:
    """Raises ValueError where the engine cannot run what it was given: it cannot be given back."""
    if case.zenflow is None or not found:
        return
    hints = "; ".join(row.hint.format(case=case) for row in found)
    raise ValueError(
        "zero_optimization.zenflow cannot run on the offload engine: "
        f"{'; '.join(row.reason.format(case=case) for row in found)}. hint: {hints}; or "
        '"stepwell": {"zenflow": false}, which keeps DeepSpeed\'s own ZenFlow'
    )


def inference_plan(engine: Any) -> Plan:
    """The plan of a DeepSpeedEngine without an optimizer.

    Raises:
        ValueError: the block `stepwell` cannot be understood.
    """
    return Plan(None, None, None, (), options_of(engine))


def plan(engine: Any, optimizer: Any, *, is_zero: bool, unfit: Callable[[str], str | None]) -> Plan:
    """Decides what steps the optimizer of a DeepSpeedEngine.

    Args:
        engine: the DeepSpeedEngine.
        optimizer: the one that DeepSpeed wraps, or uses as it is.
        is_zero: whether DeepSpeed makes an optimizer of ZeRO of it.
        unfit: says why a class does not fit this version of DeepSpeed; None: it does.

    Raises:
        ValueError: the block `stepwell` cannot be understood, its `moments` are not those of the
            optimizer, or the optimizer is Stepwell's and could not step.
    """
    options = options_of(engine)
    _check_moments(optimizer, options)
    stage = engine.zero_optimization_stage()
    zero_class: ZeroClass = (
        "OffloadZeroOptimizerStage3" if stage == _STAGE_3 else "OffloadZeroOptimizer"
    )
    device = device_of(engine.zero_offload_optimizer())
    # The sources of DeepSpeed's class are read for it.
    unfitness = None if device is None else unfit(zero_class)
    case = _Case(engine, optimizer, options, stage, device, is_zero, unfitness)
    found = [row for row in _OBSTACLES if row.is_there(case)]
    _check_steps(case, found)
    _check_zenflow(case, found)
    if device is None:
        idle = case.idle_keys
        hint = 'hint: "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}'
        warning = f"nothing is offloaded. {_without_effect(idle)}. {hint}" if idle else None
        return Plan(None, None, None, (), options, warning, propagates=case.propagates)
    if found:
        reasons = tuple(row.reason.format(case=case) for row in found)
        hints = [row.hint.format(case=case) for row in found]
        warning = _fallback_warning(case, reasons, hints)
        return Plan(None, None, None, reasons, options, warning, propagates=case.propagates)
    # Where updates are deferred the step waits for none of them.
    why_step_waits = case.why_step_waits if case.zenflow is None or not case.is_alone else None
    gate: Literal["module", "step"] = (
        "module" if options.gate == "module" and why_step_waits is None else "step"
    )
    unfetched = None
    if case.why_deepspeed_fetches is None:
        unfetched = next(filter(None, map(unfit, _FETCHING_CLASSES)), None)
    is_fetching = case.why_deepspeed_fetches is None and unfetched is None
    warning = _engine_warning(case, gate, unfetched)
    volume = _volume(case)
    return Plan(
        zero_class,
        "ram" if volume is None else "volume",
        gate,
        (),
        options,
        warning,
        is_pinned=case.is_pinned,
        propagates=case.propagates,
        zenflow=case.zenflow,
        volume=volume,
        fetch="stepwell" if is_fetching else "deepspeed",
    )


def _volume(case: _Case) -> Volume | None:
    """The volume that a configuration asks for; None: the state is in host memory.

    Raises:
        ValueError: it says no folder, or options that cannot work.
    """
    if not case.is_on_nvme:
        return None
    paths = case.options.nvme_paths
    path = case.engine.zero_offload_optimizer().nvme_path
    if paths is None and path is None:
        raise ValueError(
            "offload_optimizer.device is `nvme` without a folder, expected "
            'offload_optimizer.nvme_path, or "nvme_paths" in the block `stepwell`'
        )
    try:
        return Volume([path] if paths is None else paths, **(case.options.volume or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"in the block `stepwell.volume`, or its paths: {error}") from error
