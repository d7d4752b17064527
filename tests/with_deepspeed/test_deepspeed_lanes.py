"""The thread that copies gradients to memory that is not pinned: on a stand-in for a GPU."""

import contextlib
import threading
import weakref
from concurrent.futures import Future

import pytest
import torch
from insides import lane_of
from stepwell.deepspeed.zero import lanes
from stepwell.deepspeed.zero.lanes import Copy, ThreadLane
from stepwell.deepspeed.zero.partition import Fragment, Partition
from stepwell.deepspeed.zero.partitions import Partitions

PATIENCE = 30.0
PART = Fragment(0, 0, 4)


class Event:
    """As torch's, of gradients that are made or not."""

    def __init__(self):
        self.is_made = threading.Event()


class Stream:
    """As torch's: it waits on the thread that asks it to."""

    def __init__(self, device=None):
        self.events = []

    def record_event(self):
        self.events.append(Event())
        return self.events[-1]

    def wait_event(self, event):
        assert event.is_made.wait(PATIENCE)


@pytest.fixture
def training(monkeypatch):
    """The stream that gradients are made on."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return stream


def make(stream):
    for event in stream.events:
        event.is_made.set()


def test_a_gradient_is_copied_once_it_is_made(training):
    lane, pieces = ThreadLane(torch.device("cpu")), torch.zeros(2, 4)
    targets = torch.full((2, 4), -1.0)
    for piece, target in zip(pieces, targets, strict=True):
        lane.copy([Copy(piece, target, PART)])
    # The thread that launches goes on, and what it launches is done late.
    pieces[0] = 1.0
    pieces[1] = 2.0
    make(training)
    lane.order()
    assert targets.tolist() == [[1.0] * 4, [2.0] * 4]
    lane.wait()


class LateThread:
    """As a thread pool's, whose calls are made when they are waited for."""

    def __init__(self, *args):
        pass

    def submit(self, call, *args):
        copied = Future()

        def result():
            if not copied.done():
                copied.set_result(call(*args))

        copied.result = result
        return copied


def test_gradients_that_wait_are_bounded(training, monkeypatch):
    monkeypatch.setattr(lanes, "_UNDER_WAY_BYTES_MAX", 32)
    monkeypatch.setattr(lanes, "ThreadPoolExecutor", LateThread)
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    lane, targets = ThreadLane(torch.device("cpu")), torch.zeros(5, 4)
    seen = []
    for target in targets:
        lane.copy([Copy(torch.ones(4), target, PART)])
        seen.append(int(targets[:, 0].sum()))
    # Those that are there: the fourth one comes behind 48 bytes.
    assert seen == [0, 0, 0, 1, 2]
    lane.wait()
    assert targets.eq(1.0).all()


def test_a_gradient_is_held_until_it_is_copied(training):
    lane, target = ThreadLane(torch.device("cpu")), torch.zeros(4)
    piece = torch.ones(4)
    held = weakref.ref(piece)
    lane.copy([Copy(piece, target, PART)])
    del piece
    assert held() is not None
    make(training)
    lane.wait()


def test_a_copy_that_fails_is_an_error_of_every_wait(training):
    lane = ThreadLane(torch.device("cpu"))
    lane.copy([Copy(torch.ones(4), torch.zeros(3), PART)])
    make(training)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            lane.wait()
    with pytest.raises(RuntimeError, match="size"):
        lane.order()


@pytest.fixture
def partitions(training):
    """Of one parameter of 4 elements whose gradient comes down by a thread."""
    held = torch.empty(0, requires_grad=True)
    weight = torch.ones(4, dtype=torch.bfloat16)
    made = Partitions(
        [Partition(held, weight, torch.bfloat16, 0, False)], device=torch.device("cpu"), threads=1
    )
    setattr(*lane_of(made.gradients), ThreadLane(torch.device("cpu")))
    return made


def send(partitions):
    fragment = Fragment(0, 0, 4)
    partitions.gradients.add(fragment, torch.ones(4, dtype=torch.bfloat16), is_owned=True)
    partitions.gradients.send(fragment)


def test_a_failed_copy_refuses_the_step_and_not_those_behind_it(partitions, training, monkeypatch):
    def fail(self, event):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "wait_event", fail)
        send(partitions)
        with pytest.raises(RuntimeError, match="no memory"):
            partitions.prepare({}, [])
    # As the optimizers do behind a step that has raised.
    partitions.end_left_step()
    partitions.drop()
    send(partitions)
    make(training)
    partitions.arrive()
    assert partitions.gradients.grads[0].tolist() == [1.0] * 4
