"""Where weights, gradients and optimizer state of a training run can be: bytes and seconds of each.

Bytes are those that the library takes (`state_bytes`); of peers those of their documentation. Each
function gives one placement; `placements` has all, the fastest kinds first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepwell import _core
from stepwell.planning.activations import Activations, activations_of
from stepwell.planning.seconds import BINDS_FROM, Passes, Step, passes_of
from stepwell.planning.state_bytes import run_bytes, state_bytes, step_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell.planning.machine import Machine
    from stepwell.planning.model import Model
    from stepwell.planning.workload import Workload

__all__ = [
    "ADDER_BYTES",
    "AHEAD_NUMEL",
    "CONTEXT_BYTES",
    "PROCESS_BYTES",
    "Placement",
    "placements",
]

Kind: TypeAlias = Literal[
    "torch", "bitsandbytes", "exact", "device share", "deferred", "streamed", "volume"
]

CONTEXT_BYTES = 600 << 20
"""Of the device, that its driver and libraries take beside what torch allocates."""
PROCESS_BYTES = 2_500_000_000
"""Of host memory, that a process with torch and a device has before it trains."""
AHEAD_NUMEL = 192 << 20
"""Elements that are fetched ahead of their use (`store/host_weights.py`)."""
ADDER_BYTES = (3 + 3 + 3) * (64 << 20)
"""On the device, of gradients on their way to sums in host memory (`store/adder.py`): slots, those
under way, and those that wait."""
_RUNTIME_BYTES = 500_000_000  # what any training on a device grows its process by
_ROUNDING_BYTES = 64 << 20  # workspaces of libraries
_VOLUME_BUFFERS_BYTES = 1 << 30  # at most, and less than half of what is left (`docs/volume.md`)
_COMMIT_INTERVAL = 8
_INTERVAL = 4
# Several gradients in one pass take the cores four times what one takes in cache
# (`benches/README.md`, "Several gradients in one pass").
_DEFERRED_PASSES = 4
# What a step on the device reads and writes per parameter: torch's fused AdamW over fp32 masters
# beside 16-bit weights, with the norm and the casts; a resident's; 8-bit Adam without masters.
_TORCH_STEP_BYTES, _RESIDENT_STEP_BYTES, _EIGHT_BIT_STEP_BYTES = 44, 32, 12
# The norm of gradients, and checksums of weights.
_LOOK_BYTES = 6
_TOKENS_MAX = 1 << 28


@dataclass
class Placement:
    """One way to place a training run, on one machine."""

    kind: Kind
    moments: str
    title: str
    note: str = ""
    is_exact: bool = True
    """Whether its updates are those of AdamW over fp32 masters, in the order of the steps."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `OffloadAdamW`."""
    refused: str = ""
    """Why it cannot be, whatever the memory is; empty: it can."""
    device: dict[str, int] = field(default_factory=dict)
    """Bytes of each GPU, by what they are of."""
    peak: int = 0
    """Of each GPU, that torch allocates."""
    host: dict[str, int] = field(default_factory=dict)
    """Bytes of the host, by what they are of; of all ranks."""
    drive_space: int = 0
    drive_moved: tuple[int, int] = (0, 0)
    """Bytes that a step reads and writes."""
    step: Step = field(default_factory=Step)
    binds_until: float | None = None
    """Tokens of a step from which on nothing but compute binds; None: never."""
    lacks: dict[str, int] = field(default_factory=dict)
    """Bytes that are missing, of "GPU", "host" or "drives"."""
    remedy: str = ""
    """What would make it fit, where little is missing."""

    @property
    def fits(self) -> bool:
        """Whether it can run on the machine."""
        return not self.refused and not self.lacks

    @property
    def host_total(self) -> int:
        """Bytes of host memory."""
        return sum(self.host.values())


@dataclass(frozen=True)
class Run:
    """What all placements are made from."""

    model: Model
    workload: Workload
    machine: Machine

    @property
    def activations(self) -> Activations:
        """Of a micro-batch."""
        return activations_of(self.model, self.workload)

    @property
    def share(self) -> float:
        """Of weights and gradients, that each GPU has."""
        return 1 / self.workload.gpus

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return self.workload.itemsize * self.model.num_all

    @property
    def grad_bytes(self) -> int:
        """Of all gradients."""
        return self.workload.itemsize * self.model.num_params

    def state_bytes(self, moments: str) -> int:
        """Of all state in host memory."""
        return state_bytes(self.model.numels, self.workload.dtype, moments)

    def twin_bytes(self) -> int:
        """Of the host sides of all weights, or of all gradients."""
        return run_bytes(self.model.numels, self.workload.itemsize)

    def passes(self, tokens: float) -> Passes:
        """Of a micro-batch of so many tokens."""
        return passes_of(self.model, self.workload, self.machine, tokens)

    def host_step(self, moments: str, numel: float) -> tuple[str, float]:
        """Seconds of a step of `numel` parameters in host memory, and what takes them."""
        machine = self.machine
        memory = numel * step_bytes(self.workload.dtype, moments) / machine.host_rate
        cores = numel * machine.core_seconds.get(moments, 0.0) / machine.cores
        return ("host memory", memory) if memory >= cores else ("host cores", cores)

    def device_step(self, nbytes_each: float, numel: float) -> float:
        """Seconds of what the device does with so many bytes of each parameter."""
        return nbytes_each * numel / self.machine.device_rate


def placements(model: Model, workload: Workload, machine: Machine) -> list[Placement]:
    """All placements, with what each takes and lacks."""
    run = Run(model, workload, machine)
    found = [
        _torch(run),
        _bitsandbytes(run),
        _exact(run, "fp32"),
        _exact(run, "q8"),
        _device_share(run),
        _deferred(run),
        _streamed(run, "fp32"),
        _streamed(run, "q8"),
        _streamed(run, "q8", activations_on_host=True),
        _volume(run, "fp32", is_streamed=False),
        _volume(run, "q8", is_streamed=True),
    ]
    for placement in found:
        _compare(placement, machine)
    return found


def _compare(placement: Placement, machine: Machine) -> None:
    """Notes what the machine lacks."""
    lacks = {
        "GPU": placement.peak + CONTEXT_BYTES - machine.gpu_memory,
        "host": placement.host_total + PROCESS_BYTES - machine.host_memory,
    }
    placement.lacks |= {name: nbytes for name, nbytes in lacks.items() if nbytes > 0}


def _peak(
    run: Run, held: float, gradients: float, *, weights: float = 0.0, head: float = 0.0
) -> tuple[dict[str, int], int]:
    """Bytes of the device by what they are of, and the most at once.

    That is at the loss, before there are gradients, or in the backward of a layer. Of a backward
    what is kept leaves as gradients come: its most is at one of its ends.

    Args:
        run: the run.
        held: bytes of weights and states that are there throughout.
        gradients: of all gradients that stay.
        weights: of others, that are fetched.
        head: beside the loss, of what is there for the head alone.
    """
    activations = run.activations
    before = gradients if run.workload.accumulation > 1 else 0
    at_loss = activations.kept + activations.logits + before + head
    in_layer = activations.layer + max(activations.kept + before, gradients)
    peak = int(held + weights + max(at_loss, in_layer)) + _ROUNDING_BYTES
    return {
        "weights": int(min(run.weight_bytes * run.share, held)),
        "states": int(max(held - run.weight_bytes * run.share, 0)),
        "slots": int(weights + head),
        "gradients": int(gradients),
        "activations": activations.kept + activations.layer,
        "logits": activations.logits,
    }, peak


def _time(placement: Placement, run: Run, step_of: Callable[[float], Step]) -> Placement:
    """Gives a placement its seconds, and the tokens from which on only compute binds.

    Args:
        placement: the placement.
        run: the run.
        step_of: a step, by the tokens of a micro-batch of one GPU.
    """
    workload = run.workload
    placement.step = step_of(workload.tokens_of_forward)
    least, most = 1.0, float(_TOKENS_MAX)

    def binds(tokens: float) -> bool:
        step = step_of(tokens)
        return step.total - step.seconds["compute"] > BINDS_FROM * step.total

    if binds(most):
        return placement
    while most / least > 1.01:
        middle = math.sqrt(least * most)
        least, most = (middle, most) if binds(middle) else (least, middle)
    placement.binds_until = most * workload.accumulation * workload.gpus
    return placement


def _all_passes(run: Run, step: Step, tokens: float) -> Passes:
    """Adds all forwards and backwards of a step, with everything on the device."""
    passes = run.passes(tokens)
    step.add("compute", run.workload.accumulation * (passes.forward + passes.backward))
    return passes


# ---- everything on the device ----


def _torch(run: Run) -> Placement:
    """16-bit weights and gradients, fp32 masters and moments: 16 bytes per parameter.

    A step has the gradients in fp32 as well.
    """
    numel, share = run.model.num_params, run.share
    held = (run.weight_bytes + 12 * numel) * share
    device, peak = _peak(run, held, run.grad_bytes * share)
    # In the step, behind all activations, they are widened one by one.
    device["gradients"] = int(4 * numel * share)
    peak = max(peak, int(held + 4 * numel * share) + _ROUNDING_BYTES)

    def step(tokens: float) -> Step:
        found = Step()
        _all_passes(run, found, tokens)
        found.add("compute", run.device_step(_TORCH_STEP_BYTES, numel * share))
        return found

    found = Placement(
        "torch",
        "fp32",
        "all on the GPU, torch's AdamW",
        note="16 bytes per parameter: weights, gradients, fp32 masters and moments",
        device=device,
        peak=peak,
        host={"runtime": _RUNTIME_BYTES * run.workload.gpus},
    )
    return _time(found, run, step)


def _bitsandbytes(run: Run) -> Placement:
    """8-bit moments that are paged to host memory where the device has no room; no masters.

    Each moment has a byte per parameter, and 4 bytes per block of 256.
    """
    numel = run.model.num_params
    state = 2 * (numel + 4 * numel // 256)
    device, peak = _peak(run, run.weight_bytes, run.grad_bytes)
    room = max(run.machine.gpu_memory - CONTEXT_BYTES - peak, 0)
    paged = max(state - room, 0)

    def step(tokens: float) -> Step:
        found = Step()
        _all_passes(run, found, tokens)
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
        host={"state": paged, "runtime": _RUNTIME_BYTES},
    )
    return _time(found, run, step)


# ---- weights on the device, state in host memory ----


def _host_of(run: Run, moments: str, *, weights: bool = False) -> dict[str, int]:
    """Host memory of state, and of what crosses the bus."""
    frozen = run.workload.itemsize * run.model.num_frozen if weights else 0
    return {
        "weights": run.twin_bytes() + frozen,
        "gradients": run.twin_bytes(),
        "state": run.state_bytes(moments),
        "runtime": _RUNTIME_BYTES * run.workload.gpus,
    }


def _gathered(run: Run) -> float:
    """Bytes of whole weights that FSDP2 has gathered on a device: two groups, of the largest."""
    if run.workload.gpus == 1:
        return 0.0
    return 2.0 * run.workload.itemsize * max(run.model.numels)


def _resident_step(
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


def _exact(run: Run, moments: str) -> Placement:
    numel = run.model.num_params
    device, peak = _peak(
        run, run.weight_bytes * run.share, run.grad_bytes * run.share, weights=_gathered(run)
    )
    found = Placement(
        "exact",
        moments,
        "weights on the GPU, state in host memory" + (", q8" if moments == "q8" else ""),
        options=_moments_option(moments),
        device=device,
        peak=peak,
        host=_host_of(run, moments),
    )
    return _time(found, run, lambda tokens: _resident_step(run, tokens, moments, numel, {}))


def _moments_option(moments: str) -> dict[str, Any]:
    return {} if moments == "fp32" else {"moments": moments}


def _device_share(run: Run) -> Placement:
    """As exact, but the first parameters whose state fits stay on the device."""
    model, machine = run.model, run.machine
    base = _exact(run, "fp32")
    room = int((machine.gpu_memory - CONTEXT_BYTES - base.peak) * 0.98)
    chosen, left = set(), room
    for index, numel in enumerate(model.numels):
        nbytes = _core.DeviceSteps.state_nbytes(numel)
        if nbytes is not None and nbytes <= left:
            chosen.add(index)
            left -= nbytes
    resident = sum(model.numels[index] for index in chosen)
    hosted = [numel for index, numel in enumerate(model.numels) if index not in chosen]
    twins = run_bytes(hosted, run.workload.itemsize)
    refused = ""
    if run.workload.gpus > 1:
        refused = "one GPU only"
    elif not resident and room > 0:
        refused = "no state has room on the GPU"

    def step(tokens: float) -> Step:
        found = _resident_step(run, tokens, "fp32", sum(hosted), {})
        found.add("compute", run.device_step(_RESIDENT_STEP_BYTES, resident))
        return found

    state = room - left if room > 0 else 0
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
            "runtime": _RUNTIME_BYTES,
        },
    )
    return _time(found, run, step)


def _deferred(run: Run) -> Placement:
    """Updates are applied up to five steps late, behind forwards and backwards.

    A step moves what an exact one does of state and weights divided by the interval, and reads a
    gradient.
    """
    model, machine, workload = run.model, run.machine, run.workload
    base = _exact(run, "fp32")
    dtypes = [workload.dtype] * len(model.numels)
    gradients, predicted = _core.deferral_nbytes(model.numels, dtypes, _INTERVAL)
    nbytes = workload.itemsize * model.num_params

    def step(tokens: float) -> Step:
        found = Step()
        passes = run.passes(tokens)
        each, gradient = step_bytes(workload.dtype, "fp32"), workload.itemsize
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
    return _time(found, run, step)


# ---- weights in host memory ----


def _streamed_step(
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


def _streamed_device(run: Run, *, activations_on_host: bool) -> tuple[dict[str, int], int]:
    """Weights of the largest block and of what is fetched ahead, and gradients on their way."""
    itemsize, block = run.workload.itemsize, max(run.model.numels)
    live = itemsize * min(block + 2 * AHEAD_NUMEL, run.model.num_all)
    slots = min(ADDER_BYTES, 9 * itemsize * run.model.num_params)
    # Of a loss in parts the head has a sum of gradients and the next one.
    is_parted = run.workload.loss_tokens is not None
    head = itemsize * run.model.head * (2 if is_parted else 1)
    device, peak = _peak(run, 0, 0, weights=live + slots, head=head)
    if activations_on_host:
        # Two layers' inputs are on their way.
        kept = run.activations.kept
        there = 2 * kept // run.model.num_layers
        device["activations"] -= max(kept - there, 0)
        peak -= max(kept - there, 0)
    return {**device, "weights": live, "slots": slots}, peak


def _streamed(run: Run, moments: str, *, activations_on_host: bool = False) -> Placement:
    workload = run.workload
    device, peak = _streamed_device(run, activations_on_host=activations_on_host)
    host = _host_of(run, moments, weights=True)
    title = "weights and state in host memory" + (", q8" if moments == "q8" else "")
    options: dict[str, Any] = {"weights": "host", "device": "cuda", **_moments_option(moments)}
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
        return _streamed_step(
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
    return _time(found, run, step)


# ---- state on drives ----


def _volume(run: Run, moments: str, *, is_streamed: bool) -> Placement:
    """State on drives, as much of it in host memory as has room.

    A step reads and writes what is there; every eighth commits, and writes weights and the state
    in host memory too, on twice the space.
    """
    model, machine, workload = run.model, run.machine, run.workload
    if is_streamed:
        device, peak = _streamed_device(run, activations_on_host=False)
    else:
        base = _exact(run, moments)
        device, peak = base.device, base.peak
    host = _host_of(run, moments, weights=is_streamed)
    state = host.pop("state")
    room = machine.host_memory - PROCESS_BYTES - sum(host.values())
    buffers = int(min(_VOLUME_BUFFERS_BYTES, max(room, 0) / 2))
    in_memory = int(min(max(room - buffers, 0), state))
    on_drives = state - in_memory
    read = written = on_drives
    commits = not is_streamed
    space = on_drives
    if commits:
        weights = workload.itemsize * model.num_params
        written += (in_memory + weights) // _COMMIT_INTERVAL
        space = 2 * (state + weights)
    drives, refused = {}, ""
    if machine.drive_rate:
        drives["drives"] = (read + written) / machine.drive_rate
    if is_streamed and workload.gpus > 1:
        refused = "one GPU only"
    elif not machine.drive_rate:
        refused = "no drive is given"
    elif not on_drives:
        refused = "all state fits into host memory"

    def step(tokens: float) -> Step:
        if is_streamed:
            return _streamed_step(run, tokens, moments, beside=drives, activations_on_host=False)
        return _resident_step(run, tokens, moments, model.num_params, drives)

    title = "state on drives" + (", q8" if moments == "q8" else "")
    found = Placement(
        "volume",
        moments,
        ("weights in host memory, " if is_streamed else "weights on the GPU, ") + title,
        options={
            **({"weights": "host", "device": "cuda"} if is_streamed else {}),
            **_moments_option(moments),
            "host_bytes_max": int(max(machine.host_memory - PROCESS_BYTES, 0)),
            "tier": {"drives": machine.drives, "durability": "commit" if commits else "none"},
        },
        refused=refused,
        device=device,
        peak=peak,
        host={**host, "state": in_memory, "buffers": buffers},
        drive_space=space,
        drive_moved=(read, written),
    )
    return _time(found, run, step)
