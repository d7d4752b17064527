"""`stepwell doctor`: what this machine offers, what that means, and how to get what is missing."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepwell import _core
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "diagnose", "doctor"]

Status: TypeAlias = Literal["ok", "note", "warning", "broken"]

_STYLE: dict[Status, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "broken": "bold red",
}
_PACKAGES = (
    "stepwell",
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "matplotlib",
    "typer",
    "rich",
)
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this machine."""

    topic: str
    """What it is about."""
    status: Status
    """`note`: optional and absent; `warning`: works, but slower or smaller than it could; `broken`: does not work."""
    found: str
    """The fact."""
    meaning: str
    """What it means for a training run."""
    fix: str | None = None
    """How to change it; always given for a warning and for what is broken."""


def diagnose() -> dict[str, Any]:
    """All that `stepwell doctor` knows, as plain values.

    Returns:
        `status` (the worst of the findings), `findings`, and what they were drawn from: `versions`,
        `system`, `build`, `cuda`, `deepspeed`.
    """
    system, build = _core.system_info(), _core.build_info()
    cuda, deepspeed = _cuda(), _deepspeed()
    findings = [
        *_cpu(system, build),
        *_memory(system),
        *_storage(system),
        *_accelerator(cuda),
        *_seams(deepspeed),
    ]
    worst = max((finding.status for finding in findings), key=list(_STYLE).index)
    return {
        "status": worst,
        "findings": [asdict(finding) for finding in findings],
        "versions": _versions(),
        "system": system,
        "build": build,
        "cuda": cuda,
        "deepspeed": deepspeed,
    }


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine offers to Stepwell, and how to get what is missing. Exits with 1 if something is broken."""
    report = diagnose()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    raise typer.Exit(1 if report["status"] == "broken" else 0)


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for finding in report["findings"]:
        text = Text(finding["found"])
        text.append(f"\n{finding['meaning']}", style="dim")
        if finding["fix"]:
            text.append("\nhint: ", style="bold").append(finding["fix"])
        table.add_row(
            Text(finding["status"], style=_STYLE[finding["status"]]),
            Text(finding["topic"], style="bold"),
            text,
        )
    console.print(table)
    console.print(
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        highlight=False,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _cpu(system: dict[str, Any], build: dict[str, Any]) -> Iterator[Finding]:
    forced = os.environ.get("STEPWELL_ISA")
    available = ", ".join(system["isas_available"])
    if forced or system["isa"] == "scalar":
        fix = "unset STEPWELL_ISA" if forced else "use a CPU with AVX2 and FMA, or an aarch64 one"
        meaning = (
            "the same results as any other, but slower than this CPU can"
            if forced
            else "correct, many times slower"
        )
        yield Finding(
            topic="instructions",
            status="warning",
            found=f"{system['isa']} of {available}",
            meaning=meaning,
            fix=fix,
        )
    else:
        yield Finding(
            topic="instructions",
            status="ok",
            found=f"{system['isa']} of {available}",
            meaning="the widest kernels run",
        )
    if build.get("profile") == "debug":
        yield Finding(
            topic="build",
            status="warning",
            found="debug",
            meaning="the core was built without optimisation: many times slower",
            fix="reinstall, or `maturin develop --release`",
        )
    yield _cores(system)
    nodes = system["numa_nodes"]
    yield Finding(
        topic="NUMA",
        status="ok",
        found=f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}",
        meaning="all memory is equally near"
        if len(nodes) == 1
        else "one rank per node steps fastest: its threads and its memory stay on that node",
    )


def _cores(system: dict[str, Any]) -> Finding:
    kinds: dict[int, str] = {cpu["core"]: cpu["kind"] for cpu in system["cpus"]}
    pool = system["pool_cpus"]
    counts = [(kind, list(kinds.values()).count(kind)) for kind in ("performance", "efficiency")]
    cores = " + ".join(f"{count} {kind}" for kind, count in counts if count)
    found = f"{cores} cores, {len(system['cpus'])} CPUs; the pool's threads are on {_ranges(pool)}"
    if len(pool) >= sum(kind == "performance" for kind in kinds.values()):
        return Finding(
            topic="cores", status="ok", found=found, meaning="one pinned thread per physical core"
        )
    asked = _pool_limit()
    fix: str | None = (
        "widen the affinity mask of this process (taskset, numactl, the container's cpuset)"
    )
    if asked is not None:
        fix = (
            "unset STEPWELL_THREADS to use all cores" if "STEPWELL_THREADS" in os.environ else None
        )
    return Finding(
        topic="cores",
        status="note" if asked else "warning",
        found=found,
        meaning=f"a step uses {len(pool)} of {len(kinds)} cores: {asked or 'this process is allowed no more'}",
        fix=fix,
    )


def _pool_limit() -> str | None:
    """Why the pool is smaller than the machine, where someone asked for it."""
    if "STEPWELL_THREADS" in os.environ:
        return f"STEPWELL_THREADS is {os.environ['STEPWELL_THREADS']}"
    if "LOCAL_WORLD_SIZE" in os.environ:
        return f"{os.environ['LOCAL_WORLD_SIZE']} ranks share this host"
    return None


def _memory(system: dict[str, Any]) -> Iterator[Finding]:
    policy = system["huge_page_policy"]
    if policy is None or "[never]" in policy:
        yield Finding(
            topic="huge pages",
            status="warning",
            found=policy or "not offered by this kernel",
            meaning="state lies in small pages: steps are slower, and the first one much",
            fix=f"echo madvise | sudo tee {_HUGE_PAGES}",
        )
    else:
        yield Finding(
            topic="huge pages",
            status="ok",
            found=policy,
            meaning="state lies in huge pages where memory is not fragmented",
        )
    free = system["free_memory_bytes"]
    yield Finding(
        topic="free memory",
        status="ok" if free is not None else "note",
        found="unknown" if free is None else f"{free / 2**30:,.1f} GiB",
        meaning="state that takes more is refused"
        if free is not None
        else "state that takes more than there is ends in the kernel killing the process",
    )
    limit = system["memlock_limit_bytes"]
    yield Finding(
        topic="memlock",
        status="ok" if limit is None else "note",
        found="unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB",
        meaning="buffers can be kept resident"
        if limit is None
        else "more than this cannot be kept resident (Buffer(lock=True)); nothing else needs it",
        fix=None
        if limit is None
        else "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
    )


def _storage(system: dict[str, Any]) -> Iterator[Finding]:
    available = system["io_uring"] == "available"
    yield Finding(
        topic="io_uring",
        status="ok" if available else "note",
        found=str(system["io_uring"]),
        meaning="asynchronous storage I/O is there"
        if available
        else "no asynchronous storage I/O; state in memory does not need it",
        fix=None
        if available
        else "sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that allows it",
    )


def _cuda() -> dict[str, Any]:
    import torch

    built = torch.version.cuda
    try:
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        available = torch.cuda.is_available()
    except (RuntimeError, AssertionError) as error:
        return {"built": built, "available": False, "devices": [], "error": str(error)}
    return {"built": built, "available": available, "devices": devices, "error": None}


def _accelerator(cuda: dict[str, Any]) -> Iterator[Finding]:
    if cuda["available"]:
        names = ", ".join(
            f"{cuda['devices'].count(name)} x {name}" for name in dict.fromkeys(cuda["devices"])
        )
        yield Finding(
            topic="CUDA",
            status="ok",
            found=names,
            meaning="models train on the GPU, their optimizer state stays in host memory",
        )
    elif cuda["built"] is None:
        yield Finding(
            topic="CUDA",
            status="note",
            found="torch is built without it",
            meaning="models train on the CPU",
            fix="a torch wheel for CUDA",
        )
    else:
        yield Finding(
            topic="CUDA",
            status="note",
            found=cuda["error"] or f"torch is built for {cuda['built']} and sees no GPU",
            meaning="models train on the CPU",
            fix="nvidia-smi tells whether the driver sees one; CUDA_VISIBLE_DEVICES may hide it",
        )


def _deepspeed() -> dict[str, Any] | None:
    """The seams of DeepSpeed once Stepwell is registered here, or an `error`; None where DeepSpeed is not installed."""
    if util.find_spec("deepspeed") is None:
        return None
    try:
        from stepwell import deepspeed

        with quiet_deepspeed():
            deepspeed.register()
            seams = [asdict(seam) for seam in deepspeed.seam_report()]
        return {"seams": seams, "error": None}
    except Exception as error:  # noqa: BLE001  # whatever is wrong with an installation of DeepSpeed is a finding
        return {"seams": [], "error": f"{type(error).__name__}: {error}"}


def _seams(deepspeed: dict[str, Any] | None) -> Iterator[Finding]:
    if deepspeed is None:
        yield Finding(
            topic="DeepSpeed",
            status="note",
            found="not installed",
            meaning="stepwell.AdamW works without; `stepwell run` and `stepwell demo` need it",
            fix="pip install 'stepwell[deepspeed]'",
        )
        return
    if deepspeed["error"]:
        yield Finding(
            topic="DeepSpeed",
            status="broken",
            found=deepspeed["error"],
            meaning="DeepSpeed cannot step on Stepwell",
            fix="install a version that can: pip install 'stepwell[deepspeed]'",
        )
        return
    seams = deepspeed["seams"]
    filled = [seam["name"] for seam in seams if seam["filled"]]
    yield Finding(
        topic="DeepSpeed",
        status="ok",
        found=f"{len(filled)} of {len(seams)} seams filled",
        meaning="; ".join(filled),
    )
    for seam in seams:
        if not seam["filled"]:
            yield Finding(
                topic="DeepSpeed seam",
                status="note" if seam["found"] else "broken",
                found=f"{seam['name']}: {'left as it is' if seam['found'] else 'not found'}",
                meaning=seam["note"],
                fix=None
                if seam["found"]
                else "install a version that has it: pip install 'stepwell[deepspeed]'",
            )


def _ranges(cpus: list[int]) -> str:
    """CPU numbers as the kernel writes them: `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
