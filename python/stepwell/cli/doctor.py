"""`stepwell doctor`: what works on this machine, what does not, and how to get it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepwell import _core
from stepwell.cli import _machine, _software
from stepwell.cli._finding import STATUSES, Finding, Status, examine

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Finding", "diagnose", "doctor"]

_STYLE: dict[Status, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "broken": "bold red",
}
_PACKAGES = (
    "stepwell",
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "matplotlib",
    "typer",
    "rich",
)


def diagnose() -> dict[str, Any]:
    """All that `stepwell doctor` knows, as plain values. It raises nothing.

    Returns:
        `status` (the worst of the findings), `findings`, and what they were drawn from: `versions`,
        `system`, `build`, `cuda`, `deepspeed`. `system` is None where the machine could not be
        looked at.
    """
    cuda = _software.look_at_cuda()
    deepspeed = _software.look_at_deepspeed()
    facts: dict[str, Any] = {"system": None, "build": None}

    def core() -> list[Finding]:
        facts["build"] = _core.build_info()
        facts["system"] = _core.system_info()
        return []

    findings = examine("core", core)
    system, build = facts["system"], facts["build"]
    if build is not None:
        findings += examine("build", lambda: _machine.build(build))
    if system is not None:
        findings += [
            *examine("instructions", lambda: _machine.instructions(system)),
            *examine("threads", lambda: _machine.cores(system)),
            *examine("NUMA", lambda: _machine.numa(system)),
            *examine("ranks", lambda: _machine.ranks(system)),
            *examine("memory", lambda: _machine.memory(system)),
            *examine("io_uring", lambda: _machine.storage(system)),
        ]
    # One setting that is refused stops every step: it is the finding, not what it stops.
    obstacle = system and (system["isa_error"] or system["pool_error"])
    obstacle = obstacle and _machine.without_hint(obstacle)
    findings += [
        *examine("GPU", lambda: _software.accelerator(cuda)),
        *examine("optimizers", lambda: _software.optimizers(cuda, obstacle)),
        *examine("DeepSpeed", lambda: _software.deepspeed_parts(deepspeed, obstacle)),
    ]
    return {
        "status": max((finding.status for finding in findings), key=STATUSES.index),
        "findings": [asdict(finding) for finding in findings],
        "versions": _versions(),
        **facts,
        "cuda": cuda,
        "deepspeed": deepspeed,
    }


def doctor(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also list the places in DeepSpeed, by name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what works on this machine, what does not, and how to get it.

    Each optimizer makes one step of a tiny layer, and DeepSpeed is imported where it is installed.
    Nothing on this machine is changed. The exit code is 1 if something is broken, else 0.
    """
    report = diagnose()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report, verbose=verbose)
    raise typer.Exit(1 if report["status"] == "broken" else 0)


def _print(report: dict[str, Any], *, verbose: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from stepwell.cli._console import output

    console = output()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report["findings"]:
        text = Text(finding["found"])
        if finding["meaning"]:
            text.append(f"\n{finding['meaning']}", style="dim")
        if finding["fix"]:
            text.append("\nhint: ", style="bold").append(finding["fix"])
        table.add_row(
            Text(finding["status"], style=_STYLE[finding["status"]]),
            Text(finding["topic"], style="bold"),
            text,
        )
    console.print(table)
    if verbose:
        _print_seams(console, report)
    console.print()
    console.print(
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        highlight=False,
    )
    _print_summary(console, report)


def _print_seams(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    seams = (report["deepspeed"] or {}).get("seams", [])
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for seam in seams:
        state, style = (
            ("filled", "green")
            if seam["filled"]
            else ("left", "cyan")
            if seam["found"]
            else ("missing", "bold red")
        )
        place = Text(seam["name"]).append(f"\n{seam['note']}", style="dim")
        table.add_row(Text(state, style=style), place)
    if seams:
        console.print("\nplaces in DeepSpeed", style="bold")
        console.print(table)


def _print_summary(console: Console, report: dict[str, Any]) -> None:
    def topics(status: Status) -> str:
        found = (each["topic"] for each in report["findings"] if each["status"] == status)
        return ", ".join(dict.fromkeys(found))

    broken, warned = topics("broken"), topics("warning")
    if broken:
        console.print(f"does not work: {broken}", style=_STYLE["broken"], highlight=False)
    if warned:
        console.print(f"could be better: {warned}", style=_STYLE["warning"], highlight=False)
    if not broken and not warned:
        console.print("all that is installed works", style=_STYLE["ok"], highlight=False)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package) or "of unknown version"
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
        except (OSError, KeyError, ValueError):
            versions[package] = "of unknown version"
    return versions
