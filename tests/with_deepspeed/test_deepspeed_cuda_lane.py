"""The stream on which gradients of ZeRO's partitions are copied in batches, on a stand-in."""

import contextlib
import gc
import random
import weakref

import pytest
import torch
from stepwell.deepspeed.zero import lanes
from stepwell.deepspeed.zero import partitions as made_of
from stepwell.deepspeed.zero.lanes import Copy, CudaLane
from stepwell.deepspeed.zero.partition import Fragment, Partition
from stepwell.deepspeed.zero.partitions import Partitions

CPU = torch.device("cpu")
BATCH_ELEMENTS = 8


class Event:
    """As torch's: it has happened when the stream has caught up."""

    def __init__(self, stream):
        self.stream = stream

    def query(self):
        return not self.stream.is_late


class Stream:
    """As torch's. What it is asked for is in `log`."""

    cuda_stream = 7

    def __init__(self, name="lane"):
        self.name = name
        self.log = []
        self.is_late = False

    def wait_stream(self, other):
        self.log.append(("wait", other.name))

    def record_event(self):
        return Event(self)

    def synchronize(self):
        self.is_late = False


class Engine:
    """What the engine is told to expect, as `(group, begin, end)`, by call."""

    def __init__(self):
        self.calls = []

    def expect_parts(self, indices, begins, ends, *, stream):
        assert stream == Stream.cuda_stream
        self.calls.append(list(zip(indices, begins, ends, strict=True)))


class Device:
    """The streams of the stand-in."""

    def __init__(self, monkeypatch):
        self.current = Stream("training")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(lanes, "BATCH_BYTES", 4 * BATCH_ELEMENTS)
    return Device(monkeypatch)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def lane(device, engine):
    return CudaLane(CPU, engine)


def send(lane, target, begin, end, value=1.0):
    piece = torch.full((end - begin,), value)
    lane.copy([Copy(piece, target[begin:end], Fragment(0, begin, end - begin))])


def test_the_latest_gradient_waits_for_the_next(lane, engine):
    target = torch.zeros(40)
    send(lane, target, 30, 40)
    assert engine.calls == []
    send(lane, target, 0, 2)
    # What was there is more than a batch.
    assert engine.calls == [[(0, 30, 38)], [(0, 38, 40)]]
    assert target.tolist() == [0.0] * 30 + [1.0] * 10
    lane.launch()
    assert engine.calls[2:] == [[(0, 0, 2)]]
    assert target[:2].tolist() == [1.0] * 2
    lane.launch()
    assert len(engine.calls) == 3


def test_small_gradients_share_a_batch_and_large_ones_have_several(lane, engine):
    target = torch.zeros(40)
    for begin, end in ((0, 3), (3, 6), (6, 30), (30, 31)):
        send(lane, target, begin, end)
    lane.launch()
    assert engine.calls == [
        [(0, 0, 3), (0, 3, 6), (0, 6, 8)],
        [(0, 8, 16)],
        [(0, 16, 24)],
        [(0, 24, 30)],
        [(0, 30, 31)],
    ]
    assert target.tolist() == [1.0] * 31 + [0.0] * 9


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_here_and_in_their_partition_are_copied_as_one(lane, engine, monkeypatch, seed):
    monkeypatch.setattr(lanes, "BATCH_BYTES", 1 << 20)
    choose = random.Random(seed)
    memory, targets = torch.arange(1.0, 201.0), torch.zeros(2, 200)
    here, there, group, copies, num_gaps = 0, 0, 0, [], 0
    for size in (choose.randint(1, 9) for _ in range(8)):
        gap = choose.choice(["none", "here", "there", *(["group"] if group == 0 else [])])
        here += gap == "here"
        there = 0 if gap == "group" else there + (gap == "there")
        group += gap == "group"
        num_gaps += gap != "none" and bool(copies)
        target = targets[group, there : there + size]
        copies.append(Copy(memory[here : here + size], target, Fragment(group, there, size)))
        here, there = here + size, there + size
    # In one call or in several, which come to the same.
    if seed % 2:
        lane.copy(copies)
    else:
        for copy in copies:
            lane.copy([copy])
    lane.launch()
    (parts,) = engine.calls
    assert len(parts) == 1 + num_gaps
    assert all(torch.equal(piece, target) for piece, target, _ in copies)
    assert sum(end - begin for _, begin, end in parts) == int((targets != 0).sum())


def test_a_batch_comes_after_the_stream_that_made_it(lane, device, engine):
    target, training = torch.zeros(4), device.current
    send(lane, target, 0, 2)
    device.current = Stream("reductions")
    send(lane, target, 2, 4)
    assert lane._stream.log == [("wait", "training")]
    assert engine.calls == [[(0, 0, 2)]]
    # As a step does, whose stream is another one.
    device.current = training
    lane.launch()
    assert lane._stream.log == [("wait", "training"), ("wait", "reductions")]
    assert target.tolist() == [1.0] * 4


def test_what_is_dropped_is_not_copied(lane, engine):
    target = torch.zeros(4)
    send(lane, target, 0, 2)
    lane.drop()
    send(lane, target, 2, 4, value=2.0)
    lane.wait()
    assert target.tolist() == [0.0, 0.0, 2.0, 2.0]
    assert engine.calls == [[(0, 2, 4)]]


def test_a_gradient_is_held_until_it_is_copied(lane):
    piece, target = torch.ones(2), torch.zeros(2)
    held = weakref.ref(piece)
    lane.copy([Copy(piece, target, Fragment(0, 0, 2))])
    del piece
    assert held() is not None
    lane._stream.is_late = True
    lane.launch()
    lane.let_go()
    gc.collect()
    # A part of it is held: its memory, which no tensor of autograd's may be written to.
    assert len(lane._reads._held) == 1
    lane._stream.is_late = False
    lane.let_go()
    assert not lane._reads._held
    assert held() is None


# ---- beneath partitions ----


@pytest.fixture
def partitions(device, monkeypatch):
    monkeypatch.setattr(made_of, "EngineLane", lambda core: CudaLane(CPU, core))
    held = torch.empty(0, requires_grad=True)
    weight = torch.ones(40)
    return Partitions([Partition(held, weight, torch.float32, 0, False)], device=CPU, threads=1)


def test_the_norm_is_read_before_the_latest_gradient_is_copied(partitions):
    gradients = partitions.gradients
    for begin, end in ((20, 40), (0, 20)):
        gradients.add(Fragment(0, begin, end - begin), torch.ones(end - begin), is_owned=True)
        gradients.send(Fragment(0, begin, end - begin))
    seen = []

    def add_up(scalar):
        seen.append(gradients.grads[0].tolist())
        return float(scalar)

    assert gradients.norm(add_up) == pytest.approx(40**0.5)
    assert seen == [[0.0] * 20 + [1.0] * 20]
    assert gradients.grads[0].tolist() == [1.0] * 40
