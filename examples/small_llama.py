"""The model and the batches of the examples: a model of the Hub, or a small Llama without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = "small"
"""A Llama of 30,000 parameters with random weights."""


def model_of(name: str) -> transformers.PreTrainedModel:
    """A model in bfloat16, on the CPU: `SMALL`, or a name of the Hub or a folder."""
    if name != SMALL:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        return model.train()  # it comes in evaluation mode, in which nothing is checkpointed
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def batches(steps: int, tokens: int = 64, first: int = 0) -> Iterator[torch.Tensor]:
    """Token ids that count upwards, for the steps from `first` on. In their place come yours."""
    for step in range(first, steps):
        begin = torch.randint(256, (4, 1), generator=torch.Generator().manual_seed(step))
        yield (begin + torch.arange(tokens)) % 256
