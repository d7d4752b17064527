"""Volumes for the state of partitions, without DeepSpeed: how they are made, resumed and left."""

import contextlib
import gc
import shutil
import tempfile
import weakref
from types import SimpleNamespace

import pytest
import stepwell
import torch
from stepwell import _core
from stepwell.deepspeed.zero import swapped as swapped_module
from stepwell.deepspeed.zero.swapped import commit_last_step, swapped_on
from stepwell.store import state_volume
from stepwell.store.sharded_volume import RUN_OF_ONE
from stepwell.store.volume import Volume
from swapped_partitions import (
    BF16,
    BUFFERS_BYTES,
    FP32,
    MOMENTS,
    NUMELS,
    Run,
    assert_same,
    pieces_of,
)


def each_step(paths, **options):
    """A volume that commits each step."""
    return Volume(paths, commit_interval=1, **options)


@pytest.fixture
def volume(tmp_path):
    return each_step([tmp_path])


# ---- the beginning ----


def test_state_that_fits_into_memory_gets_no_volume(tmp_path, caplog):
    volume = Volume([tmp_path], durability="none")
    for weight, nbytes in ((BF16, 12 * sum(NUMELS)), (FP32, 8 * sum(NUMELS))):
        caplog.clear()
        run = Run(volume, weight=weight, room=nbytes)
        (record,) = caplog.records
        assert "fits into host memory, and no volume is made" in record.message
        assert run.swapped.volume.core is run.operands.swapped is None
        assert run.swapped.volume.memory_bytes == 0
        assert run.swapped.volume.committed_steps is None
        assert not run.swapped.leases
        assert not run.swapped.has_master(0)
        assert list(tmp_path.iterdir()) == []
        # There is room for the buffers.
        assert Run(volume, weight=weight, room=nbytes - 1).swapped.volume.core is not None
        gc.collect()


def test_what_is_committed_has_a_volume_also_where_it_fits(volume):
    room = BUFFERS_BYTES + 12 * sum(NUMELS)
    run, expected = Run(volume, room=room).steps(2), Run().steps(2)
    core = run.swapped.volume.core
    assert run.swapped.volume.memory_bytes == core.ram_nbytes + core.buffers_nbytes <= room
    assert core.ram_nbytes > 0
    assert run.swapped.volume.committed_steps == 2
    assert_same(run, expected)


def test_partitions_without_elements_have_no_volume(volume):
    run = Run(volume, numels=(0, 0))
    assert run.swapped.volume.core is None
    assert list(volume.paths[0].iterdir()) == []


def test_memory_for_buffers_is_enough_or_it_is_said(volume):
    with pytest.raises(ValueError, match="the buffers of a volume take") as raised:
        Run(volume, room=1)
    buffers = int(str(raised.value).split("`")[1])
    with pytest.raises(ValueError, match=f"`{buffers - 1}` are left"):
        Run(volume, room=buffers - 1)
    assert Run(volume, room=buffers).swapped.volume.core.ram_nbytes == 0


def test_without_a_bound_what_is_free_is_taken(volume, monkeypatch):
    beside = 4 * sum(NUMELS)
    free = [beside + BUFFERS_BYTES]
    monkeypatch.setattr(swapped_module, "share_of_free_bytes", lambda: free[-1])
    assert 0 < Run(volume, room=None).swapped.volume.memory_bytes <= BUFFERS_BYTES
    for left, bytes_free in ((7, beside + 7), (0, beside - 1)):
        free.append(bytes_free)
        with pytest.raises(ValueError, match=f"`{left}` are left"):
            Run(volume, room=None)


def noted(monkeypatch):
    """What the core's swaps are made of, from now on."""
    said, make = [], _core.Swap

    def note(*args, **options):
        said.append(options)
        return make(*args, **options)

    monkeypatch.setattr(_core, "Swap", note)
    return said


def of_ranks(monkeypatch, *steps, counts=None):
    """Stands in for other ranks: of this one's volume, the steps that it is made at.

    `counts`: the updates that another rank's volume has; None: as many as this one's.
    """

    class World:
        def __init__(self):
            self.ranks = [0, 1]

        def meet(self, mine=None, failure=None):
            return [mine, mine if counts is None or mine is None else counts]

        def awaited(self):
            return contextlib.nullcontext()

    def open_together(ranks, make, *, commit_interval):
        for step in steps[:-1]:
            make(step, 1).close(keep=True)
        return make(steps[-1], 1)

    monkeypatch.setattr(swapped_module, "Ranks", World)
    monkeypatch.setattr(state_volume, "open_together", open_together)


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_each_of_several_ranks_has_a_volume_of_its_own(tmp_path, monkeypatch, durability):
    said, is_commit = noted(monkeypatch), durability == "commit"
    of_ranks(monkeypatch, None)
    for rank, name in ((None, "run"), (0, "run-0"), (3, "run-3")):
        volume = Volume([tmp_path], name="run", durability=durability)
        run = Run(volume, rank=rank, room=BUFFERS_BYTES if is_commit else 1_000_000).steps(1)
        if is_commit:
            assert [each.name for each in tmp_path.iterdir()] == [f"{name}.0.stepwell"]
        assert run.swapped.volume.committed_steps == (1 if is_commit else None)
        assert_same(run, Run().steps(1))
        run.end()
        for each in tmp_path.iterdir():
            each.unlink()
    # A name that no other has is made by the core.
    assert (
        len({Run(Volume([tmp_path]), rank=rank).swapped.volume.core.name for rank in (None, 0)})
        == 2
    )
    assert [each["name"] for each in said[:3]] == ["run", "run-0", "run-3"]
    assert [each["counts_each_step"] for each in said[:3]] == [False, is_commit, is_commit]
    assert [each["run"] for each in said[:3]] == [RUN_OF_ONE, 1, 1]


def test_buffers_leave_half_of_the_memory(volume, monkeypatch):
    said = noted(monkeypatch)
    room = 1 << 22
    Run(volume, room=room)
    assert said[0]["buffers_nbytes_max"] == room // 2


# ---- a volume that is resumed ----


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("kind", [stepwell.AdamW, torch.optim.AdamW])
def test_a_volume_is_resumed(tmp_path, kind, weight):
    run = Run(each_step([tmp_path], name="run"), kind=kind, weight=weight)
    assert run.swapped.volume.committed_steps == 0
    assert run.partitions.resumed == {}
    run.steps(2)
    assert run.swapped.volume.committed_steps == 2
    expected = Run(kind=kind, weight=weight).steps(2)
    run.end()
    again = {"kind": kind, "weight": weight}
    volume = Volume([tmp_path], name="run", resume=True)
    run = Run(volume, seed=1, **again)
    assert run.partitions.resumed == {0: 2, 2: 2}
    assert run.swapped.volume.committed_steps == 2
    assert all(map(torch.equal, run.weights, expected.weights))
    # As it is used at once, or first stepped.
    if weight == BF16:
        assert torch.equal(run.masters[0].detach().clone(), expected.masters[0])
    for each in (run, expected):
        each.steps(1, 2)
        del each.optimizer.state[each.masters[2]]
        each.steps(1, 3)
    assert_same(run, expected)
    run.end()


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("room", [BUFFERS_BYTES, BUFFERS_BYTES + 900_000])
def test_a_volume_that_commits_every_few_steps_is_resumed(tmp_path, weight, room):
    options = {"weight": weight, "room": room}
    run = Run(Volume([tmp_path], name="run", commit_interval=3), **options).steps(5)
    assert run.swapped.volume.committed_steps == 3
    # The end commits the last step.
    run.end()
    del run
    again = Volume([tmp_path], name="run", resume=True, commit_interval=100)
    run, expected = Run(again, seed=1, **options), Run(weight=weight).steps(5)
    assert run.partitions.resumed == {0: 5, 2: 5}
    assert_same(run.steps(2, 5), expected.steps(2, 5))
    assert run.swapped.volume.committed_steps == 5
    commit_last_step(run.swapped, run.partitions.finish)
    assert run.swapped.volume.committed_steps == 7
    run.end()
    del run
    assert_same(Run(again, seed=2, **options).steps(1, 7), expected.steps(1, 7))


def test_a_commit_that_failed_on_a_rank_is_the_end_on_all(tmp_path, monkeypatch):
    of_ranks(monkeypatch, None)
    run = Run(Volume([tmp_path], name="run", commit_interval=9), rank=0).steps(2)
    told = OSError("rank 1 has no drive")

    def meet(*_):
        raise told

    monkeypatch.setattr(swapped_module.Ranks, "meet", meet)
    with pytest.raises(OSError, match="rank 1 has no drive"):
        commit_last_step(run.swapped, run.partitions.finish)
    with pytest.raises(OSError, match="a commit failed before: rank 1 has no drive"):
        run.step(2)


def test_only_a_volume_that_commits_can_be_told_to(tmp_path):
    run = Run(Volume([tmp_path], durability="none")).steps(1)
    for swapped in (None, run.swapped):
        with pytest.raises(ValueError, match="there is no volume that commits"):
            commit_last_step(swapped, run.partitions.finish)


def test_state_of_a_resumed_volume_that_is_deleted_at_once(tmp_path):
    Run(Volume([tmp_path], name="run")).steps(2).end()
    run, expected = Run(Volume([tmp_path], name="run", resume=True)), Run().steps(2)
    for each in (run, expected):
        del each.optimizer.state[each.masters[0]]
        each.steps(1, 2)
    assert_same(run, expected)


def test_a_volume_goes_back_a_step(tmp_path, monkeypatch):
    of_ranks(monkeypatch, None)
    Run(each_step([tmp_path], name="run"), rank=1).steps(3).end()
    # This rank has committed a step that others have not.
    of_ranks(monkeypatch, None, 2)
    said = noted(monkeypatch)
    run, expected = Run(Volume([tmp_path], name="run", resume=True), rank=1), Run().steps(2)
    assert [each["step"] for each in said] == [None, 2]
    assert run.partitions.resumed == {0: 2, 2: 2}
    assert_same(run.steps(2, 2), expected.steps(2, 2))


@pytest.mark.parametrize("counts", [[2, None, 2], [7, None, 2], [2, None, 0]])
def test_volumes_of_several_runs_at_steps_of_one_number_are_refused(tmp_path, monkeypatch, counts):
    of_ranks(monkeypatch, None)
    Run(Volume([tmp_path], name="run"), rank=1).steps(2).end()
    of_ranks(monkeypatch, None, counts=counts)
    again = Volume([tmp_path], name="run", resume=True)
    if counts == [2, None, 2]:
        assert Run(again, rank=1).partitions.resumed == {0: 2, 2: 2}
        return
    said = r"have `\[(2, 7|0, 2)\]` updates of one parameter, .* hint: "
    # It stays, and may be gone on from.
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            Run(again, rank=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_volume_of_others_is_refused(tmp_path):
    Run(Volume([tmp_path], name="run")).steps(1).end()
    volume = Volume([tmp_path], name="run", resume=True)
    with pytest.raises(ValueError, match="the state of other parameters"):
        Run(volume, identity="another model")


def test_what_partitions_are_is_told_by_parameters_and_ranks(volume, monkeypatch):
    assert swapped_on(None, "params", None, threads=1) is None
    found = set()
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=world_size: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for params in ("a", "b"):
            swapped = swapped_on(volume, params, None, threads=1)
            assert swapped._rank == (rank if world_size > 1 else None)
            found.add(swapped._identity)
    assert len(found) == 6


# ---- where what is looked at goes ----


def test_what_is_looked_at_goes_to_the_folder_with_the_most_room(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    run, expected = Run(Volume(folders)).steps(1), Run().steps(1)
    free = dict(zip(folders, (1, 3, 2), strict=True))
    usage = lambda path: SimpleNamespace(free=free[path], used=-free[path], total=-free[path])
    monkeypatch.setattr(shutil, "disk_usage", usage)
    make, made = tempfile.TemporaryFile, []
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda **options: made.append(options["dir"]) or make(**options)
    )
    assert_same(run, expected)
    assert made == [folders[1]] * 2
    # A volume on devices alone has no folders.
    monkeypatch.setattr(run.swapped.volume, "options", SimpleNamespace(paths=["/dev/null"]))
    free[tempfile.gettempdir()] = 0
    assert_same(run.steps(1, 1), expected.steps(1, 1))
    assert made[2:] == [tempfile.gettempdir()] * 2


# ---- the end ----


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name", [None, "run"])
def test_state_that_is_on_the_volume_stays_there_at_the_end(tmp_path, name, is_told):
    run, expected = Run(Volume([tmp_path], name=name)).steps(2), Run().steps(2)
    pieces = pieces_of(run)
    states = [run.state(group) for group in (0, 2)]
    looked_at = states[1]["exp_avg"].clone()
    assert len(list(tmp_path.iterdir())) == 1
    state = states[0][MOMENTS[0]].narrow(0, 0, 1)
    memory = weakref.ref(run.swapped._brought.memories[0])
    del state
    if is_told:
        run.partitions.finish()
        run.swapped.close()
        assert not run.swapped.leases
    else:
        del run
    gc.collect()
    assert memory() is None
    assert len(list(tmp_path.iterdir())) == (name is not None)
    away = [*pieces, *(states[0][name] for name in MOMENTS)]
    assert {type(each) for each in away} == {torch.Tensor}
    assert [(each.numel(), each.dtype) for each in away] == [(0, FP32)] * 5
    assert torch.equal(states[1]["exp_avg"], looked_at)
    assert torch.equal(looked_at, expected.state(2)["exp_avg"])
    assert type(states[1]["exp_avg"]) is torch.Tensor
