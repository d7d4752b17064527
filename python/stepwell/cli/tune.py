"""`stepwell tune`: what each drive needs to be fast, for the volumes on it."""

from __future__ import annotations

import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from stepwell.store.tuning import DriveTuning

__all__ = ["tune"]

_QUEUE_DEPTHS = (4, 8, 16, 32, 64)
_STRIPE_KIBS = (64, 128, 256, 512, 1024)
# What is this close to the best is as good.
_AS_GOOD = 0.97
_TRAILER_BYTES = 64


def tune(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            writable=True,
            help="A folder on each drive, as volumes are given them.",
        ),
    ],
    mib: Annotated[int, typer.Option(min=1, help="MiB of records on each drive.")] = 256,
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements.")] = 3,
    io_engine: Annotated[
        str, typer.Option(help="auto, io_uring or positional, as in Volume.")
    ] = "auto",
) -> None:
    """Measure drives, one by one, and write what volumes on them take for their defaults.

    Records are read and written at once, as a step of an optimizer does. Found are the most calls
    at once and the largest stripe that are as fast as any (within 3 %), and how fast that is: the
    drive's weight. They are written to `stepwell_tuning.json` in each folder. A `Volume` on folders
    that all have one takes them for what it is not given.
    """
    from stepwell.cli._console import output
    from stepwell.cli._drive_rates import check_folders

    console = output()
    try:
        check_folders(folders)
        for folder in folders:
            found = _tune(console, folder, mib, seconds, rounds, io_engine)
            path = found.write(folder)
            console.print(
                f"{folder}: {found.mb_per_second} MB/s, stripes of {found.stripe_bytes >> 10} KiB, "
                f"queue depth {found.queue_depth}; written: {path}",
                highlight=False,
                soft_wrap=True,
            )
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1) from error


def _tune(
    console: Console, folder: Path, mib: int, seconds: float, rounds: int, io_engine: str
) -> DriveTuning:
    from stepwell.cli._drive_rates import ThroughVolume
    from stepwell.store.tuning import DriveTuning

    def volume(stripe_kib: int, queue_depth: int) -> ThroughVolume:
        record_nbytes = (stripe_kib << 10) - _TRAILER_BYTES
        return ThroughVolume(
            [folder],
            record_nbytes=record_nbytes,
            num_records=max(mib * 1024 // stripe_kib, 1),
            num_buffers=2 * queue_depth,
            weights=(),
            stripe_bytes=stripe_kib << 10,
            queue_depth=queue_depth,
            io_engine=io_engine,
        )

    def rates(settings: Iterable[int], make: Callable[[int], ThroughVolume]) -> dict[int, float]:
        """The median rate by setting; rounds are interleaved."""
        found: dict[int, list[float]] = {setting: [] for setting in settings}
        with console.status(f"{folder}"):
            for _ in range(rounds):
                for setting, measured in found.items():
                    one = make(setting)
                    try:
                        measured.append(one.rate("swap", seconds))
                    finally:
                        one.close()
        return {setting: statistics.median(measured) for setting, measured in found.items()}

    largest = _STRIPE_KIBS[-1]
    by_depth = rates(_QUEUE_DEPTHS, lambda queue_depth: volume(largest, queue_depth))
    # Deep queues go on where the threads of the volume have to wait for a processor.
    queue_depth = max(_as_good(by_depth))
    by_stripe = rates(_STRIPE_KIBS, lambda stripe_kib: volume(stripe_kib, queue_depth))
    # Large ones take fewer calls, and so less of the processor.
    stripe_kib = max(_as_good(by_stripe))
    return DriveTuning(
        mb_per_second=max(round(by_stripe[stripe_kib] / 1e6), 1),
        stripe_bytes=stripe_kib << 10,
        queue_depth=queue_depth,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _as_good(rates: dict[int, float]) -> list[int]:
    """The settings that are nearly the fastest."""
    return [setting for setting, rate in rates.items() if rate >= _AS_GOOD * max(rates.values())]
