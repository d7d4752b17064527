"""What tests of ranks that share a step train, and what they look at."""

from hashlib import blake2b

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from insides import core_of
from stepwell.ranks import gathering
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Wide(torch.nn.Module):
    """Pieces of chunks: one parameter for both ranks, uneven; small ones of one rank each."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(96, 2100)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.down = torch.nn.Linear(2100, 96)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def make(dtype=torch.float32, seed=0, kind=Wide):
    torch.manual_seed(seed)
    return kind().to(dtype)


def batch(step, rank, dtype, width=96):
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, width).to(dtype)


def train(model, optimizer, steps, first=0):
    dtype = next(model.parameters()).dtype
    norms = []
    for step in range(first, first + steps):
        model(batch(step, dist.get_rank(), dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


def train_alike(net, optimizer):
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def bits(tensor):
    # A digest: lists of bytes take long between processes.
    return blake2b(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def resumed_bits(net, optimizer):
    """Weights and state after a step that does not depend on the number of ranks."""
    for seed, param in enumerate(net.parameters()):
        torch.manual_seed(seed)
        param.grad = torch.randn(param.shape).to(param.dtype)
    optimizer.step()
    state = optimizer.full_state_dict(rank=None)["state"]
    found = [bits(param) for param in net.parameters()]
    return found + [bits(state[index][name]) for index in state for name in sorted(state[index])]


def wrap_core(optimizer, kind):
    """The `kind` that the gathering thread of a new optimizer has as the engine's core."""
    made, cores = gathering._GatherThread, []

    def wrapped(core, *rest, **options):
        cores.append(kind(core))
        return made(cores[-1], *rest, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathering, "_GatherThread", wrapped)
        core_of(optimizer)
    return cores[-1]


def save_checkpoints(folder, net, optimizer):
    """The state of all ranks, by torch.distributed.checkpoint and whole; whether it is here."""
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp")
    whole = optimizer.full_state_dict()
    if whole:
        torch.save({"model": net.state_dict(), "optimizer": whole}, folder / "whole.pt")
    return bool(whole)


def load_checkpoint(folder, kind, net, optimizer):
    """What `save_checkpoints` has saved; `kind` is "dcp" or "whole"."""
    if kind == "dcp":
        model_state, optimizer_state = get_state_dict(net, optimizer)
        loaded = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=folder / "dcp")
        set_state_dict(
            net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
    else:
        saved = torch.load(folder / "whole.pt")
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
