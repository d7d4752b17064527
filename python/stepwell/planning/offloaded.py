"""Weights and gradients on the device, and state in host memory, or a part of it there."""

from __future__ import annotations

from stepwell import _core
from stepwell._sizes import residents, run_bytes, state_bytes
from stepwell.planning.placement import (
    CONTEXT_BYTES,
    RUNTIME_BYTES,
    Placement,
    Run,
    gathered,
    moments_option,
    peak_of,
    timed,
)
from stepwell.planning.seconds import Step

__all__ = ["deferred", "device_share", "exact", "host_of", "offloaded_step"]

_DEVICE_STEP_BYTES = 32
# The norm of gradients, and checksums of weights.
_LOOK_BYTES = 6
_INTERVAL = 4
# Several gradients in one pass take the cores four times what one takes in cache
# (`benches/README.md`, "Several gradients in one pass").
_DEFERRED_PASSES = 4


def host_of(run: Run, moments: str, *, weights: bool = False) -> dict[str, int]:
    """Host memory of state, and of what crosses the bus."""
    frozen = run.workload.itemsize * run.model.num_frozen if weights else 0
    return {
        "weights": run.twin_bytes() + frozen,
        "gradients": run.twin_bytes(),
        "state": run.state_bytes(moments),
        "runtime": RUNTIME_BYTES * run.workload.gpus,
    }


def offloaded_step(
    run: Run, tokens: float, moments: str, numel: float, beside: dict[str, float]
) -> Step:
    """An exact step of `numel` parameters on the host, whose weights are on the device.

    The backward hides what goes down, and the next forward what it does not wait for; behind the
    last weight that arrives come the last layer and the head.

    Args:
        run: the run.
        tokens: of a micro-batch.
        moments: how moments are held.
        numel: elements that the host steps.
        beside: what else goes on beside the host's step, by what takes it.
    """
    machine, nbytes = run.machine, run.workload.itemsize * numel * run.share
    step = Step()
    passes = run.passes(tokens)
    more = run.workload.accumulation - 1
    step.add("compute", more * (passes.forward + passes.backward))
    step.add("compute", run.device_step(_LOOK_BYTES, numel * run.share))
    step.exposed(passes.backward, {"bus": nbytes / machine.bus_down})
    term, host = run.host_step(moments, numel)
    waits = {term: host, "bus": nbytes / machine.bus_up, **beside}
    tail = min(passes.tail, passes.forward)
    step.exposed(passes.forward, {name: each + tail for name, each in waits.items() if each})
    return step


def exact(run: Run, moments: str) -> Placement:
    """All state in host memory, which the host steps between a backward and the next forward."""
    numel = run.model.num_params
    device, peak = peak_of(
        run, run.weight_bytes * run.share, run.grad_bytes * run.share, weights=gathered(run)
    )
    found = Placement(
        "exact",
        moments,
        "weights on the GPU, state in host memory" + (", q8" if moments == "q8" else ""),
        options=moments_option(moments),
        device=device,
        peak=peak,
        host=host_of(run, moments),
    )
    return timed(found, run, lambda tokens: offloaded_step(run, tokens, moments, numel, {}))


def device_share(run: Run) -> Placement:
    """As exact, but the first parameters whose state fits stay on the device."""
    model, machine = run.model, run.machine
    base = exact(run, "fp32")
    room = int((machine.gpu_memory - CONTEXT_BYTES - base.peak) * 0.98)
    chosen = residents(model.numels, room)
    resident = sum(model.numels[index] for index in chosen)
    hosted = [numel for index, numel in enumerate(model.numels) if index not in chosen]
    twins = run_bytes(hosted, run.workload.itemsize)
    refused = ""
    if run.workload.gpus > 1:
        refused = "one GPU only"
    elif not resident and room > 0:
        refused = "no state has room on the GPU"

    def step(tokens: float) -> Step:
        found = offloaded_step(run, tokens, "fp32", sum(hosted), {})
        found.add("compute", run.device_step(_DEVICE_STEP_BYTES, resident))
        return found

    state = sum(chosen.values())
    found = Placement(
        "device share",
        "fp32",
        f"weights and {resident / model.num_params:.0%} of the state on the GPU",
        note="the rest of the state in host memory",
        options={"device_bytes_max": max(room, 0)},
        refused=refused,
        device={**base.device, "states": state},
        peak=base.peak + state,
        host={
            "weights": twins,
            "gradients": twins,
            "state": state_bytes(hosted, run.workload.dtype, "fp32"),
            "runtime": RUNTIME_BYTES,
        },
    )
    return timed(found, run, step)


def deferred(run: Run) -> Placement:
    """Updates are applied up to five steps late, behind forwards and backwards.

    A step moves what an exact one does of state and weights divided by the interval, and reads a
    gradient.
    """
    model, machine, workload = run.model, run.machine, run.workload
    base = exact(run, "fp32")
    dtypes = [workload.dtype] * len(model.numels)
    gradients, predicted = _core.deferral_nbytes(model.numels, dtypes, _INTERVAL)
    nbytes = workload.itemsize * model.num_params

    def step(tokens: float) -> Step:
        found = Step()
        passes = run.passes(tokens)
        each, gradient = run.moved_bytes("fp32"), workload.itemsize
        moved = model.num_params * ((each - gradient) / _INTERVAL + gradient)
        memory = moved / machine.host_rate
        cores = model.num_params * _DEFERRED_PASSES * machine.core_seconds["fp32"] / machine.cores
        term, host = max(("host memory", memory), ("host cores", cores), key=lambda one: one[1])
        found.add("compute", run.device_step(_LOOK_BYTES, model.num_params))
        last = {"bus": nbytes / machine.bus_down + nbytes / machine.bus_up / _INTERVAL}
        found.exposed(passes.backward, last)
        rest = (workload.accumulation - 1) * (passes.forward + passes.backward) + passes.forward
        found.exposed(rest, {term: host - passes.backward})
        return found

    host = {**base.host, "weights": run.twin_bytes() + predicted, "gradients": gradients}
    found = Placement(
        "deferred",
        "fp32",
        "weights on the GPU, state in host memory, deferred",
        note=f"for fine-tuning: updates take effect up to {_INTERVAL + 1} steps later",
        is_exact=False,
        options={"deferred": _INTERVAL},
        refused="one GPU only" if workload.gpus > 1 else "",
        device=base.device,
        peak=base.peak,
        host=host,
    )
    return timed(found, run, step)
