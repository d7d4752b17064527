"""What a DeepSpeed program has configured, as far as it decides what steps its optimizer.

A `Case` only tells what is so: of the engine's configuration, of the optimizer that DeepSpeed
wraps, and of the block `stepwell`. `obstacles.py` says what of it the offload engine does not run,
and `plan.py` decides.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from stepwell import optim
from stepwell.deepspeed import fingerprints, zenflow
from stepwell.deepspeed.options import Options, said, written
from stepwell.deepspeed.release import has_fp32_sums
from stepwell.deepspeed.seams import accelerator_name
from stepwell.deepspeed.zero.operands import obstacle_of

__all__ = ["STAGE_3", "Case", "device_of"]

STAGE_3 = 3
"""The stage of ZeRO that partitions weights."""

# Of the block `stepwell`: what only the offload engine reads.
_ENGINE_KEYS = ("gate", "accumulate", "fetch", "threads", "host_bytes_max")
_VOLUME_KEYS = ("nvme_paths", "volume")
# Of `offload_optimizer` with device `nvme`: what only DeepSpeed's own swapper reads.
_SWAPPER_KEYS = ("buffer_count", "pipeline_read", "pipeline_write", "fast_init")


def device_of(offload: Any) -> str | None:
    """The device of an offload configuration; None: nothing is offloaded."""
    device = None if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if device == "none" else device


class Case(NamedTuple):
    """The configuration that the plan is made for."""

    engine: Any
    """The DeepSpeedEngine."""
    optimizer: Any
    """The one that DeepSpeed wraps; None: it is not made yet."""
    options: Options
    """The block `stepwell` of the JSON."""
    stage: int
    """Of ZeRO."""
    device: str | None
    """Where `offload_optimizer` has the state; None: nothing is offloaded."""
    is_zero: bool
    """Whether DeepSpeed makes an optimizer of ZeRO of it."""
    unfit: str | None
    """Why the class does not fit this version of DeepSpeed; None: it does."""

    @property
    def tested_release(self) -> str:
        """The newest release of DeepSpeed that the engine is tested with."""
        return fingerprints.releases()[-1]

    @property
    def accelerator(self) -> str:
        """DeepSpeed's accelerator, by name."""
        return accelerator_name()

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizer, by name."""
        return type(self.optimizer).__name__

    @property
    def ratio(self) -> float:
        """The share of the state that is in host memory (`offload_optimizer.ratio`)."""
        return float(self.engine.zero_partial_offload())

    @property
    def is_twin_flow(self) -> bool:
        """Whether DeepSpeed would have a part of the state on the device."""
        return self.ratio != 1.0

    @property
    def has_16_bit_masters(self) -> bool:
        """Whether masters and gradients are in 16 bits."""
        engine = self.engine
        return bool(
            engine.bf16_master_weights_and_gradients() or engine.fp16_master_weights_and_gradients()
        )

    @property
    def is_ours(self) -> bool:
        """Whether the optimizer is one of Stepwell's."""
        return isinstance(self.optimizer, optim.Adam)

    @property
    def optimizer_obstacle(self) -> str | None:
        """Why the engine does not take this optimizer's steps; None: it does."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        from stepwell.deepspeed.zero.optimizer_type import StepwellAdam, StepwellAdamW

        if self.engine.zenflow and isinstance(self.optimizer, DeepSpeedCPUAdam):
            # A subclass, which goes with the block.
            return None
        known = (DeepSpeedCPUAdam, StepwellAdam, StepwellAdamW, optim.Adam, optim.AdamW)
        return obstacle_of(self.optimizer, known)

    @property
    def rounds_fp32_sums(self) -> bool:
        """Whether DeepSpeed rounds the gradients that ZeRO-1 and -2 are to sum in fp32."""
        if self.stage == STAGE_3 or has_fp32_sums():
            return False
        dtype, sums = self.engine.get_data_types()
        # A model may be in 16 bits without a word of it in the JSON.
        trained = (param for param in self.engine.module.parameters() if param.requires_grad)
        dtypes = {dtype, *(param.dtype for param in trained)}
        return bool(sums == torch.float32 and dtypes != {torch.float32})

    @property
    def is_compressed(self) -> bool:
        """Whether weights are quantized or pruned behind steps (`compression_training`)."""
        # Refused since DeepSpeed 0.19.7; before, the engine puts an empty block there.
        return bool(said(self.engine, "compression_training"))

    @property
    def is_sharded_in_groups(self) -> bool:
        """Whether each of several groups of ranks has all weights (MiCS)."""
        # Refused since DeepSpeed 0.19.7.
        zero = self.engine._config.zero_config
        return self.stage == STAGE_3 and getattr(zero, "mics_shard_size", 0) > 0

    @property
    def corrects_quantized(self) -> bool:
        """Whether what quantized gradients have lost is added to the next ones (LoCo)."""
        # Gone since DeepSpeed 0.19.8.
        zero = self.engine._config.zero_config
        return self.stage == STAGE_3 and getattr(zero, "zeropp_loco_param", None) is not None

    @property
    def is_param_on_nvme(self) -> bool:
        """Whether weights are on NVMe between their uses."""
        # Below stage 3 DeepSpeed does not offload parameters, whatever the JSON says.
        return self.stage == STAGE_3 and device_of(self.engine.zero_offload_param()) == "nvme"

    @property
    def is_on_nvme(self) -> bool:
        """Whether the JSON has the state on NVMe."""
        return self.device == "nvme"

    @property
    def is_on_swapper(self) -> bool:
        """Whether DeepSpeed's own path would have the state on NVMe."""
        # Below stage 3 DeepSpeed holds the state in host memory, whatever the JSON says.
        return self.stage == STAGE_3 and self.is_on_nvme

    @property
    def nvme_path(self) -> str | os.PathLike[str] | None:
        """The folder that the JSON names for the state; None: none."""
        path: str | os.PathLike[str] | None = self.engine.zero_offload_optimizer().nvme_path
        return path

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is DeepSpeed's pipeline."""
        from deepspeed.runtime.pipe.module import PipelineModule

        return isinstance(self.engine.module, PipelineModule)

    @property
    def is_model_parallel(self) -> bool:
        """Whether the model is cut over ranks, other than along its sequence."""
        mpu = self.engine.mpu
        return mpu is not None and not hasattr(mpu, "initialize_sequence_parallel")

    @property
    def is_autocast_fp16(self) -> bool:
        """Whether `torch_autocast` is on, in float16."""
        from deepspeed.runtime.torch_autocast import get_autocast_dtype, is_autocast_initialized

        return bool(is_autocast_initialized()) and get_autocast_dtype() == torch.float16

    @property
    def is_alone(self) -> bool:
        """Whether one rank has all gradients."""
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
            waits = self.stage == STAGE_3 and is_on_device
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
        if self.stage != STAGE_3:
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
            # Weights may be gathered in another dtype.
            "torch_autocast": bool(is_autocast_initialized()),
            # Parameters have partitions in a second group.
            "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
            "stage3_use_all_reduce_for_fetch_params": zero.use_all_reduce_for_fetch_params,
        }
        why = next((name for name, is_there in found.items() if is_there), None)
        return None if why is None else f"with {why} and several ranks"

    @property
    def idle_keys(self) -> list[str]:
        """Keys of the block `stepwell` that only the offload engine reads."""
        return [*(key for key in _ENGINE_KEYS if key in written(self.engine)), *self.volume_keys]

    @property
    def volume_keys(self) -> list[str]:
        """Keys of the block `stepwell` that only a volume reads."""
        return [key for key in _VOLUME_KEYS if key in written(self.engine)]

    @property
    def swapper_keys(self) -> list[str]:
        """What the JSON says to DeepSpeed's own swapper, which does not exist on the engine."""
        zero = ("zero_optimization", "offload_optimizer")
        keys = [key for key in _SWAPPER_KEYS if said(self.engine, *zero, key) is not None]
        has_aio = said(self.engine, "aio") is not None
        return [*(f"offload_optimizer.{key}" for key in keys), *(["aio"] if has_aio else [])]

    @property
    def is_pinned(self) -> bool:
        """Whether what crosses the bus is pinned."""
        return (
            said(self.engine, "zero_optimization", "offload_optimizer", "pin_memory") is not False
        )

    @property
    def propagates(self) -> bool:
        """Whether the JSON says that gradients that are not finite are stepped."""
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
        is_theirs = self.is_zero and (self.engine.zenflow or self.engine.super_offload())
        if self.is_on_nvme and not self.is_on_swapper:
            path += ", with the state in host memory"
        if is_theirs and isinstance(self.optimizer, DeepSpeedCPUAdam):
            return f"{path}, on DeepSpeed's own op, which a C++ compiler builds"
        if self.is_ours or isinstance(self.optimizer, DeepSpeedCPUAdam):
            return f"{path}, on Stepwell's kernels"
        is_torchs = type(self.optimizer).__module__.startswith("torch.")
        owner = "torch's " if is_torchs else ""
        return f"{path}, with {owner}`{self.optimizer_name}`"
