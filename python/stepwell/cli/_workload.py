"""What the cases of benchmarks train, and what is measured of their steps."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import time
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepwell.cli._llama import LlamaShape, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import LlamaConfig

__all__ = [
    "SIZES",
    "Run",
    "Workload",
    "forward_backward",
    "host_bytes",
    "host_peak_bytes",
    "sync",
    "train",
]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all runs have in common."""

    size: str
    """One of `SIZES`, or the path of a transformers `config.json` of a Llama."""
    sequence_length: int
    """Tokens per sample."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Forwards per step."""
    steps: int
    """Steps that are measured, after some that are not."""
    warm_up_steps: int
    """Steps that are not measured: memory is touched for the first time in them."""
    clip_norm: float
    """What the norm of the gradients is clipped to."""
    seed: int
    """Of the weights and of the samples."""
    text: str | None
    """A file to train on; None: the standard library of Python. A token is a byte."""
    drives: tuple[str, ...] = ()
    """A folder on each drive, for cases with a volume."""
    is_compiled: bool = False
    """Whether torch.compile compiles the layers of the model."""

    def config(self) -> LlamaConfig:
        """The model's."""
        from transformers import LlamaConfig

        given = SIZES.get(self.size)
        is_tied = given is not None
        if given is None:
            given = json.loads(Path(self.size).read_text())
            is_tied = bool(given.get("tie_word_embeddings", False))
        return LlamaConfig(
            **{
                **given,
                "max_position_embeddings": self.sequence_length,
                "tie_word_embeddings": is_tied,
                "use_cache": False,
                "attn_implementation": "sdpa",
            }
        )

    def model(self, device: torch.device) -> torch.nn.Module:
        """The model in bfloat16, with activation checkpointing."""
        from transformers import LlamaForCausalLM

        torch.manual_seed(self.seed)
        with device:
            model: torch.nn.Module = LlamaForCausalLM(self.config()).to(torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        model.train()
        if self.is_compiled:
            for layer in model.model.layers:  # type: ignore[union-attr]
                layer.compile()
        return model

    def batches(self, device: torch.device) -> Iterator[torch.Tensor]:
        """The samples of all micro-steps."""
        shape = LlamaShape(sequence_length=self.sequence_length, batch_size=self.micro_batch)
        text = read_text(Path(self.text) if self.text else None, bytes_min=2 * self.sequence_length)
        count = (self.steps + self.warm_up_steps) * self.accumulation
        for batch in islice(text.batches(shape, seed=self.seed), count):
            yield batch.to(device)


@dataclass
class Run:
    """How a case trains."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    """Loss of a batch."""
    backward: Callable[[torch.Tensor], object]
    """Of a loss."""
    step: Callable[[], float | None]
    """The optimizer's, which clears the gradients. It returns the norm of the gradients.

    It is called after every backward where `steps_itself`, else after the last.
    """
    steps_itself: bool = False
    """Whether `step` counts the micro-steps itself."""
    breakdown: Callable[[], dict[str, float]] = dict
    """Seconds and bytes of the last step, as far as they are known."""
    finish: Callable[[], object] = lambda: None
    """After the last step."""


def sync(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_bytes() -> int:
    """What this process holds in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_peak_bytes() -> int:
    """The most that this process has held in RAM."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(workload: Workload, device: torch.device, run: Run) -> dict[str, Any]:
    """What was measured of all steps, as plain values."""
    # Before the steps, as the workers of a loader make them: L has none of that either.
    batches = iter(list(workload.batches(device)))
    losses, norms, marks = [], [], []
    breakdowns: list[dict[str, float]] = []
    first_step_seconds = 0.0
    for index in range(workload.warm_up_steps + workload.steps):
        if index == workload.warm_up_steps - 1:
            # A full collection looks at all that the libraries have made: .3 s, now and then. Not
            # directly before the first measured step, whose wait it would take away.
            gc.collect()
            gc.freeze()
        marks.append(time.perf_counter())
        total = torch.zeros((), device=device)
        for _ in range(workload.accumulation):
            loss = run.forward(next(batches))
            if index and len(breakdowns) < index:
                # Of the step before, whose end this forward has seen.
                breakdowns.append(run.breakdown())
            run.backward(loss)
            if run.steps_itself:
                norm = run.step()
            total = total + loss.detach().float()
        if not run.steps_itself:
            norm = run.step()
        # Not read here: that would wait for the device.
        losses.append(total / workload.accumulation)
        norms.append(norm)
        if index == 0:
            run.finish()
            sync(device)
            first_step_seconds = time.perf_counter() - marks[0]
    # A forward waits for the step before. So each interval has one step's wait, the first that of
    # the warm-up's last, and what the last step leaves is not of these steps.
    sync(device)
    marks.append(time.perf_counter())
    run.finish()
    sync(device)
    drain_seconds = time.perf_counter() - marks[-1]
    seconds = [end - begin for begin, end in pairwise(marks)][workload.warm_up_steps :]
    known = breakdowns[workload.warm_up_steps :]
    moved: dict[str, list[float]] = {}
    if "bytes_read" in known[0]:
        # Neither those of the first step, which reads no state, nor those of what is applied at the
        # end.
        moved["drive_bytes_per_step"] = [
            (known[-1][name] - known[0][name]) / (len(known) - 1)
            for name in ("bytes_read", "bytes_written")
        ]
    return moved | {
        "seconds": statistics.median(seconds),
        "mean_seconds": statistics.mean(seconds),
        "slowest_seconds": max(seconds),
        "all_seconds": seconds,
        "first_step_seconds": first_step_seconds,
        "drain_seconds": drain_seconds,
        "breakdown": {
            key: statistics.median(each[key] for each in known)
            for key in known[-1]
            if all(key in each for each in known)
        },
        "losses": [float(loss) for loss in losses],
        "norms": norms,
    }


def forward_backward(workload: Workload, device: torch.device, run: Run) -> float:
    """Seconds of the forwards and backwards of a step, whose end is not timed."""
    batches = list(islice(workload.batches(device), workload.accumulation))
    seconds = []
    for _ in range(workload.warm_up_steps + max(workload.steps // 2, 3)):
        sync(device)
        begin = time.perf_counter()
        for number, batch in enumerate(batches):
            if number and run.steps_itself:
                run.step()
            run.backward(run.forward(batch))
        sync(device)
        seconds.append(time.perf_counter() - begin)
        run.step()
    return statistics.median(seconds[workload.warm_up_steps :])
