"""One optimizer step against the peers', and what memory allows.

python benches/adam.py [--numel 67108864] [--threads N] [--case fp32] [--out FOLDER]
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pairs import EQUAL_WITHIN, interleave, ratio
from stepwell import _core
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adam_cases import Case, Memory, Streams
    from matplotlib.figure import Figure
    from rich.console import Console

_CHECK_NUMEL_MAX = 1 << 20
_CHECK_STEPS = 3
_WIDTH_PIPED = 110
_BYTES_FORMULA = (
    "every array that a pass reads counts once, every array that it writes once more; "
    "no allocation on write is counted"
)

CASES = ("fp32", "bf16", "fused", "fused_bf16", "fused_q8", "optimizer", "optimizer_propagate")
"""The cases' names. Here, and not where they are made: torch is imported behind `_bind`."""


def main(
    numel: Annotated[int, typer.Option(min=1 << 12, help="Parameters.")] = 64 << 20,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each contender.", show_default="all physical cores"),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=3, help="Rounds. In a round each contender steps once.")
    ] = 30,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help=f"Only this case; may be given more than once: {', '.join(CASES)}.",
            show_default="all",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for bench_adam.json and bench_adam.png.")
    ] = Path("stepwell-bench"),
) -> None:
    """Time one optimizer step against DeepSpeedCPUAdam's and torch's fused one.

    All contenders step the same tensors, in turns, in the same minute.

    DeepSpeedCPUAdam needs a C++ compiler; its first build takes minutes. Where it cannot be built
    the others go on.
    """
    if unknown := [name for name in only or () if name not in CASES]:
        raise typer.BadParameter(f"--case is `{unknown[0]}`, expected one of {', '.join(CASES)}")
    _bind(threads)
    from adam_cases import Memory, cases
    from rich.console import Console
    from stepwell.cli._report import circumstances, write

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_PIPED)
    native, absence = _load_deepspeed(console)
    chosen = [case for case in cases(native) if not only or case.name in only]
    report: dict[str, Any] = {
        **circumstances("python benches/adam.py"),
        "numel": numel,
        "threads": _core.Pool.default().threads,
        "repeats": repeats,
        "bytes_formula": _BYTES_FORMULA,
        "equal_within": EQUAL_WITHIN,
        "deepspeed_absent": absence,
        "cases": [],
    }
    machine = report["machine"]
    console.print(
        f"{numel:,} parameters, {report['threads']} pinned threads, {machine['cpu']}, "
        f"{report['date']}",
        highlight=False,
    )
    for case in chosen:
        differences = _check(case, min(numel, _CHECK_NUMEL_MAX))
        result = _measure(case, Memory(numel), repeats) | {
            "difference": differences,
            "tolerance": case.tolerance,
        }
        report["cases"].append(result)
        _print(console, result)
    write(console, out, "bench_adam", report, lambda figure: _draw(figure, report))


# ---- threads ----


def _bind(threads: int | None) -> None:
    """Gives all contenders the same pinned cores.

    Starts this process anew for that: OpenMP reads its settings as it is loaded.
    """
    variable = "_STEPWELL_BENCH_CPUS"
    if variable not in os.environ:
        cpus = list(_core.Pool(threads=threads).cpus)
        os.environ |= {
            variable: ",".join(map(str, cpus)),
            "STEPWELL_THREADS": str(len(cpus)),
            "OMP_NUM_THREADS": str(len(cpus)),
            "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in cpus),
            "OMP_PROC_BIND": "close",
            # ninja, without which DeepSpeed's op is not built, is installed beside this
            # interpreter.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    cpus = [int(cpu) for cpu in os.environ[variable].split(",")]
    # OpenMP has bound this thread to the first of them, and the pool takes what the thread that
    # makes it is allowed.
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    pool = _core.Pool.default()
    os.sched_setaffinity(0, bound)
    if sorted(pool.cpus) != sorted(cpus):
        raise typer.BadParameter(
            f"the pool is on CPUs `{pool.cpus}`, expected {cpus}. "
            "hint: unset LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    torch.set_num_threads(len(cpus))


# ---- DeepSpeed ----


def _load_deepspeed(console: Console) -> tuple[Any | None, str | None]:
    """DeepSpeed's own native module, or why there is none.

    Nothing is registered in this process.
    """
    absence = _build_problem()
    if absence is None:
        console.print("loading DeepSpeedCPUAdam; its first build takes minutes")
        try:
            with quiet_deepspeed():
                from deepspeed.ops.op_builder import CPUAdamBuilder

                return CPUAdamBuilder().load(verbose=False), None
        # Compiler, linker, ninja, CUDA: whatever stands in the way is the answer.
        except Exception as error:  # noqa: BLE001
            lines = str(error).strip().splitlines() or [type(error).__name__]
            absence = (
                f"its op cannot be built: {lines[0].strip()} "
                "hint: it needs a C++ compiler and ninja"
            )
    console.print(f"without DeepSpeedCPUAdam: {absence}", style="yellow", markup=False)
    return None, absence


def _build_problem() -> str | None:
    """What is known to keep DeepSpeed's op from being built, before it is tried."""
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed. hint: pip install 'stepwell[deepspeed]'"
    if lock := _build_lock():
        return f"another build of its op holds {lock}. hint: if none is running, delete that file"
    return None


def _build_lock() -> Path | None:
    """The file that an older torch waits for without end where a killed build has left it.

    A newer torch locks the file instead, so there is nothing to wait for.
    """
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return None
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return next(
        (path for pattern in ("cpu_adam/lock", "*/cpu_adam/lock") for path in root.glob(pattern)),
        None,
    )


# ---- measuring ----


def ceiling(streams: Sequence[Streams], numel: int) -> float:
    """Seconds that these passes take at least.

    The same arrays, pages, chunks and threads, with next to no arithmetic.
    """
    seconds: list[float] = [
        _core.stream_ceiling(
            numel=numel,
            read_write_bytes=list(one.read_write),
            read_bytes=list(one.read),
            write_bytes=list(one.write),
        )
        for one in streams
    ]
    return sum(seconds)


def _check(case: Case, numel: int) -> dict[str, float]:
    """How far our change of the weights is from each peer's after some steps.

    Each contender steps tensors of its own.

    Raises:
        ValueError: farther than the case tolerates.
    """
    import torch
    from adam_cases import Memory

    changes: dict[str, torch.Tensor] = {}
    for contender in (case.ours, *case.peers):
        run = contender.prepare(Memory(numel))
        before = run.weights().clone()
        for _ in range(_CHECK_STEPS):
            for step in run.passes.values():
                step()
        changes[contender.name] = run.weights().double() - before
    ours = changes.pop(case.ours.name)
    differences = {
        name: ((ours - change).norm() / change.norm()).item() for name, change in changes.items()
    }
    for name, difference in differences.items():
        if not difference <= case.tolerance:
            raise ValueError(
                f"case `{case.name}`: the result differs from that of {name} by "
                f"`{difference:.2g}`, expected {case.tolerance:.2g} at most"
            )
    return differences


def _measure(case: Case, memory: Memory, repeats: int) -> dict[str, Any]:
    contenders = {contender.name: contender for contender in (case.ours, *case.peers)}
    runs = {name: contender.prepare(memory) for name, contender in contenders.items()}
    seconds = interleave({name: run.passes for name, run in runs.items()}, repeats=repeats)
    totals = {
        name: [sum(each) for each in zip(*passes.values(), strict=True)]
        for name, passes in seconds.items()
    }
    limit = ceiling(case.ours.streams, memory.numel)
    results: list[dict[str, Any]] = []
    for name, contender in contenders.items():
        median = statistics.median(totals[name])
        nbytes = sum(streams.bytes for streams in contender.streams)
        result: dict[str, Any] = {
            "name": name,
            "seconds": median,
            "ns_per_param": median / memory.numel * 1e9,
            "bytes_per_param": nbytes,
            "gb_per_second": nbytes * memory.numel / median / 1e9,
            "passes": {pass_: statistics.median(each) for pass_, each in seconds[name].items()},
            "all_seconds": totals[name],
        }
        if contender is case.ours:
            result |= {"ceiling_seconds": limit, "share_of_ceiling": limit / median}
        else:
            ours = ratio(totals[name], totals[case.ours.name])
            result["ratio"] = asdict(ours) | {"verdict": ours.verdict}
        results.append(result)
    return {"name": case.name, "title": case.title, "contenders": results}


# ---- output ----


def _print(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{result['name']}: {result['title']}",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    table.add_column(min_width=28, no_wrap=True)
    for column in ("ms", "ns/param", "B/param", "GB/s", "of ceiling", "its time over stepwell's"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in result["contenders"]:
        against = one.get("ratio")
        table.add_row(
            one["name"],
            f"{one['seconds'] * 1e3:.1f}",
            f"{one['ns_per_param']:.3f}",
            f"{one['bytes_per_param']}",
            f"{one['gb_per_second']:.1f}",
            f"{one['share_of_ceiling']:.0%}" if "share_of_ceiling" in one else "",
            f"{against['median']:.2f} ({against['low']:.2f}-{against['high']:.2f}) "
            f"{against['verdict']:>7}"
            if against
            else "",
        )
        if len(one["passes"]) > 1:
            for name, seconds in one["passes"].items():
                table.add_row(f"  [dim]{name}[/dim]", f"[dim]{seconds * 1e3:.1f}[/dim]")
    console.print()
    console.print(table)


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    axes = figure.subplots()
    bars = [
        (case, one) for case in reversed(report["cases"]) for one in reversed(case["contenders"])
    ]
    for position, (_, one) in enumerate(bars):
        ours = "ratio" not in one
        axes.barh(position, one["ns_per_param"], color="tab:blue" if ours else "tab:gray")
        label = "" if ours else f"  {one['ratio']['median']:.2f}x"
        axes.text(one["ns_per_param"], position, label, va="center", fontsize=8)
    axes.set_xlim(right=1.15 * max(one["ns_per_param"] for _, one in bars))
    axes.set_yticks(
        range(len(bars)), [f"{case['name']}: {one['name']}" for case, one in bars], fontsize=8
    )
    axes.set_xlabel(
        "ns per parameter and step (less is better); beside a peer: its time over stepwell's"
    )
    axes.set_title(
        f"{report['numel']:,} parameters, {report['threads']} threads, "
        f"{report['machine']['cpu']}, {report['date']}",
        fontsize=9,
    )


if __name__ == "__main__":
    typer.run(main)
