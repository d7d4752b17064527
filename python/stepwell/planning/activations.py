"""Bytes of activations and logits on the device, of dense decoders.

What autograd saves of a layer, per token: of a norm its input and output in fp32 and in 16 bits (8
h); queries, keys, values and the result of attention (4 a + 4 k), of which a kernel as
FlashAttention keeps no probabilities; behind a gate four results as wide as the inner block (8 I).
So with the layers of transformers in bfloat16, as `torch.autograd.graph.saved_tensors_hooks`
counts. Without a gate it is 10 I, of a GELU that is written out. Norms of queries and keys add 6
(a + k).

At the head logits are there three times in fp32, at the beginning of its backward: the result of
log_softmax, its gradient, and that of its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.planning.model import Model
    from stepwell.planning.workload import Workload

__all__ = ["Activations", "activations_of", "saved_of_layer"]

_BYTES_PER_LOGIT = 12
# Around the head: the result of the last layer, its norm in fp32, and gradients of both.
_BYTES_BEHIND = 16


@dataclass(frozen=True)
class Activations:
    """Bytes on the device."""

    kept: int
    """From the forward to the backward: inputs of layers, or all that autograd saves."""
    layer: int
    """While one layer is in its backward, beside what is kept."""
    logits: int
    """While the loss is computed, beside what is kept."""


def saved_of_layer(model: Model) -> float:
    """Bytes that autograd saves of a token in a layer."""
    heads = model.attention + model.kv
    inner = 8 if model.is_gated else 10
    norms = 8 * max(model.num_norms, 1) * model.hidden
    return norms + (10 if model.has_qk_norm else 4) * heads + inner * model.intermediate


def activations_of(model: Model, workload: Workload) -> Activations:
    """Those of a micro-batch, on each GPU."""
    tokens = workload.tokens_of_forward
    widening = workload.itemsize / 2
    saved = saved_of_layer(model) * widening
    # Gradients of the inner block's results, and of a norm in fp32.
    gradients = (6 * model.intermediate + 12 * model.hidden) * widening
    if workload.checkpointing:
        kept = float(workload.itemsize * model.hidden * model.num_layers)
        layer = saved + gradients
    else:
        kept, layer = saved * model.num_layers, gradients
    part = min(workload.loss_tokens or tokens, tokens)
    logits = part * model.vocab * _BYTES_PER_LOGIT + tokens * model.hidden * _BYTES_BEHIND
    return Activations(int(tokens * kept), int(tokens * layer), int(logits))
