"""What selected channels capture.

    python benches/captured_share.py [--steps 120] [--hidden-size 256] [--layers 4] [--text FILE]

A small language model trains from nothing on bytes of text, with two fractions, in bfloat16 on a
GPU and in float32 on a CPU. The table has the share of the squared norms that the selected channels
had when they were chosen, as `optimizer.deferral` says it: in step 2, and as means of the quarters
that follow; then the last loss.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from stepwell import Deferred, OffloadAdamW
from stepwell.cli._llama import LlamaShape, read_text


def shares_of(deferred: Deferred, args: argparse.Namespace) -> tuple[list[float], float]:
    """The share of each step, and the mean loss of the last ten."""
    shape = LlamaShape(hidden_size=args.hidden_size, num_hidden_layers=args.layers)
    text = read_text(args.text, bytes_min=2 * shape.sequence_length)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = shape.build(seed=0).to(device, dtype)
    optimizer = OffloadAdamW(model, lr=3e-4, clip_norm=1.0, deferred=deferred)
    shares, losses = [], []
    for batch in islice(text.batches(shape, seed=0), args.steps):
        loss = model(input_ids=batch.to(device), labels=batch.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.deferral is not None
        shares.append(optimizer.deferral.captured_share)
        losses.append(float(loss.detach()))
    return shares, mean(losses[-10:])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    print("fraction  step 2  quarters of the rest            loss")
    for fraction in (0.05, 0.1):
        deferred = Deferred(interval=4, fraction=fraction, reselect=8)
        (_, second, *rest), loss = shares_of(deferred, args)
        size = len(rest) // 4
        quarters = [mean(rest[at * size : (at + 1) * size]) for at in range(4)]
        words = "  ".join(f"{share:.3f}" for share in quarters)
        print(f"{fraction:8} {second:7.3f}  {words} {loss:15.4f}")


if __name__ == "__main__":
    main()
