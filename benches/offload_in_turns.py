"""Training steps of several installations and cases in turns, a few steps at a time.

    python benches/offload_in_turns.py [--site NAME=FOLDER ...] --run "NAME: CASE" ...
        [--peer "NAME: CASE"] [--rounds 6] [--steps 4] [--skip 1] [--accumulation 1]
        [--micro-batch 1]
        [--size 1b] [--drive FOLDER ...]
        [--time MODULE:CLASS.METHOD ...]

A site is a folder with an installation (`pip install --target FOLDER WHEEL`); without `--site`
there is one, `here`. A run is a case of `stepwell bench offload` in a process of its own. All
processes live at the same time, and one of them trains while the others sleep. So what the machine
does meanwhile (its memory moves a fifth more or less from minute to minute) is the same for all.
Every other round goes backwards.

Each round's steps are printed to stderr as they come, so that a run that is cut has told them.

A row for each run has seconds per step. `mean_step` and `mean_whole` are means. All other seconds
are medians over the rounds, of the medians of each round's steps. The first step of a round has no
step to wait for. It comes before those that are asked for (`--skip`), and only `mean_whole` counts
it.

- `step`: from one forward to the next.
- `to the peer`, `to the first`: the ratio to the round's step of the peer, and of the first run
  with the same case; in brackets, that of the lowest and of the highest round.
- `mean_step`: the mean of all steps of all rounds but their first ones; in brackets, over the
  peer's.
- `mean_whole`: the mean of whole rounds, per step, with what the last steps leave to do; in
  brackets, over the peer's.
- `forward`, `backward`, `update`: until the call of the phase returns, of the first micro-step;
  behind it, how long of this the thread that launches was on a CPU (autograd's, for the backward).
- `stepping`: of the workers in host memory.

Cases with a volume need `--drive`, a folder for each. A volume is left there, since processes are
ended. Where every eighth step commits, look at `mean_whole`, with `--steps 1` and a multiple of
four rounds: then each round takes two steps, and every fourth has a commit. A disk's speed drifts
within a minute, so the shorter the rounds are, the more alike it is for all.

Where updates are deferred each round begins with an exact step, since all that was pending was
applied at the end of the last round. The second step waits for what the first has changed. So leave
out two (`--skip 2`), or look at the medians of `step`, and have six steps or more.

Two processes of one build differ by some per cent, by the memory that they have got. Name a folder
twice to see by how much (`--site old=OLD --site again=OLD`).

With `--time stepwell.store.engine:Engine.take`, for one, a row has milliseconds of such calls in
the last backward and the step, and their number. A timer takes a microsecond per call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Any

MARK = "@@ "
"""What lines of a child's begin with; libraries print others."""
WARM_UP_STEPS = 3

Spent = dict[str, tuple[float, int]]


# ---- the process of a run ----


def add_timers(methods: list[str]) -> Spent:
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

    for method in methods:
        module, qualified = method.split(":")
        class_name, name = qualified.split(".")
        owner = getattr(import_module(module), class_name)
        setattr(owner, name, timed(qualified, getattr(owner, name)))
    return spent


class Training:
    """A case, as a child process has it."""

    def __init__(self, case: str, plan: dict[str, Any], timed: list[str]) -> None:
        import torch
        from stepwell.cli import _offload_cases as cases

        # Until 2026-11-22 these had other names, and the plan knew how many steps warm up.
        workload_class: Any = getattr(cases, "Workload", None) or cases.Plan  # type: ignore[attr-defined]
        self._sync = getattr(cases, "sync", None) or cases._sync  # type: ignore[attr-defined]
        known = workload_class.__dataclass_fields__
        workload = workload_class(**{name: plan[name] for name in plan if name in known})
        self._spent = add_timers(timed)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = workload.model(self._device)
        self._autograd_clock = time.CLOCK_THREAD_CPUTIME_ID
        next(model.parameters()).register_post_accumulate_grad_hook(self._find_autograd)
        # Until 2026-11-28 a case was looked up.
        prepare = getattr(cases, "prepare", None)
        if prepare is None:
            self._run = cases.CASES[case](workload, model)  # type: ignore[attr-defined]
        else:
            self._run = prepare(case, workload, model)
        # Before the steps, as the workers of a loader make them.
        self._batches = iter(list(workload.batches(self._device)))
        self._accumulation: int = plan["accumulation"]
        self._skip: int = plan["skip"]
        self.loss = 0.0

    def _find_autograd(self, _: Any) -> None:
        self._autograd_clock = time.pthread_getcpuclockid(threading.get_ident())

    def take(self, steps: int) -> dict[str, Any]:
        """Takes steps, after some that are not looked at, and returns what they took."""
        run, found, marks = self._run, defaultdict(list), []
        calls: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for _ in range(steps + self._skip):
            marks.append(time.perf_counter())
            for micro_step in range(self._accumulation):
                begin, began = time.perf_counter(), time.thread_time()
                loss = run.forward(next(self._batches))
                forwarded = time.perf_counter()
                if not micro_step:
                    found["forward cpu"].append(time.thread_time() - began)
                    found["stepping"].append(run.breakdown().get("step", 0.0))
                self._spent.clear()
                began = time.clock_gettime(self._autograd_clock)
                run.backward(loss)
                backwarded = time.perf_counter()
                if not micro_step:
                    spent = time.clock_gettime(self._autograd_clock) - began
                    found["backward cpu"].append(spent)
                    found["forward"].append(forwarded - begin)
                    found["backward"].append(backwarded - forwarded)
                began = time.thread_time()
                if run.steps_itself:
                    run.step()
            if not run.steps_itself:
                run.step()
            found["update cpu"].append(time.thread_time() - began)
            found["update"].append(time.perf_counter() - backwarded)
            for name, call in self._spent.items():
                calls[name].append(call)
        marks.append(time.perf_counter())
        found["step"] = [end - begin for begin, end in pairwise(marks)]
        run.finish()
        self._sync(self._device)
        whole = time.perf_counter() - marks[0]
        self.loss = float(loss.detach())
        return {
            "seconds": {name: seconds[self._skip :] for name, seconds in found.items()},
            "calls": {name: each[self._skip :] for name, each in calls.items()},
            "whole": whole / (steps + self._skip),
            "loss": self.loss,
        }


def child(asked: dict[str, Any]) -> None:
    """Takes as many steps as each line of the input says."""
    training = Training(asked["case"], asked["plan"], asked["timed"])
    training.take(WARM_UP_STEPS - asked["plan"]["skip"])
    gc.collect()
    gc.freeze()
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(training.take(int(line))), flush=True)
    # Not through the interpreter's end: libraries leave threads behind.
    os._exit(0)


# ---- all runs ----


@dataclass
class Contender:
    """A run, and what it has taken."""

    site: str
    case: str
    process: subprocess.Popen[str]
    blocks: list[dict[str, Any]] = field(default_factory=list)

    def answer(self) -> dict[str, Any]:
        """What the process says next."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line[len(MARK) :])
                return found
        raise SystemExit(f"{self.site}: {self.case}: ended with {self.process.wait()}")

    def take(self, steps: int) -> None:
        """Takes steps, while all others sleep."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.blocks.append(self.answer())

    def last_round(self) -> str:
        """A line that says what its steps took."""
        seconds = ", ".join(f"{step:.3f}" for step in self.blocks[-1]["seconds"]["step"])
        return f"{self.site}: {self.case}: {seconds}; whole {self.blocks[-1]['whole']:.3f}"

    def medians(self, name: str) -> list[float]:
        """Of each round."""
        return [statistics.median(block["seconds"][name]) for block in self.blocks]

    def mean_step(self) -> float:
        """Over all rounds."""
        return statistics.fmean(step for block in self.blocks for step in block["seconds"]["step"])

    def mean_whole(self) -> float:
        """Per step, over all rounds, with their first steps and their ends."""
        return statistics.fmean(block["whole"] for block in self.blocks)

    def row(self, peer: Contender | None, first: Contender) -> str:
        """A line of the table."""
        name = f"{self.site}: {self.case}"
        texts = [f"{name:44} {statistics.median(self.medians('step')):.4f}"]
        for label, other in (("peer", peer), ("first", first)):
            if other is not None and other is not self:
                pairs = zip(self.medians("step"), other.medians("step"), strict=True)
                ratios = sorted(mine / others for mine, others in pairs)
                texts.append(
                    f"{label} {statistics.median(ratios):.3f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
                )
        for label in ("mean_step", "mean_whole"):
            seconds = getattr(self, label)()
            over = f" ({seconds / getattr(peer, label)():.3f})" if peer is not None else ""
            texts.append(f"{label} {seconds:.4f}{over}")
        for each in ("forward", "backward", "update"):
            whole, cpu = (statistics.median(self.medians(name)) for name in (each, f"{each} cpu"))
            texts.append(f"{each} {whole:.4f} ({cpu:.4f})")
        texts.append(f"stepping {statistics.median(self.medians('stepping')):.4f}")
        for call in self.blocks[0]["calls"]:
            every = [one for block in self.blocks for one in block["calls"][call]]
            milliseconds = 1e3 * statistics.median(seconds for seconds, _ in every)
            texts.append(f"{call} {milliseconds:.2f} ms, {every[0][1]} calls")
        return "  ".join([*texts, f"loss {self.blocks[-1]['loss']:.4f}"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--run", action="append", required=True, metavar="NAME: CASE")
    parser.add_argument("--peer", metavar="NAME: CASE")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--skip", type=int, default=1, help="first steps of each round, left out")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--drive", action="append", default=[], dest="drives")
    parser.add_argument("--time", action="append", default=[], dest="timed")
    args = parser.parse_args()
    folders: dict[str, str] = dict(each.split("=", 1) for each in args.site) or {"here": ""}
    plan = {
        "size": args.size,
        "sequence_length": args.sequence_length,
        "micro_batch": args.micro_batch,
        "accumulation": args.accumulation,
        "steps": args.rounds * (args.steps + args.skip),
        "skip": args.skip,
        "warm_up_steps": WARM_UP_STEPS,
        "clip_norm": 1.0,
        "seed": 0,
        "text": None,
        "drives": args.drives,
    }

    def start(run: str) -> Contender:
        site, case = run.split(": ", 1)
        asked = {"case": case, "plan": plan, "timed": args.timed}
        path = {"PYTHONPATH": folders[site]} if folders[site] else {}
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(asked)],
            env={**os.environ, **path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return Contender(site, case, process)

    peer = start(args.peer) if args.peer else None
    runs = [start(run) for run in args.run]
    contenders = ([peer] if peer else []) + runs
    for contender in contenders:
        contender.answer()
    for number in range(args.rounds):
        for contender in contenders[:: 1 if number % 2 == 0 else -1]:
            contender.take(args.steps)
            print(f"round {number + 1}, {contender.last_round()}", file=sys.stderr, flush=True)
    for contender in contenders:
        first = next(each for each in runs if each.case == contender.case or contender is peer)
        print(contender.row(peer, first if contender is not peer else contender), flush=True)
    # They wait for more.
    for contender in contenders:
        contender.process.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    main()
