"""Tensors for tests of DeepSpeed's native ops.

One parameter with its gradient and moments, and its update.
"""

import torch
from stepwell.deepspeed.native import cpu_adam

HYPER = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias_correction": True,
}
OPTIMIZER = 77


def tensors(numel=1000, dtype=torch.float32, moments=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    param, grad, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
    return [
        (param * 0.05).to(dtype),
        grad.to(dtype),
        (m * 0.1).to(moments),
        (v.square() * 0.01 + 1e-6).to(moments),
    ]


def update(step, quad, optimizer=OPTIMIZER, **changed):
    return cpu_adam.adam_update(optimizer, step, *(HYPER | changed).values(), *quad)


def assert_unchanged(quad, before):
    for tensor, kept in zip(quad, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))
