"""Models whose first parameters have their state on the device, and what they are compared with."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from optim_cases import bits
from stepwell import OffloadAdamW

if TYPE_CHECKING:
    from torch import nn

ALL = 1 << 30
# Of state per parameter, and beside it once.
STATE_BYTES, EXTRA_BYTES = 12, 4
FIRST = STATE_BYTES * 33 * 40 + EXTRA_BYTES
"""What the first parameter of the model takes."""


def made(
    model: nn.Module, device_bytes_max: int = ALL, **options: Any
) -> tuple[nn.Module, OffloadAdamW]:
    """A copy of the model, and its optimizer."""
    model = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 1.0, **options}
    return model, OffloadAdamW(model, device_bytes_max=device_bytes_max, **options)


def assert_alike(
    one: tuple[nn.Module, OffloadAdamW], other: tuple[nn.Module, OffloadAdamW]
) -> None:
    """Weights and state dicts are the same to the bit."""
    states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
    assert states[0].keys() == states[1].keys()
    named = enumerate(zip(one[0].named_parameters(), other[0].parameters(), strict=True))
    for index, ((name, param), expected) in named:
        assert torch.equal(bits(param), bits(expected)), name
        ours, theirs = states[0].get(index, {}), states[1].get(index, {})
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            assert value.is_cpu
            assert torch.equal(bits(value), bits(theirs[key])), f"{key} of {name}"


def some_have_none(step: int, index: int) -> bool:
    return (step + index) % 3 > 0
