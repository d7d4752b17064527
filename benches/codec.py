"""What moments of 2 or 4 bytes instead of 8 do to a training run.

python benches/codec.py [--steps 500] [--at 100 --at 500] [--text FILE] [--out FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_SEEDS = (0, 1, 2)
_UPDATE_ERROR_MAX = {"bf16": 0.01, "q8": 0.015}  # L2, relative
_WORST_ERROR_MAX = 0.1  # of the largest update


def main(
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps of each of the five runs.")
    ] = 500,
    at: Annotated[list[int], typer.Option(min=1, help="Steps at which updates are compared.")] = [  # noqa: B006
        100,
        500,
    ],
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
        Path, typer.Option(help="Folder for bench_codec.json and bench_codec.png.")
    ] = Path("stepwell-bench"),
    hidden_size: Annotated[
        int, typer.Option(min=64, help="Width of the model, a multiple of 64.")
    ] = 192,
    layers: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 4,
) -> None:
    """Train a small byte-level Llama, and compare moments held as fp32, bf16 and q8.

    Updates are compared, and losses. The update is m_hat / (sqrt(v_hat) + eps), over all
    parameters, in two ways:

    - `once`: the moments of the fp32 run are coded and decoded at that step.
    - `tracked`: an optimizer holds its moments so from the first step on, and gets the gradients of
      the fp32 run.
    """
    if hidden_size % 64:
        raise typer.BadParameter(f"--hidden-size is `{hidden_size}`, expected a multiple of 64")
    if max(at) > steps:
        raise typer.BadParameter(f"--at is `{max(at)}`, expected at most --steps {steps}")
    from codec_runs import CODECS, compare, final_loss, train
    from rich.console import Console
    from rich.progress import Progress
    from stepwell.cli._llama import LlamaShape, read_text
    from stepwell.cli._report import circumstances, write

    console = Console()
    shape = LlamaShape(hidden_size=hidden_size, num_hidden_layers=layers)
    try:
        data = read_text(text, bytes_min=2 * shape.sequence_length)
        with Progress(console=console) as progress:
            task = progress.add_task("", total=steps * (len(_SEEDS) + len(CODECS)))

            def on_step(name: str) -> None:
                progress.update(task, advance=1, description=name)

            errors, losses = compare(
                shape, data, seed=_SEEDS[0], steps=steps, at=at, on_step=on_step
            )
            for one in errors:
                is_close = one["update_error"] <= _UPDATE_ERROR_MAX[one["moments"]]
                one["within"] = is_close and one["worst_error"] <= _WORST_ERROR_MAX
            _print_errors(console, errors)  # they are there long before the losses
            runs = {"fp32": losses}
            runs |= {
                moments: train(shape, data, moments, seed=_SEEDS[0], steps=steps, on_step=on_step)
                for moments in CODECS
            }
            runs |= {
                f"fp32, seed {seed}": train(
                    shape, data, "fp32", seed=seed, steps=steps, on_step=on_step
                )
                for seed in _SEEDS[1:]
            }
    except (ImportError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    final = {name: final_loss(each) for name, each in runs.items()}
    seeds = [loss for name, loss in final.items() if name.startswith("fp32")]
    report = {
        **circumstances("python benches/codec.py"),
        "steps": steps,
        "text": data.source,
        "num_params": sum(param.numel() for param in shape.build(seed=0).parameters()),
        "update_error_max": _UPDATE_ERROR_MAX,
        "worst_error_max": _WORST_ERROR_MAX,
        "errors": errors,
        "final_loss": final,
        "seed_spread": max(seeds) - min(seeds),
        "losses": runs,
    }
    _print_losses(console, report)
    write(console, out, "bench_codec", report, lambda figure: _draw(figure, report))


def _print_errors(console: Console, errors: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, title="error of the update", title_justify="left", title_style="bold")
    for column in (
        "moments",
        "how",
        "step",
        "relative L2",
        "allowed",
        "worst / largest update",
        "allowed",
        "",
    ):
        table.add_column(column, justify="left" if column in ("moments", "how", "") else "right")
    for error in errors:
        table.add_row(
            error["moments"],
            error["how"],
            str(error["step"]),
            f"{error['update_error']:.3%}",
            f"{_UPDATE_ERROR_MAX[error['moments']]:.1%}",
            f"{error['worst_error']:.4f}",
            f"{_WORST_ERROR_MAX:g}",
            "within" if error["within"] else "[bold red]above[/bold red]",
        )
    console.print(table)


def _print_losses(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table

    final, spread = report["final_loss"], report["seed_spread"]
    table = Table(box=None, title="final loss", title_justify="left", title_style="bold")
    for column in ("run", "loss", "from fp32", "seed spread", ""):
        table.add_column(column, justify="left" if column in ("run", "") else "right")
    for name, loss in final.items():
        distance = loss - final["fp32"]
        verdict = (
            ""
            if name.startswith("fp32")
            else "within"
            if abs(distance) <= spread
            else "[bold red]above[/bold red]"
        )
        table.add_row(name, f"{loss:.4f}", f"{distance:+.4f}", f"{spread:.4f}", verdict)
    console.print(table)
    console.print(
        f"{report['num_params']:,} parameters, {report['steps']} steps, {report['text']}",
        highlight=False,
    )


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    axes = figure.subplots()
    for name, losses in report["losses"].items():
        axes.plot(
            losses, linewidth=1, label=name, color="tab:gray" if name.startswith("fp32,") else None
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(
        f"{report['num_params']:,} parameters, {report['machine']['cpu']}, {report['date']}",
        fontsize=9,
    )
    axes.legend()


if __name__ == "__main__":
    typer.run(main)
