"""What a layer takes of the thread that launches: felt where a device is fast and tokens are few.

It is measured with a Llama of transformers that has next to no elements, whose layers are
activation checkpoints: a device is done with each operation before the next is launched.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["launch_seconds"]

_WIDTH, _TOKENS, _LAYERS, _ROUNDS = 64, 16, 16, 7


def launch_seconds(device: torch.device) -> tuple[float, float] | None:
    """Seconds of a layer's forward, and of its backward with the forward again.

    None where transformers is not installed.
    """
    if find_spec("transformers") is None:
        return None
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        vocab_size=_WIDTH,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    # Its newer name, or the older.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    is_gpu = device.type == "cuda"
    forwards, backwards = [], []
    for _ in range(_ROUNDS):
        if is_gpu:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        middle = time.perf_counter()
        loss.backward()
        if is_gpu:
            torch.cuda.synchronize(device)
        forwards.append(middle - begin)
        backwards.append(time.perf_counter() - middle)
    forward, backward = (sorted(each)[_ROUNDS // 2] / _LAYERS for each in (forwards, backwards))
    return forward, backward
