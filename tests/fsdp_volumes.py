"""What tests of volumes over FSDP2 share: a model, its shards, and runs with their state there.

Where the ranks have GPUs (`optim_ranks.Ranks`), the model is on them.
"""

import gc
import os
import shutil
from hashlib import blake2b
from pathlib import Path

import pytest
import stepwell
import torch
import torch.distributed as dist
from stepwell._sharding import local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from volume_models import volume_of

DTYPE = torch.bfloat16
LR, CLIP_NORM = 1e-2, 0.5
HOST_BYTES_MAX = 3 << 20
"""Room for weights, gradients, buffers, and a part of the state, or with `commit` all of it."""


with_room_for_some = pytest.mark.parametrize(
    ("dtype", "moments", "durability", "host_kib"),
    [
        (DTYPE, "fp32", "none", 1800),
        (DTYPE, "fp32", "commit", 2400),
        (torch.float32, "fp32", "none", 1400),
        (torch.float32, "q8", "commit", 800),
        (DTYPE, "q8", "commit", 800),
    ],
    ids=str,
)
"""For a test of `same_as_in_memory`: KiB of host memory beside weights and gradients of a rank.

Buffers and a part of the state have room there, and the rest has not.
"""


class Wide(torch.nn.Module):
    """Of two ranks each has more than a chunk of `up`."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(96, 2100)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.down = torch.nn.Linear(2100, 96)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


class Uneven(torch.nn.Module):
    """The second rank has no row of `scale`, and fewer of `last`."""

    def __init__(self):
        super().__init__()
        self.wide = Wide()
        self.last = torch.nn.Linear(96, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.last(self.wide(x)) * self.scale


def sharded(dtype=DTYPE, seed=0, mesh=None):
    torch.manual_seed(seed)
    device = torch.get_default_device().type
    with torch.device("cpu"):
        # The same numbers on all devices.
        net = Uneven().to(dtype).to(device)
    # FSDP2 shards no scalars.
    net.wide.scale = torch.nn.Parameter(net.wide.scale.detach().view(1))
    mesh = mesh or init_device_mesh(device, (dist.get_world_size(),))
    fully_shard(net.wide, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def in_memory(net, **options):
    return stepwell.OffloadAdamW(net, lr=LR, clip_norm=CLIP_NORM, threads=1, **options)


def on_volume(
    net, drives, *, host_bytes_max=HOST_BYTES_MAX, moments="fp32", options=None, **volume
):
    return in_memory(
        net,
        moments=moments,
        host_bytes_max=host_bytes_max,
        tier=volume_of(drives, **volume),
        **(options or {}),
    )


def batch(step, rank, dtype, width=96):
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, width).to(dtype)


def bits(tensor):
    # A digest: lists of bytes take long between processes.
    return blake2b(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def train(net, optimizer, steps, first=0):
    norms = []
    for step in range(first, first + steps):
        net(batch(step, dist.get_rank(), next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


def all_bits(net, optimizer):
    """Of this rank's weights and state, by the number of the parameter."""
    # Which has the fingerprints of the weights as they are.
    states = optimizer.state_dict()["state"]
    found = {"weights": [bits(local(param.detach()).cpu()) for param in net.parameters()]}
    for index, state in states.items():
        for name, value in state.items():
            found[index, name] = float(value) if name == "step" else bits(local(value).cpu())
    return found


def reference(steps, dtype=DTYPE, moments="fp32"):
    net = sharded(dtype)
    optimizer = in_memory(net, moments=moments)
    norms = train(net, optimizer, steps)
    return norms, all_bits(net, optimizer)


def same_as_in_memory(drives, dtype, moments, durability, host_bytes):
    expected_norms, expected = reference(6, dtype, moments)
    net = sharded(dtype)
    # Beside weights and gradients.
    host_bytes_max = host_bytes + 2 * sum(local(param).nbytes for param in net.parameters())
    options = {"moments": moments, "durability": durability}
    optimizer = on_volume(net, drives, host_bytes_max=host_bytes_max, **options)
    norms = train(net, optimizer, 3)
    # From what was looked at, and then from the volume again.
    assert len(all_bits(net, optimizer)) > 1
    norms += train(net, optimizer, 3, first=3)
    assert norms == expected_norms
    timing = optimizer.timing
    assert all_bits(net, optimizer) == expected
    weight = net.wide.up.weight
    for name, value in optimizer.state[weight].items():
        assert name == "step" or value.placements == weight.placements
    return timing["bytes_read"], timing["bytes_written"]


def first_run(drives, steps, moments="fp32"):
    net = sharded()
    optimizer = on_volume(net, drives, moments=moments, name="run")
    train(net, optimizer, steps)
    return end(optimizer)


def go_on(drives, first, moments="fp32", steps=3):
    """As if never stopped."""
    gc.collect()
    dist.barrier()
    net = sharded(seed=9)
    optimizer = on_volume(net, drives, moments=moments, name="run", resume=True)
    assert optimizer.committed_steps == first
    train(net, optimizer, steps, first=first)
    _, expected = reference(first + steps, moments=moments)
    assert all_bits(net, optimizer) == expected
    return end(optimizer)


# ---- volumes, and ranks that end ----


def drives_in(folder):
    folders = [folder / f"drive{index}" for index in range(2)]
    for each in folders:
        each.mkdir()
    return folders


def members(drives, rank):
    """The files of the volume `run` of a rank, and where they are set aside."""
    names = [f"run-{rank}.{member}.stepwell" for member in range(len(drives))]
    aside = drives[0].parent / "aside"
    return [(folder / name, aside / name) for folder, name in zip(drives, names, strict=True)]


def step_and_set_back(begin, drives, behind, steps):
    """Two steps and `steps` more; as the ranks `behind` were killed in these, before their commits.

    `begin`: gives an optimizer with the volume `run`, and what trains it: called with the number of
    steps, and with the first.
    """
    gc.collect()
    optimizer, trained = begin()
    mine = members(drives, dist.get_rank()) if dist.get_rank() in behind else []
    trained(2, 0)
    optimizer.synchronize()
    for path, aside in mine:
        aside.parent.mkdir(exist_ok=True)
        shutil.copy(path, aside)
    trained(steps, 2)
    end(optimizer)
    del optimizer, trained
    gc.collect()
    for path, aside in mine:
        shutil.copy(aside, path)
    dist.barrier()


def told_steps(fifo):
    """What a rank writes its steps to: rank 0 to a pipe."""
    return (fifo if dist.get_rank() == 0 else Path(os.devnull)).open("w")


def kill_in_steps(two, order, fifo, program, *arguments):
    """Kills two ranks that step, one after the other; the last step of which rank 0 has told.

    The program writes each of its steps to `told_steps(fifo)`, its last argument, in a line.
    """
    two.run(dist.get_world_size)  # They are started.
    os.mkfifo(fifo)
    for tasks in two.tasks:
        tasks.put((program, (*arguments, fifo)))
    with fifo.open() as lines:
        step = 0
        for _ in range(3):
            step = int(lines.readline())
        for rank in order:
            two.processes[rank].kill()
            two.processes[rank].join(30)
    two.stop()
    return step


def files(drives):
    return sorted(path.name for folder in drives for path in folder.iterdir())


def end(optimizer):
    """The optimizer's work is over; its volume is free once nothing refers to it."""
    optimizer.synchronize()
    return optimizer.committed_steps
