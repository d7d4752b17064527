"""What fails on one of two ranks with volumes: all are told, and none goes ahead."""

import gc
import os

import pytest
import stepwell
import torch
import torch.distributed as dist
from sharded_models import make, train, train_alike, wrap_core
from sharded_volumes import (
    DTYPE,
    drives_in,
    files,
    first_run,
    go_on,
    in_memory,
    on_volume,
    pinned_bytes,
    refused_on_all,
)
from stepwell import _core
from stepwell.store import host_side
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def drives(tmp_path):
    return drives_in(tmp_path)


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


# ---- volumes that are not made on all ranks ----


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
            stepwell.OffloadAdamW(net, lr=-1.0, shard=True, tier=stepwell.Volume(drives))
    else:
        with pytest.raises(OSError, match="rank 1 has left"):
            on_volume(net, drives)


def test_a_rank_that_is_refused_before_the_volumes_are_made_is_named(two, drives):
    two.run(left_before, drives)
    assert not files(drives)


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
