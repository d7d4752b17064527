"""Steps of whole parameters on a GPU have the bits of the host's, however memory lies."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_cases import bits
from stepwell import _core

# What a block of threads takes is 4,096 elements, four at a time.
NUMELS = [1, 3, 4, 6, 1024, 1025, 4096, 4097, 4100, 3 * 4096 + 8, 65_536, 100_003]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 3
# Of weights, gradients and states: elements from an aligned address to where they begin. A thread
# takes four at once where all of them allow it.
AHEAD = [(0, 0, 0), (4, 8, 4), (1, 0, 0), (0, 2, 0), (0, 0, 1), (3, 3, 3)]
# Denormal numbers, and what has no order or no end.
EXTREMES = [0.0, -0.0, 1e-40, -3e-39, 1e-30, 1e30, math.inf, -math.inf, math.nan]


class Params:
    """Parameters with gradients and state; `ahead`: as an entry of `AHEAD`."""

    def __init__(self, numels: list[int], dtype: str, ahead: tuple[int, int, int]) -> None:
        self.numels, self.dtype = numels, dtype
        generator = torch.Generator().manual_seed(7)
        self.weights, self.grads, self.states = [], [], []
        for numel in numels:
            # Of weights and gradients every sixth is extreme.
            values = torch.randn(2, numel, generator=generator)
            values *= 10.0 ** torch.randint(-8, 4, (2, numel), generator=generator)
            is_extreme = torch.rand(2, numel, generator=generator) < 1 / 6
            which = torch.randint(len(EXTREMES), (2, numel), generator=generator)
            values = torch.where(is_extreme, torch.tensor(EXTREMES)[which], values)
            weight, grad = values.to(DTYPES[dtype])
            # The master, of which the weight is rounded, both moments, and a 0.
            state = torch.cat([weight.float(), torch.zeros(2 * numel + 1)])
            self.weights.append(behind(ahead[0], weight))
            self.grads.append(behind(ahead[1], grad))
            self.states.append(behind(ahead[2], state))

    def to(self, device: str) -> Params:
        """Copies of them on a device."""
        there = copy.copy(self)
        there.weights, there.grads, there.states = (
            [behind(each.storage_offset(), each, device) for each in all_of_them]
            for all_of_them in (self.weights, self.grads, self.states)
        )
        return there

    def step(self, steps: _core.DeviceSteps, number: int, hyper: _core.Hyper) -> None:
        count = len(self.numels)
        steps.step(
            [each.data_ptr() for each in self.weights],
            [each.data_ptr() for each in self.grads],
            [each.data_ptr() for each in self.states],
            numels=self.numels,
            dtypes=[self.dtype] * count,
            steps=[number] * count,
            hypers=[hyper] * count,
        )


def behind(ahead: int, values: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A copy of `values`, which begins so many elements behind the beginning of its memory."""
    memory = torch.zeros(ahead + values.numel(), dtype=values.dtype, device=device)
    memory[ahead:] = values
    return memory[ahead:]


def assert_alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """The same bits, but for the payload of a NaN."""
    for ours, theirs in zip(one, other, strict=True):
        there = ours.cpu()
        is_nan = there.isnan() & theirs.isnan()
        differ = bits(there) != bits(theirs)
        assert not (differ.view(is_nan.shape) & ~is_nan).any(), ours.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("decoupled", [True, False])
def test_bits_are_those_of_the_host(
    dtype: str, ahead: tuple[int, int, int], decoupled: bool
) -> None:
    on_host = Params(NUMELS, dtype, ahead)
    on_device = on_host.to("cuda")
    for number in range(1, STEPS + 1):
        hyper = _core.Hyper(
            lr=1e-2 / number,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            decoupled=decoupled,
            grad_scale=0.5,
        )
        on_host.step(_core.DeviceSteps("cpu"), number, hyper)
        on_device.step(_core.DeviceSteps("cuda:0"), number, hyper)
        assert_alike(on_device.weights, on_host.weights)
        assert_alike(on_device.states, on_host.states)
        # The program writes some weights, which are the masters of the next step.
        for params in (on_host, on_device):
            for weight in params.weights:
                weight[:: max(weight.numel() // 3, 1)] = 0.25


@pytest.mark.gpu
def test_more_parameters_than_a_launch_takes_are_stepped_once_each() -> None:
    numels = [1 + 4096 * (index % 3) + index for index in range(300)]
    on_host = Params(numels, "bfloat16", (0, 0, 0))
    on_device = on_host.to("cuda")
    hyper = _core.Hyper(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True)
    on_host.step(_core.DeviceSteps("cpu"), 1, hyper)
    on_device.step(_core.DeviceSteps("cuda:0"), 1, hyper)
    assert_alike(on_device.weights, on_host.weights)
    assert_alike(on_device.states, on_host.states)
