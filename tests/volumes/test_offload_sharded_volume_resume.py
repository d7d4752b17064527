"""Ranks that go on from their volumes, or do not: whichever is ahead, gone or of another run."""

import gc
import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded_models import make, train, train_alike
from sharded_volumes import (
    DTYPE,
    assert_same,
    drives_in,
    end,
    files,
    first_run,
    go_on,
    kill_in_steps,
    members,
    on_volume,
    reference,
    refused_on_all,
    step_and_set_back,
    told_steps,
)
from stepwell.store.swapped import Swapped
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def drives(tmp_path):
    return drives_in(tmp_path)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_a_resumed_run_is_as_if_never_stopped(two, drives, moments):
    assert two.run(first_run, drives, 3, moments) == [3, 3]
    expected = [f"run-{rank}.{member}.stepwell" for rank in range(2) for member in range(2)]
    assert files(drives) == expected
    assert two.run(go_on, drives, 3, moments) == [6, 6]
    assert two.run(go_on, drives, 6, moments) == [9, 9]


def commits_between(drives):
    """Commits where the program says so, beside those of each third step."""
    net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run", commit_interval=3)
    ddp = DistributedDataParallel(net)
    found = []
    for step in range(4):
        train(ddp, optimizer, 1, step)
        if step == 1:
            optimizer.commit()
        found.append(end(optimizer))
    return found


def test_steps_between_commits_are_made_again(two, drives):
    assert two.run(commits_between, drives) == [[1, 2, 3, 3]] * 2
    # The end commits the last step.
    assert two.run(go_on, drives, 4) == [7, 7]


def one_commits_and_the_other_does_not(drives, behind, steps, interval=1):
    """As `behind` were killed in the last steps, before their commits."""

    def begin():
        net = make(DTYPE)
        optimizer = on_volume(net, drives, name="run", commit_interval=interval)
        return optimizer, partial(train, DistributedDataParallel(net), optimizer)

    step_and_set_back(begin, drives, behind, steps)


@pytest.mark.parametrize("behind", [(0,), (1,)])
def test_ranks_that_are_ahead_go_back(two, drives, behind):
    two.run(one_commits_and_the_other_does_not, drives, behind, 1)
    assert two.run(go_on, drives, 2) == [5, 5]


def test_ranks_that_are_a_commit_ahead_go_back(two, drives):
    two.run(one_commits_and_the_other_does_not, drives, (1,), 2, 2)
    assert two.run(go_on, drives, 2) == [5, 5]


def to_step(drives, last):
    """Goes on, or begins, and ends the optimizer behind this step."""
    gc.collect()
    net = make(DTYPE, seed=1)
    is_new = not files(drives)
    dist.barrier()
    if is_new:
        net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run", resume=not is_new, commit_interval=8)
    first = optimizer.committed_steps
    train(DistributedDataParallel(net), optimizer, last - first, first)
    optimizer.synchronize()
    return first


def test_what_ranks_have_gone_back_from_is_no_commit_to_go_to(two, drives):
    """Two runs, in each of which one rank is killed at step 10, behind the commit of step 8."""
    two.run(to_step, drives, 8)
    for rank in (1, 0):
        for path, aside in members(drives, rank):
            aside.parent.mkdir(exist_ok=True)
            shutil.copy(path, aside)
        assert two.run(to_step, drives, 10) == [8, 8]
        for path, aside in members(drives, rank):
            shutil.copy(aside, path)
        # The other one goes back, and has what it goes back from beside it.
        two.run(to_step, drives, 8)
    assert two.run(go_on, drives, 8) == [11, 11]


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


def test_volumes_of_steps_further_apart_are_refused(two, drives):
    two.run(one_commits_and_the_other_does_not, drives, (1,), 2)
    two.run(refused_on_all, drives, r"at the steps `\[4, 2\]`(.|\n)*hint")
    # They were left as they are.
    two.run(refused_on_all, drives, r"at the steps `\[4, 2\]`(.|\n)*hint")


def trained_until_killed(drives, interval, fifo):
    net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run", commit_interval=interval)
    ddp = DistributedDataParallel(net)
    with told_steps(fifo) as out:
        for step in range(1000):
            train(ddp, optimizer, 1, first=step)
            print(step, file=out, flush=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("order", "interval"), [((0, 1), 1), ((1, 0), 1), ((1, 0), 2)])
def test_ranks_that_are_killed_go_on_from_one_step(two, drives, tmp_path, order, interval):
    step = kill_in_steps(two, order, tmp_path / "steps", trained_until_killed, drives, interval)
    committed = two.run(steps_and_bits, drives)
    assert committed[0] == committed[1]
    assert committed[0] > step - interval
    assert committed[0] % interval == 0
    assert two.run(go_on, drives, committed[0]) == [committed[0] + 3] * 2


def steps_and_bits(drives):
    net = make(DTYPE, seed=9)
    optimizer = on_volume(net, drives, name="run", resume=True)
    twin, other, _ = reference(optimizer.committed_steps)
    assert_same((net, optimizer), (twin, other))
    return optimizer.committed_steps


def begun(drives):
    gc.collect()
    net = make(DTYPE)
    optimizer = on_volume(net, drives, name="run", resume=True)
    first = optimizer.committed_steps
    train(DistributedDataParallel(net), optimizer, 3)
    assert_same((net, optimizer), reference(3)[:2])
    return first, end(optimizer)


def test_ranks_of_which_one_has_no_commit_begin(two, drives):
    # As the second one was killed before its first commit.
    two.run(first_run, drives, 1)
    for folder in drives:
        for path in folder.glob("run-1*"):
            path.unlink()
    assert two.run(begun, drives) == [(0, 3)] * 2
    assert two.run(go_on, drives, 3) == [6, 6]


# ---- volumes that do not go together, or with the ranks ----


def resumed_on_one_rank(drives):
    gc.collect()
    is_first = dist.get_rank() == 0
    with pytest.raises(ValueError, match=r"at the steps `\[2, 0\]`(.|\n)*on all ranks"):
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
    match = r"for the ranks `\[0, 1\]`(.|\n)*and `\[.\]` step together(.|\n)*hint"
    refused_on_all(drives, match, shard=alone)


def test_another_number_of_ranks_is_refused_with_a_way_out(two, drives):
    two.run(first_run, drives, 1)
    two.run(at_another_number_of_ranks, drives)
    assert two.run(go_on, drives, 1) == [4, 4]


def on_drives_of_their_own(drives, refused=None, kind=OSError):
    """As on hosts of their own, where ranks do not see the files of the others."""
    gc.collect()
    folders = [drives[dist.get_rank()]]
    if refused:
        return refused_on_all(folders, refused, kind)
    net = make(DTYPE)
    optimizer = on_volume(net, folders, name="run")
    train(DistributedDataParallel(net), optimizer, 2)
    return end(optimizer)


def test_what_is_wrong_with_a_drive_is_not_taken_for_another_number_of_ranks(two, drives):
    assert two.run(on_drives_of_their_own, drives) == [2, 2]
    own = drives[1] / "run-1.0.stepwell"
    own.rename(own.with_suffix(".away"))
    for text in two.run(on_drives_of_their_own, drives, r"at the steps `\[2, 0\]`", ValueError):
        assert "for the ranks" not in text
    assert not own.exists()
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
