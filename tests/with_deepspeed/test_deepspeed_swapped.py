"""State of partitions on a volume by itself, without DeepSpeed: beside the same state in memory."""

import copy
import errno
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import stepwell
import torch
from stepwell.store.volume import Volume
from swapped_partitions import (
    BF16,
    BUFFERS_BYTES,
    FP32,
    MOMENTS,
    NUMELS,
    PIECES,
    SIZE,
    STATE_BYTES,
    Run,
    assert_same,
    pieces_of,
)

SECONDS_MAX = 60


def tensors_of(run, group=0):
    """What of a partition is on the volume."""
    return list(run.swapped.leases[group].tensors.values())


def are_away(run):
    """Of the partitions with elements, whether their state is on the volume."""
    return [lease.is_away for lease in run.swapped.leases.values()]


@pytest.fixture
def volume(tmp_path):
    return Volume([tmp_path])


# ---- steps ----


@pytest.mark.parametrize("room", [BUFFERS_BYTES, BUFFERS_BYTES + 900_000])
@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(stepwell.AdamW, {}), (stepwell.AdamW, {"moments": "q8"}), (torch.optim.AdamW, {})],
)
def test_steps_have_the_bits_of_state_in_memory(volume, kind, options, weight, room):
    run = Run(volume, kind=kind, weight=weight, room=room, **options).steps(3)
    expected = Run(kind=kind, weight=weight, **options).steps(3)
    assert_same(run, expected)
    # On, once more.
    run.steps(2, 3)
    assert_same(run, expected.steps(2, 3))


@pytest.mark.parametrize("options", [{}, {"moments": "q8"}])
def test_weights_that_a_program_may_write_have_whole_masters_on_the_volume(volume, options):
    runs = [Run(at, is_offloaded=True, **options) for at in (volume, None)]
    for run in runs:
        run.steps(2)
        run.weights[0][:7] = 3.0
        run.steps(1, 2)
    assert_same(*runs)
    for run, is_packed in ((runs[0], False), (Run(volume, **options), True)):
        assert {each.is_packed for each in run.swapped.volume.placeholders.values()} == {is_packed}


def test_a_weight_that_was_written_is_told_where_its_master_is_packed(volume):
    run = Run(volume).steps(2)
    run.partitions.twins[0][SIZE + 1] = 3.0
    assert run.masters[0].narrow(0, 0, SIZE).sum() != 0
    with pytest.raises(ValueError, match="weights in host memory were changed"):
        run.masters[0].sum()
    with pytest.raises(OSError, match="weights in host memory were changed"):
        run.steps(1, 2)


def test_which_partitions_are_on_the_volume(volume):
    rounded, plain = Run(volume).swapped, Run(volume, weight=FP32).swapped
    for swapped in (rounded, plain):
        assert list(swapped.leases) == [0, 2]
        assert swapped.volume.tier(range(3))["swapped"] == [0, None, 1]
    assert [rounded.has_master(group) for group in range(3)] == [True, False, True]
    assert [plain.has_master(group) for group in range(3)] == [False] * 3


def test_state_that_nothing_looks_at_stays_on_the_volume(volume):
    away = []
    run = Run(volume)
    # Nor does the first step, which goes on from nothing.
    run.step(0, before_submit=lambda: away.extend(are_away(run)))
    run.partitions.finish()
    assert away == [True, True]
    read, written = run.moved()
    run.steps(1, 1)
    again, more = run.moved()
    # Records are whole blocks.
    state = STATE_BYTES * sum(NUMELS)
    assert state <= again - read < state + SIZE
    assert state <= more - written
    assert are_away(run) == [True, True]
    # What describes them reads nothing.
    assert [each.shape for each in tensors_of(run)] == [(NUMELS[0],)] * 3
    assert run.read() == again


# ---- uses between steps ----


def test_a_use_brings_all_of_a_partition_and_what_is_written_counts(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    for each in (run, expected):
        each.state()["exp_avg"].mul_(2.0)
    assert are_away(run) == [False, True]
    for each in (run, expected):
        with torch.no_grad():
            each.masters[0].add_(1.0)
            each.masters[2].zero_()
    assert are_away(run) == [False, False]
    for each in (run, expected):
        each.steps(1, 2)
    assert are_away(run) == [True, True]
    assert_same(run, expected)
    assert_same(run.steps(1, 3), expected.steps(1, 3))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "q8"])
def test_state_on_a_volume_is_saved_alone_and_in_any_dtype(volume, tmp_path, moments):
    runs = [Run(at, moments=moments).steps(2) for at in (volume, None)]
    found = []
    for number, run in enumerate(runs):
        path = tmp_path / f"{number}.pt"
        torch.save({"state": run.state(), "master": run.masters[0].detach()}, path)
        found.append(torch.load(path))
        torch.save(run.state(), path)
        assert path.stat().st_size < 9.5 * NUMELS[0]
    for name, value in found[1]["state"].items():
        assert torch.equal(torch.as_tensor(found[0]["state"][name]), torch.as_tensor(value)), name
    assert torch.equal(*(each["master"] for each in found))


def test_a_view_is_a_snapshot_after_the_next_step(volume):
    run = Run(volume).steps(2)
    kept = run.state()["exp_avg"].view(-1)
    before = kept.clone()
    run.step(2)
    run.partitions.finish()
    assert torch.equal(kept, before)
    assert not torch.equal(run.state()["exp_avg"], before)


def test_a_look_at_a_part_brings_its_chunks_alone(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    begin = run.read()
    one = STATE_BYTES * SIZE
    for name, first, numel in (("exp_avg", SIZE + 3, 5), ("exp_avg_sq", SIZE, SIZE)):
        found = run.state()[name].narrow(0, first, numel)
        assert torch.equal(found, expected.state()[name].narrow(0, first, numel))
    run.masters[0].narrow(0, SIZE, 1).sum()
    assert one <= run.read() - begin < 2 * one
    assert are_away(run) == [True, True]
    # The step goes on from the volume, and reads the rest of it alone.
    read = run.read()
    run.steps(1, 2)
    again = run.read()
    assert_same(run, expected.steps(1, 2))
    assert again - read >= STATE_BYTES * sum(NUMELS)


@pytest.mark.parametrize("name", ["exp_avg", "master"])
def test_a_part_that_is_written_to_counts(volume, name):
    run, expected = Run(volume).steps(2), Run().steps(2)
    for each in (run, expected):
        tensor = each.masters[0] if name == "master" else each.state()[name]
        with torch.no_grad():
            tensor.narrow(0, SIZE, 7).fill_(3.0)
    for each in (run, expected):
        each.steps(1, 2)
    assert_same(run, expected)


def test_a_whole_that_is_used_behind_a_part_has_what_was_written_to_it(volume):
    run = Run(volume).steps(2)
    run.state()["exp_avg"].narrow(0, 0, 1).fill_(9.0)
    read = run.read()
    assert run.state()["exp_avg"][0] == 9.0
    # The first chunk is there.
    assert STATE_BYTES * SIZE <= run.read() - read < 2 * STATE_BYTES * SIZE
    # And so has a part of what is there as a whole.
    assert run.state()["exp_avg"].narrow(0, 0, 1) == 9.0


# A scale is of 32 elements.
@pytest.mark.parametrize(
    ("name", "last"), [("exp_avg_codes", 2 * SIZE), ("exp_avg_scales", 2 * SIZE // 32)]
)
def test_codes_and_scales_are_narrowed(volume, name, last):
    runs = [Run(each, moments="q8").steps(2) for each in (volume, None)]
    found, expected = (run.state()[name].narrow(0, last, 1).clone() for run in runs)
    assert torch.equal(found, expected)
    assert found.all()


def test_a_use_waits_for_the_step(volume):
    run, expected = Run(volume, late=True), Run().steps(2)
    run.step(0)
    run.step(1)
    assert run.late.is_late
    assert run.state()["exp_avg"].shape == (NUMELS[0],)
    assert run.late.is_late
    assert torch.equal(run.state()["exp_avg"].clone(), expected.state()["exp_avg"])
    assert not run.late.is_late
    assert_same(run, expected)


def test_state_is_used_when_nothing_steps_any_more(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    state, swapped = run.state(), run.swapped
    del run
    gc.collect()
    assert torch.equal(state["exp_avg"].clone(), expected.state()["exp_avg"])
    assert 0 in swapped.leases


def test_a_drive_without_room_for_a_look_is_named_and_harms_nothing(volume, monkeypatch):
    run, expected = Run(volume).steps(1), Run().steps(1)

    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="no access to masters and moments"):
            run.state()["exp_avg"].sum()
    run.step(1)
    assert_same(run, expected.steps(1, 1))


def looked(run):
    run.state()["exp_avg"].sum()


def looked_at_a_part(run):
    run.masters[0].narrow(0, 0, 1).sum()


@pytest.mark.parametrize("look", [looked, looked_at_a_part])
def test_a_look_of_another_thread_before_the_submit(volume, look):
    run, expected = Run(volume).steps(2), Run().steps(3)
    run.step(2, before_submit=lambda: look(run))
    assert are_away(run) == [True, True]
    assert_same(run, expected)


class Slow(torch.Tensor):
    """A function that is given one has begun, and goes on when it may."""

    has_begun, may_go_on = threading.Event(), threading.Event()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.has_begun.set()
        assert cls.may_go_on.wait(SECONDS_MAX)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def slow():
    """Makes ones of which each use is slow, once, until it may go on."""
    Slow.has_begun, Slow.may_go_on = threading.Event(), threading.Event()
    yield lambda numel: torch.ones(numel).as_subclass(Slow)
    Slow.may_go_on.set()


LOOKS = {
    "moment": lambda run, ones: torch.dot(run.state()["exp_avg"], ones(NUMELS[0])),
    "part of a moment": lambda run, ones: torch.dot(
        run.state()["exp_avg"].narrow(0, SIZE - 1, 3), ones(3)
    ),
    "master": lambda run, ones: torch.mul(ones(NUMELS[0]), other=run.masters[0].data),
    "piece": lambda run, ones: torch.dot(pieces_of(run)[0], ones(3)),
    "several": lambda run, ones: torch.cat(
        [run.state()["exp_avg"], ones(1), run.state(2)["exp_avg_sq"]]
    ),
}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_begins_behind_a_look_that_is_under_way(volume, slow, look, is_there):
    run, expected = Run(volume).steps(2), Run().steps(2)
    before = look(expected, torch.ones)
    if is_there:
        run.found()
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look, run, slow)
        assert Slow.has_begun.wait(SECONDS_MAX)
        # What was brought is let go of, and brought anew.
        assert_same(run.steps(2, 2), expected.steps(2, 2))
        Slow.may_go_on.set()
        found = looked.result(SECONDS_MAX).as_subclass(torch.Tensor)
    assert torch.equal(found, before)
    assert_same(run, expected)


# ---- state that is set, loaded, deleted ----


def deleted(run):
    del run.optimizer.state[run.masters[0]]


def deleted_and_set(run):
    state = run.optimizer.state.pop(run.masters[0])
    run.optimizer.state[run.masters[0]] = {
        "step": state["step"],
        **{name: torch.ones(NUMELS[0]) for name in MOMENTS},
    }


def one_set(run):
    run.state()["exp_avg_sq"] = torch.ones(NUMELS[0])


def loaded(run):
    other = Run(seed=1).steps(5)
    run.optimizer.load_state_dict(other.optimizer.state_dict())


def reloaded(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.steps(1, 7)
    run.optimizer.load_state_dict(saved)


def test_state_that_is_loaded_before_the_first_step(volume):
    run, expected = Run(volume), Run()
    for each in (run, expected):
        loaded(each)
        each.steps(2)
    assert_same(run, expected)


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("change", [deleted, deleted_and_set, one_set, loaded, reloaded])
def test_state_that_is_changed_while_it_is_on_the_volume(volume, change, weight):
    run, expected = Run(volume, weight=weight).steps(2), Run(weight=weight).steps(2)
    for each in (run, expected):
        change(each)
        each.steps(1, 2)
    assert are_away(run) == [True, True]
    # The optimizer has what is on the volume.
    own = run.swapped.leases[0].state()
    assert all(run.state()[name] is own[name] for name in MOMENTS)
    assert_same(run, expected)
    for each in (run, expected):
        each.steps(1, 3)
    assert_same(run, expected)


# ---- pieces of masters ----


@pytest.mark.parametrize("steps", [0, 2])
def test_pieces_go_where_the_master_goes(volume, steps):
    run, expected = (Run(each).steps(steps) for each in (volume, None))
    if steps == 0:
        # The master is in memory now.
        run.masters[0].detach()
    found, others = pieces_of(run), pieces_of(expected)
    for number in range(steps, steps + 2):
        assert [each.numel() for each in found] == [3, 2, 5]
        assert all(
            torch.equal(piece.clone(), other) for piece, other in zip(found, others, strict=True)
        )
        for each in (run, expected):
            each.steps(1, number)
        assert are_away(run) == [True, True]
    # All of the partition is brought, and the pieces lie in it.
    master = run.masters[0].detach()
    assert are_away(run) == [False, True]
    assert [each.data_ptr() for each in found] == [master[begin:].data_ptr() for begin, _ in PIECES]
    assert all(map(torch.equal, found, others))


def test_a_piece_brings_its_chunks_alone(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    found, others = pieces_of(run), pieces_of(expected)
    read = run.read()
    assert torch.equal(found[0] + 0, others[0])
    assert STATE_BYTES * SIZE <= run.read() - read < 2 * STATE_BYTES * SIZE
    assert are_away(run) == [True, True]
    for each in (found, others):
        each[0].fill_(5.0)
    # It is there already.
    address, read = found[0].data_ptr(), run.read()
    assert (found[0].data_ptr(), run.read()) == (address, read)
    assert found[0].sum() == 15.0
    for each in (run, expected):
        each.steps(1, 2)
    assert_same(run, expected)
    assert torch.equal(found[0], others[0])


def test_a_part_of_a_piece(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    found, other = pieces_of(run)[1].narrow(0, 1, 1), pieces_of(expected)[1].narrow(0, 1, 1)
    assert torch.equal(found, other)


def test_a_piece_of_a_partition_in_memory_stays_there(volume):
    run = Run(volume).steps(2)
    run.masters[0].detach()
    pieces = pieces_of(run)
    read = run.read()
    assert all(torch.isfinite(each).all() for each in (*pieces, run.masters[0]))
    assert run.read() == read
    assert pieces[0].data_ptr() == run.masters[0].data_ptr()


def test_pieces_are_given_out_anew(volume):
    run = Run(volume).steps(2)
    old = pieces_of(run)
    new = pieces_of(run, PIECES[:2])
    assert len(new) == 2
    gone = [weakref.ref(each) for each in old]
    del old
    assert [each() for each in gone] == [None] * len(PIECES)
    run.step(2)
    expected = Run().steps(3)
    assert all(map(torch.equal, new, pieces_of(expected, PIECES[:2])))
