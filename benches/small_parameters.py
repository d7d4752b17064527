"""Microseconds that `step()` takes per parameter, where parameters are small.

    python benches/small_parameters.py [--params 200] [--steps 300] [--device cuda]

`step` is the wall time of the call. `thread` is that less what the call says it has waited: for the
norm, the copies of gradients and the step before (`OffloadAdamW.timing`). Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import stepwell
import torch


def measured(optimizer: Any, net: torch.nn.Module, steps: int) -> tuple[float, float]:
    """Seconds of `step()`, and of these the ones that it did not wait."""
    whole, own = [], []
    batch = torch.ones(1, 4, device=next(net.parameters()).device)
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch).sum().backward()
        if batch.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        whole.append(time.perf_counter() - begin)
        timing = getattr(optimizer, "timing", {})
        waited = sum(timing.get(name, 0.0) for name in ("norm", "release", "background"))
        own.append(whole[-1] - waited)
    warm = len(whole) // 5
    return statistics.median(whole[warm:]), statistics.median(own[warm:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    def model(device: str) -> torch.nn.Module:
        layers = (torch.nn.Linear(4, 4, bias=False) for _ in range(options.params))
        return torch.nn.Sequential(*layers).to(device)

    host, device = model("cpu"), model(options.device)
    cases = {
        "AdamW": (stepwell.AdamW(host.parameters(), nonfinite="propagate"), host),
        "OffloadAdamW": (stepwell.OffloadAdamW(device), device),
    }
    print(f"{options.params} parameters on {options.device}; microseconds per parameter")
    for name, (optimizer, net) in cases.items():
        whole, own = measured(optimizer, net, options.steps)
        per = 1e6 / options.params
        print(f"{name:>14} step {whole * per:6.2f} thread {own * per:6.2f}")


if __name__ == "__main__":
    main()
