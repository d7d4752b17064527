"""`stepwell bench offload`: training steps with the optimizer in host memory.

They are held against DeepSpeed's, against those of a model that is on the GPU with its optimizer,
and against the bound of an exact step that hides nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepwell.cli._cases import DEFAULT_CASES, Case
from stepwell.cli._memory_rate import MemoryRate, bound
from stepwell.cli._processes import run_processes
from stepwell.cli._report import case_table, failed_case

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from stepwell.cli._workload import Workload

__all__ = ["CASES", "bench_offload", "bus_gb_per_second", "host_bytes_per_param", "run_case"]

_PEER = "deepspeed"

CASES = """Every case trains the same bfloat16 Llama on the same text, in a process of its own.

A case is what is named here, with q8 moments or not, and options behind commas that go together:
`stepwell q8, deferred=2, resident=0.5`.

- `torch`: everything is on the GPU, with torch's fused AdamW.
- `stepwell`: OffloadAdamW with fp32 moments; `stepwell q8`: with q8 moments.
- `stepwell, no model`: `step()` waits for all weights at once.
- `stepwell, untold`: `accumulation_steps` is not given.
- `stepwell, deferred=4`: updates are deferred; each part of the model is stepped in every
  fourth step. Other numbers of steps likewise. `fraction=0.1`: a tenth of the rows or columns
  is stepped at once, on the GPU.
- `stepwell, resident=0.5`: half of the optimizer state stays on the GPU.
- `stepwell volume`: state on the drives of --drive, with commits, and with as little of it in
  host memory as can be; `commit_interval=1`: a commit in each step; `durability=none`: without
  commits, and with deferred updates.
- `deepspeed`: ZeRO-2 with CPU offload. Its op needs a C++ compiler.
- `deepspeed on stepwell`: the same JSON with Stepwell registered.
- `deepspeed on stepwell, accumulate=device`: with several micro-steps, gradients are summed on
  the GPU, not in host memory.
- `deepspeed, zenflow`: with a block `zenflow`; `deepspeed on stepwell, zenflow`: the same JSON
  with Stepwell registered, whose engine defers the updates.
- `deepspeed, offload_param`, `deepspeed on stepwell, offload_param`: ZeRO-3 with parameters
  offloaded as well; `fetch=deepspeed`: with DeepSpeed's hooks that fetch them.
- `deepspeed, ratio=0.5`, `deepspeed on stepwell, ratio=0.5`: ZeRO-3 with half of the optimizer
  state in host memory, and half on the GPU.
- `deepspeed, nvme`, `deepspeed on stepwell, nvme`: ZeRO-3 with optimizer state on the drives;
  DeepSpeed's swapper uses the first. `durability=none` and `commit_interval=1` as above.

Each time is held against L + bytes / R, the bound of an exact step that hides nothing. L is
forward and backward alone. R is the rate at which this host's memory is read and written: the
larger one of directly before and behind a case.
"""
"""What a case is, for the end of the help."""


def bench_offload(
    size: Annotated[
        str,
        typer.Option(
            help="tiny, 1b, 3b, 8b, or the path of a transformers config.json of a Llama."
        ),
    ] = "1b",
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens per sample.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per forward.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forwards per optimizer step.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="Only this case, as below; may be given more than once.",
            show_default=(
                f"{'; '.join(DEFAULT_CASES)}, those with a volume where --drive is given"
            ),
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=3, help="Steps that are measured, after those of --warm-up.")
    ] = 12,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps that are not measured.")] = 3,
    clip_norm: Annotated[
        float, typer.Option(help="What the norm of the gradients is clipped to.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the weights and the samples.")] = 0,
    drives: Annotated[
        list[Path] | None,
        typer.Option(
            "--drive",
            exists=True,
            file_okay=False,
            help="A folder on a drive, for the cases with a volume; once for each drive.",
        ),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="The model's layers are compiled by torch.compile."),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="A file to train on. A token is a byte.",
            show_default="the sources of Python's library",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for bench_offload.json and bench_offload.png.")
    ] = Path("stepwell-bench"),
) -> None:
    """Time training steps with the optimizer in host memory, and those of others."""
    from stepwell.cli._console import output
    from stepwell.cli._report import circumstances, write, write_json
    from stepwell.cli._step_times import circumstances_line
    from stepwell.cli._workload import SIZES, Workload

    console = output()
    if size not in SIZES and not Path(size).is_file():
        raise typer.BadParameter(
            f"--size is `{size}`, expected {', '.join(SIZES)} or the path of a config.json"
        )
    names = _names(only, has_drives=bool(drives))
    workload = Workload(
        size=size,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        steps=steps,
        warm_up_steps=warm_up,
        clip_norm=clip_norm,
        seed=seed,
        text=str(text.resolve()) if text else None,
        drives=tuple(str(drive.resolve()) for drive in drives or ()),
        is_compiled=compiled,
    )
    memory = MemoryRate()
    report: dict[str, Any] = {
        **circumstances(),
        "plan": asdict(workload),
        "memory_gb_per_second": memory.gb_per_second,
        "bus_gb_per_second": bus_gb_per_second(),
    }
    console.print(
        f"{circumstances_line(report)}; "
        f"R {report['memory_gb_per_second']:.0f} GB/s"
        + "".join(
            f", {name} {rate:.0f} GB/s" for name, rate in report["bus_gb_per_second"].items()
        ),
        highlight=False,
    )
    report["forward_backward_seconds"] = alone = run_case(
        console, "forward and backward", workload
    ).get("seconds")
    report["cases"] = cases = []
    for name in names:
        result = memory.beside(partial(run_case, console, name, workload))
        if "seconds" in result:
            # Of a share that is on the GPU, and of what is hidden, no bound is known.
            is_whole = not any(word in name for word in ("ratio", "deferred", "zenflow"))
            bytes_per_param = host_bytes_per_param(name.split(",")[0]) if is_whole else None
            if bytes_per_param and alone:
                result |= bound(result, alone, bytes_per_param)
            console.print(f"    {result['mean_seconds']:.3f} s per step", style="dim")
        cases.append(result)
        # A run that is stopped has what came before.
        write_json(out, "bench_offload", report)
    _print(console, report)
    write(console, out, "bench_offload", report, lambda figure: _draw(figure, report))


def _names(only: list[str] | None, *, has_drives: bool) -> list[str]:
    """The cases that run; raises BadParameter where one cannot."""
    if not only:
        return [name for name in DEFAULT_CASES if has_drives or not Case.parse(name).is_on_drives]
    for name in only:
        try:
            case = Case.parse(name)
        except ValueError as error:
            raise typer.BadParameter(f"--case: {error}") from error
        if case.is_on_drives and not has_drives:
            raise typer.BadParameter(f"--case is `{name}`, expected --drive with it")
    return only


def bus_gb_per_second() -> dict[str, float]:
    """What the bus moves between pinned memory and the GPU, each way and both; else nothing."""
    from stepwell.planning.measuring import bus_rates

    return {name: rate / 1e9 for name, rate in bus_rates().items()}


def host_bytes_per_param(name: str) -> float | None:
    """What a step of a bfloat16 model moves in host memory; None for cases off the engine."""
    from stepwell._sizes import moved_bytes

    # Beside float32 masters a 16-bit gradient is read, and a 16-bit weight written.
    held = {
        "stepwell": ("bfloat16", "fp32"),
        "stepwell q8": ("bfloat16", "q8"),
        "deepspeed on stepwell": ("float32", "fp32"),
    }
    return round(moved_bytes(*held[name]), 2) if name in held else None


def run_case(console: Console, name: str, workload: Workload) -> dict[str, Any]:
    """Runs a case in a process of its own."""
    console.print(f"running: {name}", style="dim", highlight=False)
    asked = {"name": name, "plan": asdict(workload)}
    result = run_processes(["-m", "stepwell.cli._offload_cases"], asked, [{}])
    return failed_case(console, name, result) if isinstance(result, str) else result


def _print(console: Console, report: dict[str, Any]) -> None:
    workload = report["plan"]
    done = [case for case in report["cases"] if "seconds" in case]
    numel = done[0]["num_params"] / 1e9 if done else 0
    title = (
        f"{numel:.3f} B parameters, "
        f"{workload['micro_batch']} x {workload['sequence_length']} tokens, "
        f"{workload['accumulation']} micro-step(s), clipping at {workload['clip_norm']:g}"
    )
    columns = (
        "s/step",
        "mean",
        "slowest",
        "L + bytes/R",
        "of it",
        "of DeepSpeed's",
        "host step s",
        "waited s",
        "start s",
        "host B/param",
        "host peak GiB",
        "bus GB",
        "device GiB",
        "last loss",
    )
    table = case_table(title, columns)
    seconds = {case["name"]: case["seconds"] for case in done}
    if report["forward_backward_seconds"]:
        table.add_row("L: forward, backward", f"{report['forward_backward_seconds']:.3f}")
    for case in done:
        least, known = case.get("bound_seconds"), case["breakdown"]
        _, comma, kind = case["name"].partition(",")
        try:
            peer_name = _PEER + comma + kind
            Case.parse(peer_name)
        except ValueError:
            peer_name = _PEER
        peer = seconds.get(peer_name)
        bus = known.get("bytes_downloaded", 0) + known.get("bytes_uploaded", 0)
        table.add_row(
            case["name"],
            f"{case['seconds']:.3f}",
            f"{case['mean_seconds']:.3f}",
            f"{case['slowest_seconds']:.3f}",
            f"{least:.3f}" if least else "",
            f"{case['seconds'] / least:.2f}" if least else "",
            f"{case['seconds'] / peer:.2f}" if peer and case["name"] != peer_name else "",
            f"{known['step']:.3f}" if "step" in known else "",
            f"{known.get('gate', 0.0):.3f}" if "step" in known else "",
            f"{case['start_seconds']:.1f}",
            f"{case['host_bytes_per_param']:.1f}",
            f"{case['host_peak_gib']:.1f}",
            f"{bus / 1e9:.2f}" if bus else "",
            f"{case['device_peak_gib']:.1f}" if case["device_peak_gib"] else "",
            f"{case['losses'][-1]:.4f}",
        )
    console.print()
    console.print(table)
    for case in done:
        if moved := case.get("drive_bytes_per_param"):
            console.print(
                f"{case['name']}: {moved[0]:.2f} B read and {moved[1]:.2f} B written on drives per "
                f"parameter and step, {case['start_seconds']:.1f} s to start, "
                f"{case['pinned_bytes'] / 2**30:.2f} GiB pinned for weights and gradients, "
                f"{case['registered_bytes'] / 2**30:.2f} GiB for reads and writes",
                highlight=False,
            )


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    from stepwell.cli._step_times import circumstances_line, draw_every_step, draw_step_times

    figure.set_size_inches(15, 5)
    left, middle, right = figure.subplots(1, 3)
    draw_step_times(left, report)
    draw_every_step(middle, report)
    for case in report["cases"]:
        if "seconds" in case:
            right.plot(case["losses"], label=case["name"], linewidth=1)
    right.set_xlabel("step")
    right.set_ylabel("loss")
    right.legend(fontsize=7)
    figure.suptitle(circumstances_line(report), fontsize=9)
