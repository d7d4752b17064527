"""Seconds that optimizers of one parameter each take to start and to step, and their threads."""

import argparse
import pathlib
import time

import stepwell
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", type=int, default=122)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    params = [
        torch.nn.Parameter(torch.randn(64, 64, device=options.device))
        for _ in range(options.optimizers)
    ]
    # What is imported and made with the first one counts for no other.
    step(stepwell.OffloadAdamW([torch.nn.Parameter(torch.ones(1, device=options.device))]))
    begin = time.perf_counter()
    optimizers = [stepwell.OffloadAdamW([param]) for param in params]
    started = time.perf_counter()
    for optimizer in optimizers:
        step(optimizer)
    ended = time.perf_counter()
    num_threads = len(list(pathlib.Path("/proc/self/task").iterdir()))
    print(
        f"{options.optimizers} optimizers: start {started - begin:.3f} s, a step of each "
        f"{ended - started:.3f} s; threads of the process {num_threads}"
    )


def step(optimizer: stepwell.OffloadAdamW) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()


if __name__ == "__main__":
    main()
