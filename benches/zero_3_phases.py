"""Where a training step of ZeRO-3 with `offload_param` spends its time, on one rank.

    python benches/zero_3_phases.py [--size 1b] [--sequence-length 4096] [--steps 8] [--case ...]

Each case is a process of its own: a case of `stepwell bench offload`, on DeepSpeed's hooks and on
Stepwell's. Prints a JSON object per case, with medians per step in milliseconds:

- `step`: from one forward to the next, with nothing waited for between the phases.
- `forward`, `backward`, `update`: until the call of the phase returns. `device_*`: until the device
  has ended it, in steps of their own that wait behind each phase.
- `samples`: per step, of all threads, one each millisecond: those within the code of DeepSpeed's
  hooks, of Stepwell's, and in waits for a step in the background.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter

import torch
from stepwell.cli._workload import Workload

__all__ = ["WARM_UP", "milliseconds", "workload_of"]

WARM_UP = 4
"""Steps that are not measured."""
CASES = (
    "deepspeed, offload_param",
    "deepspeed on stepwell, offload_param, fetch=deepspeed",
    "deepspeed on stepwell, offload_param",
)
# The innermost of these files in a stack says whose time a sample is.
OWNERS = {
    "deepspeed/zero/partitions.py": "waits for a step",
    "stepwell/weights/calls.py": "hooks of Stepwell",
    "stepwell/weights/fetcher.py": "hooks of Stepwell",
    "stepwell/weights/lane.py": "hooks of Stepwell",
    "stepwell/deepspeed/zero/fetching.py": "hooks of Stepwell",
    "zero/parameter_offload.py": "hooks of DeepSpeed",
    "zero/partitioned_param_coordinator.py": "hooks of DeepSpeed",
    "zero/partition_parameters.py": "hooks of DeepSpeed",
    "zero/linear.py": "linear layers of DeepSpeed",
    "zero/stage3.py": "gradients of DeepSpeed",
    "stepwell/deepspeed/zero/stage_3.py": "gradients and step of Stepwell",
    "stepwell/deepspeed/zero/gradients.py": "gradients and step of Stepwell",
}


class Sampler(threading.Thread):
    """Looks at what all other threads run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.is_on = False

    def run(self) -> None:
        """Samples until the process ends."""
        while True:
            time.sleep(0.001)
            if self.is_on:
                frames = sys._current_frames()
                self.counts.update(
                    owner_of(frame) for thread, frame in frames.items() if thread != self.ident
                )


def owner_of(frame: object) -> str:
    """Whose code a thread runs."""
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")  # type: ignore[attr-defined]
        for end, owner in OWNERS.items():
            if path.endswith(end):
                return owner
        frame = frame.f_back  # type: ignore[attr-defined]
    return "other"


def milliseconds(values: list[float]) -> float:
    """The median."""
    return round(1e3 * statistics.median(values), 1)


def workload_of(size: str, sequence_length: int, steps: int) -> Workload:
    """What a case trains: `steps` that are timed, and as many that are looked into."""
    return Workload(
        size=size,
        sequence_length=sequence_length,
        micro_batch=1,
        accumulation=1,
        steps=2 * steps,
        warm_up_steps=WARM_UP,
        clip_norm=1.0,
        seed=0,
        text=None,
    )


def measure(name: str, size: str, sequence_length: int, steps: int) -> dict[str, object]:
    """Runs a case in this process."""
    from stepwell.cli._offload_cases import prepare

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    workload = workload_of(size, sequence_length, steps)
    model = workload.model(device)
    begin = time.perf_counter()
    run = prepare(name, workload, model)
    wait()
    start = time.perf_counter() - begin
    batches = iter(list(workload.batches(device)))
    sampler = Sampler()
    sampler.start()

    def step(phases: dict[str, list[float]], *, is_waiting: bool) -> float:
        marks = [time.perf_counter()]

        def mark() -> None:
            if is_waiting:
                wait()
            marks.append(time.perf_counter())

        loss = run.forward(next(batches))
        mark()
        run.backward(loss)
        mark()
        run.step()
        mark()
        for key, (first, last) in zip(phases, itertools.pairwise(marks), strict=True):
            phases[key].append(last - first)
        return float(loss) if is_waiting else 0.0

    names = ("forward", "backward", "update")
    phases: list[dict[str, list[float]]] = [{key: [] for key in names} for _ in range(3)]
    warm, launched, ended = phases
    for _ in range(workload.warm_up_steps):
        step(warm, is_waiting=True)
    seconds = []
    for _ in range(steps):
        mark = time.perf_counter()
        step(launched, is_waiting=False)
        seconds.append(time.perf_counter() - mark)
    wait()
    sampler.is_on = True
    for _ in range(steps):
        loss = step(ended, is_waiting=True)
    sampler.is_on = False
    # Torch's and DeepSpeed's threads that sleep are no part of it.
    known = {owner: count for owner, count in sampler.counts.items() if owner != "other"}
    return {
        "case": name,
        "start_s": round(start, 2),
        "step": milliseconds(seconds),
        **{key: milliseconds(values) for key, values in launched.items()},
        **{f"device_{key}": milliseconds(values) for key, values in ended.items()},
        "samples": {owner: count / steps for owner, count in sorted(known.items())},
        "device_peak_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else None,
        "last_loss": loss,
    }


def main() -> None:
    """Runs each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--case", nargs="+", default=CASES)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        found = measure(asked.case[0], asked.size, asked.sequence_length, asked.steps)
        print(json.dumps(found), flush=True)
        # Not through the interpreter's end: DeepSpeed leaves threads behind.
        os._exit(0)
    for name in asked.case:
        command = [sys.executable, __file__, "--here", "--size", asked.size, "--steps"]
        command += [str(asked.steps), "--sequence-length", str(asked.sequence_length)]
        done = subprocess.run(
            [*command, "--case", name], capture_output=True, text=True, timeout=600, check=False
        )
        print(done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:])


if __name__ == "__main__":
    main()
