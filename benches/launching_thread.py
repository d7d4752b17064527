"""What a case of `stepwell bench offload` takes of the thread that launches, and of the device.

    python benches/launching_thread.py [CASE] [--size 1b] [--sequence-length 4096]

- `prepare`: of `step()` without its waits (`OffloadAdamW.timing`), milliseconds, median.
- `forward`: until the call returns, and of this the processor time of the thread: as the case
  trains, and where the step before is over first.
- On a GPU, of each step the milliseconds of copies and of checksums there (torch.profiler).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from stepwell.cli._offload_cases import prepare as run_of
from stepwell.cli._workload import Workload, sync

STEPS, WARM_UP_STEPS, PROFILED_STEPS = 14, 10, 8


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="?", default="stepwell")
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = Workload(
        size=args.size,
        sequence_length=args.sequence_length,
        steps=2 * STEPS + PROFILED_STEPS,
        warm_up_steps=WARM_UP_STEPS,
        micro_batch=1,
        accumulation=1,
        clip_norm=1.0,
        seed=0,
        text=None,
    )
    model = workload.model(device)
    run = run_of(args.case, workload, model)
    batches = iter(list(workload.batches(device)))

    def step(*, is_quiet: bool = False) -> tuple[float, float, float]:
        """Milliseconds of the forward, of its thread, and of `prepare`."""
        if is_quiet:
            run.finish()
            sync(device)
        begin, began = time.perf_counter(), time.thread_time()
        loss = run.forward(next(batches))
        forward, own = time.perf_counter() - begin, time.thread_time() - began
        run.backward(loss)
        run.step()
        return 1e3 * forward, 1e3 * own, 1e3 * run.breakdown().get("prepare", 0.0)

    for _ in range(WARM_UP_STEPS):
        step()
    for name, is_quiet in (("as it trains", False), ("behind the step", True)):
        forward, own, prepare = map(
            median, zip(*(step(is_quiet=is_quiet) for _ in range(STEPS)), strict=True)
        )
        print(f"{name:16} forward {forward:.1f} ms ({own:.1f})  prepare {prepare:.2f} ms")
    if device.type == "cuda":
        # Its methods have no types.
        profiled: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with profiled:
            for _ in range(PROFILED_STEPS):
                step()
            run.finish()
            sync(device)
        sums: dict[str, float] = defaultdict(float)
        for event in profiled.events():
            if event.name.startswith("Memcpy") or event.name == "checksums":
                sums[event.name] += event.device_time_total / 1e3 / PROFILED_STEPS
        for name, milliseconds in sums.items():
            print(f"{name}: {milliseconds:.2f} ms per step")


if __name__ == "__main__":
    main()
