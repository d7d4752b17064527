"""OffloadAdamW(shard=True, tier=Volume(...)): two ranks, each with its rows' state on a volume."""

import copy
import gc
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import stepwell
import torch
import torch.distributed as dist
from optim_ranks import Ranks
from sharded_models import (
    bits,
    load_checkpoint,
    make,
    resumed_bits,
    save_checkpoints,
    train,
    train_alike,
    wrap_core,
)
from stepwell import _core
from stepwell.offload import host_side, sharded_volume
from stepwell.offload.shares import Shares
from stepwell.offload.swapped import Swapped
from stepwell.offload.twins import Twins
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.stop()


@pytest.fixture
def drives(tmp_path):
    folders = [tmp_path / f"drive{index}" for index in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def on_volume(net, drives, *, shard=True, host_bytes_max=3 << 20, moments="fp32", **volume):
    """A sharded optimizer whose state is on a volume, but for what fits beside it."""
    return stepwell.OffloadAdamW(
        net.named_parameters(),
        lr=1e-2,
        clip_norm=0.5,
        moments=moments,
        threads=1,
        shard=shard,
        host_bytes_max=host_bytes_max,
        tier=stepwell.Volume(drives, **volume),
    )


def in_memory(net, **options):
    return stepwell.OffloadAdamW(
        net.named_parameters(), lr=1e-2, clip_norm=0.5, threads=1, **options
    )


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


def pinned_bytes(net):
    """Of this rank's rows: weights and gradients."""
    shares = Shares(dist.get_rank(), dist.get_world_size())
    shares.add(net.parameters())
    return Twins(shares=shares, is_paged=True).nbytes(net.parameters())


# Buffers and a part of the state have room, and the rest has not.
@pytest.mark.parametrize(
    ("dtype", "moments", "durability", "host_kib"),
    [
        (DTYPE, "fp32", "none", 1800),
        (DTYPE, "fp32", "commit", 2400),
        (torch.float32, "fp32", "none", 1400),
        (torch.float32, "q8", "commit", 800),
    ],
    ids=str,
)
def test_bits_are_those_of_training_in_memory(two, drives, dtype, moments, durability, host_kib):
    moved = two.run(same_as_in_memory, drives, dtype, moments, durability, host_kib << 10)
    assert all(read > 0 and written > 0 for read, written in moved)


# ---- going on ----


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


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_a_resumed_run_is_as_if_never_stopped(two, drives, moments):
    assert two.run(first_run, drives, 3, moments) == [3, 3]
    expected = [f"run-{rank}.{member}.stepwell" for rank in range(2) for member in range(2)]
    assert files(drives) == expected
    assert two.run(go_on, drives, 3, moments) == [6, 6]
    assert two.run(go_on, drives, 6, moments) == [9, 9]


def one_commits_and_the_other_does_not(drives, behind, steps):
    """As `behind` were killed in the last steps, before their commits."""
    gc.collect()
    rank = dist.get_rank()
    net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run")
    ddp = DistributedDataParallel(net)
    train(ddp, optimizer, 2)
    optimizer.synchronize()
    aside = drives[0].parent / "aside"
    if rank in behind:
        for member, folder in enumerate(drives):
            name = f"run-{rank}.{member}.stepwell"
            aside.mkdir(exist_ok=True)
            shutil.copy(folder / name, aside / name)
    train(ddp, optimizer, steps, first=2)
    end(optimizer)
    del optimizer
    gc.collect()
    if rank in behind:
        for member, folder in enumerate(drives):
            name = f"run-{rank}.{member}.stepwell"
            shutil.copy(aside / name, folder / name)
    dist.barrier()


@pytest.mark.parametrize("behind", [(0,), (1,)])
def test_ranks_that_are_ahead_go_back(two, drives, behind):
    two.run(one_commits_and_the_other_does_not, drives, behind, 1)
    assert two.run(go_on, drives, 2) == [5, 5]


def resumed_and_not_kept(drives, fail=None):
    """The committed steps; or none, where one rank has this error as it reads its volume."""
    gc.collect()
    net = make(DTYPE)
    if not fail:
        return on_volume(net, drives, name="run", resume=True, keep=False).committed_steps
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():

            def resumed(*_):
                raise fail("cannot be read")

            patched.setattr(Swapped, "_resumed", resumed)
        kind, match = (fail, "be read") if dist.get_rank() else (OSError, "rank 1.* be read|left")
        with pytest.raises(kind, match=match):
            on_volume(net, drives, name="run", resume=True, keep=False)
    return None


def test_what_is_not_to_be_kept_stays_until_it_was_gone_on_from(two, drives):
    two.run(one_commits_and_the_other_does_not, drives, (1,), 1)
    before = files(drives)
    missing = drives[1] / "run-1.1.stepwell"
    missing.rename(missing.with_suffix(".away"))
    refused = partial(refused_on_all, keep=False)
    two.run(refused, drives, "is missing", (ValueError, OSError))
    missing.with_suffix(".away").rename(missing)
    for fail in (OSError, KeyboardInterrupt):
        two.run(resumed_and_not_kept, drives, fail)
        two.run(gc.collect)
        assert files(drives) == before
    # One rank goes back, to files of its own.
    assert two.run(resumed_and_not_kept, drives) == [2, 2]
    two.run(gc.collect)
    assert not files(drives)


def refused_on_all(drives, match, kind=ValueError, **volume):
    gc.collect()
    with pytest.raises(kind, match=match) as raised:
        on_volume(make(DTYPE), drives, **{"name": "run", "resume": True, **volume})
    return str(raised.value)


def test_volumes_of_steps_further_apart_are_refused(two, drives):
    two.run(one_commits_and_the_other_does_not, drives, (1,), 2)
    two.run(refused_on_all, drives, r"at the steps `\[4, 2\]`(.|\n)*hint")
    # They were left as they are.
    two.run(refused_on_all, drives, r"at the steps `\[4, 2\]`(.|\n)*hint")


def test_the_step_that_all_volumes_have():
    common_step = sharded_volume._common_step
    assert common_step([None, None]) is None
    assert common_step([3, 3]) == 3
    assert common_step([4, 3, 4]) == 3
    for steps in ([3, None], [3, 4, 5], [1, 3]):
        with pytest.raises(ValueError, match="not of one run"):
            common_step(steps)


def trained_until_killed(drives, resume, fifo):
    net = make(DTYPE, seed=3 if resume else 0)
    optimizer = on_volume(net, drives, name="run", resume=resume)
    ddp = DistributedDataParallel(net)
    with (fifo if dist.get_rank() == 0 else Path(os.devnull)).open("w") as out:
        for step in range(optimizer.committed_steps, 1000):
            train(ddp, optimizer, 1, first=step)
            print(step, file=out, flush=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_are_killed_go_on_from_one_step(two, drives, tmp_path, order):
    two.run(dist.get_world_size)  # They are started.
    fifo = tmp_path / "steps"
    os.mkfifo(fifo)
    for tasks in two.tasks:
        tasks.put((trained_until_killed, (drives, False, fifo)))
    with fifo.open() as lines:
        step = 0
        for _ in range(3):
            step = int(lines.readline())
        for rank in order:
            two.processes[rank].kill()
            two.processes[rank].join(30)
    two.stop()
    committed = two.run(steps_and_bits, drives)
    assert committed[0] == committed[1]
    assert committed[0] >= step
    assert two.run(go_on, drives, committed[0]) == [committed[0] + 3] * 2


def steps_and_bits(drives):
    net = make(DTYPE, seed=9)
    optimizer = on_volume(net, drives, name="run", resume=True)
    twin, other, _ = reference(optimizer.committed_steps)
    assert_same((net, optimizer), (twin, other))
    return optimizer.committed_steps


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
    own = [ours._host.twins.weight(param).numel() for param in net.parameters()]
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


# ---- failures ----


class NotCommitting:
    """The core of an engine whose commits may fail, of a rank with nothing else to wait for."""

    def __init__(self, core):
        self.core, self.fails = core, False

    def wait(self, *args, **options):
        return self.core.wait(*args, **options)

    def finish(self, **options):
        # Its commit has ended before the test counts the steps that were committed.
        self.core.finish(**options)
        if self.fails:
            raise OSError("no commit here")


def a_commit_that_fails(drives):
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 1, bias=False)
    optimizer = on_volume(net, drives, name="run")
    core = wrap_core(optimizer, NotCommitting)
    train_alike(net, optimizer)
    optimizer.synchronize()
    core.fails = dist.get_rank() == 1
    what = "no commit here" if dist.get_rank() else r"on rank 1 \(`no commit here`\)"
    with pytest.raises(OSError, match=what):
        train_alike(net, optimizer)
        optimizer.synchronize()
    for _ in range(2):
        with pytest.raises(OSError, match=what):
            train_alike(net, optimizer)
    # The next step has begun nowhere.
    return optimizer.committed_steps


def test_no_rank_begins_a_step_before_all_have_committed_the_last(two, drives):
    assert two.run(a_commit_that_fails, drives) == [2, 2]


def a_drive_that_fails(drives):
    net = make(DTYPE)
    ddp = DistributedDataParallel(net)
    optimizer = on_volume(net, drives, host_bytes_max=pinned_bytes(net) + (2 << 20), name="run")
    train(ddp, optimizer, 1)
    optimizer.synchronize()
    if dist.get_rank() == 1:
        os.truncate(drives[1] / "run-1.1.stepwell", 1 << 18)
    what = r"(?s)member `1`.*drive1" if dist.get_rank() else r"(?s)on rank 1 .*member `1`"
    with pytest.raises(OSError, match=what):
        train(ddp, optimizer, 2, first=1)
        optimizer.synchronize()
    for call in (optimizer.step, optimizer.full_state_dict, net.state_dict):
        with pytest.raises(OSError, match=what):
            call()


def test_a_drive_that_fails_on_one_rank_stops_all(two, drives):
    two.run(a_drive_that_fails, drives)
    two.run(refused_on_all, drives, r"rank 1|member `1`", OSError)


def named_on_all(drives, match):
    """What rank 1 cannot make is named to rank 0."""
    gc.collect()
    expected = match if dist.get_rank() else rf"on rank 1: (.|\n)*({match})"
    with pytest.raises((ValueError, OSError), match=expected) as raised:
        on_volume(make(DTYPE), drives, name="run", io_timeout=1.0)
    return type(raised.value).__name__


def without_buffers(drives):
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():
            patched.setattr(_core, "swap_buffers_nbytes", lambda *_, **__: 1 << 40)
        return named_on_all(drives, "buffers of a volume")


def test_what_one_rank_cannot_make_is_named_to_all_and_nothing_is_left(two, drives):
    taken = drives[1] / "run-1.1.stepwell"
    taken.touch()
    assert two.run(named_on_all, drives, r"run-1`(.|\n)*another name") == [
        "OSError",
        "FileExistsError",
    ]
    assert files(drives) == [taken.name]
    taken.unlink()
    assert two.run(without_buffers, drives) == ["OSError", "ValueError"]
    assert not files(drives)


def left_before(drives):
    net = make(DTYPE)
    if dist.get_rank():
        with pytest.raises(ValueError, match="lr"):
            stepwell.OffloadAdamW(
                net.parameters(), lr=-1.0, shard=True, tier=stepwell.Volume(drives)
            )
    else:
        with pytest.raises(OSError, match="rank 1 has left"):
            on_volume(net, drives)


def test_a_rank_that_is_refused_before_the_volumes_are_made_is_named(two, drives):
    two.run(left_before, drives)
    assert not files(drives)


def resumed_on_one_rank(drives):
    gc.collect()
    is_first = dist.get_rank() == 0
    with pytest.raises(ValueError, match=r"at the steps `\[2, None\]`(.|\n)*`resume` on all"):
        on_volume(make(DTYPE), drives, name="run", resume=is_first)


def test_a_resumed_volume_does_not_go_with_a_new_one(two, drives):
    two.run(first_run, drives, 2)
    for path in [*drives[0].glob("run-1*"), *drives[1].glob("run-1*")]:
        path.unlink()
    two.run(resumed_on_one_rank, drives)
    assert len(files(drives)) == 2, "the one that was resumed is there, the new one is not"


def at_another_number_of_ranks(drives):
    gc.collect()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    match = r"for the ranks `\[0, 1\]`(.|\n)*and `\[.\]` share the step(.|\n)*hint"
    refused_on_all(drives, match, shard=alone)


def test_another_number_of_ranks_is_refused_with_a_way_out(two, drives):
    two.run(first_run, drives, 1)
    two.run(at_another_number_of_ranks, drives)
    assert two.run(go_on, drives, 1) == [4, 4]


def on_drives_of_their_own(drives, refused=None):
    """As on hosts of their own, where ranks do not see the files of the others."""
    gc.collect()
    folders = [drives[dist.get_rank()]]
    if refused:
        return refused_on_all(folders, refused, OSError)
    net = make(DTYPE)
    optimizer = on_volume(net, folders, name="run")
    train(DistributedDataParallel(net), optimizer, 1)
    return end(optimizer)


def test_what_is_wrong_with_a_drive_is_not_taken_for_another_number_of_ranks(two, drives):
    assert two.run(on_drives_of_their_own, drives) == [1, 1]
    own = drives[1] / "run-1.0.stepwell"
    own.rename(own.with_suffix(".away"))
    for text in two.run(on_drives_of_their_own, drives, "run-1"):
        assert "for the ranks" not in text
    # Another rank of that host has its drive.
    shutil.copy(drives[0] / "run-0.0.stepwell", drives[1] / "run-0.0.stepwell")
    for text in two.run(on_drives_of_their_own, drives, "run-1"):
        assert "it is missing" in text or "no volume" in text, text
        assert "for the ranks `[0]` in the folders of rank `1`" in text
        assert "its own drives" in text
    own.with_suffix(".away").rename(own)
    os.truncate(own, 1 << 16)
    for text in two.run(on_drives_of_their_own, drives, "run-1.*is truncated"):
        assert "number of ranks" not in text
        assert "for the ranks" not in text


def volumes_of_groups(drives):
    """Two groups of one rank each, whose volumes have one name."""
    gc.collect()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run", shard=alone)
    train_alike(net, optimizer)
    end(optimizer)
    del optimizer
    gc.collect()
    dist.barrier()
    with pytest.raises(ValueError, match="of other parameters") as raised:
        on_volume(torch.nn.Linear(6, 2), drives, name="run", resume=True, shard=alone)
    return str(raised.value)


def test_groups_of_ranks_may_have_volumes_of_one_name(two, drives):
    for text in two.run(volumes_of_groups, drives):
        assert "with their names and shapes" in text
        assert "expected `[" not in text


def uneven_tiers(drives):
    """Of the ranks one has a volume; then both, of which one commits."""
    gc.collect()
    net, rank = make(DTYPE), dist.get_rank()
    with pytest.raises(ValueError, match=r"this rank has (no|a) `tier`(.|\n)*on all ranks"):
        on_volume(net, drives) if rank else in_memory(net, shard=True)
    with pytest.raises(ValueError, match=r"of durability `(none|commit)`, others have not"):
        on_volume(net, drives, durability=("none", "commit")[rank])


def test_ranks_of_which_one_has_a_volume_are_told_at_once(two, drives):
    two.run(uneven_tiers, drives)
    assert not files(drives)


def no_memory_for_rows(drives):
    gc.collect()
    net = make(DTYPE)
    with pytest.MonkeyPatch.context() as patched:
        fetch_rows, count = host_side.fetch_rows, 0

        def fail(*_, **__):
            raise RuntimeError("no memory here")

        def fetch(*args):
            nonlocal count
            count += 1
            # Other parameters have come before.
            with pytest.MonkeyPatch.context() as inner:
                if dist.get_rank() and count == 2:
                    inner.setattr(torch, "empty", fail)
                fetch_rows(*args)

        patched.setattr(host_side, "fetch_rows", fetch)
        kind, match = (RuntimeError, "here") if dist.get_rank() else (OSError, "rank 1 has left")
        with pytest.raises(kind, match=match):
            on_volume(net, drives, name="run", resume=True)


def test_a_rank_that_leaves_while_weights_go_between_them_is_named(two, drives):
    two.run(first_run, drives, 1)
    two.run(no_memory_for_rows, drives)
    assert two.run(go_on, drives, 1) == [4, 4]


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
