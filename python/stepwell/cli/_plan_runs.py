"""`stepwell plan --measure`: a few steps of each placement that fits, beside what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.cli._workload import Workload
from stepwell.cli.bench_offload import run_case

if TYPE_CHECKING:
    from rich.console import Console

    from stepwell.planning.placement import Placement
    from stepwell.planning.plans import Plan

__all__ = ["check_measurable", "measure", "print_measured"]

_STEPS, _WARM_UP = 5, 3


def check_measurable(model: str, found: Plan) -> None:
    """Raises ValueError where no case of `stepwell bench offload` is the run that was planned."""
    file = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    kind = json.loads(file.read_text()).get("model_type") if file.is_file() else None
    if kind != "llama":
        raise ValueError(f"`--measure` is given for `{model}`, expected the config.json of a Llama")
    workload = found.workload
    for name, value, usual in (
        ("--gpus", workload.gpus, 1),
        ("--loss-tokens", workload.loss_tokens, None),
        ("--no-checkpointing", not workload.checkpointing, False),
        ("--dtype", workload.dtype, "bfloat16"),
    ):
        if value != usual:
            raise ValueError(f"`--measure` is given with `{name}`, expected it to be left out")


def _case_of(found: Plan, placement: Placement) -> str | None:
    """What the placement is as a case of `stepwell bench offload`; None: none is it."""
    codec = "" if placement.moments == "fp32" else f" {placement.moments}"
    if placement.kind == "torch":
        return "torch"
    if placement.kind == "exact":
        return f"stepwell{codec}"
    if placement.kind == "device share":
        share = placement.device["states"] / (12 * found.model.num_params)
        return f"stepwell, resident={share:.3f}"
    if placement.kind == "deferred":
        return f"stepwell, deferred={placement.options['deferred']}"
    if placement.kind == "streamed" and "activations" not in placement.options:
        return f"stepwell{codec}, streamed"
    return None


def measure(console: Console, model: str, found: Plan) -> list[dict[str, Any]]:
    """Runs the placements that fit, each in a process of its own, and says what was measured.

    Returns for each its title, its index in the plan, and seconds, GiB of the device and bytes of
    host memory per parameter, planned and measured.
    """
    path = Path(model)
    workload = Workload(
        size=str((path / "config.json" if path.is_dir() else path).resolve()),
        sequence_length=found.workload.tokens,
        micro_batch=found.workload.micro_batch,
        accumulation=found.workload.accumulation,
        steps=_STEPS,
        warm_up_steps=_WARM_UP,
        clip_norm=1.0,
        seed=0,
        text=None,
    )
    rows = []
    for index, placement in enumerate(found.placements):
        case = _case_of(found, placement) if placement.fits else None
        if case is None:
            continue
        result = run_case(console, case, workload)
        if "seconds" not in result:
            continue
        device = result["device_peak_gib"]
        rows.append(
            {
                "placement": index,
                "title": placement.title,
                "is_exact": placement.is_exact,
                "seconds": (placement.step.total, result["seconds"]),
                "device_gib": None if device is None else (placement.peak / 2**30, device),
                "host_bytes_per_param": (
                    placement.host_total / found.model.num_params,
                    result["host_bytes_per_param"],
                ),
            }
        )
    return rows


def print_measured(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints what was measured, and which placement to use."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("planned, measured", overflow="fold")
    names = {"seconds": "s/step", "device_gib": "GPU GiB", "host_bytes_per_param": "host B/param"}
    for name in names.values():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        pairs = (row[name] for name in names)
        table.add_row(
            row["title"], *("" if p is None else f"{p[0]:.3f}, {p[1]:.3f}" for p in pairs)
        )
    console.print()
    console.print(table)
    if fastest := min(rows, key=lambda row: (not row["is_exact"], row["seconds"][1]), default=None):
        console.print(f"\nuse: {fastest['title']}", style="bold", highlight=False)
