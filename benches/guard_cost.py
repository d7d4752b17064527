"""What the guard of weights under way costs the training thread per step.

    python benches/guard_cost.py [--params 150] [--steps 2000]

Prints microseconds per step of each part, the least of some rounds, for parameters that are small:
the cost is per parameter and not per element.

- `exposed`: whose memory others hold as well, in `step()`.
- `protect`: the parameters become those under way, in `step()`.
- `wait`: they become plain ones again, at the forwards, in runs of two as a layer's.
- `zero_grad`: of the optimizer and of the model, beyond what it costs without a guard.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
from stepwell.access.guard import Uploads, WeightGuard, clear_grads, exposed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROUNDS = 7


class Landed(Uploads):
    """Uploads that have arrived."""

    def wait(self, _: Iterable[torch.Tensor], /) -> bool:
        """There is nothing to wait for."""
        return True

    def finish(self) -> None:
        """There is nothing to wait for."""


def microseconds(
    call: Callable[[], object], steps: int, before: Callable[[], object] | None = None
) -> float:
    """Of a call, each after `before`: the mean of `steps`, the least of some rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        seconds = 0.0
        for _ in range(steps):
            if before is not None:
                before()
            begin = time.perf_counter()
            call()
            seconds += time.perf_counter() - begin
        least = min(least, seconds / steps)
    return least * 1e6


def main() -> None:
    """Prints the parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=int, default=150)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(8)) for _ in range(options.params)
    )
    params = list(model)
    guard = WeightGuard(Landed())
    layers = [params[index : index + 2] for index in range(0, len(params), 2)]

    def wait() -> None:
        for layer in layers:
            guard.enter(layer)

    def grads() -> None:
        for param in params:
            param.grad = torch.empty_like(param)

    def grads_under_way() -> None:
        wait()
        grads()
        guard.protect(params)

    steps = options.steps // 10
    parts = {
        "exposed": microseconds(lambda: exposed(params, params), options.steps),
        "protect": microseconds(lambda: guard.protect(params), options.steps, wait),
        "wait": microseconds(wait, options.steps, lambda: guard.protect(params)),
    }
    wait()
    plain = microseconds(model.zero_grad, steps, grads)
    parts["optimizer.zero_grad"] = (
        microseconds(lambda: clear_grads(params), steps, grads_under_way) - plain
    )
    parts["model.zero_grad"] = microseconds(model.zero_grad, steps, grads_under_way) - plain
    print(f"{options.params} parameters, microseconds per step")
    for name, cost in parts.items():
        print(f"{name:>20} {cost:8.1f}")
    in_step = sum(parts[name] for name in ("exposed", "protect", "wait"))
    print(f"{'sum of the first three':>20} {in_step:8.1f}")


if __name__ == "__main__":
    main()
