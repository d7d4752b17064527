"""What deferred updates do to a model's quality: runs of a simulation, on text that is at hand.

    python benches/delay_study.py RUNS.jsonl [--parts large-tune,small-new] [--seconds 570] [--plan]

Trains byte-level Llamas on one GPU. On a CPU only `--parts tiny` makes sense. A line is appended
to the file for each run that ended; runs whose lines are there are left out, so a study that was
cut is gone on with by the same command. Fine-tuning then begins from a base that is trained again,
and is not the same to the bit: lines name their base by its loss, and exact runs are repeated.
`delay_report.py` makes the table and the plot of it.

Needs torch alone. What is simulated is `delay_simulation.py`, which is tested against the engine.

| task | text | steps | lr |
|---|---|---|---|
| base | Python sources | more | 100 steps of warm-up, a cosine down to a tenth |
| new | Python sources | 1,000 | as base |
| tune | C++ headers | 1,000 | 30 steps of warm-up, then constant |

`tune` starts from the weights of `base`, rounded to bf16, with moments from nothing. Equal
seeds mean equal batches, so runs are compared in pairs. The text that losses are validated on is of
files that no run trains on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from delay_simulation import Delay, Hyper, Simulation
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Case", "Ended", "Trains", "describe", "follow", "lr_name", "model_of", "plan"]

Task: TypeAlias = Literal["base", "new", "tune"]

TEXT_BYTES_MAX = 48 << 20
VALIDATION_BYTES_MAX = 2 << 20
VALIDATED_EVERY = 50
"""Exact runs are validated every so many steps, for what a delay costs in steps."""
LAST = 50
"""The training loss of a run is the mean of its last so many steps."""


# ---- what is trained -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, what a step takes, and how a GPU is shared."""

    hidden: int
    """Width of the residual stream; heads are 64 wide, or half of it."""
    layers: int
    """Blocks. What is between the two matrices of a block's MLP is four times as wide."""
    sequence_length: int = 512
    """Bytes per sample."""
    batch_size: int = 8
    """Samples per step."""
    base_lr: float
    """Peak learning rate of the run that fine-tuning starts from."""
    base_steps: int
    """Steps of it."""
    steps: int = 1000
    """Steps of every other run."""
    slots: int
    """How many runs share the GPU."""
    seconds_per_step: float
    """On an H200, in a slot, as planned with; of "micro" on one core."""

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(2, self.hidden // 64)


SIZES = {
    "tiny": Size(
        hidden=32,
        layers=2,
        sequence_length=32,
        batch_size=2,
        base_lr=3e-3,
        base_steps=60,
        steps=40,
        slots=2,
        seconds_per_step=0.01,
    ),
    "micro": Size(
        hidden=64,
        layers=2,
        sequence_length=64,
        base_lr=3e-3,
        base_steps=1500,
        slots=1,
        seconds_per_step=0.02,
    ),
    "small": Size(
        hidden=512, layers=8, base_lr=1e-3, base_steps=4000, slots=4, seconds_per_step=0.012
    ),
    "large": Size(
        hidden=1024, layers=20, base_lr=5e-4, base_steps=1500, slots=2, seconds_per_step=0.052
    ),
}


class Block(nn.Module):
    """Attention with rotated positions, and a gated MLP, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Linear(hidden, 4 * hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Of (batch x sequence x hidden)."""
        normed = normalized(x, self.attention_norm)
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (project(normed).view(shape).transpose(1, 2) for project in self.qkv)
        q, k = (torch.addcmul(each * cos, rotated(each), sin) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(x.shape))
        normed = normalized(x, self.mlp_norm)
        mixed: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return mixed


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the root of the mean square of the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The halves of the last dimension turned by a quarter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Llama(nn.Module):
    """A byte-level Llama. Its parameters are in forward order."""

    cos: torch.Tensor
    sin: torch.Tensor
    alphabet: torch.Tensor

    def __init__(self, size: Size, *, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(256, size.hidden))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.Parameter(torch.ones(size.hidden))
        self.head = nn.Linear(size.hidden, 256, bias=False)
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                is_into_stream = name.endswith(("attention_out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * size.layers) if is_into_stream else 0.02
                nn.init.normal_(param, std=std, generator=generator)
        half = size.hidden // size.heads // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(size.sequence_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("alphabet", torch.arange(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of each byte behind the first (int64, batch x (sequence + 1))."""
        # Rows are taken by a product: its backward needs no sort, and has the same bits each time.
        x = torch.eq(tokens[:, :-1, None], self.alphabet).to(self.embedding.dtype) @ self.embedding
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(normalized(x, self.norm))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# ---- text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Bytes on the device (uint8)."""

    training: torch.Tensor
    """What runs train on."""
    validation: torch.Tensor
    """Of other files."""

    @classmethod
    def of(cls, paths: Iterable[Path], device: torch.device) -> Text:
        """Of these files; every 16th is for validation."""
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        room = [TEXT_BYTES_MAX, VALIDATION_BYTES_MAX]
        for index, path in enumerate(sorted(paths)):
            which = int(index % 16 == 7)
            if room[which] > 0 and path.is_file():
                parts[which].append(path.read_bytes()[: room[which]])
                room[which] -= len(parts[which][-1])
        training, validation = (
            torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).to(device)
            for part in parts
        )
        return cls(training, validation)


def read_texts(device: torch.device) -> dict[Task, Text]:
    """Sources of Python's library and of torch; the headers of torch."""
    library, torch_folder = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    packages = ("site-packages", "dist-packages")
    sources = [path for path in library.rglob("*.py") if not set(packages) & set(path.parts)]
    python = Text.of([*sources, *torch_folder.rglob("*.py")], device)
    headers = Text.of((torch_folder / "include").rglob("*.h"), device)
    return {"base": python, "new": python, "tune": headers}


def batches(text: torch.Tensor, size: Size, count: int, seed: int) -> Callable[[int], torch.Tensor]:
    """Samples by the number of their step, from places that follow from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    last = text.numel() - size.sequence_length - 1
    starts = torch.randint(0, last, (count, size.batch_size, 1), generator=generator)
    starts = starts.to(text.device)
    offsets = torch.arange(size.sequence_length + 1, device=text.device)
    return lambda step: text[starts[step] + offsets].long()


# ---- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run."""

    size: str
    """Key of `SIZES`."""
    task: Task
    """What is trained on what."""
    lr: float
    """The highest learning rate."""
    seed: int = 0
    """Of the batches, and of the weights from nothing."""
    delay: Delay | None = None
    """What is deferred; None: nothing."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return SIZES[self.size].base_steps if self.task == "base" else SIZES[self.size].steps

    @property
    def key(self) -> str:
        """What tells its line from those of other runs."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def lrs(self) -> list[float]:
        """The learning rate of each step."""
        warmup = 30 if self.task == "tune" else 100
        rates = []
        for step in range(self.steps):
            part = (
                1.0 if self.task == "tune" else 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
            )
            rates.append(self.lr * part * min(1.0, (step + 1) / warmup))
        return rates

    @property
    def hyper(self) -> Hyper:
        """Those of pre-training, or torch's defaults."""
        if self.task == "tune":
            return Hyper()
        return Hyper(betas=(0.9, 0.95), weight_decay=0.1)


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


# ---- the plan ------------------------------------------------------------------------------------

PREDICTED = Delay(interval=4)
SELECTED = Delay(interval=4, fraction=0.1)
ZENFLOW = Delay(interval=4, predict=False, average=True, fraction=0.1, channels="columns")


def at(delay: Delay, interval: int) -> Delay:
    """The same with another interval."""
    return dataclasses.replace(delay, interval=interval)


def plain(interval: int) -> Delay:
    """Without prediction."""
    return Delay(interval=interval, predict=False)


def cases(
    size: str, task: Task, lrs: Iterable[float], runs: Iterable[tuple[Delay | None, int]]
) -> list[Case]:
    """Of each learning rate, these delays with these seeds."""
    runs = list(runs)
    return [
        Case(size=size, task=task, lr=lr, seed=seed, delay=delay)
        for lr in lrs
        for delay, seed in runs
    ]


def small_grid(task: Task, lrs: Sequence[float]) -> list[Case]:
    """What is compared at the small size: what matters most first."""
    exact = [(None, seed) for seed in range(3)]
    main: list[tuple[Delay | None, int]] = [(PREDICTED, 0), (SELECTED, 0), (ZENFLOW, 0)]
    main += [(at(PREDICTED, 2), 0), (plain(4), 0)]
    replace = dataclasses.replace
    intervals = [
        *(at(PREDICTED, interval) for interval in (1, 8)),
        *(plain(interval) for interval in (2, 1, 8)),
        *(at(ZENFLOW, interval) for interval in (2, 8)),
        *(at(SELECTED, interval) for interval in (2, 8)),
    ]
    selections = [
        replace(SELECTED, channels="columns"),
        replace(SELECTED, fraction=0.05),
        replace(SELECTED, predict=False),
        replace(ZENFLOW, channels="rows"),
        replace(ZENFLOW, fraction=0.0),
        replace(ZENFLOW, fraction=0.05),
    ]
    warmups = [replace(PREDICTED, warmup_steps=steps) for steps in (100, 250)]
    warmups += [replace(SELECTED, warmup_steps=250), replace(ZENFLOW, warmup_steps=250)]
    seeds = [(delay, seed) for seed in (1, 2) for delay in (PREDICTED, SELECTED, ZENFLOW)]
    rest = [*intervals, *selections, *(warmups if task == "new" else [])]
    return [
        *cases(size="small", task=task, lrs=lrs, runs=[*exact, *main]),
        *cases(size="small", task=task, lrs=lrs, runs=seeds),
        *cases(size="small", task=task, lrs=lrs, runs=[(delay, 0) for delay in rest]),
    ]


def plan() -> dict[str, list[Case]]:
    """The parts of the study, each in the order in which it is run."""
    small = Case(size="small", task="base", lr=SIZES["small"].base_lr, seed=100)
    large = Case(size="large", task="base", lr=SIZES["large"].base_lr, seed=100)
    tiny = Case(size="tiny", task="base", lr=SIZES["tiny"].base_lr, seed=100)
    exact: list[tuple[Delay | None, int]] = [(None, seed) for seed in range(3)]

    def tune_large(lr: float, *runs: tuple[Delay | None, int]) -> list[Case]:
        return cases("large", "tune", [lr], runs)

    return {
        "large-tune": [
            large,
            *tune_large(1e-5, (None, 0), (PREDICTED, 0), (None, 1)),
            *tune_large(1e-4, (None, 0), (PREDICTED, 0), (None, 1), (at(PREDICTED, 2), 0)),
            *tune_large(1e-4, (ZENFLOW, 0), (SELECTED, 0), (None, 2)),
            *tune_large(1e-5, (ZENFLOW, 0), (None, 2), (at(PREDICTED, 2), 0)),
            *tune_large(1e-4, (PREDICTED, 1)),
            *tune_large(1e-5, (PREDICTED, 1)),
            *tune_large(3e-5, (None, 0), (PREDICTED, 0)),
        ],
        "small-tune": [small, *small_grid("tune", [1e-4, 1e-5, 3e-5])],
        "small-new": small_grid("new", [3e-4, 1e-3]),
        "large-new": cases(
            "large",
            "new",
            [3e-4],
            [(None, 0), (PREDICTED, 0), (ZENFLOW, 0), (SELECTED, 0), (None, 1)],
        ),
        "tiny": [
            tiny,
            *cases("tiny", "new", [1e-3], [*exact, (PREDICTED, 0), (SELECTED, 0), (ZENFLOW, 0)]),
            *cases("tiny", "tune", [1e-3], [*exact, (PREDICTED, 0), (SELECTED, 0), (ZENFLOW, 0)]),
        ],
    }


# ---- all runs ------------------------------------------------------------------------------------


class Runner:
    """Runs cases side by side, and appends their lines.

    Args:
        path: the file of lines.
        until: when to stop, as `time.monotonic()` has it.
        device: what runs are on.
        fuse: whether an update is one kernel.
    """

    def __init__(self, path: Path, until: float, device: torch.device, *, fuse: bool) -> None:
        self.path, self.until, self.device, self.fuse = path, until, device, fuse
        self.texts = read_texts(device)
        self.done = {
            json.dumps(json.loads(line)["case"], sort_keys=True)
            for line in (path.read_text().splitlines() if path.exists() else ())
        }
        self.bases: dict[str, list[torch.Tensor]] = {}
        self.base_losses: dict[str, float] = {}
        # Streams come from a pool that goes round: two that are made late may be one.
        slots = max(size.slots for size in SIZES.values())
        self.streams: list[AbstractContextManager[Any]] = [
            torch.cuda.stream(new_stream()) if device.type == "cuda" else nullcontext()
            for _ in range(slots)
        ]
        self.seconds_per_step: dict[str, float] = {}

    def run(self, cases: Sequence[Case]) -> None:
        """Cases of one size, in this order but for those whose base is not trained yet."""
        size = cases[0].size
        waiting = [case for case in cases if case.key not in self.done]
        # Each process trains a base of its own, which exact runs have to share with what is held
        # against them.
        paired = {(case.lr, case.seed) for case in waiting if case.task == "tune"}
        waiting = [
            case
            for case in cases
            if case in waiting
            or (case.task == "tune" and not case.delay and (case.lr, case.seed) in paired)
        ]
        is_needed = any(case.task == "tune" for case in waiting) and size not in self.bases
        bases = [case for case in cases if case.task == "base" and case not in waiting]
        if is_needed:
            # Its weights went with the process that has written its line.
            waiting = [*bases, *waiting]
        slots: list[tuple[Case, Generator[None, None, Ended]] | None]
        slots = [None] * SIZES[size].slots
        while True:
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
                case, steps = slot
                try:
                    with stream:
                        next(steps)
                except StopIteration as stop:
                    slots[index] = None
                    self._end(case, stop.value)
                del steps
            if all(slot is None for slot in slots):
                if waiting:
                    left = max(self.until - time.monotonic(), 0.0)
                    print(
                        f"{len(waiting)} runs are left: none would end in {left:.0f} s", flush=True
                    )
                return
            if time.monotonic() > self.until:
                running = ", ".join(name_of(slot[0]) for slot in slots if slot is not None)
                print(f"out of time; not ended: {running}", flush=True)
                return

    def _next(self, waiting: Sequence[Case], size: str) -> Case | None:
        """The next that can start, and that would end in time."""
        pace = self.seconds_per_step.get(size, SIZES[size].seconds_per_step)
        for case in waiting:
            if case.task == "tune" and size not in self.bases:
                continue
            if time.monotonic() + pace * case.steps < self.until:
                return case
        return None

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


def name_of(case: Case) -> str:
    """A line's name, for people."""
    lr = lr_name(case.lr)
    return f"{case.size} {case.task} lr {lr} seed {case.seed} {describe(case.delay)}"


def lr_name(lr: float) -> str:
    """A learning rate, as people write it."""
    return f"{lr:.0e}".replace("e-0", "e-")


def describe(delay: Delay | None) -> str:
    """A delay in words."""
    if delay is None:
        return "exact"
    words = ["mean" if delay.average else "deferred", f"S={delay.interval}"]
    words += ["predicted"] if delay.predict else []
    words += [f"{delay.channels} {delay.fraction:g}"] if delay.fraction else []
    words += [f"warm-up {delay.warmup_steps}"] if delay.warmup_steps else []
    return " ".join(words)


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


def print_plan(parts: Sequence[str]) -> None:
    """How many runs there are, and how long they take."""
    for part in parts:
        runs = plan()[part]
        size = SIZES[runs[0].size]
        seconds = sum(case.steps for case in runs) * size.seconds_per_step / size.slots
        print(f"{part}: {len(runs)} runs, about {seconds:.0f} s")
        for case in runs:
            print(f"    {name_of(case)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the study of deferred updates.")
    parser.add_argument("runs", type=Path, help="the file that lines are appended to")
    known = list(plan())
    parser.add_argument(
        "--parts", default="large-tune,small-new", help=f"in this order, of {', '.join(known)}"
    )
    parser.add_argument("--seconds", type=float, default=570, help="when to stop")
    parser.add_argument(
        "--no-fuse", dest="fuse", action="store_false", help="do without torch.compile"
    )
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    parts = options.parts.split(",")
    if not set(parts) <= set(known):
        parser.error(f"--parts is `{options.parts}`, expected some of {', '.join(known)}")
    if options.plan:
        print_plan(parts)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = Runner(options.runs, until, device, fuse=options.fuse)
    for task in ("new", "tune"):
        text = runner.texts[task]
        print(f"{task}: {text.training.numel():,} bytes of text, {text.validation.numel():,} held")
    if device.type == "cuda":
        check(device, runner.texts, fuse=options.fuse)
    for part in parts:
        runner.run(plan()[part])


if __name__ == "__main__":
    main()
