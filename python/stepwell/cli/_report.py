"""What every measurement is published with: machine, date, command; and where it is written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

__all__ = ["case_table", "circumstances", "failed_case", "write", "write_json", "write_plot"]


def circumstances(program: str = "stepwell") -> dict[str, Any]:
    """Machine, versions, date and command, as plain values.

    Args:
        program: what comes before the arguments of the command.
    """
    import torch

    system: dict[str, Any] = _core.system_info()
    return {
        "machine": {
            "cpu": _cpu_name(),
            "cores": len({cpu["core"] for cpu in system["cpus"]}),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
            "isa": system["isa"],
            "huge_pages": system["huge_page_policy"],
        },
        "versions": {
            "python": platform.python_version(),
            "stepwell": _core.__version__,
            **_versions("torch", "deepspeed"),
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
    }


def write_json(folder: Path, name: str, report: dict[str, Any]) -> Path:
    """Writes `NAME.json` into `folder`, which is made if it is not there.

    Returns the file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.json"
    data.write_text(json.dumps(report, indent=2) + "\n")
    return data


def write(
    console: Console,
    folder: Path,
    name: str,
    report: dict[str, Any],
    draw: Callable[[Figure], None],
) -> None:
    """Writes `NAME.json` and, where matplotlib is installed, `NAME.png` into `folder`, and says so.

    Args:
        console: where it is said.
        folder: made if it is not there.
        name: of the files.
        report: plain values.
        draw: fills the figure.

    Raises:
        OSError: the folder cannot be written.
    """
    data = write_json(folder, name, report)
    console.print(f"written: {data}", highlight=False, soft_wrap=True)
    write_plot(console, folder / f"{name}.png", draw)


def write_plot(console: Console, file: Path, draw: Callable[[Figure], None]) -> None:
    """Writes a plot, where matplotlib is installed, and says so.

    Args:
        console: where it is said.
        file: a PNG.
        draw: fills the figure.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        # Not pyplot: that would look for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        console.print(
            "no plot: matplotlib is not installed. hint: pip install 'stepwell\\[demo]'",
            style="yellow",
        )
        return
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(file, dpi=150)
    console.print(f"written: {file}", highlight=False, soft_wrap=True)


def failed_case(console: Console, name: str, why: str) -> dict[str, Any]:
    """Says that a case has no figures. Returns what a report has of it."""
    console.print(f"no {name}: {why}", style="yellow", markup=False, highlight=False)
    return {"name": name, "failure": why}


def case_table(title: str, columns: Iterable[str], *, is_wrapped: bool = False) -> Table:
    """An empty table: a column for the names of cases, and these for their figures.

    `is_wrapped`: where there is no room for it, the name of a column takes several lines.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column(min_width=22, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=not is_wrapped)
    return table


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
