"""OffloadAdamW(shard=True, tier=Volume(...)): two ranks, each with its rows' state on a volume."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from insides import host_weight
from sharded_models import (
    bits,
    load_checkpoint,
    make,
    resumed_bits,
    save_checkpoints,
    train,
    train_alike,
)
from sharded_volumes import (
    DTYPE,
    FITTING,
    assert_same,
    drives_in,
    end,
    in_memory,
    on_volume,
    pinned_bytes,
)
from stepwell import _core
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def drives(tmp_path):
    return drives_in(tmp_path)


def same_as_in_memory(drives, dtype, moments, durability, host_bytes):
    nets = [make(dtype), make(dtype)]
    ddps = [DistributedDataParallel(net) for net in nets]
    options = {"moments": moments, "durability": durability}
    host_bytes_max = pinned_bytes(nets[0]) + host_bytes
    ours = on_volume(nets[0], drives, host_bytes_max=host_bytes_max, **options)
    theirs = in_memory(nets[1], moments=moments)
    assert train(ddps[0], ours, 3) == train(ddps[1], theirs, 3)
    assert_same((nets[0], ours), (nets[1], theirs))
    # From what was looked at, and then from the volume again.
    assert train(ddps[0], ours, 3, first=3) == train(ddps[1], theirs, 3, first=3)
    assert_same((nets[0], ours), (nets[1], theirs))
    timing = ours.timing
    assert timing["bytes_gathered"] > 0
    return timing["bytes_read"], timing["bytes_written"]


@pytest.mark.parametrize(("dtype", "moments", "durability", "host_kib"), FITTING, ids=str)
def test_bits_are_those_of_training_in_memory(two, drives, dtype, moments, durability, host_kib):
    moved = two.run(same_as_in_memory, drives, dtype, moments, durability, host_kib << 10)
    assert all(read > 0 and written > 0 for read, written in moved)


# ---- rows of one rank alone ----


class Uneven(torch.nn.Module):
    """Of two ranks the second has rows of one parameter only, and no rank has any of another."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(6))
        self.second = torch.nn.Parameter(torch.ones(6))
        self.nothing = torch.nn.Parameter(torch.ones(0))


def step_alike(net, optimizer, names):
    for name, param in net.named_parameters():
        param.grad = torch.full_like(param, 0.5) if name in names else None
    optimizer.step()
    optimizer.synchronize()


def steps_of_one_rank_alone(drives):
    """Every step counts on every rank, whichever has rows of what it steps."""
    everything = ("first", "second", "nothing")
    steps = [everything, ("first",), ("second",), ("nothing",), everything]
    net, twin = Uneven(), Uneven()
    ours, theirs = on_volume(net, drives, name="run"), in_memory(twin)
    own = [host_weight(ours, param).numel() for param in net.parameters()]
    for nth, names in enumerate(steps):
        step_alike(net, ours, names)
        step_alike(twin, theirs, names)
        assert ours.committed_steps == nth + 1
    del ours
    gc.collect()
    dist.barrier()
    net = Uneven()
    ours = on_volume(net, drives, name="run", resume=True)
    assert ours.committed_steps == len(steps)
    counts = [int(state["step"]) for state in ours.full_state_dict(rank=None)["state"].values()]
    # A volume has no count of what has no elements.
    assert counts == [3, 3, 3]
    step_alike(net, ours, ("first", "second"))
    step_alike(twin, theirs, ("first", "second"))
    for name in ("first", "second"):
        assert torch.equal(getattr(net, name), getattr(twin, name))
    return own


def test_a_step_counts_on_ranks_that_have_none_of_its_rows(two, drives):
    assert two.run(steps_of_one_rank_alone, drives) == [[6, 0, 0], [0, 6, 0]]


def no_rows_at_all(drives):
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 1, bias=False)
    optimizer = on_volume(net, drives, name="run")
    for _ in range(2):
        train_alike(net, optimizer)
    assert end(optimizer) == 2
    del optimizer
    gc.collect()
    dist.barrier()
    again = torch.nn.Linear(6, 1, bias=False)
    optimizer = on_volume(again, drives, name="run", resume=True)
    assert torch.equal(again.weight, net.weight)
    train_alike(again, optimizer)
    return end(optimizer)


def test_a_rank_without_rows_has_a_volume_all_the_same(two, drives):
    assert two.run(no_rows_at_all, drives) == [3, 3]


# ---- checkpoints ----


def saved(drives, folder):
    net = make(DTYPE)
    optimizer = on_volume(
        net, drives, durability="none", host_bytes_max=pinned_bytes(net) + (1800 << 10)
    )
    train(DistributedDataParallel(net), optimizer, 2)
    save_checkpoints(folder, net, optimizer)
    return resumed_bits(net, optimizer)


def loaded(drives, folder):
    found = []
    for kind in ("dcp", "whole"):
        net = make(DTYPE, seed=7)
        optimizer = on_volume(net, drives)
        load_checkpoint(folder, kind, net, optimizer)
        found.append(resumed_bits(net, optimizer))
        # The step after that has what was loaded from the volume.
        found.append(resumed_bits(net, optimizer))
    return found


def loaded_in_memory(folder):
    net = make(DTYPE, seed=7)
    optimizer = in_memory(net)
    load_checkpoint(folder, "whole", net, optimizer)
    return [resumed_bits(net, optimizer) for _ in range(2)]


def test_checkpoints_are_saved_and_loaded(two, drives, tmp_path):
    first, second = two.run(saved, drives, tmp_path)
    assert first == second
    expected = two.run(loaded_in_memory, tmp_path)[0]
    assert expected[0] == first
    for found in two.run(loaded, drives, tmp_path):
        assert found == expected * 2


def no_memory_for_the_state(drives):
    net = make(DTYPE)
    optimizer = on_volume(net, drives)
    train_alike(net, optimizer)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():
            patched.setattr(_core, "free_memory_bytes", lambda: 1000)
        match = "bytes of host memory as tensors"
        kind = ValueError if dist.get_rank() else OSError
        with pytest.raises(kind, match=match if dist.get_rank() else f"on rank 1: .*{match}"):
            optimizer.full_state_dict()
    # The ranks are together.
    found = optimizer.full_state_dict(rank=None)
    train_alike(net, optimizer)
    return len(found["state"]), end(optimizer)


def test_a_rank_that_cannot_read_its_state_is_named_and_all_go_on(two, drives):
    assert two.run(no_memory_for_the_state, drives) == [(5, 2)] * 2


def back_to_a_kept_state(drives, durability):
    net = make(DTYPE)
    optimizer = on_volume(net, drives, durability=durability)
    ddp = DistributedDataParallel(net)
    train(ddp, optimizer, 2)
    kept = optimizer.state_dict(), copy.deepcopy(net.state_dict())
    if durability == "none":
        # A part of the state is in memory.
        kept = copy.deepcopy(kept)
    norms = train(ddp, optimizer, 2, first=2)
    optimizer.load_state_dict(kept[0])
    net.load_state_dict(kept[1])
    assert train(ddp, optimizer, 2, first=2) == norms
    end(optimizer)
    return [bits(param) for param in net.parameters()]


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_ranks_go_back_to_a_state_that_they_have_kept(two, drives, durability):
    first, second = two.run(back_to_a_kept_state, drives, durability)
    assert first == second
