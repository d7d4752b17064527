"""`register`: puts Stepwell into DeepSpeed's seams. The list of them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from stepwell.deepspeed import accelerate
from stepwell.deepspeed.after_import import after_import
from stepwell.deepspeed.logs import warn
from stepwell.deepspeed.native import (
    adam,
    async_io,
    byte_views,
    compiled_adam,
    cpu_adam,
    cpu_vendor,
    fused_adam,
    pin_memory,
    step_guard,
)
from stepwell.deepspeed.release import release_name
from stepwell.deepspeed.seams import Attribute, NativeOp, Seam
from stepwell.deepspeed.state import consolidation
from stepwell.deepspeed.zero import client_optimizer, optimizer_type
from stepwell.deepspeed.zero import seams as zero_seams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepwell.deepspeed.seams import Fillable

__all__ = ["VERSIONS", "register", "seam_report"]

VERSIONS = ">=0.19.6,<=0.19.8"
"""The releases of DeepSpeed that Stepwell is tested with.

In another release a feature works if its seams are found.
"""

# Missing seams that an error names: the first tells the versions apart.
_NAMED_MAX = 4

_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()
# Features that were warned of.
_LACKING: set[str] = set()


def _without_shm(original: Any) -> Any:
    def build_shm_op() -> None:
        # DeepSpeed then does inference_all_reduce by the process group, as it does where the op
        # cannot be built.
        _LOGGER.debug(
            "left out DeepSpeed's shared-memory communication op, which would have to be compiled"
        )

    return build_shm_op


_CPU_ADAM = "deepspeed.ops.adam.cpu_adam"

# Without these there is nothing to register for.
_ESSENTIAL: tuple[Fillable, ...] = (
    NativeOp("op cpu_adam", "cpu_adam", cpu_adam),
    Attribute(
        "op deepspeed_shm_comm, left out", "deepspeed.comm.torch", "build_shm_op", _without_shm, ()
    ),
    Attribute(
        "making of DeepSpeedCPUAdam", _CPU_ADAM, "DeepSpeedCPUAdam.__init__", cpu_vendor.not_asked
    ),
    Attribute(
        "step of DeepSpeedCPUAdam",
        _CPU_ADAM,
        "DeepSpeedCPUAdam.step",
        step_guard.whole,
        ("self", "closure"),
    ),
    Attribute(
        "step of DeepSpeedCPUAdam by sub-groups",
        _CPU_ADAM,
        "DeepSpeedCPUAdam.step_subgroup",
        step_guard.counting_applied_steps,
        ("self", "subgroup_id", "closure"),
    ),
)

# Of a feature either all seams are filled or none.
_FEATURES: dict[str, tuple[Fillable, ...]] = {
    "FusedAdam on the CPU": (
        NativeOp("op fused_adam", "fused_adam", fused_adam, accelerator="cpu"),
        Attribute(
            "step of FusedAdam",
            "deepspeed.ops.adam.fused_adam",
            "FusedAdam.step",
            step_guard.whole,
            ("self", "closure"),
            accelerator="cpu",
        ),
    ),
    # The first asks for memory of the second, and DeepSpeed loads that before it.
    "files of tensors": (
        NativeOp("op async_io", "async_io", async_io),
        NativeOp("op pin_memory", "pin_memory", pin_memory.OP),
        NativeOp("op utils", "utils", byte_views),
    ),
    "the processes of ZenFlow and SuperOffload": tuple(
        Attribute(f"process of {name}", f"deepspeed.runtime.{module}", path, compiled_adam.used_by)
        for name, module, path in (
            ("ZenFlow", "zenflow.zenflow_utils", "zenflow_optimizer_process"),
            (
                "SuperOffload",
                "superoffload.superoffload_utils",
                "superoffload_optimizer_worker",
            ),
        )
    ),
    # The engine hands its state to the same accessors and checkpoints as Stepwell's optimizers.
    "the offload engine, StepwellAdamW and StepwellAdam": (
        *optimizer_type.SEAMS,
        *client_optimizer.SEAMS,
        *consolidation.SEAMS,
        *zero_seams.SEAMS,
    ),
}
_SEAMS: tuple[Fillable, ...] = (*_ESSENTIAL, *chain.from_iterable(_FEATURES.values()))


def _is_installed() -> bool:
    if "deepspeed" in sys.modules:
        return sys.modules["deepspeed"] is not None
    return importlib.util.find_spec("deepspeed") is not None


def _problems(places: Iterable[Fillable]) -> list[str]:
    return [f"{place.name}: {problem}" for place in places if (problem := place.missing())]


def _lacking(problems: list[str], needed_by: str) -> str:
    more = f"; and {len(problems) - _NAMED_MAX} more" if len(problems) > _NAMED_MAX else ""
    release = release_name() or "of unknown version"
    return (
        f"deepspeed `{release}` lacks what Stepwell fills for {needed_by}, expected {VERSIONS}: "
        f"{'; '.join(problems[:_NAMED_MAX])}{more}. hint: pip install 'deepspeed{VERSIONS}'"
    )


def _fill() -> None:
    """Fills the seams of all features that have theirs.

    Raises ImportError and fills none where what all of them need is missing.
    """
    with _LOCK:
        if problems := _problems(_ESSENTIAL):
            raise ImportError(_lacking(problems, "DeepSpeedCPUAdam"))
        lacking = {name: _problems(places) for name, places in _FEATURES.items()}
        there = [places for name, places in _FEATURES.items() if not lacking[name]]
        for place in chain(_ESSENTIAL, *there):
            if place.unused() is None and not place.is_filled():
                place.fill()
        for name, problems in lacking.items():
            if problems and name not in _LACKING:
                _LACKING.add(name)
                warn(f"{name}: DeepSpeed's own code runs, as {_lacking(problems, name)}")


def register(*, nonfinite: Literal["raise", "propagate"] = "raise") -> None:
    """Puts Stepwell into DeepSpeed, for this process.

    From then on DeepSpeed's CPU Adam (ZeRO-1/2/3 with CPU offload, `bf16_optimizer_states`) runs on
    Stepwell's kernels, `"optimizer": {"type": "StepwellAdamW"}` is known, and none of these paths
    compiles anything. ZeRO with optimizer state in host memory or on NVMe, and ZenFlow under ZeRO-1
    and -2, run on the offload engine as a whole, unless the block `"stepwell"` of the JSON says
    otherwise (`options.Options`). SuperOffload and any other ZenFlow are DeepSpeed's own, on its
    own op, which it compiles.
    What DeepSpeed reads and writes through its op `async_io` (parameters on NVMe, FastFileWriter,
    `ds_io`) goes through Stepwell's files, where every failure is an OSError.

    Where DeepSpeed is not imported yet, that is done at the end of its import, and costs nothing
    before. Engines and optimizers that exist already are left as they are. Calling it again only
    sets `nonfinite`.

    Args:
        nonfinite: what a NaN or an infinity in a gradient does that DeepSpeed itself has not
            caught: "raise" a ValueError before anything is changed, or "propagate", as DeepSpeed's
            own op, which saves reading the gradients once more.

    Raises:
        ImportError: there is no DeepSpeed, or it lacks a seam that all features need, which is
            named; nothing was changed. Where DeepSpeed is not imported yet, its import raises the
            latter. A feature whose seam is missing is DeepSpeed's own, with a warning.
        ValueError: for another `nonfinite`.
    """
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"`nonfinite` is `{nonfinite}`, expected raise or propagate")
    if not _is_installed():
        raise ImportError("deepspeed is not installed. hint: pip install 'stepwell[deepspeed]'")
    if "deepspeed" in sys.modules:
        _fill()
    else:
        after_import("deepspeed", _fill_unless_reporting)
    accelerate.keep_optimizers()
    adam.set_nonfinite(nonfinite)


_REPORTING = threading.local()


def _fill_unless_reporting() -> None:
    if not getattr(_REPORTING, "is_on", False):
        _fill()


def seam_report() -> list[Seam]:
    """Which seams the installed DeepSpeed has, and which of them Stepwell is in, in this process.

    Imports DeepSpeed if it is installed, so that seams are filled after `register`, and only then.
    Raises nothing.
    """
    if not _is_installed():
        return [
            Seam(place.name, False, False, f"{place.where}: deepspeed is not installed")
            for place in _SEAMS
        ]
    try:
        importlib.import_module("deepspeed")
    except ImportError:
        # For want of a seam, perhaps: which one is found below.
        _REPORTING.is_on = True
    try:
        return [_report(place) for place in _SEAMS]
    finally:
        _REPORTING.is_on = False


def _report(place: Fillable) -> Seam:
    if problem := place.missing():
        return Seam(place.name, False, False, problem)
    if reason := place.unused():
        return Seam(place.name, True, False, f"{place.where}: {reason}")
    return Seam(place.name, True, place.is_filled(), place.where)
