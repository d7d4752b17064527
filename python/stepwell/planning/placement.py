"""One way to place a training run, and what all ways are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepwell._sizes import moved_bytes, run_bytes, state_bytes
from stepwell.planning.activations import Activations, activations_of
from stepwell.planning.seconds import BINDS_FROM, Passes, Step, passes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell.planning.machine import Machine
    from stepwell.planning.model import Model
    from stepwell.planning.workload import Workload

__all__ = [
    "CONTEXT_BYTES",
    "PROCESS_BYTES",
    "ROUNDING_BYTES",
    "RUNTIME_BYTES",
    "Placement",
    "Run",
    "add_all_passes",
    "gathered",
    "moments_option",
    "peak_of",
    "timed",
]

Kind: TypeAlias = Literal[
    "torch", "bitsandbytes", "exact", "device share", "deferred", "streamed", "volume"
]

CONTEXT_BYTES = 600 << 20
"""Of the device, that its driver and libraries take beside what torch allocates."""
PROCESS_BYTES = 2_500_000_000
"""Of host memory, that a process with torch and a device has before it trains."""
RUNTIME_BYTES = 500_000_000
"""Of host memory, that any training on a device grows its process by."""
ROUNDING_BYTES = 64 << 20
"""Of the device: workspaces of libraries, and what the allocator rounds up."""
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

    def moved_bytes(self, moments: str) -> float:
        """Per parameter of a step in host memory, and of its weight's way up, which reads it."""
        return moved_bytes(self.workload.dtype, moments) + self.workload.itemsize

    def passes(self, tokens: float) -> Passes:
        """Of a micro-batch of so many tokens."""
        return passes_of(self.model, self.workload, self.machine, tokens)

    def host_step(self, moments: str, numel: float) -> tuple[str, float]:
        """Seconds of a step of `numel` parameters in host memory, and what takes them."""
        machine = self.machine
        memory = numel * self.moved_bytes(moments) / machine.host_rate
        cores = numel * machine.core_seconds.get(moments, 0.0) / machine.cores
        return ("host memory", memory) if memory >= cores else ("host cores", cores)

    def device_step(self, nbytes_each: float, numel: float) -> float:
        """Seconds of what the device does with so many bytes of each parameter."""
        return nbytes_each * numel / self.machine.device_rate


def peak_of(
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
    peak = int(held + weights + max(at_loss, in_layer)) + ROUNDING_BYTES
    return {
        "weights": int(min(run.weight_bytes * run.share, held)),
        "states": int(max(held - run.weight_bytes * run.share, 0)),
        "slots": int(weights + head),
        "gradients": int(gradients),
        "activations": activations.kept + activations.layer,
        "logits": activations.logits,
    }, peak


def timed(placement: Placement, run: Run, step_of: Callable[[float], Step]) -> Placement:
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


def add_all_passes(run: Run, step: Step, tokens: float) -> Passes:
    """Adds all forwards and backwards of a step, with everything on the device."""
    passes = run.passes(tokens)
    step.add("compute", run.workload.accumulation * (passes.forward + passes.backward))
    return passes


def moments_option(moments: str) -> dict[str, Any]:
    """The option of `OffloadAdamW`, where it is not the default."""
    return {} if moments == "fp32" else {"moments": moments}


def gathered(run: Run) -> float:
    """Bytes of whole weights that FSDP2 has gathered on a device: two groups, of the largest."""
    if run.workload.gpus == 1:
        return 0.0
    return 2.0 * run.workload.itemsize * max(run.model.numels)
