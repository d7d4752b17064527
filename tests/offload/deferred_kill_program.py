"""Trains with deferred updates and saves itself every few steps: a process that may be killed.

Goes on from what it has saved. Tells of each step in a line: its number, and whether updates are
pending behind it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
from insides import num_pending
from stepwell import Deferred, OffloadAdamW
from torch import nn

SAVE_STEPS = 6
WIDTH = 384


def model_of() -> nn.Module:
    """Matrices of one size: each is the most of some turn."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(6):
        model.extend([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)])
    return model.append(nn.Linear(WIDTH, 3)).to(torch.bfloat16)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x.to(torch.bfloat16)).float().square().mean()
    return loss


def save(
    path: Path, model: nn.Module, optimizer: OffloadAdamW, step: int, losses: list[float]
) -> None:
    """What is at `path` is whole at any moment."""
    found = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_suffix(".unfinished")
    torch.save({**found, "losses": losses}, unfinished)
    unfinished.rename(path)


def load(path: Path, model: nn.Module, optimizer: OffloadAdamW) -> tuple[int, list[float]]:
    """The step, and the losses until then."""
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["losses"]


def main(folder: Path, last: int, lines: TextIO, deferred: dict[str, Any], **options: Any) -> None:
    """Trains until step `last`. That is saved in a file of its own where nobody reads the lines."""
    torch.set_num_threads(1)
    model = model_of()
    optimizer = OffloadAdamW(
        model, lr=1e-2, clip_norm=1.0, deferred=Deferred(**deferred), **options
    )
    saved, step = folder / "saved", 0
    losses: list[float] = []
    if saved.exists():
        step, losses = load(saved, model, optimizer)
    while step < last:
        step += 1
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        # It is no look at a weight.
        losses.append(loss.item())
        optimizer.zero_grad()
        print(step, int(num_pending(optimizer) > 0), file=lines, flush=True)
        if step % SAVE_STEPS == 0:
            save(saved, model, optimizer, step, losses)
    if lines.name != os.devnull:
        # Until it is killed.
        signal.pause()
    save(folder / "end", model, optimizer, step, losses)


if __name__ == "__main__":
    with Path(sys.argv[3]).open("w") as told:
        print(os.getpid(), file=told, flush=True)
        main(Path(sys.argv[1]), int(sys.argv[2]), told, **json.loads(sys.argv[4]))
