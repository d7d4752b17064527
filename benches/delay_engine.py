"""Deferred updates on the engine itself, their simulation, and DeepSpeed's own ZenFlow.

    python benches/delay_engine.py RUNS.jsonl [--size micro] [--tasks tune,new]
        [--by engine,zenflow] [--device cpu] [--threads 1] [--seconds 3600] [--plan]

The study (`delay_study.py`) simulates what `OffloadAdamW(deferred=...)` does. Here the same model
is trained on the same text by the engine, on one core, or with `--device cuda` on a GPU. Beside it
are the simulation and ZenFlow as DeepSpeed has it (`pip install 'stepwell[deepspeed]'`, and a
compiler: Stepwell is not registered). Model, text, batches, learning rates and lines are the
study's. Weights are bf16, with fp32 masters, and gradients are clipped at 1.0.

Runs whose lines are there are left out. The model that fine-tuning starts from is trained once and
kept in `target/delay_engine`. Lines name it by its loss. `delay_report.py --engine` makes the
table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import socket
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from delay_cases import PREDICTED, SELECTED, ZENFLOW, Case, name_of, plain
from delay_model import SIZES, Llama, Task, read_texts
from delay_study import Ended, Trainer, Trains, follow, model_of, own_stream
from stepwell import Deferred, OffloadAdamW
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delay_simulation import Delay

__all__ = ["By", "Work", "done_in", "line_of", "plan"]

By: TypeAlias = Literal[
    "engine", "simulation", "zenflow", "zenflow in turn", "zenflow untouched", "zenflow auto"
]
"""What steps the model. All of ZenFlow but "untouched" have matrices put right (`put_right`)."""

BASES = Path(__file__).parents[1] / "target" / "delay_engine"
"""Where models are kept that fine-tuning starts from."""
LRS: dict[str, float] = {"tune": 1e-4, "new": 1e-3}
"""The learning rate of each task."""
SEEDS = 3

# With the study's interval and share, but in the last. An explicit interval: with "auto", which is
# the default, DeepSpeed divides gradients by 0.
_EXPLICIT = {
    "topk_ratio": ZENFLOW.fraction,
    "select_strategy": "step",
    "select_interval": ZENFLOW.reselect,
    "update_interval": ZENFLOW.interval,
}
ZENFLOW_BLOCKS: dict[str, dict[str, Any]] = {
    "zenflow": {**_EXPLICIT, "overlap_step": True},
    "zenflow in turn": {**_EXPLICIT, "overlap_step": False},
    "zenflow untouched": {**_EXPLICIT, "overlap_step": True},
    "zenflow auto": {"topk_ratio": ZENFLOW.fraction, "overlap_step": True},
}
"""The block of DeepSpeed's JSON."""


# ---- what steps ----------------------------------------------------------------------------------


class NotFiniteError(RuntimeError):
    """A loss is NaN or infinite."""


class EngineTrainer:
    """A model that the engine steps.

    Args:
        case: the run; which of rows and columns are selected is the engine's choice.
        masters: what it starts from; None: from nothing.
        device: where the model is.
    """

    share = 0.0

    def __init__(
        self, case: Case, masters: Sequence[torch.Tensor] | None, device: torch.device
    ) -> None:
        self.model = model_of(case, masters, device, torch.bfloat16)
        self._rates = iter(case.lrs())
        hyper = case.hyper
        self.optimizer = OffloadAdamW(
            self.model,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            clip_norm=hyper.clip_norm,
            threads=torch.get_num_threads(),
            deferred=None if case.delay is None else deferred_of(case.delay),
        )

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights, of which this run keeps none."""
        return []

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step with these tokens (int64, batch x (sequence + 1)). Returns its loss."""
        self.optimizer.param_groups[0]["lr"] = next(self._rates)
        loss: torch.Tensor = self.model(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def drain(self) -> None:
        """Applies what is pending."""
        deferral = self.optimizer.deferral
        self.share = 0.0 if deferral is None else deferral.captured_share
        self.optimizer.drain()


def deferred_of(delay: Delay) -> Deferred:
    """What the engine is told.

    Raises:
        ValueError: it does not do this.
    """
    if delay.average:
        raise ValueError(f"`average` of `{delay}` is set, expected updates one after the other")
    return Deferred(
        interval=delay.interval,
        predict=delay.predict,
        warmup_steps=delay.warmup_steps,
        fraction=delay.fraction,
        reselect=delay.reselect,
    )


def put_right() -> None:
    """Has DeepSpeed's ZenFlow view a matrix as it stores it.

    It stores matrices column by column. 0.19.7 and 0.19.8 view that memory row by row, so that a
    model's matrices are shuffled as training begins, and most updates go to other elements than
    their gradients come from. 0.19.6 views it column by column; so does this.
    """
    from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

    ZenFlowZeroOptimizer._update_model_bit16_weights = view_by_columns


def view_by_columns(optimizer: Any, group: int) -> None:
    """Makes the parameters of a group views of its flat memory.

    Args:
        optimizer: DeepSpeed's.
        group: index of a parameter group.
    """
    flat, params = optimizer.bit16_groups_flat[group], optimizer.round_robin_bit16_groups[group]
    metas, offsets = optimizer.round_robin_bit16_meta, optimizer.round_robin_bit16_offsets
    for param, meta, offset in zip(params, metas[group], offsets[group], strict=True):
        part = flat.narrow(0, offset, meta.numel())
        is_matrix = meta.dim() == 2
        param.data = part.view(meta.shape[::-1]).t() if is_matrix else part.view(meta.shape)
    order = optimizer.round_robin_bit16_indices[group]
    for index, param in enumerate(optimizer.bit16_groups[group]):
        param.data = params[order[index]].data


class ZenFlowTrainer:
    """A model that DeepSpeed's ZenFlow steps, under ZeRO-2, in a process that has no other.

    Every batch is a micro-step of DeepSpeed, which then accumulates over `update_interval` of them.

    Args:
        case: the run.
        masters: what it starts from; None: from nothing.
        device: where the model is.
        block: DeepSpeed's `zenflow`.
        is_untouched: whether matrices stay as DeepSpeed has them.
    """

    share = 0.0

    def __init__(
        self,
        case: Case,
        masters: Sequence[torch.Tensor] | None,
        device: torch.device,
        block: dict[str, Any],
        *,
        is_untouched: bool = False,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {
            # It calls ninja by its name.
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
            "DS_ACCELERATOR": device.type,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        import deepspeed

        if not is_untouched:
            put_right()
        hyper = case.hyper
        self._rates = iter(case.lrs())
        self._engine, *_ = deepspeed.initialize(
            model=model_of(case, masters, device, torch.bfloat16),
            config={
                "train_micro_batch_size_per_gpu": SIZES[case.size].batch_size,
                "gradient_accumulation_steps": 1,
                "bf16": {"enabled": True},
                "gradient_clipping": hyper.clip_norm,
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu"},
                    "zenflow": block,
                },
                "optimizer": {
                    "type": "AdamW",
                    "params": {
                        "betas": list(hyper.betas),
                        "eps": hyper.eps,
                        "weight_decay": hyper.weight_decay,
                    },
                },
                "steps_per_print": 10**9,
            },
        )
        self.model: Llama = self._engine.module
        self._steps = 0

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights, of which this run keeps none."""
        return []

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step with these tokens (int64, batch x (sequence + 1)). Returns its loss.

        Raises:
            NotFiniteError: it is NaN or infinite.
        """
        rate = next(self._rates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        loss: torch.Tensor = self._engine(batch)
        if not math.isfinite(float(loss.detach())):
            raise NotFiniteError(f"the loss of step {self._steps} is {float(loss.detach())}")
        self._engine.backward(loss)
        self._engine.step()
        self._steps += 1
        return loss.detach()

    def drain(self) -> None:
        """Nothing: DeepSpeed has no way to. Evaluation sees the weights that forwards saw."""


# ---- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """A run, and what steps it."""

    by: By
    """What steps the model."""
    case: Case
    """What is trained. Of ZenFlow `delay` is its simulation."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.by}: {name_of(self.case)}"


def line_of(work: Work, base: dict[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Trains, and returns the line.

    Args:
        work: what is run.
        base: what fine-tuning starts from: its `masters` and its `loss`.
        device: where it trains.
    """
    case, begin = work.case, time.monotonic()
    masters = base["masters"] if base is not None else None
    line: dict[str, Any]
    try:
        if work.by == "simulation":
            line = simulated(case, masters, device).line
        elif work.by == "engine":
            line = ended(EngineTrainer(case, masters, device), case, device).line
        else:
            block, is_untouched = ZENFLOW_BLOCKS[work.by], work.by == "zenflow untouched"
            trainer = ZenFlowTrainer(case, masters, device, block, is_untouched=is_untouched)
            line = ended(trainer, case, device).line
    except NotFiniteError as error:
        line = {"case": dataclasses.asdict(case), "failed": str(error)}
        line["seconds"] = round(time.monotonic() - begin, 2)
    line["by"] = work.by
    if base is not None:
        line["base"] = base["loss"]
    return line


def ended(trainer: Trains, case: Case, device: torch.device) -> Ended:
    """Runs it to its end."""
    steps = follow(trainer, case, read_texts(device)[case.task])
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: Ended = stop.value
            return found


def simulated(case: Case, masters: Sequence[torch.Tensor] | None, device: torch.device) -> Ended:
    """Runs the simulation to its end. A CUDA graph is not captured on the default stream."""
    with own_stream(device):
        return ended(Trainer(case, masters, device), case, device)


def apart(
    work: Work, base: dict[str, Any] | None, device: torch.device, threads: int
) -> dict[str, Any]:
    """`line_of` in a process that is new."""
    torch.set_num_threads(threads)
    with quiet_deepspeed(), Path(os.devnull).open("w") as nowhere:
        # ZenFlow prints with every selection.
        os.dup2(nowhere.fileno(), 2)
        return line_of(work, base, device)


def base_of(size: str, device: torch.device) -> dict[str, Any]:
    """What fine-tuning starts from; trained where it is not kept."""
    path = BASES / f"{size}.pt"
    if not path.is_file():
        case = Case(size=size, task="base", lr=SIZES[size].base_lr, seed=100)
        found = simulated(case, None, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        loss = round(found.line["validation_loss"], 6)
        masters = [master.cpu() for master in found.masters]
        torch.save({"masters": masters, "loss": loss}, path)
        print(f"{name_of(case)} {loss} {found.line['seconds']:.1f} s", flush=True)
    base: dict[str, Any] = torch.load(path, weights_only=True)
    return base


# ---- all runs ------------------------------------------------------------------------------------


def plan(size: str, tasks: Iterable[Task]) -> list[Work]:
    """All runs: what matters most first."""
    main: list[tuple[By, Delay | None]] = [
        ("engine", None),
        ("engine", PREDICTED),
        ("engine", SELECTED),
        ("zenflow", ZENFLOW),
        ("simulation", PREDICTED),
    ]
    once: list[tuple[By, Delay | None]] = [
        ("zenflow auto", ZENFLOW),
        ("zenflow untouched", ZENFLOW),
    ]
    more: list[tuple[By, Delay | None]] = [
        ("simulation", ZENFLOW),
        ("simulation", SELECTED),
        ("simulation", None),
        ("zenflow in turn", ZENFLOW),
        ("engine", plain(4)),
    ]

    def works(
        task: Task, ways: Iterable[tuple[By, Delay | None]], seeds: Iterable[int]
    ) -> list[Work]:
        return [
            Work(by=by, case=Case(size=size, task=task, lr=LRS[task], seed=seed, delay=delay))
            for seed in seeds
            for by, delay in ways
        ]

    # Seeds first where the spread of seeds is what gaps are held against.
    found = [*works("tune", main, range(SEEDS)), *works("tune", once, [0])]
    found += [*works("new", main, [0]), *works("tune", more, [0])]
    found += [*works("new", [*once, *more], [0]), *works("new", main, range(1, SEEDS))]
    found += works("tune", more, range(1, SEEDS))
    return [work for work in found if work.case.task in set(tasks)]


def key_of(by: str, case: dict[str, Any], base: float | None) -> str:
    """What tells a line from others."""
    return json.dumps([by, case, base], sort_keys=True)


def done_in(path: Path) -> set[str]:
    """The keys of the lines of a file that may not be there."""
    texts = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(text) for text in texts]
    return {key_of(line["by"], line["case"], line.get("base")) for line in lines}


def run(path: Path, works: Sequence[Work], until: float, device: torch.device) -> None:
    """Runs what the file has no line of, and appends that.

    Args:
        path: the file.
        works: in this order.
        until: when the last one has to end, as `time.monotonic()` has it.
        device: where models are.
    """
    done = done_in(path)
    pace = SIZES[works[0].case.size].seconds_per_step
    for work in works:
        case = work.case
        base = base_of(case.size, device) if case.task == "tune" else None
        key = key_of(work.by, dataclasses.asdict(case), base["loss"] if base else None)
        if key in done:
            continue
        if time.monotonic() + pace * case.steps > until:
            print(f"left out, for it would not end in time: {work.name}", flush=True)
            continue
        if work.by in ("engine", "simulation"):
            line = line_of(work, base, device)
        else:
            spawned = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawned) as pool:
                threads = torch.get_num_threads()
                line = pool.submit(apart, work, base, device, threads).result()
        done.add(key)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "failed" in line:
            print(f"{work.name:72s} {line['failed']}", flush=True)
            continue
        pace = line["seconds"] / case.steps
        losses = f"{line['train_loss']:.4f} {line['validation_loss']:.4f}"
        print(f"{work.name:72s} {losses} {line['seconds']:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with deferred updates of several makes.")
    parser.add_argument("runs", type=Path, help="the file that lines are appended to")
    parser.add_argument("--size", default="micro", choices=list(SIZES), help="the model")
    parser.add_argument("--tasks", default="tune,new", help="in this order, of tune and new")
    parser.add_argument("--by", default="", help=f"only these, of {', '.join(get_args(By))}")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of the host, for each run")
    parser.add_argument("--seconds", type=float, default=3600, help="when to stop")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    tasks = options.tasks.split(",")
    if not set(tasks) <= set(LRS):
        parser.error(f"--tasks is `{options.tasks}`, expected some of {', '.join(LRS)}")
    makes = set(options.by.split(",")) if options.by else set(get_args(By))
    if not makes <= set(get_args(By)):
        parser.error(f"--by is `{options.by}`, expected some of {', '.join(get_args(By))}")
    works = [work for work in plan(options.size, tasks) if work.by in makes]
    if options.plan:
        for work in works:
            print(work.name)
        return
    torch.set_num_threads(options.threads)
    run(options.runs, works, until, torch.device(options.device))


if __name__ == "__main__":
    main()
