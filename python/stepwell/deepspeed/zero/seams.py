"""DeepSpeed's seams for ZeRO whose offloaded state is on the offload engine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from stepwell import optim
from stepwell.deepspeed.logs import warn
from stepwell.deepspeed.native import adam, compiled_adam
from stepwell.deepspeed.plan import inference_plan, plan, zenflow_plan
from stepwell.deepspeed.seams import Attribute, Overridden
from stepwell.deepspeed.state.home import home_of
from stepwell.deepspeed.zero.client_optimizer import check_client

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stepwell.deepspeed.seams import Fillable

__all__ = ["SEAMS"]

_ENGINE = "deepspeed.runtime.engine"
_MUON = "deepspeed.runtime.zero.muon.original_muon"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"
_FRAGMENT = "deepspeed.utils.tensor_fragment"


def _stage_1_2() -> tuple[Any, str, type]:
    """Where DeepSpeed's engine finds the class of its optimizer, and ours."""
    from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer

    return importlib.import_module(_ENGINE), "DeepSpeedZeroOptimizer", OffloadZeroOptimizer


def _deferred() -> tuple[Any, str, type]:
    """As `_stage_1_2`, for updates that are deferred."""
    from stepwell.deepspeed.zero.deferred import DeferredZeroOptimizer

    return importlib.import_module(_ENGINE), "DeepSpeedZeroOptimizer", DeferredZeroOptimizer


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


def _propagate(optimizer: Any) -> None:
    """Gradients that are not finite are stepped."""
    if not isinstance(optimizer, optim.Adam):
        adam.propagate_in(optimizer)
    elif optimizer._nonfinite == "raise":
        # Its default; another policy was asked for.
        optimizer._nonfinite = "propagate"


def _compiled_later(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """As DeepSpeed's factory of decorators that compile; a function is when it is first called."""

    @functools.wraps(compiles)
    def factory(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            found: list[Any] = []

            @functools.wraps(function)
            def call(*args_of_call: Any, **kwargs_of_call: Any) -> Any:
                if not found:
                    found.append(compiles(*args, **kwargs)(function))
                return found[0](*args_of_call, **kwargs_of_call)

            return call

        return decorate

    return factory


def _import_muon() -> None:
    """Imports DeepSpeed's Muon, which it asks of each optimizer whether it is one.

    Muon's own import compiles its functions, which imports torch's compiler: 2 seconds.
    """
    if _MUON in sys.modules:
        return
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    theirs = compiler.compile
    compiler.compile = _compiled_later(theirs)
    try:
        # Without it, DeepSpeed's own import says so.
        with contextlib.suppress(ImportError):
            importlib.import_module(_MUON)
    finally:
        compiler.compile = theirs


def _planned(original: Callable[..., str | None]) -> Callable[..., str | None]:
    @functools.wraps(original)
    def check(self: Any, basic_optimizer: Any) -> str | None:
        _import_muon()
        wrapper = original(self, basic_optimizer)
        module = importlib.import_module(_ENGINE)
        # Under ZeRO-1 DeepSpeed sums gradients of bf16 in fp32 in another optimizer, unless state
        # is on the device `cpu`. That of ZeRO does it, too.
        is_of_bf16 = wrapper == module.BFLOAT16 and self.zero_optimization()
        is_zero = is_of_bf16 or wrapper == module.ZERO_OPTIMIZATION
        self.stepwell_plan = plan(self, basic_optimizer, is_zero=is_zero, unfit=_unfit)
        if self.stepwell_plan.propagates:
            _propagate(basic_optimizer)
        if self.stepwell_plan.warning is not None:
            warn(self.stepwell_plan.warning)
        check_client(self)
        cpu_adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        if (self.zenflow or self.super_offload()) and isinstance(basic_optimizer, cpu_adam):
            # Before its process is spawned, which then finds the op built.
            compiled_adam.stepping(basic_optimizer)
        has_ours = self.stepwell_plan.zero_class is not None
        return module.ZERO_OPTIMIZATION if has_ours else wrapper

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
        place = _PLACES[decided.zero_class] if decided.zenflow is None else _deferred
        module, name, cls = place()
        theirs = getattr(module, name)
        setattr(module, name, functools.partial(cls, plan=decided))
        try:
            made = original(self, optimizer)
        finally:
            setattr(module, name, theirs)
        made.watch(self.module)
        return made

    return configure


def _zenflow_configured(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def configure_zenflow(engine: Any) -> None:
        if engine.zenflow_config() is not None:
            engine.stepwell_zenflow, engine.stepwell_zenflow_obstacle = zenflow_plan(engine, _unfit)
            if engine.stepwell_zenflow is not None:
                # None of DeepSpeed's branches for it run.
                engine._config.zero_config.zenflow = None
        original(engine)

    return configure_zenflow


def _linear(original: Callable[..., Any]) -> Callable[..., Any]:
    from stepwell.deepspeed.zero.linear import linear_for

    return linear_for(original)


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
        home, address = home_of(self), self.hp_fragment_address
        grad = None if home is None else home.gradient(address.start, address.numel)
        return original(self, index_in_param_group) if grad is None else grad

    return get_lp_grad_fragment


def _gradient_set(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_full_hp_grad(self: Any, value: torch.Tensor) -> None:
        fragment = self._hp_mapping
        home = None if fragment is None else home_of(fragment)
        if home is None:
            original(self, value)
            return
        source = fragment.lp_fragment_address
        piece = value.detach().flatten().narrow(0, source.start, source.numel)
        if not home.set_gradient(fragment.hp_fragment_address.start, piece):
            original(self, value)
        elif hasattr(self, "_zero_optimizer"):
            self._zero_optimizer.update_offload_overflow_tracker(value)

    return set_full_hp_grad


_MAKER = Attribute(
    "offload engine, making",
    _ENGINE,
    "DeepSpeedEngine._configure_zero_optimizer",
    _configured,
    ("self", "optimizer"),
)

_CLASSES = {
    "OffloadZeroOptimizer": Overridden(
        "offload engine, ZeRO-1/2 optimizer",
        _STAGE_1_2,
        "DeepSpeedZeroOptimizer",
        "OffloadZeroOptimizer",
        _MAKER,
    ),
    "OffloadZeroOptimizerStage3": Overridden(
        "offload engine, ZeRO-3 optimizer",
        _STAGE_3,
        "DeepSpeedZeroOptimizer_Stage3",
        "OffloadZeroOptimizerStage3",
        _MAKER,
    ),
    "ModuleHooks": Overridden(
        "offload engine, ZeRO-3 module hooks",
        _OFFLOAD,
        "DeepSpeedZeRoOffload",
        "ModuleHooks",
        _MAKER,
    ),
    "Coordinator": Overridden(
        "offload engine, ZeRO-3 fetches",
        _COORDINATOR,
        "PartitionedParameterCoordinator",
        "Coordinator",
        _MAKER,
    ),
}
_PLACES = {"OffloadZeroOptimizer": _stage_1_2, "OffloadZeroOptimizerStage3": _stage_3}

SEAMS: tuple[Fillable, ...] = (
    Attribute(
        "offload engine, plan",
        _ENGINE,
        "DeepSpeedEngine._do_optimizer_sanity_check",
        _planned,
        ("self", "basic_optimizer"),
    ),
    _MAKER,
    Attribute(
        "offload engine, ZenFlow",
        _ENGINE,
        "configure_zenflow",
        _zenflow_configured,
        ("engine",),
    ),
    *_CLASSES.values(),
    # DeepSpeed has it as the function of torch, from when the first model is partitioned.
    Attribute(
        "offload engine, ZeRO-3 linear layers",
        _PARTITIONS,
        "zero3_linear_wrap",
        _linear,
        ("input", "weight", "bias"),
    ),
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
    Attribute(
        "offload engine, gradient setting",
        "deepspeed.utils.mixed_precision_linkage",
        "set_full_hp_grad",
        _gradient_set,
        ("self", "value"),
    ),
)
