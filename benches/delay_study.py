"""What deferred updates do to a model's quality: runs of a simulation, on text that is at hand.

    python benches/delay_study.py RUNS.jsonl [--parts large-tune,small-new] [--seconds 570]
        [--share 0/4] [--plan]

Trains byte-level Llamas on one GPU. On a CPU only `--parts tiny` makes sense. A line is appended
to the file for each run that ended; runs whose lines are there are left out, so a study that was
cut is gone on with by the same command. Fine-tuning then begins from a base that is trained again,
and is not the same to the bit: lines name their base by its loss, and exact runs are repeated.
`delay_report.py` makes the table and the plot of it.

Several GPUs take a process each, at the same time and with the same file: CUDA_VISIBLE_DEVICES=0
and `--share 0/4`, and so on.

Needs torch alone. What is simulated is `delay_simulation.py`, which is tested against the engine.

Which runs there are is in `delay_cases.py`, what they train in `delay_model.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from delay_cases import SELECTED, Case, key_in, left_of, name_of, plan, share_of
from delay_model import SIZES, Llama, Task, Text, batches, read_texts
from delay_simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Ended", "Trainer", "Trains", "follow", "model_of", "own_stream"]

VALIDATED_EVERY = 50
"""Exact runs are validated every so many steps, for what a delay costs in steps."""
LAST = 50
"""The training loss of a run is the mean of its last so many steps."""


# ---- one run -------------------------------------------------------------------------------------


class Trains(Protocol):
    """A model, and what steps it."""

    @property
    def model(self) -> Llama:
        """What is trained."""

    @property
    def share(self) -> float:
        """The share of the squared norm that selected channels had when they were selected."""

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights, for runs that start from them."""

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step with these tokens (int64, batch x (sequence + 1)). Returns its loss."""

    def drain(self) -> None:
        """Applies what is pending. No step comes after it."""


def model_of(
    case: Case, masters: Sequence[torch.Tensor] | None, device: torch.device, dtype: torch.dtype
) -> Llama:
    """The model of a run, from these weights, or from nothing."""
    with device:
        model = Llama(SIZES[case.size], seed=case.seed).to(dtype)
    if masters is not None:
        with torch.no_grad():
            torch._foreach_copy_(list[torch.Tensor](model.parameters()), list(masters))
    return model


class Trainer:
    """A model and its optimizer; forward, backward and the copy of gradients are one CUDA graph.

    Made and used within the stream that it is on.
    """

    def __init__(
        self,
        case: Case,
        masters: Sequence[torch.Tensor] | None,
        device: torch.device,
        *,
        fuse: bool = True,
        capture: bool = True,
    ) -> None:
        size = SIZES[case.size]
        self.model = model_of(case, masters, device, torch.bfloat16)
        params = list(self.model.parameters())
        self.optimizer = Simulation(params, case.lrs(), case.hyper, case.delay, fuse=fuse)
        self._params = params
        self._batch = torch.zeros(
            size.batch_size, size.sequence_length + 1, dtype=torch.int64, device=device
        )
        self._loss = torch.zeros((), device=device)
        self._replay: Callable[[], None] = self._forward_backward
        if capture and device.type == "cuda":
            for _ in range(3):
                self._forward_backward()
            graph = torch.cuda.CUDAGraph()
            # On the run's own stream: what cuBLAS works in is one for each stream, and graphs of
            # several runs are replayed at a time.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._forward_backward()
            self._replay = graph.replay

    def _forward_backward(self) -> None:
        loss = self.model(self._batch)
        grads = torch.autograd.grad(loss, self._params)
        with torch.no_grad():
            torch._foreach_copy_(self.optimizer.grads, list(grads))
            self._loss.copy_(loss)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step. Returns the loss, in memory that the next step writes."""
        self._batch.copy_(batch)
        self._replay()
        self.optimizer.step()
        return self._loss

    @property
    def share(self) -> float:
        """What selected channels captured."""
        return self.optimizer.share

    @property
    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights."""
        return self.optimizer.masters

    def drain(self) -> None:
        """Applies what is pending."""
        self.optimizer.drain()


@torch.no_grad()
def validate(model: Llama, batches: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
    """The mean loss of some batches, with the weights as they are."""
    return torch.stack([model(batches(index)) for index in range(count)]).mean()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a run has come to."""

    line: dict[str, Any]
    """For the file."""
    masters: list[torch.Tensor]
    """The fp32 weights, for runs that start from them."""


def train(
    case: Case,
    text: Text,
    masters: Sequence[torch.Tensor] | None,
    device: torch.device,
    *,
    fuse: bool,
) -> Generator[None, None, Ended]:
    """A run of the simulation; it gives way after each step."""
    return (yield from follow(Trainer(case, masters, device, fuse=fuse), case, text))


def follow(trainer: Trains, case: Case, text: Text) -> Generator[None, None, Ended]:
    """A run of any trainer; it gives way after each step."""
    size, device, begin = SIZES[case.size], text.training.device, time.monotonic()
    sample = batches(text.training, size, case.steps, 1000 + case.seed)
    count = 16
    held_out = batches(text.validation, size, count, 5)
    losses = torch.zeros(case.steps, device=device)
    validated: list[tuple[int, torch.Tensor]] = []
    for step in range(case.steps):
        if case.delay is None and step % VALIDATED_EVERY == 0:
            validated.append((step, validate(trainer.model, held_out, count)))
        losses[step] = trainer.step(sample(step))
        yield
    trainer.drain()
    validated.append((case.steps, validate(trainer.model, held_out, count)))
    # Other streams read them when this one has been waited for, which the next line does.
    masters = [one.detach().clone() for one in trainer.masters]
    curve = losses.tolist()
    means = [statistics.fmean(curve[at : at + LAST]) for at in range(0, case.steps, LAST)]
    line = {
        "case": dataclasses.asdict(case),
        "parameters": sum(param.numel() for param in trainer.model.parameters()),
        "tokens_per_step": size.batch_size * size.sequence_length,
        "train_loss": statistics.fmean(curve[-LAST:]),
        "validation_loss": float(validated[-1][1]),
        "train_losses": [round(mean, 5) for mean in means],
        "validation_losses": [(at, round(float(loss), 5)) for at, loss in validated],
        "share": trainer.share,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begin, 2),
    }
    return Ended(line=line, masters=masters)


# ---- all runs ------------------------------------------------------------------------------------


def done_in(path: Path) -> set[str]:
    """The keys of the runs that have their lines in a file, which may not be there."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_in(json.loads(line)["case"]) for line in lines}


class Runner:
    """Runs cases side by side, and appends their lines.

    Args:
        path: the file of lines.
        done: keys of the runs that it has.
        until: when to stop, as `time.monotonic()` has it.
        device: what runs are on.
        fuse: whether an update is one kernel.
    """

    def __init__(
        self, path: Path, done: set[str], until: float, device: torch.device, *, fuse: bool
    ) -> None:
        self.path, self.done, self.until, self.device, self.fuse = path, done, until, device, fuse
        self.texts = read_texts(device)
        self.bases: dict[str, list[torch.Tensor]] = {}
        self.base_losses: dict[str, float] = {}
        # Streams come from a pool that goes round: two that are made late may be one.
        slots = max(size.slots for size in SIZES.values())
        self.streams = [own_stream(device) for _ in range(slots)]
        self.seconds_per_step: dict[str, float] = {}

    def run(self, cases: Sequence[Case]) -> None:
        """Cases of one size, in this order but for those whose base is not trained yet."""
        size, waiting = cases[0].size, list(cases)
        slots: list[tuple[Case, Generator[None, None, Ended]] | None]
        slots = [None] * SIZES[size].slots
        while True:
            is_idle = True
            for index, stream in enumerate(self.streams[: len(slots)]):
                slot = slots[index]
                if slot is None:
                    found = self._next(waiting, size)
                    if found is None:
                        continue
                    waiting.remove(found)
                    text, masters = self.texts[found.task], self.bases.get(size)
                    masters = masters if found.task == "tune" else None
                    steps = train(found, text, masters, self.device, fuse=self.fuse)
                    slot = slots[index] = found, steps
                is_idle = False
                case, steps = slot
                try:
                    with stream:
                        next(steps)
                except StopIteration as stop:
                    slots[index] = None
                    self._end(case, stop.value)
                del steps
            if is_idle:
                if waiting:
                    needed = min(self._pace(size) * case.steps for case in waiting)
                    left = max(self.until - time.monotonic(), 0.0)
                    print(
                        f"{len(waiting)} runs are left: the shortest takes {needed:.0f} s, or "
                        f"waits for a base; {left:.0f} s are left",
                        flush=True,
                    )
                return
            if time.monotonic() > self.until:
                running = ", ".join(name_of(slot[0]) for slot in slots if slot is not None)
                print(f"out of time; not ended: {running}", flush=True)
                return

    def _next(self, waiting: Sequence[Case], size: str) -> Case | None:
        """The next that can start, and that would end in time."""
        for case in waiting:
            if case.task == "tune" and size not in self.bases:
                continue
            if time.monotonic() + self._pace(size) * case.steps < self.until:
                return case
        return None

    def _pace(self, size: str) -> float:
        """Seconds per step, in a slot: as the last run had it."""
        return self.seconds_per_step.get(size, SIZES[size].seconds_per_step)

    def _end(self, case: Case, ended: Ended) -> None:
        if case.task == "base":
            self.bases[case.size] = ended.masters
            self.base_losses[case.size] = round(ended.line["validation_loss"], 6)
        self.seconds_per_step[case.size] = ended.line["seconds"] / case.steps
        if case.task == "tune":
            ended.line["base"] = self.base_losses[case.size]
        if case.key not in self.done or case.task == "tune":
            self.done.add(case.key)
            with self.path.open("a") as file:
                file.write(json.dumps(ended.line) + "\n")
        losses = f"{ended.line['train_loss']:.4f} {ended.line['validation_loss']:.4f}"
        print(f"{name_of(case):64s} {losses} {ended.line['seconds']:.1f} s", flush=True)


def new_stream() -> torch.cuda.Stream:
    """A stream of the GPU."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which work goes to a stream of its own, where the device has streams."""
    return torch.cuda.stream(new_stream()) if device.type == "cuda" else nullcontext()


def check(device: torch.device, texts: dict[Task, Text], *, fuse: bool) -> None:
    """That graphs, kernels and runs side by side change nothing but the last bits.

    Raises:
        ValueError: they do.
    """
    steps = 30
    case = Case(size="small", task="base", lr=1e-3, delay=dataclasses.replace(SELECTED, interval=2))
    losses = []
    begin = time.monotonic()
    streams = [new_stream() for _ in range(3)]
    sample = batches(texts["base"].training, SIZES[case.size], steps, 1)
    trainers = []
    for index, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            is_plain = index == 0
            fuses = fuse and not is_plain
            trainers.append(Trainer(case, None, device, fuse=fuses, capture=not is_plain))
            losses.append(torch.zeros(steps, device=device))
    torch.cuda.synchronize()
    for step in range(steps):
        for stream, trainer, loss in zip(streams, trainers, losses, strict=True):
            with torch.cuda.stream(stream):
                loss[step] = trainer.step(sample(step))
    torch.cuda.synchronize()
    slow, *fast = (loss.cpu() for loss in losses)
    apart = max(float((one - slow).abs().max()) for one in fast)
    print(
        f"checked {steps} steps, plain and twice as graphs: {float(slow[0]):.4f} to "
        f"{float(slow[-1]):.4f}, {apart:.1e} apart at most, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    if not apart < 0.1 or not slow[-1] < slow[0] - 0.5:
        raise ValueError(f"losses are `{apart}` apart, expected less than 0.1, and that they fall")


def print_plan(cases: Sequence[Case]) -> None:
    """How many runs are left, and how long they take."""
    print(f"{len(cases)} runs, about {sum(case.seconds for case in cases):.0f} s")
    for case in cases:
        print(f"    {name_of(case)}")


def share_in(text: str) -> tuple[int, int]:
    """The index and the count of `0/4`.

    Raises:
        ArgumentTypeError: it is none of the kind.
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(
            f"`{text}` is no share, expected the number of a process and how many there are: 0/4"
        )
    return int(index), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the study of deferred updates.")
    parser.add_argument("runs", type=Path, help="the file that lines are appended to")
    known = list(plan())
    parser.add_argument(
        "--parts",
        default="large-tune,small-tune,small-new,large-new",
        help=f"in this order, of {', '.join(known)}",
    )
    parser.add_argument("--seconds", type=float, default=570, help="when to stop")
    parser.add_argument(
        "--no-fuse", dest="fuse", action="store_false", help="do without torch.compile"
    )
    parser.add_argument(
        "--share",
        type=share_in,
        default=(0, 1),
        help="of the runs that are left, as 0/4: a quarter",
    )
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    parts = options.parts.split(",")
    if not set(parts) <= set(known):
        parser.error(f"--parts is `{options.parts}`, expected some of {', '.join(known)}")
    done = done_in(options.runs)
    left = [case for part in parts for case in left_of(plan()[part], done)]
    cases = share_of(left, *options.share)
    if options.plan:
        print_plan(cases)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = Runner(options.runs, done, until, device, fuse=options.fuse)
    for task in ("new", "tune"):
        text = runner.texts[task]
        print(f"{task}: {text.training.numel():,} bytes of text, {text.validation.numel():,} held")
    if device.type == "cuda":
        check(device, runner.texts, fuse=options.fuse)
    for size in dict.fromkeys(case.size for case in cases):
        runner.run([case for case in cases if case.size == size])


if __name__ == "__main__":
    main()
