"""State of partitions on a volume by itself, without DeepSpeed: beside the same state in memory."""

import copy
import errno
import gc
import os
import tempfile
import weakref
from types import SimpleNamespace

import pytest
import stepwell
import torch
from late_engine import LateEngine
from stepwell import _core
from stepwell.deepspeed.zero import swapped as swapped_module
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions, PartitionWork, Update
from stepwell.deepspeed.zero.swapped import SwappedPartitions, swapped_on
from stepwell.offload import writes
from stepwell.offload.volume import Volume
from stepwell.offload.writes import Written

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = _core.CHUNK_LEN
# Three chunks, the last of which is short; none; a part of one.
NUMELS = (2 * SIZE + 5, 0, 100)
BUFFERS_BYTES = 1_800_000
"""Host memory that buffers take at least, with no room for the state of a chunk beside them."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Run:
    """Steps of partitions whose state is on a volume; or in host memory, for `volume=None`.

    Args:
        room: bytes of host memory for state and buffers; None: what is free.
        late: whether a step begins when it is waited for.
    """

    def __init__(
        self,
        volume=None,
        *,
        numels=NUMELS,
        weight=BF16,
        kind=stepwell.AdamW,
        room=BUFFERS_BYTES,
        seed=0,
        identity="a model",
        rank=None,
        late=False,
        **options,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(each, generator=generator).to(weight) for each in numels]
        self.masters = [torch.empty(0, requires_grad=True) for _ in numels]
        self.optimizer = kind([{"params": [each]} for each in self.masters], lr=0.5, **options)
        self.operands = Operands(self.optimizer, 0)
        self.swapped = volume and SwappedPartitions(
            volume, new_state=self.operands.new_state, identity=identity, rank=rank
        )
        self.operands.swapped = self.swapped
        beside = sum(each.nbytes * 2 for each in self.weights)
        self.partitions = Partitions(
            [
                Partition(
                    master,
                    weight,
                    weight.dtype,
                    self.operands.moments_bytes(weight.to("meta", master.dtype)),
                )
                for master, weight in zip(self.masters, self.weights, strict=True)
            ],
            device=torch.device("cpu"),
            threads=1,
            is_pinned=False,
            swapped=self.swapped,
            host_bytes_max=None if volume is None or room is None else beside + room,
        )
        self.operands.forget_unused_volume()
        self.operands.resume(self.partitions.resumed, self.masters)
        self.late = None
        if late:
            self.late = self.partitions._engine = LateEngine(self.partitions._engine)

    def step(self, number, *, before_submit=None):
        """Takes a step of gradients that depend on its number, and does not wait for it."""
        generator = torch.Generator().manual_seed(1000 + number)
        grads = self.partitions.stepped_grads()
        for grad in grads:
            grad.copy_(torch.randn(grad.numel(), generator=generator))
        operands = [
            self.operands.of(group, group, master, grad, twin)
            for group, (master, grad, twin) in enumerate(
                zip(self.masters, grads, self.partitions.twins, strict=True)
            )
        ]
        updates = [
            Update(group, each.tensor, each.step, each.hyper.core(1.0))
            for group, each in enumerate(operands)
            if each.tensor is not None
        ]
        calls = self.partitions.prepare(updates, self.weights, [operands], grad_scale=1.0)
        if before_submit is not None:
            before_submit()
        self.operands.commit(operands, calls)
        self.partitions.forget()

    def steps(self, count, first=0):
        """Takes steps, and waits for them."""
        for number in range(first, first + count):
            self.step(number)
        self.partitions.finish()
        return self

    def moved(self):
        """Bytes read from drives and written."""
        return [self.partitions.timing()[key] for key in ("bytes_read", "bytes_written")]

    def read(self):
        """Bytes that the drives have read."""
        return self.moved()[0]

    def state(self, group=0):
        return self.optimizer.state[self.masters[group]]

    def found(self):
        """Weights, masters; moments and counts of what has elements."""
        self.partitions.finish()
        return [
            *(each.clone() for each in self.weights),
            *(each.detach().clone() for each in self.masters),
            *(
                torch.as_tensor(value).clone()
                for master, weight in zip(self.masters, self.weights, strict=True)
                if weight.numel() > 0
                for _, value in sorted(self.optimizer.state[master].items())
            ),
        ]

    def end(self):
        self.partitions.end()


def assert_same(run, other):
    found, expected = run.found(), other.found()
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected))


def tensors_of(run, group=0):
    """What of a partition is on the volume."""
    return list(run.swapped._held[group].tensors.values())


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


def test_which_partitions_are_on_the_volume(volume):
    rounded, plain = Run(volume).swapped, Run(volume, weight=FP32).swapped
    for swapped in (rounded, plain):
        assert [group in swapped for group in range(4)] == [True, False, True, False]
        assert swapped.indices(3) == [0, None, 1]
    assert [rounded.has_master(group) for group in range(3)] == [True, False, True]
    assert [plain.has_master(group) for group in range(3)] == [False] * 3


def test_state_that_nothing_looks_at_stays_on_the_volume(volume):
    in_use = []
    run = Run(volume)
    # Nor does the first step, which goes on from nothing.
    run.step(0, before_submit=lambda: in_use.extend(run.swapped.in_use([0, 1, 2])))
    run.partitions.finish()
    assert len(in_use) == 0
    read, written = run.moved()
    run.steps(1, 1)
    assert len(run.swapped.in_use([0, 1, 2])) == 0
    again, more = run.moved()
    # Records are whole blocks.
    state = 12 * sum(NUMELS)
    assert state <= again - read < state + SIZE
    assert state <= more - written
    assert {type(each) for each in tensors_of(run)} == {Written}
    # What describes them reads nothing.
    assert [each.shape for each in tensors_of(run)] == [(NUMELS[0],)] * 3
    assert run.read() == again


# ---- uses between steps ----


def test_a_use_brings_all_of_a_partition_and_what_is_written_counts(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    for each in (run, expected):
        each.state()["exp_avg"].mul_(2.0)
    assert {type(each) for each in tensors_of(run)} == {torch.Tensor}
    assert {type(each) for each in tensors_of(run, 2)} == {Written}
    for each in (run, expected):
        with torch.no_grad():
            each.masters[0].add_(1.0)
            each.masters[2].zero_()
    storages = {each.data_ptr() for each in run.swapped.in_use([0, 1])}
    assert storages == {each.untyped_storage().data_ptr() for each in tensors_of(run)}
    for each in (run, expected):
        each.steps(1, 2)
    assert {type(each) for each in tensors_of(run)} == {Written}
    assert_same(run, expected)
    assert_same(run.steps(1, 3), expected.steps(1, 3))


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
    one = 12 * SIZE
    for name, first, numel in (("exp_avg", SIZE + 3, 5), ("exp_avg_sq", SIZE, SIZE)):
        found = run.state()[name].narrow(0, first, numel)
        assert torch.equal(found, expected.state()[name].narrow(0, first, numel))
    run.masters[0].narrow(0, SIZE, 1).sum()
    assert one <= run.read() - begin < 2 * one
    assert {type(each) for each in tensors_of(run)} == {Written}
    # The step goes on from the volume, and reads the rest of it alone.
    read = run.read()
    run.steps(1, 2)
    assert len(run.swapped.in_use([0])) == 0
    again = run.read()
    assert_same(run, expected.steps(1, 2))
    assert again - read >= 12 * sum(NUMELS)


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
    assert 12 * SIZE <= run.read() - read < 2 * 12 * SIZE
    # Plain tensors are no matter of the volume's.
    assert run.swapped.narrow(run.state()["exp_avg"], 0, 1) is None


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
    assert type(run.state()["exp_avg"]) is Written
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
    assert 0 in swapped


def test_all_of_it_is_brought(volume):
    """As where torch has given the class of a tensor to another one."""
    run, expected = Run(volume).steps(2), Run().steps(2)
    run.swapped.wait_for_all()
    assert {type(each) for each in (*tensors_of(run), *tensors_of(run, 2))} == {torch.Tensor}
    assert_same(run, expected)


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
    assert {type(each) for each in tensors_of(run)} == {Written}
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
    assert {type(each) for each in tensors_of(run)} == {Written}
    # The optimizer has what is on the volume.
    own = run.swapped.state(0)
    assert all(run.state()[name] is own[name] for name in MOMENTS)
    assert_same(run, expected)
    for each in (run, expected):
        each.steps(1, 3)
    assert_same(run, expected)


# ---- pieces of masters ----

RUNS = [(0, 3), (SIZE - 1, 2), (2 * SIZE, 5)]


def pieces_of(run, runs=RUNS):
    """Pieces of the first master: those that are good after every step; or views of it."""
    found = PartitionWork(run.partitions, 0, run.swapped).pieces(runs)
    if found is not None:
        return found
    return [run.masters[0].detach().narrow(0, begin, numel) for begin, numel in runs]


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
        assert {type(each) for each in found} == {Written}
    # All of the partition is brought, and the pieces lie in it.
    master = run.masters[0].detach()
    assert {type(each) for each in found} == {torch.Tensor}
    assert [each.data_ptr() for each in found] == [master[begin:].data_ptr() for begin, _ in RUNS]
    assert all(map(torch.equal, found, others))


def test_a_piece_brings_its_chunks_alone(volume):
    run, expected = Run(volume).steps(2), Run().steps(2)
    found, others = pieces_of(run), pieces_of(expected)
    read = run.read()
    assert torch.equal(found[0] + 0, others[0])
    assert 12 * SIZE <= run.read() - read < 2 * 12 * SIZE
    assert [type(each) for each in found] == [torch.Tensor, Written, Written]
    for each in (found, others):
        each[0].fill_(5.0)
    # It is there already.
    address, read = found[0].data_ptr(), run.read()
    run.swapped.wait_for(found[:1])
    assert (found[0].data_ptr(), run.read()) == (address, read)
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
    run.swapped.wait_for(pieces)
    run.swapped.wait_for([run.masters[0]])
    assert run.read() == read
    assert pieces[0].data_ptr() == run.masters[0].data_ptr()


def test_pieces_are_given_out_anew(volume):
    run = Run(volume).steps(2)
    old = pieces_of(run)
    new = pieces_of(run, RUNS[:2])
    assert len(new) == 2
    assert len(run.swapped._held[0].views) == 2
    assert not {id(each) for each in old} & run.swapped._group_of.keys()
    assert run.swapped._run_of == {id(each): part for each, part in zip(new, RUNS[:2], strict=True)}
    assert not {id(each) for each in old} & writes._WAITING.keys()
    run.step(2)
    expected = Run().steps(3)
    assert all(map(torch.equal, new, pieces_of(expected, RUNS[:2])))


# ---- the beginning ----


def test_state_that_fits_into_memory_gets_no_volume(tmp_path, caplog):
    volume = Volume([tmp_path], durability="none")
    for weight, nbytes in ((BF16, 12 * sum(NUMELS)), (FP32, 8 * sum(NUMELS))):
        caplog.clear()
        run = Run(volume, weight=weight, room=nbytes)
        (record,) = caplog.records
        assert "fits into host memory, and no volume is made" in record.message
        assert run.swapped.core is run.operands.swapped is None
        assert run.swapped.memory_bytes == 0
        assert run.swapped.committed_steps is None
        assert 0 not in run.swapped
        assert not run.swapped.has_master(0)
        assert list(tmp_path.iterdir()) == []
        # There is room for the buffers.
        assert Run(volume, weight=weight, room=nbytes - 1).swapped.core is not None
        gc.collect()


def test_what_is_committed_has_a_volume_also_where_it_fits(volume):
    room = BUFFERS_BYTES + 12 * sum(NUMELS)
    run, expected = Run(volume, room=room).steps(2), Run().steps(2)
    core = run.swapped.core
    assert run.swapped.memory_bytes == core.ram_nbytes + core.buffers_nbytes <= room
    assert core.ram_nbytes > 0
    assert run.swapped.committed_steps == 2
    assert_same(run, expected)


def test_partitions_without_elements_have_no_volume(volume):
    run = Run(volume, numels=(0, 0))
    assert run.swapped.core is None
    assert list(volume.paths[0].iterdir()) == []


def test_memory_for_buffers_is_enough_or_it_is_said(volume):
    with pytest.raises(ValueError, match="the buffers of a volume take") as raised:
        Run(volume, room=1)
    buffers = int(str(raised.value).split("`")[1])
    with pytest.raises(ValueError, match=f"`{buffers - 1}` are left"):
        Run(volume, room=buffers - 1)
    assert Run(volume, room=buffers).swapped.core.ram_nbytes == 0


def test_without_a_bound_what_is_free_is_taken(volume, monkeypatch):
    beside = 4 * sum(NUMELS)
    free = [beside + BUFFERS_BYTES]
    monkeypatch.setattr(swapped_module, "share_of_free_bytes", lambda: free[-1])
    assert 0 < Run(volume, room=None).swapped.memory_bytes <= BUFFERS_BYTES
    for left, bytes_free in ((7, beside + 7), (0, beside - 1)):
        free.append(bytes_free)
        with pytest.raises(ValueError, match=f"`{left}` are left"):
            Run(volume, room=None)


def noted(monkeypatch):
    """What the core's swaps are made of, from now on."""
    said, make = [], swapped_module.make_swap

    def note(volume, tensors, **options):
        said.append(options)
        return make(volume, tensors, **options)

    monkeypatch.setattr(swapped_module, "make_swap", note)
    return said


def of_ranks(monkeypatch, *steps):
    """Stands in for other ranks: of this one's volume, the steps that it is made at."""

    def open_together(ranks, make):
        for step in steps[:-1]:
            make(step).close(keep=True)
        return make(steps[-1])

    monkeypatch.setattr(swapped_module, "WholeWorld", object)
    monkeypatch.setattr(swapped_module, "open_together", open_together)


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_each_of_several_ranks_has_a_volume_of_its_own(tmp_path, monkeypatch, durability):
    said, is_commit = noted(monkeypatch), durability == "commit"
    of_ranks(monkeypatch, None)
    for rank, name in ((None, "run"), (0, "run-0"), (3, "run-3")):
        volume = Volume([tmp_path], name="run", durability=durability)
        run = Run(volume, rank=rank, room=BUFFERS_BYTES if is_commit else 1_000_000).steps(1)
        if is_commit:
            assert [each.name for each in tmp_path.iterdir()] == [f"{name}.0.stepwell"]
        assert run.swapped.committed_steps == (1 if is_commit else None)
        assert_same(run, Run().steps(1))
        run.end()
        for each in tmp_path.iterdir():
            each.unlink()
    # A name that no other has is made by the core.
    assert len({Run(Volume([tmp_path]), rank=rank).swapped.core.name for rank in (None, 0)}) == 2
    assert [each["name"] for each in said] == ["run", "run-0", "run-3", None, None]
    assert [each["commits_each_step"] for each in said[:3]] == [False, is_commit, is_commit]


def test_buffers_leave_half_of_the_memory(volume, monkeypatch):
    said = noted(monkeypatch)
    room = 1 << 22
    Run(volume, room=room)
    assert said[0]["buffers_nbytes_max"] == room // 2


# ---- a volume that is resumed ----


@pytest.mark.parametrize("weight", [BF16, FP32])
@pytest.mark.parametrize("kind", [stepwell.AdamW, torch.optim.AdamW])
def test_a_volume_is_resumed(tmp_path, kind, weight):
    run = Run(Volume([tmp_path], name="run"), kind=kind, weight=weight)
    assert run.swapped.committed_steps == 0
    assert run.partitions.resumed == {}
    run.steps(2)
    assert run.swapped.committed_steps == 2
    expected = Run(kind=kind, weight=weight).steps(2)
    run.end()
    again = {"kind": kind, "weight": weight}
    volume = Volume([tmp_path], name="run", resume=True)
    run = Run(volume, seed=1, **again)
    assert run.partitions.resumed == {0: 2, 2: 2}
    assert run.swapped.committed_steps == 2
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


def test_state_of_a_resumed_volume_that_is_deleted_at_once(tmp_path):
    Run(Volume([tmp_path], name="run")).steps(2).end()
    run, expected = Run(Volume([tmp_path], name="run", resume=True)), Run().steps(2)
    for each in (run, expected):
        del each.optimizer.state[each.masters[0]]
        each.steps(1, 2)
    assert_same(run, expected)


def test_a_volume_goes_back_a_step(tmp_path, monkeypatch):
    of_ranks(monkeypatch, None)
    Run(Volume([tmp_path], name="run"), rank=1).steps(3).end()
    # This rank has committed a step that others have not.
    of_ranks(monkeypatch, None, 2)
    said = noted(monkeypatch)
    run, expected = Run(Volume([tmp_path], name="run", resume=True), rank=1), Run().steps(2)
    assert [each["step"] for each in said] == [None, 2]
    assert run.partitions.resumed == {0: 2, 2: 2}
    assert_same(run.steps(2, 2), expected.steps(2, 2))


def test_a_volume_of_others_is_refused(tmp_path):
    Run(Volume([tmp_path], name="run")).steps(1).end()
    volume = Volume([tmp_path], name="run", resume=True)
    with pytest.raises(ValueError, match="the state of other parameters"):
        Run(volume, identity="another model")


def test_what_partitions_are_is_told_by_parameters_and_ranks(volume, monkeypatch):
    assert swapped_on(None, "params", None) is None
    found = set()
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=world_size: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for params in ("a", "b"):
            swapped = swapped_on(volume, params, None)
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
    monkeypatch.setattr(swapped_module.shutil, "disk_usage", usage)
    made, state = [], swapped_module.MappedState
    monkeypatch.setattr(
        swapped_module, "MappedState", lambda *args: made.append(args[0]) or state(*args)
    )
    assert_same(run, expected)
    assert made == [folders[1]] * 2


def test_what_is_looked_at_goes_beside_devices(tmp_path):
    swapped = Run(Volume([tmp_path])).swapped
    swapped._volume = SimpleNamespace(paths=[tmp_path / "no folder", tmp_path])
    assert swapped._folder() == tmp_path
    swapped._volume.paths.pop()
    assert swapped._folder() == tempfile.gettempdir()


# ---- the end ----


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name", [None, "run"])
def test_state_that_is_on_the_volume_stays_there_at_the_end(tmp_path, name, is_told):
    run, expected = Run(Volume([tmp_path], name=name)).steps(2), Run().steps(2)
    pieces = pieces_of(run)
    states = [run.state(group) for group in (0, 2)]
    looked_at = states[1]["exp_avg"].clone()
    assert len(list(tmp_path.iterdir())) == 1
    memory = weakref.ref(run.swapped._part(0, 0, 1))
    if is_told:
        run.partitions.finish()
        run.swapped.close()
        assert 0 not in run.swapped
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
    assert not {id(each) for each in (*away, states[1]["exp_avg"])} & writes._WAITING.keys()
