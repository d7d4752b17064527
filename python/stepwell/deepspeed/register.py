"""`register`: puts Stepwell into DeepSpeed's seams. The list of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import threading
from typing import TYPE_CHECKING, Any, Literal

from stepwell.deepspeed import consolidation, cpu_adam, fused_adam, native, optimizer_type, spawn, step_guard
from stepwell.deepspeed.seams import Attribute, NativeOp, Seam

if TYPE_CHECKING:
    from stepwell.deepspeed.seams import Place

__all__ = ["VERSIONS", "register", "seam_report"]

VERSIONS = "0.19.8"
"""The releases of DeepSpeed that have all seams, and that Stepwell is tested with."""

_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()


def _without_shm(original: Any) -> Any:
    def build_shm_op() -> None:
        # DeepSpeed then does inference_all_reduce by the process group, as it does where the op cannot be built.
        _LOGGER.debug("left out DeepSpeed's shared-memory communication op, which would have to be compiled")

    return build_shm_op


_PLACES: tuple[Place, ...] = (
    NativeOp("op cpu_adam", "cpu_adam", cpu_adam),
    NativeOp("op fused_adam", "fused_adam", fused_adam, accelerator="cpu"),
    Attribute("op deepspeed_shm_comm, left out", "deepspeed.comm.torch", "build_shm_op", _without_shm, ()),
    Attribute(
        "step of DeepSpeedCPUAdam",
        "deepspeed.ops.adam.cpu_adam",
        "DeepSpeedCPUAdam.step",
        step_guard.whole,
        ("self", "closure"),
    ),
    Attribute(
        "step of DeepSpeedCPUAdam by sub-groups",
        "deepspeed.ops.adam.cpu_adam",
        "DeepSpeedCPUAdam.step_subgroup",
        step_guard.counting_applied_steps,
        ("self", "subgroup_id", "closure"),
    ),
    Attribute(
        "step of ZenFlowCPUAdam",
        "deepspeed.ops.adam.zenflow_cpu_adam",
        "ZenFlowCPUAdam._sequential_step",
        step_guard.whole,
        ("self", "step_id", "closure"),
    ),
    Attribute(
        "process of ZenFlow",
        "deepspeed.runtime.zenflow.zenflow_utils",
        "zenflow_optimizer_process",
        lambda _: spawn.zenflow_worker,
    ),
    Attribute(
        "process of SuperOffload",
        "deepspeed.runtime.superoffload.superoffload_utils",
        "superoffload_optimizer_worker",
        lambda _: spawn.superoffload_worker,
    ),
    *optimizer_type.SEAMS,
    *consolidation.SEAMS,
)


def _is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _version() -> str:
    return str(getattr(importlib.import_module("deepspeed"), "__version__", "of unknown version"))


def register(*, nonfinite: Literal["raise", "propagate"] = "raise") -> None:
    """Puts Stepwell into DeepSpeed, before or after `import deepspeed`, for this process and those that DeepSpeed spawns.

    From then on DeepSpeed's CPU Adam (ZeRO-1/2/3 with CPU offload, `bf16_optimizer_states`, SuperOffload, ZenFlow) runs on
    Stepwell's kernels, `"optimizer": {"type": "StepwellAdamW"}` is known, and none of these paths compiles anything.
    Engines and optimizers that exist already are left as they are. Calling it again only sets `nonfinite`.

    Args:
        nonfinite: what a NaN or an infinity in a gradient does that DeepSpeed itself has not caught: "raise" a ValueError
            before anything is changed, or "propagate", as DeepSpeed's own op, which saves reading the gradients once more.

    Raises:
        ImportError: there is no DeepSpeed, or it lacks a seam, which is named; nothing was changed.
        ValueError: for another `nonfinite`.
    """
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"`nonfinite` is `{nonfinite}`, expected raise or propagate")
    if not _is_installed():
        raise ImportError("deepspeed is not installed. hint: pip install 'stepwell[deepspeed]'")
    with _LOCK:
        problems = [f"{place.name}: {problem}" for place in _PLACES if (problem := place.missing())]
        if problems:
            raise ImportError(
                f"deepspeed `{_version()}` lacks what Stepwell fills, expected {VERSIONS}: {'; '.join(problems)}. "
                f"hint: pip install 'deepspeed=={VERSIONS}'"
            )
        for place in _PLACES:
            if place.unused() is None and not place.is_filled():
                place.fill()
        native.set_nonfinite(nonfinite)


def seam_report() -> list[Seam]:
    """Which seams the installed DeepSpeed has, and which of them Stepwell is in, in this process.

    Imports DeepSpeed if it is installed. Fills nothing.
    """
    if not _is_installed():
        return [Seam(place.name, False, False, f"{place.where}: deepspeed is not installed") for place in _PLACES]
    report = []
    for place in _PLACES:
        if problem := place.missing():
            report.append(Seam(place.name, False, False, problem))
        elif reason := place.unused():
            report.append(Seam(place.name, True, False, f"{place.where}: {reason}"))
        else:
            report.append(Seam(place.name, True, place.is_filled(), place.where))
    return report
