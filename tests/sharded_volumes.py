"""What tests of ranks with a volume each share: models on them, runs that end and go on."""

import gc
import os
import shutil
from pathlib import Path

import pytest
import stepwell
import torch
import torch.distributed as dist
from sharded_models import make, train
from stepwell.ranks.shares import Shares
from stepwell.store.twins import Twins
from torch.nn.parallel import DistributedDataParallel
from volume_models import volume_of

DTYPE = torch.bfloat16
FITTING = [
    (DTYPE, "fp32", "none", 1800),
    (DTYPE, "fp32", "commit", 2400),
    (torch.float32, "fp32", "none", 1400),
    (torch.float32, "q8", "commit", 800),
]
"""Dtype, moments, durability, and KiB of host memory beside weights and gradients of half a `Wide`.

Buffers and a part of the state have room there, and the rest has not.
"""


def drives_in(folder):
    folders = [folder / f"drive{index}" for index in range(2)]
    for each in folders:
        each.mkdir()
    return folders


def on_volume(net, drives, *, shard=True, host_bytes_max=3 << 20, moments="fp32", **volume):
    """A sharded optimizer whose state is on a volume, but for what fits beside it."""
    return stepwell.OffloadAdamW(
        net,
        lr=1e-2,
        clip_norm=0.5,
        moments=moments,
        threads=1,
        shard=shard,
        host_bytes_max=host_bytes_max,
        tier=volume_of(drives, **volume),
    )


def in_memory(net, **options):
    return stepwell.OffloadAdamW(net, lr=1e-2, clip_norm=0.5, threads=1, **options)


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


def assert_same(ours, theirs):
    """Models with their optimizers: weights, and the whole state of the ranks."""
    (net, optimizer), (twin, reference) = ours, theirs
    optimizer.synchronize()
    reference.synchronize()
    for mine, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, expected)
    whole, expected = optimizer.full_state_dict(rank=None), reference.state_dict()
    assert whole["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert whole["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(whole["state"][index][name], value), (index, name)


def pinned_bytes(net):
    """Of this rank's rows: weights and gradients."""
    shares = Shares(dist.get_rank(), dist.get_world_size())
    shares.add(net.parameters())
    return Twins(shares=shares, is_paged=True).nbytes(net.parameters())


def reference(steps, first=0, moments="fp32"):
    """A model that was trained without a volume for so many steps."""
    net = make(DTYPE)
    optimizer = in_memory(net, moments=moments)
    ddp = DistributedDataParallel(net)
    train(ddp, optimizer, steps, first)
    return net, optimizer, ddp


def first_run(drives, steps, moments="fp32"):
    net = make(DTYPE)
    optimizer = on_volume(net, drives, moments=moments, name="run")
    train(DistributedDataParallel(net), optimizer, steps)
    return end(optimizer)


def go_on(drives, expected_steps, moments="fp32"):
    """Resumes, and trains on as a run that never stopped."""
    gc.collect()
    net = make(DTYPE, seed=9)
    optimizer = on_volume(net, drives, moments=moments, name="run", resume=True)
    assert optimizer.committed_steps == expected_steps
    twin, other, other_ddp = reference(expected_steps, moments=moments)
    assert_same((net, optimizer), (twin, other))
    norms = train(DistributedDataParallel(net), optimizer, 3, first=expected_steps)
    assert norms == train(other_ddp, other, 3, first=expected_steps)
    assert_same((net, optimizer), (twin, other))
    return end(optimizer)


def refused_on_all(drives, match, kind=ValueError, **volume):
    gc.collect()
    with pytest.raises(kind, match=match) as raised:
        on_volume(make(DTYPE), drives, **{"name": "run", "resume": True, **volume})
    return str(raised.value)
