"""What steps the optimizer of a DeepSpeedEngine: decided once, from its configuration, as a value.

A configuration that cannot run on the offload engine is a row of `obstacles.OBSTACLES`. What a user
who asked for offload is not getting is in `Plan.warning`, with what to change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stepwell import optim
from stepwell._budget import GIB
from stepwell._notices import tell
from stepwell._sizes import moments_bytes
from stepwell.deepspeed import zenflow
from stepwell.deepspeed.case import STAGE_3, Case, device_of
from stepwell.deepspeed.obstacles import OBSTACLES, Obstacle
from stepwell.deepspeed.options import Options, options_of, written
from stepwell.store.volume import Volume

__all__ = ["Plan", "inference_plan", "plan", "zenflow_plan"]

_STAGE_2 = 2

# Master, and the gradient and weight that cross the bus.
_BYTES_BESIDE_MOMENTS = 8

ZeroClass = Literal["OffloadZeroOptimizer", "OffloadZeroOptimizerStage3"]
"""The class of ZeRO's optimizer on the offload engine."""

# What fetches weights in the place of DeepSpeed's classes.
_FETCHING_CLASSES = ("ModuleHooks", "Coordinator")


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
    def is_on_engine(self) -> bool:
        """Whether the offload engine steps it, and not DeepSpeed's own code."""
        return self.zero_class is not None

    @property
    def threads(self) -> int | None:
        """Workers that step; None: most physical cores of this process."""
        if self.options.threads is not None or self.zenflow is None:
            return self.options.threads
        return self.zenflow.threads

    @property
    def is_resumed(self) -> bool:
        """Whether weights and state come from a volume, where it has a committed step."""
        return self.volume is not None and self.volume.resume


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


def _check_steps(case: Case, found: list[Obstacle]) -> None:
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


def _fallback_warning(case: Case, reasons: tuple[str, ...], hints: list[str]) -> str | None:
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


def _engine_warning(
    case: Case, gate: str, unfetched: str | None, why_in_ram: str | None
) -> str | None:
    """What to say of keys that the engine does not follow."""
    remarks = []
    if why_in_ram is not None:
        remarks.append(
            "the state is in host memory, as DeepSpeed has it, since offload_optimizer.nvme_path "
            f"{why_in_ram}. hint: a folder on the drive, or device `cpu`"
        )
    elif case.is_on_nvme and (keys := case.swapper_keys):
        remarks.append(
            f"without effect, since the state is on Stepwell's volume and not on DeepSpeed's "
            f"swapper: {', '.join(f'`{key}`' for key in keys)}"
        )
    if case.volume_keys and not case.is_on_nvme:
        remarks.append(
            f'{_without_effect(case.volume_keys)}. hint: offload_optimizer.device "nvme"'
        )
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
    if case.is_twin_flow:
        remarks.append(
            f"offload_optimizer.ratio is `{case.ratio}`, but all state is off the device. "
            "hint: leave out ratio"
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
    case = Case(engine, None, options, stage, device, True, unfit("OffloadZeroOptimizer"))
    found = [row for row in OBSTACLES if row.is_early and row.is_there(case)]
    if found:
        return None, "; ".join(row.reason.format(case=case) for row in found)
    return zenflow.zenflow_of(engine), None


def _check_zenflow(case: Case, found: list[Obstacle]) -> None:
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
        "OffloadZeroOptimizerStage3" if stage == STAGE_3 else "OffloadZeroOptimizer"
    )
    device = device_of(engine.zero_offload_optimizer())
    # The sources of DeepSpeed's class are read for it.
    unfitness = None if device is None else unfit(zero_class)
    case = Case(engine, optimizer, options, stage, device, is_zero, unfitness)
    found = [row for row in OBSTACLES if row.is_there(case)]
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
    why_in_ram = _why_in_host_memory(case)
    warning = _engine_warning(case, gate, unfetched, why_in_ram)
    volume = _volume(case) if case.is_on_nvme and why_in_ram is None else None
    _tell(case, volume)
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


def _tell(case: Case, volume: Volume | None) -> None:
    """Says what steps, where, and what that takes."""
    moments = str(case.options.moments or getattr(case.optimizer, "_moments", "fp32"))
    numel = sum(
        getattr(param, "ds_numel", param.numel())
        for group in case.optimizer.param_groups
        for param in group["params"]
    )
    is_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_ranks = torch.distributed.get_world_size() if is_of_many else 1
    place = "host memory" if volume is None else "host memory and on a volume"
    share = "" if num_ranks == 1 else f" on each of {num_ranks} ranks"
    nbytes = moments_bytes([numel], moments) + _BYTES_BESIDE_MOMENTS * numel
    tell(
        f"ZeRO-{case.stage} on the offload engine, {numel:,} parameters: optimizer state in "
        f"{place}, {moments} moments, about {nbytes / num_ranks / GIB:.2f} GiB{share}"
    )


def _why_in_host_memory(case: Case) -> str | None:
    """Why state that the JSON has on NVMe is in host memory, on all ranks; None: it is not."""
    # What the block says is not given up, and on its swapper DeepSpeed needs the folder.
    if not case.is_on_nvme or case.is_on_swapper or case.volume_keys:
        return None
    path = case.nvme_path
    if path is None:
        return "is not set"
    is_there = Path(path).is_dir() or Path(path).is_block_device()
    if not case.is_alone:
        # On another host it may not be. Ranks make their volumes together.
        found = [is_there] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, is_there)
        is_there = all(found)
    return None if is_there else f"is `{path}`, which is no folder or device on every host"


def _volume(case: Case) -> Volume:
    """The volume that a configuration asks for.

    Raises:
        ValueError: it says no folder, or options that cannot work.
    """
    paths: Sequence[str | os.PathLike[str]] | None = case.options.nvme_paths
    if paths is None:
        path = case.nvme_path
        if path is None:
            raise ValueError(
                "offload_optimizer.device is `nvme` without a folder, expected "
                'offload_optimizer.nvme_path, or "nvme_paths" in the block `stepwell`'
            )
        if case.is_on_swapper:
            # As DeepSpeed does. What cannot be made is the volume's to look at.
            with contextlib.suppress(OSError):
                Path(path).mkdir(parents=True, exist_ok=True)
        paths = [path]
    try:
        return Volume(paths, **(case.options.volume or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"in the block `stepwell.volume`, or its paths: {error}") from error
