"""Steps of an optimizer whose state is on drives, without a model around them.

    python benches/volume_steps.py FOLDER... [--state-mib 800] [--steps 16]

Parameters in bfloat16, with gradients that stay, are stepped one step after the other. So the
drives never pause. All state that is stepped is on them: what memory is left beside the buffers has
the state of a parameter without a gradient. What fio moves of the same kind, in the same run, is
`volume.py FOLDER...` (`swap`).
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from drives import optimizer_on
from stepwell import Volume

if TYPE_CHECKING:
    from stepwell.optim import Moments
    from stepwell.store.volume import Durability

# So that both slots of each record have been written, also with the longest interval.
WARMUP_STEPS = 16
VOLUMES: list[tuple[Durability, int | None]] = [("none", None), ("commit", 1), ("commit", None)]
"""Durability, and steps from one commit to the next; None: as `Volume` has it."""


def measure(
    moments: Moments, durability: Durability, interval: int | None, args: argparse.Namespace
) -> None:
    """Prints a line of the table."""
    volume = Volume(args.folders, durability=durability, commit_interval=interval)
    optimizer = optimizer_on(volume, moments, args.state_mib << 20)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numel = sum(param.numel() for param in params if param.grad is not None)

    def moved(steps: int) -> tuple[float, float]:
        for _ in range(steps):
            optimizer.step()
        optimizer.synchronize()
        return optimizer.timing["bytes_read"], optimizer.timing["bytes_written"]

    before = moved(WARMUP_STEPS)
    begin = time.perf_counter()
    after = moved(args.steps)
    seconds = time.perf_counter() - begin
    read, written = (now - then for now, then in zip(after, before, strict=True))
    steps = args.steps
    print(
        f"{moments:5} {durability:7} {interval or '':8}"
        f" {seconds / steps:8.3f} {read / steps / numel:11.2f}"
        f" {written / steps / numel:8.2f} {read / seconds / 1e6:12.0f}"
        f" {written / seconds / 1e6:8.0f} {(read + written) / seconds / 1e6:8.0f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--state-mib", type=int, default=800)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    print("moments      interval   s/step   B/param: read, written   MB/s: read, written, both")
    kinds: list[Moments] = ["fp32", "q8"]
    for moments in kinds:
        for durability, interval in VOLUMES:
            measure(moments, durability, interval, args)


if __name__ == "__main__":
    main()
