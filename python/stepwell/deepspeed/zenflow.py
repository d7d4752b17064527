"""What a `zero_optimization.zenflow` block asks for, in the terms of `stepwell.Deferred`.

Where DeepSpeed's engine configures ZenFlow, Stepwell stashes the block and clears it, if the
offload engine can run it (`plan.zenflow_plan`). So none of DeepSpeed's branches for it run:
gradient accumulation stays what the user has set, and the optimizer is the one of ZeRO with CPU
offload.

| key | what it means here |
|---|---|
| `topk_ratio` | `fraction`: of the rows or columns of each matrix |
| `update_interval` | `interval`; "auto" is 4 |
| `select_strategy`, `select_interval`, `steps_per_epoch` | `reselect`, in steps |
| `full_warm_up_rounds` | `warmup_steps` |
| `overlap_step` | true, whatever it says: turns run behind the next forward and backward |
| `pt_reserved_cores_perc` | `threads`, if it is written: of the cores that it leaves |
| `offload`, `auto_ratio` | without effect, and said so |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepwell import _core
from stepwell.deepspeed.options import Options, said
from stepwell.store.deferred import INTERVAL_MAX, Deferred

__all__ = ["ZenFlow", "asked", "obstacle_of", "zenflow_of"]

_BLOCK = ("zero_optimization", "zenflow")
_INTERVAL_AUTO = 4


@dataclass(frozen=True)
class ZenFlow:
    """A block that the offload engine runs."""

    deferred: Deferred
    """Which updates are deferred."""
    threads: int | None
    """Workers that step; None: the block does not say."""
    remarks: tuple[str, ...]
    """What of the block has no effect."""


def asked(engine: Any) -> ZenFlow | None:
    """What a DeepSpeedEngine's block asks for, if the offload engine was given it."""
    found: ZenFlow | None = vars(engine).get("stepwell_zenflow")
    return found


def obstacle_of(engine: Any, options: Options) -> str | None:
    """Why the block of an engine is left to DeepSpeed, in its own terms; None: it need not be."""
    block = engine.zenflow_config()
    if not options.zenflow:
        return '"zenflow" is false in the block `stepwell`'
    if engine.zero_optimization_stage() not in (1, 2):
        return "zero_optimization.stage is neither 1 nor 2"
    if said(engine, "zero_optimization", "offload_optimizer", "device") == "nvme":
        return "offload_optimizer.device is `nvme`"
    interval = block.update_interval
    if isinstance(interval, int) and interval > INTERVAL_MAX:
        return f"zenflow.update_interval is `{interval}`, expected {INTERVAL_MAX} at most"
    if options.moments not in (None, "fp32"):
        return f"`stepwell.moments` is `{options.moments}`, expected fp32"
    if options.gate == "step":
        return "`stepwell.gate` is `step`, expected module: evaluation has to be seen"
    if engine.bf16_master_weights_and_gradients() or engine.fp16_master_weights_and_gradients():
        return "masters are in 16 bits"
    if engine.bf16_optimizer_states():
        return "moments are in 16 bits (bf16_optimizer_states)"
    if engine.get_data_types()[0] != engine.get_data_types()[1]:
        return "data_types.grad_accum_dtype is not the dtype of the model"
    return None


def zenflow_of(engine: Any) -> ZenFlow:
    """The block of an engine for which there is no `obstacle_of`.

    Raises:
        ValueError: a value is out of range.
    """
    block = engine.zenflow_config()
    interval, remarks = block.update_interval, []
    reselect, unknown = _reselect(engine, block)
    remarks += unknown
    if said(engine, *_BLOCK, "overlap_step") is False:
        remarks.append(
            "zenflow.overlap_step is false, but updates are applied behind the next forward"
        )
    if block.offload:
        remarks.append("zenflow.offload is true, but the GPU has the state of what is selected")
    if said(engine, *_BLOCK, "auto_ratio") is not None:
        remarks.append("zenflow.auto_ratio has no effect")
    threads = None
    if said(engine, *_BLOCK, "pt_reserved_cores_perc") is not None:
        cores = _core.Pool.default().threads
        threads = max(1, round((1 - block.pt_reserved_cores_perc) * cores))
    deferred = Deferred(
        interval=_INTERVAL_AUTO if isinstance(interval, str) else interval,
        fraction=block.topk_ratio,
        reselect=reselect,
        warmup_steps=max(0, block.full_warm_up_rounds),
    )
    return ZenFlow(deferred, threads, tuple(remarks))


def _reselect(engine: Any, block: Any) -> tuple[int, list[str]]:
    """After how many steps channels are selected anew, and what to say of that."""
    strategy, interval = block.select_strategy, block.select_interval
    remarks = []
    if strategy == "auto" and isinstance(interval, int):
        remarks.append(
            f"zenflow.select_interval is `{interval}`, but select_strategy is `auto`: every epoch. "
            'hint: select_strategy "step" or "epoch"'
        )
        interval = "auto"
    if strategy == "step" and isinstance(interval, int):
        return max(1, interval), []
    loader = engine.training_dataloader
    steps = block.steps_per_epoch or (
        0 if loader is None else len(loader) // engine.gradient_accumulation_steps()
    )
    if steps:
        return max(1, steps * (interval if isinstance(interval, int) else 1)), remarks
    if strategy != "epoch":
        return Deferred.reselect, remarks
    remarks.append(
        "zenflow.select_strategy is `epoch`, but the epochs of a program's own data loader are not "
        f"known: channels are selected anew every {Deferred.reselect} steps. hint: "
        'select_strategy "step" with a select_interval'
    )
    return Deferred.reselect, remarks
