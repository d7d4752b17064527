"""Seconds of a step, as its parts follow from rates.

- Compute: 2 operations per parameter and token in a forward, 4 in a backward, 2 more where layers
  compute their activations again; attention, of which a causal mask leaves half. A product of
  matrices runs at the measured rate, attention at half of it (FlashAttention-2, 2023: 50 to 73 %
  of the peak). Between the products activations are read and written: what autograd saves is
  written and read once by a forward, and twice by a backward.
- Bus: 16-bit gradients come down, weights go up, each once per step or per pass.
- Host: bytes of a step / R; or, where memory does not bind, the arithmetic of its cores.
- Drives: bytes read and written / their rate.

Of what goes on at once only the longest counts (`exposed`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepwell.planning.activations import saved_of_layer

if TYPE_CHECKING:
    from stepwell.planning.machine import Machine
    from stepwell.planning.model import Model
    from stepwell.planning.workload import Workload

__all__ = ["BINDS_FROM", "Passes", "Step", "passes_of"]

BINDS_FROM = 0.05
"""Which share of a step something other than compute takes before it is said to bind."""

_ATTENTION_SHARE = 0.5
# Per logit: written by the head, widened, log_softmax, the loss; and back.
_LOSS_FORWARD_BYTES, _LOSS_BACKWARD_BYTES = 20, 24


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch, with everything on the device."""

    forward: float
    backward: float
    tail: float
    """Of the forward's last layer and the head: what comes behind the last weight that arrives."""


@dataclass
class Step:
    """Seconds of a step by what takes them, none of which goes on beside another."""

    seconds: dict[str, float] = field(default_factory=lambda: {"compute": 0.0})

    def add(self, term: str, seconds: float) -> None:
        """So much more of `term`."""
        self.seconds[term] = self.seconds.get(term, 0.0) + max(seconds, 0.0)

    def exposed(self, compute: float, beside: dict[str, float]) -> None:
        """A phase of so much compute, beside which other things go on.

        Args:
            compute: seconds of the device.
            beside: seconds of the others, by what takes them; the longest counts for what it takes
                beyond compute.
        """
        self.add("compute", compute)
        if beside:
            term = max(beside, key=lambda name: beside[name])
            self.add(term, beside[term] - compute)

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(self.seconds.values())

    @property
    def binds(self) -> str:
        """What takes most beyond compute; "compute" where that is next to nothing."""
        others = {name: each for name, each in self.seconds.items() if name != "compute"}
        if sum(others.values()) <= BINDS_FROM * self.total:
            return "compute"
        return max(others, key=lambda name: others[name])


def passes_of(model: Model, workload: Workload, machine: Machine, tokens: float) -> Passes:
    """Forward and backward of `tokens` tokens, in samples of those of `workload`."""
    flops, rate = machine.flops, machine.device_rate
    layer_count = model.num_layers
    # Half of `tokens` keys for each query; two products of 2 operations each.
    attention = 2 * workload.tokens * model.attention * layer_count * tokens
    layers = (
        2 * model.in_layers * tokens / flops
        + attention / (flops * _ATTENTION_SHARE)
        + 2 * saved_of_layer(model) * tokens * layer_count / rate
    )
    head_flops = 2 * model.head * tokens / flops
    logits = model.vocab * tokens / rate
    head = head_flops + _LOSS_FORWARD_BYTES * logits
    backward = 2 * layers + 2 * head_flops + _LOSS_BACKWARD_BYTES * logits
    if workload.checkpointing:
        backward += layers
    if workload.loss_tokens is not None:
        backward += head
    forward = layers + head
    return Passes(forward, backward, forward / layer_count + head)
