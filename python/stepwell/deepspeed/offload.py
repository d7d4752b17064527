"""ZeRO-1 and -2 with CPU offload on the offload engine: when, and DeepSpeed's seams for it."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from stepwell import optim
from stepwell.deepspeed.optimizer_type import StepwellAdam, StepwellAdamW
from stepwell.deepspeed.options import options_of
from stepwell.deepspeed.seams import Attribute, Overridden, accelerator_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell.deepspeed.options import Options

__all__ = ["SEAMS"]

_ENGINE = "deepspeed.runtime.engine"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_FRAGMENT = "deepspeed.utils.tensor_fragment"

_STAGES = (1, 2)
_ACCELERATORS = ("cpu", "cuda")

_LOGGER = logging.getLogger(__name__)


def _in_the_way(engine: Any, optimizer: Any, options: Options) -> str | None:
    """Why a DeepSpeedEngine with ZeRO-1 or -2 and CPU offload keeps DeepSpeed's own path; None if it need not."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.torch_autocast import is_autocast_initialized

    is_ours = type(optimizer) in (DeepSpeedCPUAdam, StepwellAdam, StepwellAdamW, optim.Adam, optim.AdamW)
    mpu = engine.mpu
    obstacles = {
        '"engine" is false in the block `stepwell`': not options.engine,
        f"the accelerator is `{accelerator_name()}`": accelerator_name() not in _ACCELERATORS,
        f"the optimizer is `{type(optimizer).__name__}`": not is_ours,
        "ZenFlow is on": engine.zenflow,
        "offload_optimizer.ratio is not 1": engine.zero_partial_offload() != 1.0,
        "the model has mixtures of experts": engine.has_moe_layers,
        "the model is a pipeline": isinstance(engine.module, PipelineModule),
        "the model is parallel": mpu is not None and not hasattr(mpu, "initialize_sequence_parallel"),
        "torch_autocast is on": is_autocast_initialized(),
        "DeepCompile is on": engine.is_deepcompile_enabled(),
        "the hybrid engine is on": engine._config.hybrid_engine.enabled,
    }
    reasons = [reason for reason, is_there in obstacles.items() if is_there]
    return reasons[0] if reasons else _CLASS.unused()


def _device(engine: Any) -> str | None:
    offload = engine.zero_offload_optimizer()
    return None if offload is None else str(getattr(offload.device, "value", offload.device))


def _check_moments(optimizer: Any, options: Options) -> None:
    """Raises ValueError for an optimizer that does not hold its moments as the block says."""
    held = optimizer._moments if isinstance(optimizer, optim.Adam) else "fp32"
    if options.moments not in (None, held):
        raise ValueError(
            f"`stepwell.moments` is `{options.moments}`, but the optimizer is `{type(optimizer).__name__}` with `{held}`. "
            "hint: optimizers of type Adam, AdamW, StepwellAdam and StepwellAdamW in the JSON take it from there"
        )


def _configured(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def configure(self: Any, optimizer: Any) -> Any:
        options = options_of(self)
        _check_moments(optimizer, options)
        if self.zero_optimization_stage() not in _STAGES or _device(self) in (None, "none"):
            return original(self, optimizer)
        reason = "offload_optimizer.device is `nvme`" if _device(self) != "cpu" else None
        reason = reason or _in_the_way(self, optimizer, options)
        if reason is not None:
            _LOGGER.info("not on the offload engine, but DeepSpeed's own path on Stepwell's kernels: %s", reason)
            return original(self, optimizer)
        from stepwell.deepspeed.zero_optimizer import OffloadZeroOptimizer

        # DeepSpeed's function knows what the constructor takes.
        module: Any = importlib.import_module(_ENGINE)
        theirs = module.DeepSpeedZeroOptimizer
        module.DeepSpeedZeroOptimizer = functools.partial(OffloadZeroOptimizer, options=options)
        try:
            return original(self, optimizer)
        finally:
            module.DeepSpeedZeroOptimizer = theirs

    return configure


def _weights_got(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_hp_fragment(self: Any, optim_state_key: str | None = None) -> Any:
        partitions = getattr(self, "stepwell_partitions", None)
        if partitions is not None:
            partitions.finish()
        return original(self, optim_state_key)

    return get_hp_fragment


def _gradient_got(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_lp_grad_fragment(self: Any, index_in_param_group: int) -> Any:
        partitions = getattr(self, "stepwell_partitions", None)
        if partitions is not None:
            partitions.arrive()
        return original(self, index_in_param_group)

    return get_lp_grad_fragment


_MAKER = Attribute(
    "offload engine, ZeRO-1/2 making",
    _ENGINE,
    "DeepSpeedEngine._configure_zero_optimizer",
    _configured,
    ("self", "optimizer"),
)

# Of the optimizer that DeepSpeed makes for ZeRO-1 and -2: what ours overrides or calls.
_CLASS = Overridden(
    "offload engine, ZeRO-1/2 optimizer",
    _STAGE_1_2,
    "DeepSpeedZeroOptimizer",
    {
        "initialize_optimizer_states": ("self",),
        "_get_offload_gradient_dict": ("self",),
        "_link_all_hp_params": ("self",),
        "_lazy_init_hp_params_optimizer_state": ("self",),
        "setup_buckets": ("self",),
        "reduce_independent_p_g_buckets_and_remove_grads": ("self", "param", "i"),
        "reduce_ipg_grads": ("self", "comm_dtype"),
        "copy_grads_in_partition": ("self", "param", "group_idx"),
        "_use_compact_grad_partition_buffer": ("self", "group_idx"),
        "_get_compact_grad_partition_slice": ("self", "group_idx", "partition_id", "param_id", "num_elements"),
        "_release_preflattened_grad_buffers": ("self", "group_idx"),
        "_finalize_cpu_offload_gradient_accumulation": ("self",),
        "get_param_gradient_attribute": ("self", "param"),
        "clear_grad_attribute": ("self", "param"),
        "update_offload_overflow_tracker": ("self", "grad"),
        "_update_scale": ("self", "has_overflow"),
        "step": ("self", "closure"),
        "state_dict": ("self",),
        "load_state_dict": ("self", "state_dict_list"),
        "refresh_fp32_params": ("self",),
        "update_lp_params": ("self",),
        "offload_states": ("self", "include"),
        "destroy": ("self",),
    },
    _MAKER,
)

SEAMS = (
    _MAKER,
    _CLASS,
    Attribute(
        "offload engine, state access",
        _FRAGMENT,
        "tensor_fragment.get_hp_fragment",
        _weights_got,
        ("self", "optim_state_key"),
    ),
    Attribute(
        "offload engine, gradient access",
        _FRAGMENT,
        "tensor_fragment.get_lp_grad_fragment",
        _gradient_got,
        ("self", "index_in_param_group"),
    ),
)
