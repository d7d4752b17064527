"""What `stepwell doctor` says of the software: torch, the optimizers, DeepSpeed."""

from __future__ import annotations

import copy
import importlib
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from stepwell.cli._finding import Finding, one_line
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

__all__ = ["accelerator", "deepspeed_parts", "look_at_cuda", "look_at_deepspeed", "optimizers"]

_INSTALL_DEEPSPEED = "pip install 'stepwell[deepspeed]'"


# ---- torch ----


def look_at_cuda() -> dict[str, Any]:
    """What torch says of CUDA, as plain values: `error` is None where it answers."""
    facts: dict[str, Any] = {"built": None, "available": False, "devices": [], "error": None}
    try:
        import torch

        facts["built"] = torch.version.cuda
        facts["available"] = torch.cuda.is_available()
        count = torch.cuda.device_count() if facts["available"] else 0
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a broken torch may raise anything
        facts |= {"available": False, "error": one_line(error)}
    return facts


def accelerator(cuda: dict[str, Any]) -> Iterator[Finding]:
    """Where models train."""
    if cuda["available"]:
        names = ", ".join(
            f"{cuda['devices'].count(name)} x {name}" for name in dict.fromkeys(cuda["devices"])
        )
        yield Finding(
            topic="GPU",
            status="ok",
            found=names,
            meaning="models train on the GPU, their optimizer state stays in host memory",
        )
    elif cuda["error"]:
        yield Finding(
            topic="GPU",
            status="broken",
            found=cuda["error"],
            meaning="torch cannot say whether there is a GPU",
            fix="python -c 'import torch; torch.cuda.is_available()' must work; reinstall torch",
        )
    else:
        built = cuda["built"]
        yield Finding(
            topic="GPU",
            status="note",
            found=f"none; torch is built for CUDA {built}" if built else "none; torch is for CPUs",
            meaning="models train on the CPU",
            fix="`nvidia-smi` says what the driver sees; CUDA_VISIBLE_DEVICES may hide a GPU"
            if built
            else "for a GPU, install a torch wheel for CUDA",
        )


# ---- optimizers ----


def optimizers(cuda: dict[str, Any], obstacle: str | None = None) -> Iterator[Finding]:
    """Whether each optimizer steps here as torch's does. Each makes one step of a tiny layer.

    Args:
        cuda: of `look_at_cuda`.
        obstacle: why nothing steps on Stepwell in this process; None if it does.
    """
    if obstacle:
        yield Finding(
            topic="optimizers",
            status="broken",
            found="AdamW and OffloadAdamW do not work",
            meaning=f"each step raises: {obstacle}",
            fix="see above",
        )
        return
    yield _try_optimizer(
        "AdamW", "cpu", "in host memory", lambda stepwell, params: stepwell.AdamW(params)
    )
    on_gpu = cuda["available"]
    yield _try_optimizer(
        "OffloadAdamW",
        "cuda" if on_gpu else "cpu",
        "on the GPU" if on_gpu else "in host memory (there is no GPU)",
        lambda stepwell, params: stepwell.OffloadAdamW(params),
    )


def _try_optimizer(
    name: str, device: str, where: str, make: Callable[[Any, Any], torch.optim.Optimizer]
) -> Finding:
    try:
        difference = _difference_after_a_step(device, make)
    # Whatever stands in the way is the finding.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Finding(
            topic=name,
            status="broken",
            found=one_line(error),
            meaning="a step of one small layer failed",
            fix="mend what the error names; other lines here may name it too",
        )
    if not difference < 1e-5:
        return Finding(
            topic=name,
            status="broken",
            found=f"a weight is `{difference:.2g}` from torch's after a step, expected below 1e-5",
            meaning="results are wrong on this machine",
            fix="report it, with what `stepwell doctor --json` prints",
        )
    return Finding(
        topic=name,
        status="ok",
        found="works",
        meaning=f"a step of a small layer {where} gave the weights of torch.optim.AdamW",
    )


def _difference_after_a_step(
    device: str, make: Callable[[Any, Any], torch.optim.Optimizer]
) -> float:
    """The largest difference of a weight from torch's after the same step."""
    import torch

    import stepwell

    layer = torch.nn.Linear(33, 65, device=device, dtype=torch.float32)
    twin = copy.deepcopy(layer)
    batch = torch.ones(1, 33, device=device, dtype=torch.float32)
    ours, reference = make(stepwell, layer.parameters()), torch.optim.AdamW(twin.parameters())
    for module, optimizer in ((layer, ours), (twin, reference)):
        module(batch).square().sum().backward()
        optimizer.step()
    if hasattr(ours, "synchronize"):
        ours.synchronize()
    with torch.no_grad():
        pairs = zip(layer.parameters(), twin.parameters(), strict=True)
        return max((mine - other).abs().max().item() for mine, other in pairs)


# ---- DeepSpeed ----


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a user of DeepSpeed knows by name, and the seams that it takes."""

    topic: str
    seams: tuple[str, ...]
    """How their names begin."""
    works: str
    otherwise: str
    """What happens where one of its seams is left to DeepSpeed."""


# Of ZeRO on the offload engine, whatever the stage.
_ENGINE_SEAMS = (
    "offload engine, making",
    "offload engine, plan",
    "offload engine, state",
    "offload engine, gradient",
)
_PARTS = (
    _Part(
        topic="ZeRO-1 and -2",
        seams=(*_ENGINE_SEAMS, "offload engine, ZeRO-1/2"),
        works="CPU and NVMe offload step on the engine, in the background",
        otherwise="CPU offload is DeepSpeed's own path on Stepwell's kernels, not the engine",
    ),
    _Part(
        topic="ZeRO-3",
        seams=(*_ENGINE_SEAMS, "offload engine, ZeRO-3"),
        works="CPU and NVMe offload step on the engine; in the background, except on one rank "
        "without offload_param",
        otherwise="CPU offload is DeepSpeed's own path on Stepwell's kernels, not the engine",
    ),
    _Part(
        topic="DeepSpeedCPUAdam",
        seams=("op cpu_adam", "making of DeepSpeedCPUAdam", "step of DeepSpeedCPUAdam"),
        works="steps on Stepwell's kernels; nothing is compiled",
        otherwise="is DeepSpeed's own, and needs a C++ compiler",
    ),
    _Part(
        topic="FusedAdam on CPUs",
        seams=("op fused_adam", "step of FusedAdam"),
        works="steps on Stepwell's kernels; nothing is compiled",
        otherwise="is DeepSpeed's own where models train on a GPU",
    ),
    _Part(
        topic="files of tensors",
        seams=("op async_io", "op pin_memory", "op utils"),
        works="parameters on NVMe, FastFileWriter, ds_io: through Stepwell; nothing is compiled",
        otherwise="is DeepSpeed's own async_io, and needs a C++ compiler and libaio",
    ),
    _Part(
        topic="ZenFlow",
        seams=("offload engine, ZenFlow", "process of"),
        works="under ZeRO-1 and -2 on the engine; else, and SuperOffload, DeepSpeed's own, which "
        "needs a C++ compiler",
        otherwise="ZenFlow and SuperOffload are DeepSpeed's own, and need a C++ compiler",
    ),
    _Part(
        topic="StepwellAdamW",
        seams=("optimizer type", "client optimizer", "optimizers of ZeRO", "16-bit masters"),
        works="is known as an optimizer type of the JSON, and stepwell.AdamW as an optimizer",
        otherwise="is not known everywhere in the JSON",
    ),
    _Part(
        topic="state access",
        seams=("state access", "universal checkpoints"),
        works="checkpoints and safe_get_full_* see fp32 state, also of bf16 and q8 moments",
        otherwise="checkpoints and safe_get_full_* see state as it is held",
    ),
    _Part(
        topic="shm messages",
        seams=("op deepspeed_shm_comm",),
        works="left out: their op would have to be compiled; CPU ranks use the process group",
        otherwise="DeepSpeed's own, compiled on first use",
    ),
)


def look_at_deepspeed() -> dict[str, Any] | None:
    """DeepSpeed once Stepwell is registered here, as plain values; None where it is not installed.

    Returns:
        `version`, `tested` (the versions that Stepwell is tested with), `seams`, and `error`: None
        where Stepwell could be registered.
    """
    facts: dict[str, Any] = {"version": None, "tested": None, "seams": [], "error": None}
    try:
        if util.find_spec("deepspeed") is None:
            return None
        facts["version"] = metadata.version("deepspeed")
    except (ImportError, ValueError):
        pass  # not installed by pip: its import says whether it is one
    try:
        from stepwell import deepspeed

        facts["tested"] = deepspeed.VERSIONS
        with quiet_deepspeed():
            try:
                deepspeed.register()
                importlib.import_module("deepspeed")  # fills the seams, or says what is missing
            finally:
                facts["seams"] = [asdict(seam) for seam in deepspeed.seam_report()]
    # A broken DeepSpeed may raise anything.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        facts["error"] = one_line(error)
    return facts


def deepspeed_parts(facts: dict[str, Any] | None, obstacle: str | None = None) -> Iterator[Finding]:
    """Which parts of DeepSpeed step on Stepwell.

    Args:
        facts: of `look_at_deepspeed`.
        obstacle: why nothing steps on Stepwell in this process; None if it does.
    """
    if facts is None:
        yield Finding(
            topic="DeepSpeed",
            status="note",
            found="not installed",
            meaning="the optimizers work without; `stepwell run` and `stepwell demo` need it",
            fix=_INSTALL_DEEPSPEED,
        )
        return
    version = facts["version"] or "of unknown version"
    if facts["error"]:
        yield Finding(
            topic="DeepSpeed",
            status="broken",
            found=f"{version}: {facts['error']}",
            meaning="DeepSpeed cannot step on Stepwell; the optimizers do not need it",
            fix=f"`python -c 'import deepspeed'` must work; then {_INSTALL_DEEPSPEED}",
        )
        return
    if obstacle:
        yield Finding(
            topic="DeepSpeed",
            status="broken",
            found=version,
            meaning=f"each step on Stepwell raises: {obstacle}",
            fix="see above",
        )
        return
    yield _version(version, facts["tested"])
    known: set[str] = set()
    for part in _PARTS:
        seams = [seam for seam in facts["seams"] if seam["name"].startswith(part.seams)]
        known.update(seam["name"] for seam in seams)
        if seams:
            yield _finding_of(part, seams)
    others = [seam for seam in facts["seams"] if seam["name"] not in known]
    for seam in others:
        part = _Part(
            topic=seam["name"], seams=(), works="is Stepwell's", otherwise="is DeepSpeed's"
        )
        yield _finding_of(part, [seam])


def _version(version: str, tested: str | None) -> Finding:
    if tested is None or _is_in(version, tested):
        return Finding(
            topic="DeepSpeed",
            status="ok",
            found=version,
            meaning="the following holds after stepwell.deepspeed.register() and in `stepwell run`",
        )
    return Finding(
        topic="DeepSpeed",
        status="warning",
        found=version,
        meaning=f"Stepwell is tested with {tested}; the following was found in this version",
        fix=f"pip install 'deepspeed{tested}'",
    )


def _is_in(version: str, specifiers: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except (ImportError, ValueError):
        return False


def _finding_of(part: _Part, seams: list[dict[str, Any]]) -> Finding:
    missing = [seam["note"] for seam in seams if not seam["found"]]
    if missing:
        return Finding(
            topic=part.topic,
            status="broken",
            found="does not work with this version of DeepSpeed",
            meaning="; ".join(missing),
            fix=f"install a version that has it: {_INSTALL_DEEPSPEED}",
        )
    left = [seam["note"] for seam in seams if not seam["filled"]]
    if left:
        return Finding(
            topic=part.topic, status="note", found=part.otherwise, meaning="; ".join(left)
        )
    return Finding(topic=part.topic, status="ok", found=part.works, meaning="")
