"""`stepwell demo`: a small Llama trained by DeepSpeed on Stepwell, then by torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure
    from rich.console import Console

    from stepwell.cli._demo_runs import Curve, Workload

__all__ = ["demo"]


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 120,
    moments: Annotated[
        Literal["fp32", "bf16", "q8"], typer.Option(help="How Stepwell holds both moments.")
    ] = "fp32",
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
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path(
        "stepwell-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of weights and samples.")] = 0,
    hidden_size: Annotated[
        int, typer.Option(min=64, help="Width of the model, a multiple of 64.")
    ] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 4,
) -> None:
    """Train a small Llama with DeepSpeed on Stepwell, then with torch's AdamW, and compare.

    DeepSpeed runs ZeRO-2 with CPU offload. Both runs have the same weights, samples and steps: a
    bf16 model, an fp32 master in host memory, gradients clipped to norm 1.

    The demo uses a GPU where there is one. Nothing is compiled.
    """
    if hidden_size % 64:
        raise typer.BadParameter(f"--hidden-size is `{hidden_size}`, expected a multiple of 64")
    from stepwell.cli._console import output
    from stepwell.cli._demo_runs import Workload, with_deepspeed, with_torch
    from stepwell.cli._llama import LlamaShape, read_text
    from stepwell.cli._report import circumstances, write

    console = output()
    shape = LlamaShape(hidden_size=hidden_size, num_hidden_layers=layers)
    try:
        workload = Workload(
            shape=shape,
            text=read_text(text, bytes_min=2 * shape.sequence_length),
            steps=steps,
            seed=seed,
        )
        console.print(
            f"text: {workload.text.source}, {workload.text.data.numel():,} bytes; "
            f"model on {workload.device}",
            highlight=False,
        )
        ours = _watch(
            console,
            workload,
            "DeepSpeed on Stepwell",
            lambda on_step: with_deepspeed(workload, moments, on_step),
        )
        reference = _watch(
            console, workload, "torch fused AdamW", lambda on_step: with_torch(workload, on_step)
        )
    except (ImportError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    report = {
        **circumstances(),
        "steps": steps,
        "seed": seed,
        "text": workload.text.source,
        "num_params": ours.num_params,
        "device": str(workload.device),
        "moments": moments,
        "distance": _distance(ours, reference),
        "runs": [ours.report(), reference.report()],
    }
    _print(console, report)
    write(console, out, "demo", report, lambda figure: _draw(figure, report))


def _watch(
    console: Console,
    workload: Workload,
    name: str,
    train: Callable[[Callable[[float], None]], Curve],
) -> Curve:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        task = progress.add_task(name, total=workload.steps, loss="")
        return train(lambda loss: progress.update(task, advance=1, loss=f"{loss:.3f}"))


def _distance(ours: Curve, reference: Curve) -> dict[str, float]:
    distances = [
        abs(mine - theirs) for mine, theirs in zip(ours.losses, reference.losses, strict=True)
    ]
    return {"max": max(distances), "mean": sum(distances) / len(distances), "final": distances[-1]}


def _print(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    for column in ("first loss", "last loss", "optimizer ms", "step ms", "state B/param"):
        table.add_column(column, justify="right")
    for run in report["runs"]:
        table.add_row(
            run["name"],
            f"{run['losses'][0]:.4f}",
            f"{run['losses'][-1]:.4f}",
            f"{run['optimizer_seconds_median'] * 1e3:.2f}",
            f"{run['step_seconds_median'] * 1e3:.1f}",
            f"{run['state_bytes_per_param']:.2f}",
        )
    console.print(table)
    distance = report["distance"]
    console.print(
        f"{report['num_params']:,} parameters, {report['steps']} steps; "
        f"the loss curves differ by {distance['max']:.2g} at most, "
        f"{distance['mean']:.2g} on average, {distance['final']:.2g} at the end",
        highlight=False,
    )


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    ours, reference = report["runs"]
    curves.plot(
        reference["losses"], color="tab:gray", linewidth=3, alpha=0.6, label=reference["name"]
    )
    curves.plot(ours["losses"], color="tab:blue", linewidth=1, label=ours["name"])
    curves.set_ylabel("loss (nats per byte)")
    curves.legend()
    pairs = zip(ours["losses"], reference["losses"], strict=True)
    differences.plot([mine - theirs for mine, theirs in pairs], color="tab:blue", linewidth=1)
    differences.set_ylabel("difference")
    differences.set_xlabel("step")
    curves.set_title(
        f"{report['num_params']:,} parameters, {report['machine']['cpu']}, {report['date']}",
        fontsize=9,
    )
