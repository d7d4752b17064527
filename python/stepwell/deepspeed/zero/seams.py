"""DeepSpeed's seams for ZeRO with CPU offload on the offload engine."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from stepwell.deepspeed.logs import warn
from stepwell.deepspeed.plan import inference_plan, plan
from stepwell.deepspeed.seams import Attribute, Overridden
from stepwell.deepspeed.state.home import home_of
from stepwell.deepspeed.zero.client_optimizer import check_client

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SEAMS"]

_ENGINE = "deepspeed.runtime.engine"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_FRAGMENT = "deepspeed.utils.tensor_fragment"


def _stage_1_2() -> tuple[Any, str, type]:
    """Where DeepSpeed's engine finds the class of its optimizer, and ours."""
    from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer

    return importlib.import_module(_ENGINE), "DeepSpeedZeroOptimizer", OffloadZeroOptimizer


def _stage_3() -> tuple[Any, str, type]:
    from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3

    # The engine imports it along, and it has a subclass of what is found there.
    importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    return (
        importlib.import_module(_STAGE_3),
        "DeepSpeedZeroOptimizer_Stage3",
        OffloadZeroOptimizerStage3,
    )


def _unfit(zero_class: str) -> str | None:
    """Why a class of ours does not fit this version of DeepSpeed; None if it does."""
    return _CLASSES[zero_class].unused()


def _planned(original: Callable[..., str | None]) -> Callable[..., str | None]:
    @functools.wraps(original)
    def check(self: Any, basic_optimizer: Any) -> str | None:
        wrapper = original(self, basic_optimizer)
        is_zero = wrapper == importlib.import_module(_ENGINE).ZERO_OPTIMIZATION
        self.stepwell_plan = plan(self, basic_optimizer, is_zero=is_zero, unfit=_unfit)
        if self.stepwell_plan.warning is not None:
            warn(self.stepwell_plan.warning)
        check_client(self)
        return wrapper

    return check


def _configured(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def configure(self: Any, optimizer: Any) -> Any:
        if optimizer is None:
            self.stepwell_plan = inference_plan(self)
        decided = self.stepwell_plan
        if decided.zero_class is None:
            return original(self, optimizer)
        # DeepSpeed's function knows what the constructor takes.
        module, name, cls = _PLACES[decided.zero_class]()
        theirs = getattr(module, name)
        setattr(module, name, functools.partial(cls, plan=decided))
        try:
            return original(self, optimizer)
        finally:
            setattr(module, name, theirs)

    return configure


def _weights_got(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_hp_fragment(self: Any, optim_state_key: str | None = None) -> Any:
        home = home_of(self)
        if home is not None:
            home.wait_for_step()
        return original(self, optim_state_key)

    return get_hp_fragment


def _gradient_got(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_lp_grad_fragment(self: Any, index_in_param_group: int) -> Any:
        home = home_of(self)
        if home is not None:
            home.wait_for_gradients()
        return original(self, index_in_param_group)

    return get_lp_grad_fragment


_MAKER = Attribute(
    "offload engine, making",
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
        "_lazy_init_hp_params_optimizer_state": ("self",),
        "scale_if_loss": ("self", "value"),
        "clear_backward_seen_flag": ("self",),
        "backward_prologue": ("self",),
        "process_gradients": ("self", "param", "i"),
        "backward_epilogue": ("self",),
        "zero_grad": ("self", "set_to_none"),
        "_backward_active_depth": (),
        "_release_ipg_buffers": ("self",),
        "setup_buckets": ("self",),
        "reduce_independent_p_g_buckets_and_remove_grads": ("self", "param", "i"),
        "reduce_ipg_grads": ("self", "comm_dtype"),
        "copy_grads_in_partition": ("self", "param", "group_idx"),
        "_use_compact_grad_partition_buffer": ("self", "group_idx"),
        "_get_compact_grad_partition_slice": (
            "self",
            "group_idx",
            "partition_id",
            "param_id",
            "num_elements",
        ),
        "_release_preflattened_grad_buffers": ("self", "group_idx"),
        "_finalize_cpu_offload_gradient_accumulation": ("self",),
        "get_param_gradient_attribute": ("self", "param"),
        "clear_grad_attribute": ("self", "param"),
        "update_offload_overflow_tracker": ("self", "grad"),
        "_update_scale": ("self", "has_overflow"),
        "step": ("self", "closure"),
        "state_dict": ("self",),
        "load_state_dict": ("self", "state_dict_list"),
        "offload_states": ("self", "include"),
        "reload_states": ("self", "non_blocking"),
        "destroy": ("self",),
    },
    _MAKER,
)
_CLASS_3 = Overridden(
    "offload engine, ZeRO-3 optimizer",
    _STAGE_3,
    "DeepSpeedZeroOptimizer_Stage3",
    {
        "_setup_for_real_optimizer": ("self",),
        "initialize_optimizer_states": ("self",),
        "scale_if_loss": ("self", "value"),
        "clear_backward_seen_flag": ("self",),
        "backward_prologue": ("self",),
        "reduce_ready_partitions_and_remove_grads": ("self", "param"),
        "backward_epilogue": ("self",),
        "zero_grad": ("self", "set_to_none"),
        "_backward_active_depth": (),
        "partition_grads": ("self", "params_to_release", "grad_partitions"),
        "_finalize_offload_gradient_accumulation": ("self",),
        "_get_fp32_grad_state_partition": ("self", "param", "release_swap_buffers"),
        "get_fp32_grad_partitions": ("self",),
        "get_fp32_grad_for_param": ("self", "param"),
        "set_fp32_grad_for_param": ("self", "value", "param"),
        "set_local_grad_for_param": ("self", "value", "param"),
        "update_fp32_grad_for_param_vectorized": ("self", "update_func", "param_list"),
        "_pre_step": ("self",),
        "_partition_all_parameters": ("self",),
        "_loss_scale_update_and_overflow_cleanup": ("self",),
        "_unflatten_partitioned_parameters": ("self", "sub_group_id"),
        "_post_step": ("self", "timer_names"),
        "step": ("self", "closure"),
        "offload_states": ("self", "include"),
        "destroy": ("self",),
    },
    _MAKER,
)
_CLASSES = {"OffloadZeroOptimizer": _CLASS, "OffloadZeroOptimizerStage3": _CLASS_3}
_PLACES = {"OffloadZeroOptimizer": _stage_1_2, "OffloadZeroOptimizerStage3": _stage_3}

SEAMS = (
    Attribute(
        "offload engine, plan",
        _ENGINE,
        "DeepSpeedEngine._do_optimizer_sanity_check",
        _planned,
        ("self", "basic_optimizer"),
    ),
    _MAKER,
    _CLASS,
    _CLASS_3,
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
