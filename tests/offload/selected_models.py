"""Models with matrices, norms and biases, stepped with selected channels and exactly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from optim_cases import bits
from stepwell import Deferred, OffloadAdamW
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The host is a device too: there copies are late as well.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 40
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CODECS = ["bf16", "q8"]


class Net(nn.Module):
    """Matrices, a stack of them, norms and biases, in sizes that are multiples of nothing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 33)
        self.norm = nn.LayerNorm(33)
        self.conv = nn.Conv1d(1, 11, 3)
        self.last = nn.Linear(31, 70, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        out: torch.Tensor = self.last(self.conv(hidden[:, None]).mean(1))
        return out


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(DEVICE, dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, WIDTH, generator=generator).to(DEVICE, dtype)
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def drawn(param: torch.Tensor, step: int, index: int) -> torch.Tensor:
    """A gradient that depends on no weight; in each step other rows and columns are large."""
    generator = torch.Generator().manual_seed(100 * step + index)
    grad = torch.randn(param.shape, generator=generator)
    for dim, size in enumerate(param.shape):
        shape = [1] * param.dim()
        shape[dim] = size
        grad *= torch.rand(shape, generator=generator).pow(3)
    return grad.to(DEVICE, param.dtype)


def step_with(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    has_grad: Callable[[int, int], bool] = lambda *_: True,
) -> None:
    # A forward and a backward, whose gradients are replaced.
    loss_of(model, step).backward()
    for index, param in enumerate(model.parameters()):
        param.grad = drawn(param, step, index) if has_grad(step, index) else None
    optimizer.step()
    optimizer.zero_grad()


def assert_same(one: tuple[nn.Module, OffloadAdamW], other: tuple[nn.Module, OffloadAdamW]) -> None:
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


def pair(
    deferred: Deferred, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> list[tuple[nn.Module, OffloadAdamW]]:
    """The same model, stepped as `deferred` says and exactly."""
    model = model_of(dtype)
    options = {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 1.0, **options}
    found = []
    for each, how in ((model, deferred), (copy.deepcopy(model), None)):
        found.append((each, OffloadAdamW(each.parameters(), model=each, deferred=how, **options)))
    return found
