"""The command line: one file per command.

A command imports torch, DeepSpeed, transformers and matplotlib where it uses them. So `--help` is
quick, and `stepwell doctor` runs where one of them is broken.
"""

from __future__ import annotations

from typing import Annotated

import typer

from stepwell import _core
from stepwell.cli import (
    bench_offload,
    demo,
    doctor,
    plan,
    run,
    tune,
    volume,
)

__all__ = ["app"]

app = typer.Typer(
    name="stepwell",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Keeps paragraphs, refills their lines, and leaves what is in brackets alone.
    rich_markup_mode="markdown",
)
bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure speed on this machine.")

volumes = typer.Typer(
    name="volume", no_args_is_help=True, help="Look after optimizer state on drives."
)

app.command()(doctor.doctor)
app.command()(plan.plan)
# As for `python`: what follows the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(demo.demo)
app.add_typer(bench)
bench.command(name="offload", epilog=bench_offload.CASES)(bench_offload.bench_offload)
app.command()(tune.tune)
app.add_typer(volumes)
volumes.command()(volume.ls)
volumes.command()(volume.check)
volumes.command()(volume.rm)
volumes.command(name="format")(volume.format_device)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepwell {_core.__version__}")
        raise typer.Exit


@app.callback()
def stepwell(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Adam(W) over host memory for models that outgrow their GPU."""
    if isinstance(context.obj, run.Launch):
        context.obj.local_rank = local_rank
