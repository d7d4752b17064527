"""Training steps of several ranks of this host, with the optimizer in host memory.

    python benches/offload_ranks.py --ranks 2 [--size 1b] [--steps 8] [--warm-up 3] [--case ddp ...]

All ranks are on this host, each on a GPU of its own if there are GPUs, with samples of its own:

- `ddp`: DistributedDataParallel and OffloadAdamW, which steps everything on every rank.
- `fsdp2`: fully_shard and OffloadAdamW, whose gradients cross the bus during the backward.
- `fsdp2 cpu_offload`: the same with CPUOffloadPolicy, so that the shards are in host memory;
  `torch fsdp2 cpu_offload`: torch's fused AdamW there, over fp32 shards that FSDP2 casts to bf16.
- `deepspeed, stage=2`, `deepspeed, stage=3`: ZeRO with CPU offload of the optimizer;
  `deepspeed on stepwell` likewise, with Stepwell registered. ZeRO-2 has `round_robin_gradients`.
- `deepspeed, stage=2, all on the devices`, likewise of stage 3: without offload.

Each time but torch's is held against L + bytes / R, as by `stepwell bench offload`. L is that of
DDP, of FSDP2 (also for ZeRO-3; another with CPUOffloadPolicy), and for ZeRO-2 that of the case that
has all on the devices.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rank_cases import CASES
from rich.console import Console
from stepwell.cli._memory_rate import MemoryRate, bound
from stepwell.cli._processes import launched, run_processes
from stepwell.cli._report import case_table, circumstances, failed_case, write, write_json
from stepwell.cli._step_times import circumstances_line
from stepwell.cli._workload import Workload
from stepwell.cli.bench_offload import bus_gb_per_second, host_bytes_per_param

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure


def _is_cut(name: str) -> bool:
    """Whether no rank has all weights between the steps."""
    return "fsdp2" in name or "stage=3" in name


def _reduction(name: str) -> str:
    """What reduces a case's gradients, and has the time of forward and backward alone.

    ZeRO-3 with offload is held against FSDP2, which cuts the model likewise and is faster.
    """
    if name == "deepspeed, stage=3, all on the devices":
        return "zero-3"
    if "cpu_offload" in name:
        return name
    if _is_cut(name):
        return "fsdp2"
    return "zero-2" if "stage=2" in name else "ddp"


def _received_bytes_per_param(name: str, num_ranks: int) -> float:
    """What each rank receives of 16-bit gradients and weights in a step, if they go in a ring.

    An all-reduce is a reduce-scatter and an all-gather; either brings a rank what is not its own.
    """
    # Cut weights are gathered for the forward and for the backward, and gradients scattered.
    passes = 3 if _is_cut(name) else 2
    return passes * 2 * (num_ranks - 1) / num_ranks


def measure_ranks(
    console: Console,
    names: list[str],
    workload: Workload,
    num_ranks: int,
    *,
    memory: MemoryRate,
    bytes_per_param: dict[str, float | None],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Runs the cases on `num_ranks` ranks of this host.

    Args:
        console: for what is going on.
        names: of `CASES`.
        workload: what is trained; each rank has samples of its own.
        num_ranks: processes, each on a GPU of its own where there are GPUs.
        memory: the rate of host memory, which all ranks share.
        bytes_per_param: what a step moves in host memory, by the optimizer's case without ranks.
        keep: called after each case with what is known by then, without bounds: a run that is
            stopped has what came before.

    Returns:
        for a report: seconds of forward and backward, and `cases`.
    """
    cases: list[dict[str, Any]] = []
    for name in names:
        cases.append(memory.beside(partial(_run, console, name, workload, num_ranks)))
        if "seconds" in cases[-1]:
            console.print(f"    {cases[-1]['seconds']:.3f} s per step", style="dim")
        keep({"ranks": num_ranks, "cases": cases})
    done = [result for result in cases if "seconds" in result]
    alone = {
        _reduction(result["name"]): result["forward_backward_seconds"]
        for result in done
        if result["forward_backward_seconds"]
    }
    for result in done:
        name = result["name"]
        result["received_bytes_per_param"] = _received_bytes_per_param(name, num_ranks)
        own = name.split(",")[0] if name.startswith("deepspeed") else "stepwell"
        if name.startswith("torch"):
            continue
        moved, before = bytes_per_param[own], alone.get(_reduction(name))
        if moved is not None and before:
            # All that the ranks of this host move together.
            moved *= num_ranks if name == "ddp" else 1
            result |= bound(result, before, moved)
    return {"ranks": num_ranks, "forward_backward_seconds": alone, "cases": cases}


def _run(console: Console, name: str, workload: Workload, num_ranks: int) -> dict[str, Any]:
    """Runs a case; all its ranks end when one fails."""
    console.print(f"running: {name}, {num_ranks} ranks", style="dim", highlight=False)
    asked = {"name": name, "plan": asdict(workload)}
    result = run_processes(
        [str(Path(__file__).with_name("rank_cases.py"))], asked, launched(num_ranks)
    )
    return failed_case(console, name, result) if isinstance(result, str) else result


def print_ranks(console: Console, report: dict[str, Any]) -> None:
    """Prints the table of a report."""
    workload, done = report["plan"], [case for case in report["cases"] if "seconds" in case]
    numel = done[0]["num_params"] / 1e9 if done else 0
    title = (
        f"{report['ranks']} ranks, {numel:.3f} B parameters, "
        f"{workload['micro_batch']} x {workload['sequence_length']} tokens each, "
        f"{workload['accumulation']} micro-step(s), clipping at {workload['clip_norm']:g}"
    )
    columns = (
        "s/step",
        "slowest",
        "R GB/s",
        "L + bytes/R",
        "of it",
        "of DeepSpeed's",
        "start s",
        "host B/param, all ranks",
        "host peak GiB",
        "received B/param",
        "device GiB",
        "last loss",
    )
    table = case_table(title, columns, is_wrapped=True)
    for kind, seconds in report["forward_backward_seconds"].items():
        table.add_row(f"L: forward, backward, {kind}", f"{seconds:.3f}")
    by_name = {case["name"]: case["seconds"] for case in done}
    for case in done:
        least = case.get("bound_seconds")
        peer = by_name.get(case["name"].replace(" on stepwell", ""))
        is_ours = " on stepwell" in case["name"]
        table.add_row(
            case["name"],
            f"{case['seconds']:.3f}",
            f"{case['slowest_seconds']:.3f}",
            f"{case['memory_gb_per_second']:.0f}",
            f"{least:.3f}" if least else "",
            f"{case['seconds'] / least:.2f}" if least else "",
            f"{case['seconds'] / peer:.2f}" if is_ours and peer else "",
            f"{case['start_seconds']:.1f}",
            f"{case['host_bytes_per_param']:.1f}",
            f"{case['host_peak_gib']:.1f}",
            f"{case['received_bytes_per_param']:.1f}",
            f"{case['device_peak_gib']:.1f}" if case["device_peak_gib"] else "",
            f"{case['losses'][-1]:.4f}",
        )
    console.print()
    console.print(table)


def draw_ranks(figure: Figure, report: dict[str, Any]) -> None:
    """Draws what a step of each case takes, and the losses."""
    done = [case for case in report["cases"] if "seconds" in case]
    left, right = figure.subplots(1, 2)
    left.barh([case["name"] for case in done], [case["seconds"] for case in done])
    left.invert_yaxis()
    left.set_xlabel(f"seconds per step, {report['ranks']} ranks")
    for case in done:
        right.plot(case["losses"], label=case["name"], linewidth=1)
    right.set_xlabel("step")
    right.set_ylabel("loss")
    right.legend(fontsize=7)
    figure.suptitle(circumstances_line(report), fontsize=9)


def main() -> None:
    """Measures the cases, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--case", action="append", dest="cases", choices=CASES)
    parser.add_argument("--out", type=Path, default=Path("stepwell-bench"))
    args = parser.parse_args()
    if 0 < torch.cuda.device_count() < args.ranks:
        parser.error(
            f"--ranks is `{args.ranks}`, expected `{torch.cuda.device_count()}` at most, one for "
            "each GPU. hint: CUDA_VISIBLE_DEVICES= for the CPU"
        )
    workload = Workload(
        size=args.size,
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch,
        accumulation=args.accumulation,
        steps=args.steps,
        warm_up_steps=args.warm_up,
        clip_norm=1.0,
        seed=0,
        text=None,
    )
    console, memory, name = Console(width=170), MemoryRate(), "bench_offload_ranks"
    report: dict[str, Any] = {
        **circumstances("python benches/offload_ranks.py"),
        "plan": asdict(workload),
        "memory_gb_per_second": memory.gb_per_second,
        "bus_gb_per_second": bus_gb_per_second(),
    }
    systems = ("stepwell", "deepspeed", "deepspeed on stepwell")
    report |= measure_ranks(
        console,
        args.cases or list(CASES),
        workload,
        args.ranks,
        memory=memory,
        bytes_per_param={system: host_bytes_per_param(system) for system in systems},
        keep=lambda known: write_json(args.out, name, report | known),
    )
    print_ranks(console, report)
    write(console, args.out, name, report, lambda figure: draw_ranks(figure, report))


if __name__ == "__main__":
    main()
