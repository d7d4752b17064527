"""What drives move through a volume, beside what they move without one.

python benches/volume.py FOLDER... [--mib 256] [--rounds 5] [--no-deepspeed] [--out FOLDER]
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drives import Contender
    from matplotlib.figure import Figure
    from rich.console import Console

_MIB = 1 << 20
_MB = 1e6


def main(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            writable=True,
            help="A folder on each drive.",
        ),
    ],
    mib: Annotated[
        int,
        typer.Option(
            min=1,
            help="MiB of each contender on each drive. The optimizer's steps take some 4 times as "
            "much host memory.",
        ),
    ] = 256,
    record_kib: Annotated[int, typer.Option(min=1, help="KiB of a record.")] = 644,
    buffers: Annotated[int, typer.Option(min=2, help="Records in flight, of each drive.")] = 32,
    weights: Annotated[
        str | None,
        typer.Option(
            help="The bandwidth of each drive, such as 400,400,200.",
            show_default="as tuned, else alike",
        ),
    ] = None,
    stripe_kib: Annotated[
        int | None, typer.Option(min=1, help="KiB of a stripe.", show_default="as tuned, else 1024")
    ] = None,
    queue_depth: Annotated[
        int | None, typer.Option(min=1, help="Calls at once.", show_default="as tuned, else 32")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements.")] = 5,
    with_deepspeed: Annotated[
        bool, typer.Option("--deepspeed/--no-deepspeed", help="DeepSpeed's async_io too.")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="Folder for bench_volume.json and bench_volume.png.")
    ] = Path("stepwell-bench"),
) -> None:
    """Measure drives: a volume, an optimizer's steps, plain calls, fio and DeepSpeed's async_io.

    All of them move bytes on all drives at once, in turns. A round measures each of them once;
    medians of rounds are shown. `swap` reads and writes at once, as a step of an optimizer does;
    its bytes are both. `steps, fp32` and `steps, q8` are such steps: those of OffloadAdamW on a
    volume, without a model around them. DeepSpeed's async_io is compiled first, which takes
    minutes.
    """
    from drives import DeepSpeedAio, Fio, OptimizerSteps, PlainCalls
    from rich.console import Console
    from stepwell.cli._drive_rates import ThroughVolume, check_folders
    from stepwell.cli._report import circumstances, write
    from stepwell.store.tuning import shape_of
    from stepwell.store.volume import Volume

    console = Console()
    try:
        check_folders(folders)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    said = _weights(weights, len(folders))
    absent: dict[str, str] = {}
    native = None
    if with_deepspeed:
        native, absence = DeepSpeedAio.load()
        if absence is not None:
            absent["deepspeed aio"] = absence
    if absence := Fio.absence():
        absent["fio"] = absence
    for name, why in absent.items():
        console.print(f"without {name}: {why}", style="yellow", markup=False)
    contenders: list[Contender] = []
    try:
        shape = shape_of(
            Volume(
                folders,
                weights=said,
                stripe_bytes=None if stripe_kib is None else stripe_kib << 10,
                queue_depth=queue_depth,
            )
        )
        through = ThroughVolume(
            folders,
            record_nbytes=record_kib << 10,
            num_records=max(len(folders) * mib * 1024 // record_kib, 1),
            num_buffers=buffers * len(folders),
            weights=shape.weights,
            stripe_bytes=shape.stripe_bytes,
            queue_depth=shape.queue_depth,
        )
        contenders.append(through)
        stepped = Volume(
            folders,
            durability="none",
            weights=shape.weights,
            stripe_bytes=shape.stripe_bytes,
            queue_depth=shape.queue_depth,
        )
        for moments in ("fp32", "q8"):
            contenders.append(OptimizerSteps(stepped, moments, len(folders) * mib * _MIB))
        # All have as much in flight.
        calls_at_once = min(shape.queue_depth, buffers)
        contenders.append(PlainCalls(folders, mib * _MIB, calls_at_once))
        if "fio" not in absent:
            contenders.append(Fio(folders, mib * _MIB, calls_at_once))
        if native is not None:
            # For each way, and as much memory.
            nbytes = mib * _MIB // 4 or _MIB
            contenders.append(DeepSpeedAio(folders, nbytes, calls_at_once, native))
        rates = _measure(console, contenders, seconds, rounds)
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    finally:
        for contender in contenders:
            contender.close()
    report: dict[str, Any] = {
        **circumstances("python benches/volume.py"),
        "folders": [str(folder) for folder in folders],
        "weights": shape.weights,
        "stripe_bytes": shape.stripe_bytes,
        "queue_depth": shape.queue_depth,
        "record_nbytes": record_kib << 10,
        "io_uring": through.has_rings,
        "direct": through.is_direct,
        "seconds": seconds,
        "rounds": rounds,
        "absent": absent,
        "mb_per_second": rates,
        "ratio": _ratios(rates),
    }
    _print(console, report)
    write(console, out, "bench_volume", report, lambda figure: _draw(figure, report))


def _weights(text: str | None, num_folders: int) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(word) for word in text.split(",") if word]
    except ValueError:
        raise typer.BadParameter(f"--weights is `{text}`, expected numbers and commas") from None
    if found and len(found) != num_folders:
        raise typer.BadParameter(f"--weights is `{text}`, expected one for each folder")
    return found


def _measure(
    console: Console, contenders: list[Contender], seconds: float, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """MB per second by contender and pattern, in each round; the first to go changes."""
    from rich.progress import Progress
    from stepwell.cli._drive_rates import PATTERNS

    rates: dict[str, dict[str, list[float]]] = {
        each.name: {pattern: [0.0] * rounds for pattern in each.patterns} for each in contenders
    }
    with Progress(console=console) as progress:
        task = progress.add_task("", total=rounds * sum(len(each.patterns) for each in contenders))
        for round_ in range(rounds):
            for pattern in PATTERNS:
                having = [each for each in contenders if pattern in each.patterns]
                first = round_ % len(having)
                for each in having[first:] + having[:first]:
                    progress.update(task, description=f"{each.name}, {pattern}")
                    rates[each.name][pattern][round_] = each.rate(pattern, seconds) / _MB
                    progress.advance(task)
    return rates


def _ratios(rates: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """How many times faster the volume is than each other one, with the 95 % interval."""
    from dataclasses import asdict

    from pairs import ratio

    ours, *peers = rates
    return {
        peer: {
            pattern: asdict(
                ratio([1 / rate for rate in found], [1 / rate for rate in rates[ours][pattern]])
            )
            for pattern, found in rates[peer].items()
        }
        for peer in peers
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        box=None,
        title="MB/s, and the volume's share of it",
        title_justify="left",
        title_style="bold",
    )
    rates = report["mb_per_second"]
    patterns = list(next(iter(rates.values())))
    table.add_column("")
    for pattern in patterns:
        table.add_column(pattern, justify="right")
        table.add_column("share", justify="right")
    for name, by_pattern in rates.items():
        row = [name]
        for pattern in patterns:
            found_rates = by_pattern.get(pattern)
            row.append("" if found_rates is None else f"{statistics.median(found_rates):.0f}")
            found = report["ratio"].get(name, {}).get(pattern)
            row.append(
                ""
                if found is None
                else f"{found['median']:.1%} ({found['low']:.0%}-{found['high']:.0%})"
            )
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{len(report['folders'])} drives, weights {report['weights'] or 'alike'}, stripes of "
        f"{report['stripe_bytes'] >> 10} KiB, queue depth {report['queue_depth']}, io_uring "
        f"{'yes' if report['io_uring'] else 'no'}, O_DIRECT {'yes' if report['direct'] else 'no'}, "
        f"{report['rounds']} rounds of {report['seconds']:g} s, {report['date']}",
        highlight=False,
    )


def _draw(figure: Figure, report: dict[str, Any]) -> None:
    axes = figure.subplots()
    rates = report["mb_per_second"]
    patterns = list(next(iter(rates.values())))
    for place, (name, by_pattern) in enumerate(rates.items()):
        axes.bar(
            [patterns.index(pattern) + place / (len(rates) + 1) for pattern in by_pattern],
            [statistics.median(found) for found in by_pattern.values()],
            1 / (len(rates) + 1),
            label=name,
        )
    axes.set_xticks(range(len(patterns)), patterns)
    axes.set_ylabel("MB/s")
    axes.set_title(f"{len(report['folders'])} drives, {report['date']}", fontsize=9)
    axes.legend()


if __name__ == "__main__":
    typer.run(main)
