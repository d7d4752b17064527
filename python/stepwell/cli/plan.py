"""`stepwell plan`: whether a model fits, where, how fast, and what to write."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.figure import Figure
    from rich.console import Console

    from stepwell.planning import Machine, Plan
    from stepwell.planning.placement import Placement

__all__ = ["plan"]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json, a folder with one, MODULE:CALLABLE, or a number of parameters, "
            "as 7B.",
        ),
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Samples of a forward, on each GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Forwards of a step.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of the host.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option(help="Layers compute their activations again in the backward.")
    ] = True,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens whose logits are there at once, where the loss is computed in parts.",
            show_default="those of a forward",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters.")] = "bfloat16",
    drives: Annotated[
        list[str] | None,
        typer.Option(
            "--drive",
            help="For a volume: a folder that `stepwell tune` has measured, or a rate, as 3GB/s; "
            "once for each drive.",
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Of another machine: of each GPU, as 24GB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of another machine: that is free, as 64GB.")
    ] = None,
    bus: Annotated[
        str | None, typer.Option(help="One way, in GB/s.", show_default="25: PCIe 4 x16")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(help="TFLOP/s of 16-bit products, as sustained.", show_default="150"),
    ] = None,
    device_rate: Annotated[
        str | None, typer.Option(help="Of the GPU's memory, in GB/s.", show_default="900")
    ] = None,
    host_rate: Annotated[
        str | None,
        typer.Option(help="Of host memory, read and written, in GB/s.", show_default="60"),
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Of the host.", show_default="8")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure this machine anew, for half a minute.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Train a few steps of what fits here: the config.json of a Llama."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="A picture of the speed over the tokens of a step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a model fits, where, how fast a step is, what binds it, and what to write.

    The machine is this one, which is measured once. With --gpu-memory and --host-memory it is
    another one, of which --bus and what follows say more; what they leave out is assumed. Nothing
    is trained, but with --measure.

    `binds` is what a step waits for beyond compute, and `until` the tokens of a step from which on
    that is next to nothing. GB are 10^9 bytes.
    """
    from rich.console import Console

    from stepwell.cli._console import output
    from stepwell.planning.plans import plan as planned

    console = output()
    described = {
        "bus": bus,
        "flops": flops,
        "device_rate": device_rate,
        "host_rate": host_rate,
        "cores": cores,
    }
    try:
        machine = _machine(gpu_memory, host_memory, described, again=again)
        if measure and gpu_memory is not None:
            raise ValueError(
                "`--measure` is given and the machine is described, expected one of the two"
            )
        found = planned(
            model,
            tokens=tokens,
            micro_batch=micro_batch,
            accumulation=accumulation,
            gpus=gpus,
            drives=drives or (),
            checkpointing=checkpointing,
            loss_tokens=loss_tokens,
            dtype=dtype,  # type: ignore[arg-type]  # which is checked there
            machine=machine,
        )
        if measure:
            _plan_runs_of().check_measurable(model, found)
        if plot is not None:
            from stepwell.cli._report import write_plot

            # JSON alone is on the standard output.
            write_plot(Console(stderr=True), plot, partial(_draw, found=found))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        said = Console(stderr=True)
        rows = {"measured": _plan_runs_of().measure(said, model, found)} if measure else {}
        typer.echo(json.dumps(found.to_dict() | rows, indent=2))
        return
    _print(console, found)
    if measure:
        runs = _plan_runs_of()
        runs.print_measured(console, runs.measure(console, model, found))


def _plan_runs_of() -> ModuleType:
    # It imports torch.
    from stepwell.cli import _plan_runs

    return _plan_runs


def _machine(
    gpu_memory: str | None,
    host_memory: str | None,
    described: dict[str, str | int | None],
    *,
    again: bool,
) -> Machine:
    from stepwell.planning import described as described_machine
    from stepwell.planning import machine_here

    if gpu_memory is not None and host_memory is not None:
        if again:
            raise ValueError(
                "`--again` is given and the machine is described, expected one of the two"
            )
        return described_machine(
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            **described,  # type: ignore[arg-type]
        )
    given = {"gpu-memory": gpu_memory, "host-memory": host_memory, **described}
    if names := [f"--{name.replace('_', '-')}" for name, each in given.items() if each is not None]:
        raise ValueError(
            f"`{'`, `'.join(names)}` is given, expected --gpu-memory and --host-memory for another "
            "machine, or none of these for this one. hint: --gpu-memory 24GB --host-memory 64GB"
        )
    return machine_here(again=again)


def _print(console: Console, found: Plan) -> None:
    from rich.table import Table

    from stepwell._quantities import size_text

    model, workload, machine = found.model, found.workload, found.machine
    many = f" on each of {workload.gpus} GPUs" if workload.gpus > 1 else ""
    batches = f"{workload.accumulation} x " if workload.accumulation > 1 else ""
    say = {"highlight": False, "markup": False, "soft_wrap": True}
    shape = " (the rest as Llama has it)" if model.is_assumed else ""
    console.print(
        f"{model.name}: {model.num_all / 1e9:.3f} B parameters{shape}, "
        f"{batches}{workload.micro_batch} x {workload.tokens} tokens per step{many}",
        **say,  # type: ignore[arg-type]
    )
    console.print(
        f"{machine.name}: GPU {size_text(machine.gpu_memory)}, host "
        f"{size_text(machine.host_memory)}, bus {machine.bus_up / 1e9:.0f} GB/s, "
        f"{machine.flops / 1e12:.0f} TFLOP/s, R {machine.host_rate / 1e9:.0f} GB/s"
        + (f", drives {machine.drive_rate / 1e9:.1f} GB/s" if machine.drive_rate else ""),
        **say,  # type: ignore[arg-type]
    )
    if machine.assumed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in machine.assumed)
        console.print(f"assumed, since not said: {names}", style="yellow", **say)  # type: ignore[arg-type]
    table = Table(box=None, pad_edge=False)
    table.add_column("placement", overflow="fold")
    table.add_column("fits", overflow="fold")
    columns = ("GPU GB", "host GB", "drives: GB, GB/step", "s/step", "binds", "tokens/s", "until")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    best = found.best
    for each in found.placements:
        style = "bold" if each in best[:1] else "dim" if not each.fits else ""
        table.add_row(each.title, *_cells(found, each), style=style)
    console.print(table)
    _print_codes(console, found)


def _cells(found: Plan, placement: Placement) -> list[str]:
    drives = ""
    if placement.drive_space:
        moved = sum(placement.drive_moved) / 1e9
        drives = f"{placement.drive_space / 1e9:.0f}, {moved:.1f}"
    until = placement.binds_until
    is_bound = until is not None and until > found.workload.tokens_of_step
    return [
        _fits(placement),
        f"{placement.peak / 1e9:.1f}",
        f"{placement.host_total / 1e9:.1f}",
        drives,
        f"{placement.step.total:.2f}",
        placement.step.binds,
        f"{found.tokens_per_second(placement):,.0f}",
        "never" if until is None else f"{until:,.0f}" if is_bound else "",
    ]


def _fits(placement: Placement) -> str:
    if placement.fits:
        return "yes"
    if placement.refused:
        return f"no: {placement.refused}"
    lacks = ", ".join(f"{each / 1e9:.1f} GB of {name}" for name, each in placement.lacks.items())
    return f"no, lacks {lacks}" + (f"; fits with {placement.remedy}" if placement.remedy else "")


def _print_codes(console: Console, found: Plan) -> None:
    if not found.best:
        hint = "" if found.machine.drive_rate else "; hint: --drive, for state on drives"
        console.print(f"\nnothing fits on this machine{hint}", style="bold red")
        return
    for name, placement in zip(("best", "second best"), found.best, strict=False):
        note = f" ({placement.note})" if placement.note else ""
        console.print(f"\n{name}: {placement.title}{note}", style="bold", highlight=False)
        console.print(found.code(placement), markup=False, highlight=False, soft_wrap=True)


def _draw(figure: Figure, found: Plan) -> None:
    """Draws tokens per second over the tokens of a step, by placements that fit."""
    from dataclasses import replace

    from stepwell.planning.plans import plan_of

    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for power in range(8):
        workload = replace(found.workload, micro_batch=1 << power)
        other = plan_of(found.model, workload, found.machine)
        for before, each in zip(found.placements, other.placements, strict=True):
            if each.fits:
                point = workload.tokens_of_step, other.tokens_per_second(each)
                lines.setdefault(before.title, []).append(point)
    for title, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=title)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a step")
    axes.set_ylabel("tokens per second")
    if lines:
        axes.legend(fontsize=7)
    figure.suptitle(f"{found.model.name} on {found.machine.name}", fontsize=9)
