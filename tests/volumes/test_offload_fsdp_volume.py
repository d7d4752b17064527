"""OffloadAdamW(tier=Volume(...)) over FSDP2: two ranks, each with its shards' state on a volume."""

import gc
import logging
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import stepwell
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_volumes import (
    CLIP_NORM,
    DTYPE,
    HOST_BYTES_MAX,
    all_bits,
    batch,
    drives_in,
    end,
    files,
    first_run,
    go_on,
    in_memory,
    kill_in_steps,
    members,
    on_volume,
    reference,
    same_as_in_memory,
    sharded,
    step_and_set_back,
    told_steps,
    train,
    with_room_for_some,
)
from stepwell.store import sharded_volume
from stepwell.store.swapped import Swapped
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def drives(tmp_path):
    return drives_in(tmp_path)


@with_room_for_some
def test_bits_are_those_of_training_in_memory(two, drives, dtype, moments, durability, host_kib):
    moved = two.run(same_as_in_memory, drives, dtype, moments, durability, host_kib << 10)
    assert all(read > 0 and written > 0 for read, written in moved)


def deferred(drives):
    """Forwards of shards are not seen, so every step is exact."""
    expected_norms, expected = reference(4)
    net = sharded()
    optimizer = on_volume(
        net,
        drives,
        durability="none",
        options={"deferred": stepwell.Deferred(interval=2), "accumulation_steps": 1},
    )
    assert train(net, optimizer, 4) == expected_norms
    assert all_bits(net, optimizer) == expected


def test_deferred_updates_have_the_bits_too(two, drives):
    two.run(deferred, drives)


# ---- runs that go on ----


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_a_resumed_run_is_as_if_never_stopped(two, drives, moments):
    assert two.run(first_run, drives, 3, moments) == [3, 3]
    expected = [f"run-{rank}.{member}.stepwell" for rank in range(2) for member in range(2)]
    assert files(drives) == expected
    assert two.run(go_on, drives, 3, moments) == [6, 6]
    assert two.run(go_on, drives, 6, moments) == [9, 9]


def commits_between(drives):
    """Commits where the program says so, beside those of each third step."""
    net = sharded()
    optimizer = on_volume(net, drives, name="run", commit_interval=3)
    found = []
    for step in range(4):
        train(net, optimizer, 1, step)
        if step == 1:
            optimizer.commit()
        found.append(end(optimizer))
    return found


def test_steps_between_commits_are_made_again(two, drives):
    assert two.run(commits_between, drives) == [[1, 2, 3, 3]] * 2
    # The end commits the last step.
    assert two.run(go_on, drives, 4) == [7, 7]


def one_is_behind(drives, steps, interval=1):
    """As rank 1 were killed in the last steps, before their commits."""

    def begin():
        net = sharded()
        optimizer = on_volume(net, drives, name="run", commit_interval=interval)
        return optimizer, partial(train, net, optimizer)

    step_and_set_back(begin, drives, (1,), steps)


def refused_on_all(drives, match, kind=ValueError):
    gc.collect()
    with pytest.raises(kind, match=match):
        on_volume(sharded(), drives, name="run", resume=True)


def test_ranks_that_are_ahead_go_back(two, drives):
    two.run(one_is_behind, drives, 1)
    assert two.run(go_on, drives, 2) == [5, 5]


def to_step(drives, last):
    """Goes on, or begins, and ends the optimizer behind this step."""
    gc.collect()
    is_new = not files(drives)
    dist.barrier()
    net = sharded(seed=0 if is_new else 1)
    optimizer = on_volume(net, drives, name="run", resume=not is_new, commit_interval=8)
    first = optimizer.committed_steps
    train(net, optimizer, last - first, first)
    end(optimizer)
    return first


def test_what_ranks_have_gone_back_from_is_no_commit_to_go_to(two, drives):
    """Two runs, in each of which one rank is killed at step 10, behind the commit of step 8."""
    two.run(to_step, drives, 8)
    for rank in (1, 0):
        for path, aside in members(drives, rank):
            aside.parent.mkdir(exist_ok=True)
            shutil.copy(path, aside)
        assert two.run(to_step, drives, 10) == [8, 8]
        two.run(gc.collect)
        for path, aside in members(drives, rank):
            shutil.copy(aside, path)
        # The other one goes back, and has what it goes back from beside it.
        two.run(to_step, drives, 8)
    two.run(gc.collect)
    assert two.run(go_on, drives, 8) == [11, 11]


def resumed_and_not_kept(drives, fail=None):
    """The committed steps; or none, where one rank has this error as it reads its volume."""
    gc.collect()
    net = sharded()
    if not fail:
        return on_volume(net, drives, name="run", resume=True, keep=False).committed_steps
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():

            def resumed(*_):
                raise fail("cannot be read")

            patched.setattr(Swapped, "_resumed", resumed)
        kind, match = (fail, "be read") if dist.get_rank() else (OSError, "on rank 1: .* be read")
        with pytest.raises(kind, match=match):
            on_volume(net, drives, name="run", resume=True, keep=False)
    return None


def test_what_is_not_to_be_kept_stays_until_it_was_gone_on_from(two, drives):
    two.run(one_is_behind, drives, 1)
    before = files(drives)
    for fail in (OSError, RuntimeError):
        two.run(resumed_and_not_kept, drives, fail)
        two.run(gc.collect)
        assert files(drives) == before
    # One rank goes back, to files of its own.
    assert two.run(resumed_and_not_kept, drives) == [2, 2]
    two.run(gc.collect)
    assert not files(drives)


def swapped_ranks(drives):
    for member, folder in enumerate(drives):
        paths = [folder / f"run-{rank}.{member}.stepwell" for rank in range(2)]
        aside = folder / "aside"
        paths[0].rename(aside)
        paths[1].rename(paths[0])
        aside.rename(paths[1])


def test_a_volume_of_other_shards_is_refused(two, drives):
    two.run(first_run, drives, 1)
    swapped_ranks(drives)
    two.run(refused_on_all, drives, "run", (ValueError, OSError))


# ---- plain parameters beside shards: each rank has its own, and its own gradients of them ----


def with_own(seed=0):
    net = sharded(seed=seed)
    net.own = torch.nn.Parameter(torch.ones(300, dtype=DTYPE))
    return net


def backward(net, step):
    net(batch(step, dist.get_rank(), DTYPE)).square().mean().backward()


def train_own(net, optimizer, step, *, shards):
    """A step in which rank 1 alone has a gradient of its own parameter."""
    if shards:
        backward(net, step)
    if dist.get_rank() == 1:
        net.own.grad = torch.full_like(net.own, 1 / (step + 1))
    optimizer.step()
    optimizer.zero_grad()


def own_run(drives, shards, first=0, **volume):
    gc.collect()
    dist.barrier()
    net = with_own(seed=first)
    optimizer = on_volume(net, drives, **volume)
    for step, has_shards in enumerate(shards, first):
        train_own(net, optimizer, step, shards=has_shards)
    return all_bits(net, optimizer), end(optimizer)


def own_runs(drives, shards, more):
    """A run that goes on, and then one that was never stopped."""
    _, first = own_run(drives, shards, name="run")
    found, last = own_run(drives, more, first, name="run", resume=True)
    expected, _ = own_run(drives, [*shards, *more], name="whole")
    assert found == expected
    return first, last


@pytest.mark.parametrize(
    "shards",
    [[True, True], [True, False, True], [True, False, False, True], [True, False]],
    ids=str,
)
def test_ranks_go_on_with_other_updates_of_plain_parameters(two, drives, shards):
    more = [False, True]
    count = len(shards)
    # Rank 0 never steps the parameter of its own, and its weight is that of the program.
    assert two.run(own_runs, drives, shards, more) == [(count, count + 2)] * 2


def one_more(drives, number):
    """Rank 1 has a parameter more."""
    gc.collect()
    dist.barrier()
    net = with_own(seed=number)
    if dist.get_rank() == 0:
        del net.own
    optimizer = on_volume(net, drives, name="run", resume=number > 0)
    backward(net, number)
    optimizer.step()
    return end(optimizer)


def test_ranks_with_other_plain_parameters_go_on(two, drives):
    assert two.run(one_more, drives, 0) == [1, 1]
    assert two.run(one_more, drives, 1) == [2, 2]


def a_nan_of_its_own(drives, nonfinite, has_volume):
    gc.collect()
    net = with_own()
    options = {"nonfinite": nonfinite}
    if has_volume:
        optimizer = on_volume(net, drives, name="run", options=options)
    else:
        optimizer = in_memory(net, **options)
    train_own(net, optimizer, 0, shards=True)
    before = all_bits(net, optimizer)
    backward(net, 1)
    if dist.get_rank() == 1:
        net.own.grad = torch.full_like(net.own, torch.nan)
    if nonfinite == "skip":
        optimizer.step()
    else:
        match = "norm of the gradients is `nan`" if dist.get_rank() else "of another rank"
        with pytest.raises(ValueError, match=match):
            optimizer.step()
    assert all_bits(net, optimizer) == before
    return optimizer.skipped_steps


@pytest.mark.parametrize("has_volume", [False, True])
@pytest.mark.parametrize(("nonfinite", "num_skipped"), [("skip", 1), ("raise", 0)])
def test_a_nan_of_one_rank_is_that_of_all(two, drives, nonfinite, num_skipped, has_volume):
    assert two.run(a_nan_of_its_own, drives, nonfinite, has_volume) == [num_skipped] * 2


def warnings_of_clipping(clip_norm):
    """What is said in two steps in which rank 1 has a large gradient of its own."""
    net = with_own()
    optimizer = in_memory(net)
    optimizer.clip_norm = clip_norm
    records = []
    logger = logging.getLogger("stepwell")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    for step in range(2):
        train_own(net, optimizer, step, shards=True)
    logger.removeHandler(handler)
    return records


def test_shards_that_ranks_clip_differently_are_warned_of_once(two):
    for found in two.run(warnings_of_clipping, CLIP_NORM):
        (message,) = found
        assert "clip_norm scales gradients by" in message
    assert two.run(warnings_of_clipping, None) == [[], []]


# ---- failures ----


def a_drive_that_fails(drives, found_inf):
    net = sharded()
    optimizer = on_volume(net, drives, name="run")
    train(net, optimizer, 1)
    optimizer.synchronize()
    rank = dist.get_rank()
    if rank == 1:
        os.truncate(drives[1] / "run-1.1.stepwell", 1 << 18)
    net(batch(1, rank, DTYPE)).square().mean().backward()
    optimizer.step()
    # The step has failed on rank 1, and is committed on rank 0; the next one begins on neither.
    for param in net.parameters():
        param.grad = None
    if found_inf:
        # As GradScaler has it. Rank 0 skips the step, and is there to hear of the failure.
        optimizer.found_inf = torch.ones(())
        if not rank:
            optimizer.step()
            return optimizer.committed_steps
    kind, match = (OSError, r"(?s)member `1`.*drive1") if rank else (ValueError, "another rank")
    with pytest.raises(kind, match=match):
        optimizer.step()
    return optimizer.committed_steps


@pytest.mark.parametrize("found_inf", [False, True])
def test_a_drive_that_fails_on_one_rank_stops_all(two, drives, found_inf):
    assert two.run(a_drive_that_fails, drives, found_inf) == [2, 1]


def too_little_memory(drives, in_groups):
    gc.collect()
    net = sharded()
    named = list(net.named_parameters())
    rank = dist.get_rank()
    kind, match = (ValueError, "host_bytes_max") if rank else (OSError, "on rank 1: .*bytes")
    with pytest.raises(kind, match=match):
        stepwell.OffloadAdamW(
            [{"params": [each]} for each in named] if in_groups else named,
            host_bytes_max=1 << 13 if rank else HOST_BYTES_MAX,
            tier=stepwell.Volume(drives, name="run"),
        )


@pytest.mark.parametrize("in_groups", [False, True])
def test_a_rank_with_too_little_memory_is_told_to_the_others(two, drives, in_groups):
    two.run(too_little_memory, drives, in_groups)
    assert files(drives) == []
    # The ranks are not apart.
    assert two.run(first_run, drives, 1) == [1, 1]


def hybrid_shards(drives):
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    net = sharded(mesh=hybrid)
    optimizer = on_volume(net, drives, name="hybrid")
    train(net, optimizer, 2)
    return end(optimizer)


def test_meshes_of_two_dimensions_step_together(two, drives):
    assert two.run(hybrid_shards, drives) == [2, 2]


def mesh_of(ranks, *, ndim=1):
    """As `ranks_of` sees a mesh."""
    return SimpleNamespace(
        mesh=torch.tensor(ranks), ndim=ndim, get_group=lambda: f"the group of {ranks}"
    )


MESHES = {
    "all ranks": ([mesh_of([0, 1, 2, 3])], None),
    "all ranks, two dimensions": ([mesh_of([[0, 1], [2, 3]], ndim=2)], None),
    "all ranks and some": ([mesh_of([0, 1]), mesh_of([0, 1, 2, 3])], None),
    "some": ([mesh_of([2, 3])], "the group of [2, 3]"),
    "some and others": ([mesh_of([0, 1]), mesh_of([0, 2])], "refused"),
    "some, two dimensions": ([mesh_of([[0, 1]], ndim=2)], "refused"),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_ranks_of_meshes_are_all_or_those_of_one(monkeypatch, name):
    meshes, expected = MESHES[name]

    def ranks(group):
        return SimpleNamespace(group=group, ranks=[3, 2] if group else [0, 1, 2, 3])

    monkeypatch.setattr(sharded_volume, "meshes", lambda _: meshes)
    monkeypatch.setattr(sharded_volume, "Ranks", ranks)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    if expected == "refused":
        assert sharded_volume.ranks_of([], commits=False) is None
        with pytest.raises(ValueError, match="hint"):
            sharded_volume.ranks_of([], commits=True)
        return
    found = sharded_volume.ranks_of([], commits=True)
    assert found.group == expected
    assert sharded_volume.ranks_of([], commits=True, known=found) is found
    others = SimpleNamespace(ranks=[0, 1])
    assert sharded_volume.ranks_of([], commits=True, known=others) is not others


def trained_until_killed(drives, fifo):
    net = sharded()
    optimizer = on_volume(net, drives, name="run")
    with told_steps(fifo) as out:
        for step in range(1000):
            train(net, optimizer, 1, first=step)
            print(step, file=out, flush=True)


def resumed_steps(drives):
    gc.collect()
    return on_volume(sharded(seed=9), drives, name="run", resume=True).committed_steps


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_are_killed_go_on_from_one_step(two, drives, tmp_path, order):
    step = kill_in_steps(two, order, tmp_path / "steps", trained_until_killed, drives)
    first, second = two.run(resumed_steps, drives)
    assert first == second >= step
    assert two.run(go_on, drives, first) == [first + 3] * 2


# ---- checkpoints ----


def saved(drives, folder):
    net = sharded()
    optimizer = on_volume(net, drives, durability="none")
    train(net, optimizer, 2)
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def loaded(drives, folder):
    gc.collect()
    net = sharded(seed=4)
    optimizer = on_volume(net, drives, durability="none")
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    train(net, optimizer, 3, first=2)
    _, expected = reference(5)
    assert all_bits(net, optimizer) == expected


def test_checkpoints_of_torch_have_the_state(two, drives, tmp_path):
    folder = tmp_path / "checkpoint"
    two.run(partial(saved, folder=folder), drives)
    two.run(partial(loaded, folder=folder), drives)
