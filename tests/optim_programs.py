"""What random programs train, read and write (`test_optim_programs`)."""

import copy
import io
from dataclasses import dataclass

import stepwell
import torch
from optim_cases import bits


class Part(torch.nn.Module):
    """A weight whose gradient is the input, whatever the weight is."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return (self.weight * x).sum().float()


class Net(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.parts = torch.nn.ModuleList(Part(weight) for weight in weights)

    def forward(self, inputs):
        terms = (part(x) for part, x in zip(self.parts, inputs, strict=True) if x is not None)
        return sum(terms, torch.zeros((), dtype=torch.float32))


@dataclass
class Run:
    """One of the two models, and what it is trained with."""

    net: Net
    optimizer: torch.optim.Optimizer
    average: list

    @property
    def is_offloaded(self):
        return isinstance(self.optimizer, stepwell.OffloadAdamW)

    @property
    def params(self):
        return [part.weight for part in self.net.parts]

    def synchronize(self):
        if self.is_offloaded:
            self.optimizer.synchronize()


def values(seed, shape, dtype, kind="plain"):
    """Random numbers that depend on the arguments only."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator, dtype=torch.float32)
    if kind == "zero":
        found.zero_()
    elif kind == "small":
        found *= 1e-4
    elif kind == "large":
        found = found.clamp(-2, 2) * (2e4 if dtype == torch.float16 else 1e17)
    elif found.numel() and kind in ("nan", "inf"):
        found.view(-1)[seed % found.numel()] = float(kind)
    return found.to(dtype)


def average(run):
    """An average of the weights over the reads."""
    params = [param.detach() for param in run.params]
    run.average = [
        0.5 * (before + param) if before.shape == param.shape else param.clone()
        for before, param in zip(run.average, params, strict=False)
    ] + [param.clone() for param in params[len(run.average) :]]
    return run.average


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def state_of(run, param):
    state = run.optimizer.state.get(param, {})
    # On purpose: beside a device fingerprints are taken when somebody asks for a state dict.
    return {name: value for name, value in state.items() if name != "fingerprints"}


READS = {
    "clone": lambda run: [param.clone() for param in run.params],
    "data": lambda run: [param.data.clone() for param in run.params],
    "norm": lambda run: [param.norm() for param in run.params],
    "numpy": lambda run: [bits(param).numpy().tobytes() for param in run.params],
    "deepcopy": lambda run: list(copy.deepcopy(run.net).state_dict().values()),
    "torch.save": lambda run: list(saved(run.net).state_dict().values()),
    "state_dict": lambda run: [value.clone() for value in run.net.state_dict().values()],
    "vector": lambda run: torch.nn.utils.parameters_to_vector(run.params).clone(),
    "average": average,
    "item": lambda run: [param.view(-1)[0].item() for param in run.params if param.numel()],
    "state": lambda run: [state_of(run, param) for param in run.params],
}


@torch.no_grad()
def _copy(param, new):
    param.copy_(new)


@torch.no_grad()
def _halve(param, _):
    param.mul_(0.5)


@torch.no_grad()
def _by_view(param, new):
    param.view(-1)[:] = new.view(-1)


@torch.no_grad()
def _same(param, _):
    # Of a NaN arithmetic would write other bits: one element, of which AdamW cannot know.
    param.copy_(param.detach().clone())


def _swap(param, new):
    param.data = new.clone()


WRITES = {
    "copy_": _copy,
    "mul_": _halve,
    "view": _by_view,
    "same": _same,
    "data": _swap,
    "zeros_": lambda param, _: torch.nn.init.zeros_(param),
}


def other_values(seed, param):
    """Values for a parameter, of which none is what is there, or was there before a write.

    `AdamW` drops the trailing bits of a chunk that was written, and beside a device those of the
    elements that differ from those of the last step. So what is compared writes all of them.
    """
    known = vars(param).setdefault("known", [])
    known.append(param.detach().clone())
    new = values(seed, param.shape, param.dtype)
    while (is_known := sum(new == each for each in known if each.shape == new.shape) > 0).any():
        new = torch.where(is_known, new + 1, new)
    return new


def written(how, index, seed):
    """A function that writes a parameter of a run."""

    def act(run):
        param = run.params[index % len(run.params)]
        WRITES[how](param, other_values(seed, param))

    return act
