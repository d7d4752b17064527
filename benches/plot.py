"""The pictures of step times, from what `stepwell bench offload` wrote.

python benches/plot.py JSON... [--out step_time.svg] [--every-step]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

_PANEL_INCHES = (9.0, 3.0)


def main(
    reports: Annotated[
        list[Path],
        typer.Argument(
            metavar="JSON",
            exists=True,
            dir_okay=False,
            readable=True,
            help="Files that `stepwell bench offload` wrote. Each becomes a panel.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The picture. Its ending says the format: .svg, .png or .pdf.")
    ] = Path("step_time.svg"),
    every_step: Annotated[
        bool, typer.Option("--every-step", help="What each step took, in place of the medians.")
    ] = False,
) -> None:
    """Draw the step times of one or more runs of `stepwell bench offload`.

    The README's picture is drawn by `python benches/plot.py docs/step_time.json --out
    docs/step_time.svg`.
    """
    try:
        # Not pyplot: that would look for a display.
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _failed("matplotlib is not installed. hint: pip install matplotlib") from error
    from stepwell.cli._step_times import (
        circumstances_line,
        draw_every_step,
        draw_step_times,
    )

    contents = [_read(path) for path in reports]
    # The same file gives the same picture, byte by byte.
    matplotlib.rcParams["svg.hashsalt"] = "stepwell"
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * len(contents)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(contents), 1, squeeze=False)[:, 0]
    for axes, report in zip(panels, contents, strict=True):
        (draw_every_step if every_step else draw_step_times)(axes, report)
    figure.supxlabel(circumstances_line(contents[0]), fontsize=8)
    try:
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise _failed(f"`{out}` cannot be written: {error}") from error
    typer.echo(f"written: {out}")


def _read(path: Path) -> dict[str, Any]:
    expected = "expected what `stepwell bench offload` writes, with a case that was measured"
    try:
        report: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _failed(f"`{path}` cannot be read: {error}. hint: {expected}") from error
    if isinstance(report, dict) and "plan" in report:
        found: dict[str, Any] = report
        if any("seconds" in case for case in found.get("cases", ())):
            return found
    raise _failed(f"`{path}` has no step times, {expected}")


def _failed(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
