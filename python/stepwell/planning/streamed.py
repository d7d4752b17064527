"""Weights in host memory, which modules fetch (`store/host_weights.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell._sizes import AHEAD_NUMEL, SUMS_BYTES_MAX
from stepwell.planning.offloaded import host_of
from stepwell.planning.placement import Placement, Run, moments_option, peak_of, timed
from stepwell.planning.seconds import Step

if TYPE_CHECKING:
    from stepwell.planning.machine import Machine

__all__ = ["streamed", "streamed_device", "streamed_step"]


def streamed_step(
    run: Run,
    tokens: float,
    moments: str,
    *,
    beside: dict[str, float],
    activations_on_host: bool,
) -> Step:
    """Each pass fetches all weights, gradients go down in it, and the host's step is behind them.

    From the second micro-batch on sums of gradients come up as well.
    """
    machine, workload = run.machine, run.workload
    weights, grads = run.weight_bytes * run.share, run.grad_bytes * run.share
    passes = run.passes(tokens)
    kept = 0.0
    if activations_on_host:
        kept = run.activations.kept / workload.tokens_of_forward * tokens
    step = Step()
    for number in range(workload.accumulation):
        step.exposed(
            passes.forward,
            {"bus": _bus_seconds(machine, up=weights, down=kept)},
        )
        up = weights + kept + (grads if number else 0)
        step.exposed(passes.backward, {"bus": _bus_seconds(machine, up=up, down=grads)})
    term, host = run.host_step(moments, run.model.num_params)
    step.exposed(0.0, {term: host, **beside})
    return step


def _bus_seconds(machine: Machine, *, up: float, down: float) -> float:
    """Of bytes that cross both ways at once."""
    return max(up / machine.bus_up, down / machine.bus_down, (up + down) / machine.bus_both)


def streamed_device(run: Run, *, activations_on_host: bool) -> tuple[dict[str, int], int]:
    """Weights of the largest block and of what is fetched ahead, and gradients on their way."""
    itemsize, block = run.workload.itemsize, max(run.model.numels)
    live = itemsize * min(block + 2 * AHEAD_NUMEL, run.model.num_all)
    slots = min(SUMS_BYTES_MAX, 9 * itemsize * run.model.num_params)
    # Of a loss in parts the head has a sum of gradients and the next one.
    is_parted = run.workload.loss_tokens is not None
    head = itemsize * run.model.head * (2 if is_parted else 1)
    device, peak = peak_of(run, 0, 0, weights=live + slots, head=head)
    if activations_on_host:
        # Two layers' inputs are on their way.
        kept = run.activations.kept
        there = 2 * kept // run.model.num_layers
        device["activations"] -= max(kept - there, 0)
        peak -= max(kept - there, 0)
    return {**device, "weights": live, "slots": slots}, peak


def streamed(run: Run, moments: str, *, activations_on_host: bool = False) -> Placement:
    """Weights, gradients and state in host memory; on several GPUs by ZeRO-3."""
    workload = run.workload
    device, peak = streamed_device(run, activations_on_host=activations_on_host)
    host = host_of(run, moments, weights=True)
    title = "weights and state in host memory" + (", q8" if moments == "q8" else "")
    options: dict[str, Any] = {"weights": "host", "device": "cuda", **moments_option(moments)}
    if activations_on_host:
        title = title.replace("weights and state", "weights, state, activations")
        options["activations"] = "host"
        host["activations"] = run.activations.kept * workload.gpus
    refused = ""
    if workload.gpus > 1:
        # Under DeepSpeed, which has fp32 masters beside 16-bit weights.
        title = title.replace("in host memory", "in host memory, ZeRO-3", 1)
        host["state"] += 2 * run.model.num_params
        refused = "one GPU only" if activations_on_host else ""

    def step(tokens: float) -> Step:
        return streamed_step(
            run, tokens, moments, beside={}, activations_on_host=activations_on_host
        )

    found = Placement(
        "streamed",
        moments,
        title,
        options=options,
        refused=refused,
        device=device,
        peak=peak,
        host=host,
    )
    return timed(found, run, step)
