"""Where a training step of several ranks spends its time, and which threads run in it.

    torchrun --nproc-per-node 2 benches/rank_phases.py "deepspeed on stepwell, stage=3"

The case is one of `offload_ranks.py`. Prints a JSON object of rank 0, per step and in
milliseconds:

- `step`: from one forward to the next, nothing waited for between the phases. A median.
- `forward`, `backward`, `update`: until the call of the phase returns. Medians.
- `threads`: CPU time of each phase by the name of the thread, of those with more than .5 ms. The
  thread that launches a backward is `pt_autograd_0`, or the caller's where there is no GPU.
- `device`: in steps of their own, under torch's profiler: time in which kernels, NCCL's kernels and
  copies ran. Copies and kernels run at once, so they do not add up.
- `operations`: of the same steps, the operations of the host with most time of their own. The
  profiler makes each of them slower, by some microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank_cases as ranked
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from zero_3_phases import WARM_UP, milliseconds, workload_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepwell.cli._workload import Run

PHASES = ("forward", "backward", "update")
OPERATIONS = 20
"""How many are printed."""


def thread_milliseconds() -> Counter[str]:
    """CPU time of all threads of this process by name, since each began."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            run_ns = int((task / "schedstat").read_text().split()[0])
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[name] += run_ns / 1e6  # type: ignore[assignment]
    return found


class Phases:
    """Wall time and CPU time of the phases of steps."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.threads: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.steps: list[float] = []

    def step(self, run: Run, batch: torch.Tensor) -> None:
        """One step, measured."""
        first = time.perf_counter()
        loss: Any = None
        for phase in PHASES:
            before, begin = thread_milliseconds(), time.perf_counter()
            if phase == "forward":
                loss = run.forward(batch)
            elif phase == "backward":
                run.backward(loss)
            else:
                run.step()
            self.wall[phase].append(time.perf_counter() - begin)
            self.threads[phase].update(thread_milliseconds())
            self.threads[phase].subtract(before)
        self.steps.append(time.perf_counter() - first)

    def report(self) -> dict[str, object]:
        """Per step, in milliseconds."""
        count = len(self.steps)
        by_phase = {
            phase: {
                name: round(spent / count, 1)
                for name, spent in threads.most_common()
                if spent > count / 2
            }
            for phase, threads in self.threads.items()
        }
        walls = {phase: milliseconds(seconds) for phase, seconds in self.wall.items()}
        return {"step": milliseconds(self.steps), **walls, "threads": by_phase}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, in their unit."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def profiled(run: Run, batches: list[torch.Tensor]) -> dict[str, object]:
    """What ran on the device, and the operations of the host, per step of these."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        for batch in batches:
            run.backward(run.forward(batch))
            run.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "nccl": [], "copies": []}
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            kind = "copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            kind = "nccl" if "nccl" in event.name else kind
            spans[kind].append((event.time_range.start, event.time_range.end))
    averages = sorted(found.key_averages(), key=lambda one: -one.self_cpu_time_total)
    count = len(batches)
    return {
        "device": {kind: round(covered(of) / 1e3 / count, 1) for kind, of in spans.items()},
        "operations": {
            one.key: [round(one.self_cpu_time_total / 1e3 / count, 2), one.count // count]
            for one in averages[:OPERATIONS]
        },
    }


def measure(name: str, size: str, sequence_length: int, steps: int) -> dict[str, object]:
    """Runs a rank of a case in this process."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    workload = workload_of(size, sequence_length, steps)
    model = workload.model(device)
    if name in ranked.MODELS:
        model = ranked.MODELS[name](model)
    run = ranked.prepare(name, workload, model)
    own = replace(workload, seed=dist.get_rank())
    batches = list(own.batches(device))
    phases = Phases()
    for batch in batches[:WARM_UP]:
        Phases().step(run, batch)
    for batch in batches[WARM_UP : WARM_UP + steps]:
        phases.step(run, batch)
    return {"case": name, **phases.report(), **profiled(run, batches[WARM_UP + steps :])}


def main() -> None:
    """Measures one case on the ranks of the launcher."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=ranked.CASES)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    found = measure(asked.case, asked.size, asked.sequence_length, asked.steps)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
    dist.barrier()
    # Not through the interpreter's end: DeepSpeed leaves threads behind.
    os._exit(0)


if __name__ == "__main__":
    main()
