"""Weights in host memory: forward, backward and step beside those of weights on the device.

    python benches/streamed.py [--size 8b] [--tokens 4096 --tokens 8192] [--moments q8] [--steps 6]
        [--activations host]

One process: the model is on the device first, then `OffloadAdamW(model, weights="host")` takes its
weights. Layers compute their activations again, and the loss is computed in parts of 2,048 tokens.
Prints a JSON object per number of tokens; seconds are medians, and the device is waited for behind
each phase but in whole steps:

- `forward`, `backward`: with weights on the device; `streamed_forward`, `streamed_backward`: with
  weights in host memory, gradients summed there, and no step.
- `bus`: all 16-bit weights in one direction, from pinned memory. `rate`: R, in GB/s.
- `step`: whole exact steps, clipped to 1. `host_step`: of it, from the first chunk to the last.
- `of_forward_backward`: the streamed ones against those on the device; `of_bus_bound`: against
  max(forward, bus) + max(backward, bus). `of_bound`: a step against that and bytes / R.
- `tokens_per_second`, and `tflops` at 6 operations per parameter and token, of whole steps.
- `device_gib`, `nvml_gib`: peak of the allocator in steps; what the process has of the device.
  `host_bytes_per_param`: growth of the process since before the optimizer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from typing import TYPE_CHECKING

import torch
from stepwell import OffloadAdamW
from stepwell._sizes import moved_bytes
from stepwell.cli._memory_rate import MemoryRate
from stepwell.cli._workload import Workload, host_bytes, sync
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKENS_OF_PART = 2048
WARM_UP = 2
"""Passes that are not measured."""


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """As the model's own, without all logits at once."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)  # type: ignore[operator]
    targets = ids[:, 1:].flatten()

    def part(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(hidden).float()  # type: ignore[operator]
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    total = torch.zeros((), device=ids.device)
    parts = (torch.split(each, TOKENS_OF_PART) for each in (hidden, targets))
    for pair in zip(*parts, strict=True):
        total = total + checkpoint(part, *pair, use_reentrant=False)
    return total / targets.numel()


def passes(
    model: torch.nn.Module,
    batches: Iterator[torch.Tensor],
    steps: int,
    clear: Callable[[], object],
) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    forward, backward = [], []
    for _ in range(WARM_UP + steps):
        batch = next(batches)
        sync(batch.device)
        begin = time.perf_counter()
        loss = loss_of(model, batch)
        sync(batch.device)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        sync(batch.device)
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
        clear()
    return statistics.median(forward[WARM_UP:]), statistics.median(backward[WARM_UP:])


def train(
    model: torch.nn.Module, batches: Iterator[torch.Tensor], steps: int, optimizer: OffloadAdamW
) -> tuple[float, float, float]:
    """Seconds of a whole step and of its part on the host, and the last loss."""
    marks, host = [], []
    for _ in range(WARM_UP + steps):
        loss = loss_of(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        host.append(optimizer.timing.get("step", 0.0))
    value = float(loss)
    optimizer.synchronize()
    seconds = [end - begin for begin, end in itertools.pairwise(marks)]
    return statistics.median(seconds[WARM_UP:]), statistics.median(host[WARM_UP:]), value


def bus_seconds(device: torch.device, nbytes: int) -> float:
    """How long so many bytes take to the device."""
    if device.type != "cuda":
        return 0.0
    piece = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(piece, device=device)
    found = []
    for _ in range(8):
        sync(device)
        begin = time.perf_counter()
        there.copy_(piece, non_blocking=True)
        sync(device)
        found.append(time.perf_counter() - begin)
    return min(found) * nbytes / piece.nbytes


def used_gib(device: torch.device) -> float | None:
    """What this process, which is alone there, has of the device."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def main() -> None:
    """Measures, and prints an object per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--moments", default="fp32", choices=("fp32", "q8"))
    parser.add_argument("--activations", default="device", choices=("device", "host"))
    parser.add_argument("--device-bytes-max", default=0, help="as OffloadAdamW has it: 20GB")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def workload_of(tokens: int) -> Workload:
        return Workload(
            size=args.size,
            sequence_length=min(tokens, 4096),
            micro_batch=max(tokens // 4096, 1),
            accumulation=1,
            steps=10 * (WARM_UP + args.steps),
            warm_up_steps=0,
            clip_norm=1.0,
            seed=0,
            text=None,
        )

    all_tokens = args.tokens or [8192]
    workloads = {tokens: workload_of(tokens) for tokens in all_tokens}
    model = workloads[max(all_tokens)].model(device)
    numel = sum(param.numel() for param in model.parameters())
    found: dict[int, dict[str, object]] = {}
    for tokens, workload in workloads.items():
        forward, backward = passes(model, workload.batches(device), args.steps, model.zero_grad)
        found[tokens] = {"tokens": tokens, "forward": forward, "backward": backward}
    bus = bus_seconds(device, 2 * numel)
    before = host_bytes()
    optimizer = OffloadAdamW(
        model,
        lr=1e-4,
        weights="host",
        activations=args.activations,
        device_bytes_max=args.device_bytes_max or 0,
        clip_norm=1.0,
        moments=args.moments,
        accumulation_steps=1,
    )
    gc.collect()
    memory = MemoryRate()
    host_step_bytes = moved_bytes("bfloat16", args.moments) * numel
    for tokens, workload in workloads.items():
        row = found[tokens]
        batches = workload.batches(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        forward, backward = passes(model, batches, args.steps, optimizer.zero_grad)
        alone = row["forward"] + row["backward"]  # type: ignore[operator]
        on_bus = max(row["forward"], bus) + max(row["backward"], bus)  # type: ignore[call-overload]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def steps(batches: Iterator[torch.Tensor] = batches) -> dict[str, float]:
            step, host_step, loss = train(model, batches, args.steps, optimizer)
            return {"step": step, "host_step": host_step, "loss": loss}

        row |= {"streamed_forward": forward, "streamed_backward": backward, "bus": bus}
        row |= memory.beside(steps)
        rate = row.pop("memory_gb_per_second")
        limit = on_bus + host_step_bytes / (rate * 1e9)  # type: ignore[operator]
        row |= {
            "of_forward_backward": (forward + backward) / alone,
            "of_bus_bound": (forward + backward) / on_bus,
            "of_bound": row["step"] / limit,
            "tokens_per_second": tokens / row["step"],
            "tflops": 6e-12 * numel * tokens / row["step"],
            "rate": rate,
            "host_bytes_per_param": (host_bytes() - before) / numel,
            "params": numel,
            "moments": args.moments,
            "activations": args.activations,
            "device_bytes_max": args.device_bytes_max,
            "nvml_gib": used_gib(device),
        }
        if device.type == "cuda":
            row["device_gib"] = torch.cuda.max_memory_allocated() / 2**30
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
