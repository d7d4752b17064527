"""What the thread that launches does in training steps: of several installations, in turns.

    python benches/offload_phases.py [SITE...] [--case "stepwell q8"] [--size 1b] [--steps 14]
        [--rounds 5] [--calls]

A SITE is a folder with an installation (`pip install --target SITE WHEEL`); without one it is that
which runs this. Each run is a case of `stepwell bench offload`, in a process of its own; every
other round goes backwards. A line for each run has medians per step, in seconds:

- `step`: from one forward to the next, with nothing waited for between the phases.
- `forward`, `backward`, `update`: until the call of the phase returns.
- `stepping`: of the workers in host memory.

With `--calls` one more run of each has timers around calls that a backward makes: milliseconds per
backward, and how many calls. The timers take a microsecond each.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import wraps
from typing import Any

import torch
from stepwell.cli import _offload_cases as cases
from stepwell.offload.engine import Engine
from stepwell.offload.gradients import OnGrad

# Until 2026-11-22 it had another name, and knew how many steps warm up.
Workload: Any = getattr(cases, "Workload", None) or cases.Plan  # type: ignore[attr-defined]

WARM_UP_STEPS = 3
TIMED = [(OnGrad, "__call__"), (Engine, "take"), (Engine, "checksums")]

Spent = dict[str, tuple[float, int]]


def add_timers() -> Spent:
    """Times calls from now on: seconds and number by name, which the caller clears."""
    spent: Spent = {}

    def timed(name: str, method: Any) -> Any:
        @wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                seconds, count = spent.get(name, (0.0, 0))
                spent[name] = seconds + time.perf_counter() - begin, count + 1

        return call

    for owner, name in TIMED:
        if hasattr(owner, name):
            label = f"{owner.__name__}.{name}"
            setattr(owner, name, timed(label, getattr(owner, name)))
    return spent


def run(case: str, size: str, sequence_length: int, steps: int, *, times_calls: bool) -> None:
    """Prints what one run has taken, as JSON."""
    spent = add_timers() if times_calls else {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = {
        "size": size,
        "sequence_length": sequence_length,
        "micro_batch": 1,
        "accumulation": 1,
        "steps": steps,
        "warm_up_steps": WARM_UP_STEPS,
        "clip_norm": 1.0,
        "seed": 0,
        "text": None,
    }
    known = Workload.__dataclass_fields__
    workload = Workload(**{name: value for name, value in plan.items() if name in known})
    training = cases.CASES[case](workload, workload.model(device))
    batches = workload.batches(device)
    found: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, list[tuple[float, int]]] = defaultdict(list)
    marks = []
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS - 1:
            gc.collect()
            gc.freeze()
        marks.append(time.perf_counter())
        loss = training.forward(next(batches))
        forwarded = time.perf_counter()
        spent.clear()
        training.backward(loss)
        backwarded = time.perf_counter()
        backward_calls = dict(spent)
        training.step()
        updated = time.perf_counter()
        if step >= WARM_UP_STEPS:
            found["forward"].append(forwarded - marks[-1])
            found["backward"].append(backwarded - forwarded)
            found["update"].append(updated - backwarded)
            found["stepping"].append(training.breakdown().get("step", 0.0))
            for name, call in backward_calls.items():
                calls[name].append(call)
    if device.type == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    training.finish()
    found["step"] = [end - begin for begin, end in itertools.pairwise(marks)][WARM_UP_STEPS:]
    medians: dict[str, Any] = {
        name: round(statistics.median(seconds), 4) for name, seconds in sorted(found.items())
    }
    medians["fastest backward"] = round(min(found["backward"]), 4)
    for name, each in calls.items():
        seconds = statistics.median(seconds for seconds, _ in each)
        medians[name] = f"{1e3 * seconds:.2f} ms, {each[0][1]} calls"
    print(json.dumps(medians), flush=True)
    # Not through the interpreter's end: libraries leave threads behind.
    os._exit(0)


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sites", nargs="*", metavar="SITE")
    parser.add_argument("--case", default="stepwell q8", choices=list(cases.CASES))
    parser.add_argument("--size", default="1b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run(args.case, args.size, args.sequence_length, args.steps, times_calls=args.calls)
    options = ["--case", args.case, "--size", args.size, "--steps", str(args.steps)]
    options += ["--sequence-length", str(args.sequence_length)]
    sites: list[str | None] = args.sites or [None]
    turns: list[tuple[str | None, list[str]]] = [
        (site, []) for nth in range(args.rounds) for site in sites[:: 1 if nth % 2 == 0 else -1]
    ]
    if args.calls:
        turns += [(site, ["--calls"]) for site in sites]
    for site, more in turns:
        path = {} if site is None else {"PYTHONPATH": site}
        ended = subprocess.run(
            [sys.executable, __file__, "--child", *options, *more],
            env={**os.environ, **path},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()
        print(site or "this installation", lines[-1] if lines else ended.returncode, flush=True)


if __name__ == "__main__":
    main()
