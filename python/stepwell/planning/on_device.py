"""Everything on the device: by torch, and with 8-bit moments."""

from __future__ import annotations

from stepwell.planning.placement import (
    CONTEXT_BYTES,
    ROUNDING_BYTES,
    RUNTIME_BYTES,
    Placement,
    Run,
    add_all_passes,
    gathered,
    peak_of,
    timed,
)
from stepwell.planning.seconds import Step

__all__ = ["all_on_device", "paged_8_bit"]

# What a step on the device reads and writes per parameter: torch's fused AdamW over fp32 masters
# beside 16-bit weights, with the norm and the casts; 8-bit Adam without masters.
_TORCH_STEP_BYTES, _EIGHT_BIT_STEP_BYTES = 44, 12


def all_on_device(run: Run) -> Placement:
    """16-bit weights and gradients, fp32 masters and moments: 16 bytes per parameter.

    A step has the gradients in fp32 as well.
    """
    numel, share = run.model.num_params, run.share
    held = (run.weight_bytes + 12 * numel) * share
    device, peak = peak_of(run, held, run.grad_bytes * share, weights=gathered(run))
    # In the step, behind all activations, they are widened one by one.
    device["gradients"] = int(4 * numel * share)
    peak = max(peak, int(held + 4 * numel * share) + ROUNDING_BYTES)

    def step(tokens: float) -> Step:
        found = Step()
        add_all_passes(run, found, tokens)
        found.add("compute", run.device_step(_TORCH_STEP_BYTES, numel * share))
        return found

    found = Placement(
        "torch",
        "fp32",
        "all on the GPU, torch's AdamW",
        note="16 bytes per parameter: weights, gradients, fp32 masters and moments",
        device=device,
        peak=peak,
        host={"runtime": RUNTIME_BYTES * run.workload.gpus},
    )
    return timed(found, run, step)


def paged_8_bit(run: Run) -> Placement:
    """8-bit moments that are paged to host memory where the device has no room; no masters.

    Each moment has a byte per parameter, and 4 bytes per block of 256.
    """
    numel = run.model.num_params
    state = 2 * (numel + 4 * numel // 256)
    device, peak = peak_of(run, run.weight_bytes, run.grad_bytes)
    room = max(run.machine.gpu_memory - CONTEXT_BYTES - peak, 0)
    paged = max(state - room, 0)

    def step(tokens: float) -> Step:
        found = Step()
        add_all_passes(run, found, tokens)
        found.add("compute", run.device_step(_EIGHT_BIT_STEP_BYTES, numel))
        found.add("bus", paged / run.machine.bus_up + paged / run.machine.bus_down)
        return found

    found = Placement(
        "bitsandbytes",
        "8-bit",
        "all on the GPU, paged 8-bit AdamW of bitsandbytes",
        note="no masters: 16-bit weights are updated in place",
        is_exact=False,
        refused="one GPU only" if run.workload.gpus > 1 else "",
        device={**device, "states": state - paged},
        peak=peak + state - paged,
        host={"state": paged, "runtime": RUNTIME_BYTES},
    )
    return timed(found, run, step)
