"""Training steps with their state on drives, in turns with fio on the same drives.

    python benches/volume_training.py FOLDER... [--size 1b] [--steps 3] [--warm-up 2] [--rounds 2]
        [--case "stepwell volume" ...]

Each round runs each case of `stepwell bench offload` once, in a process of its own, with no state
in host memory. Before and behind each of them fio reads and writes 1 MiB blocks of the same
drives, mixed. A case's bytes per second, of whole training steps, are held against the mean of the
two. Drives that other programs use as well change from minute to minute.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from drives import Fio
from rich.console import Console
from stepwell.cli._drive_rates import check_folders
from stepwell.cli._workload import Workload
from stepwell.cli.bench_offload import run_case

FIO_FILE_BYTES, FIO_CALLS_AT_ONCE = 2_000_000_000, 32
GIB = 1 << 30
DEFAULT_CASES = (
    "stepwell volume, durability=none",
    "stepwell volume",
    "stepwell volume q8, durability=none",
)


def row(found: dict[str, Any], fio_bytes_per_second: float | None) -> str:
    """One line of the table."""
    name = found["name"]
    if "failure" in found:
        return f"{name:46} failed: {found['failure']}"
    seconds = found["seconds"]
    every = ", ".join(f"{each:.2f}" for each in found["all_seconds"])
    line = f"{name:46} {seconds:6.2f} ({every})"
    if "drive_bytes_per_param" in found:
        read, written = found["drive_bytes_per_param"]
        rate = (read + written) * found["num_params"] / seconds
        share = "" if fio_bytes_per_second is None else f" {rate / fio_bytes_per_second:.2f} of fio"
        line += (
            f"  {rate / 1e6:5.0f} MB/s{share}  {read:.2f} + {written:.2f} B/param"
            f"  {found['pinned_bytes'] / GIB:.2f} + {found['registered_bytes'] / GIB:.2f} GiB"
        )
    return (
        f"{line}  {found['host_bytes_per_param']:.1f} B/param of host memory"
        f"  start {found['start_seconds']:.1f} s  loss {found['losses'][-1]:.4f}"
    )


def fio_rate(folders: list[Path], seconds: float) -> float | None:
    """Bytes per second of reads and writes, mixed; None without fio."""
    if Fio.absence():
        return None
    fio = Fio(folders, FIO_FILE_BYTES, FIO_CALLS_AT_ONCE)
    try:
        return fio.rate("swap", seconds)
    finally:
        fio.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of fio")
    parser.add_argument("--case", action="append", dest="cases")
    parser.add_argument("--out", type=Path, default=Path("stepwell-bench"))
    args = parser.parse_args()
    check_folders(args.folders)
    args.out.mkdir(parents=True, exist_ok=True)
    workload = Workload(
        size=args.size,
        sequence_length=args.sequence_length,
        micro_batch=1,
        accumulation=1,
        steps=args.steps,
        warm_up_steps=args.warm_up,
        clip_norm=1.0,
        seed=0,
        text=None,
        drives=tuple(str(folder.resolve()) for folder in args.folders),
    )
    print("case, s/step: median (all), bytes moved, of fio's, pinned: for copies + for reads")
    console = Console(stderr=True)
    report: list[dict[str, Any]] = []
    before = fio_rate(args.folders, args.seconds)
    for _ in range(args.rounds):
        for name in args.cases or DEFAULT_CASES:
            found = run_case(console, name, workload)
            # DeepSpeed's swapper leaves its files.
            for folder in args.folders:
                shutil.rmtree(folder / "zero_stage_3", ignore_errors=True)
            after = fio_rate(args.folders, args.seconds)
            fio = None if before is None or after is None else statistics.mean([before, after])
            print(row(found, fio), flush=True)
            report.append({"fio_bytes_per_second": [before, after], **found})
            (args.out / "volume_training.json").write_text(json.dumps(report, indent=1))
            before = after
    rates = [each["fio_bytes_per_second"][1] for each in report]
    if None not in rates:
        print("fio, MB/s: " + ", ".join(f"{rate / 1e6:.0f}" for rate in rates))


if __name__ == "__main__":
    main()
