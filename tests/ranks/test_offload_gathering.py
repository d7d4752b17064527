"""The thread that gathers the weights of several ranks, with stand-ins for engine and ranks.

What real ranks do together is in `test_offload_peers.py`.
"""

import os
import queue
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from stepwell.ranks.gathering import Gatherer, Piece, _close, _GatheredStep, bytes_of

CPU = torch.device("cpu")
SECONDS_MAX = 5.0
# Long enough for another thread to have begun to wait. Where it has not, a test says less.
SOON = 0.02
OTHER = OSError("the step has failed on rank 1 (`no memory there`)")


class Gate:
    """Keeps a thread until it is opened; says whether that came too late."""

    def __init__(self):
        self.is_open, self.was_late = threading.Event(), False

    def open_soon(self):
        threading.Timer(SOON, self.is_open.set).start()

    def pass_through(self):
        self.was_late |= not self.is_open.wait(SECONDS_MAX)


class Core:
    """The core of an engine: its waits pass gates, and may fail at a place."""

    def __init__(self):
        self.gates, self.fails_at = {}, None
        self.waited = []

    def wait(self, place, begin, end, *, stream):
        if place in self.gates:
            self.gates[place].pass_through()
        self.waited.append((place, begin, end, stream))
        if place == self.fails_at:
            raise OSError("no memory here")


class Peers:
    """Two ranks, which have nothing to gather; `answers` are what they have told."""

    rank, ranks, world_size, data = 0, [0, 1], 2, None

    def __init__(self):
        self.answers, self.told, self.gates = [], [], {}
        self.is_forked = False

    def check_process(self):
        if self.is_forked:
            raise ValueError("a forked child")

    def tell(self, failure, *, is_taken):
        self.told.append((failure, is_taken))
        step = len(self.told)

        def error():
            if step in self.gates:
                self.gates[step].pass_through()
            return self.answers.pop(0)

        return SimpleNamespace(error=error)


class Case:
    """A gatherer of weights `a` and `b`, each one piece, of which this rank has 3 elements."""

    def __init__(self):
        self.core, self.peers = Core(), Peers()
        self.gatherer = Gatherer(self.core, self.peers, CPU)

    def submit(self, *answers, names="ab"):
        """A step of which the ranks tell this before the first piece and behind the last."""
        self.peers.answers += answers
        empty = [torch.empty(0, dtype=torch.uint8)] * 2
        pieces = [Piece(place, 0, 3, empty) for place, _ in enumerate(names)]
        for call in self.gatherer.submission(pieces, {name: at for at, name in enumerate(names)}):
            call()


def test_all_ranks_are_told_of_each_step_twice():
    case = Case()
    assert not case.gatherer.is_busy
    for _ in range(2):
        case.submit(None, None)
        case.gatherer.confirm()
        assert not case.gatherer.is_busy
    assert case.peers.told == [(None, True)] * 4
    assert case.core.waited == [(0, 0, 3, 0), (1, 0, 3, 0)] * 2
    case.core.fails_at = 0
    case.submit(None, OSError("told"))
    with pytest.raises(OSError, match=r"^no memory here$"):
        case.gatherer.confirm()
    assert case.peers.told[4:] == [(None, True), ("no memory here", True)]
    # The others wait for this rank's parts of what comes behind, and nothing waits for the engine.
    assert case.core.waited[4:] == [(0, 0, 3, 0)]


@pytest.mark.parametrize("names", ["", "ab"])
def test_a_failure_elsewhere_is_named(names):
    case = Case()
    case.submit(None, None, names=names)
    case.gatherer.finish(())
    calls = case.gatherer.confirm, partial(case.gatherer.finish, ())
    for answers in ([OTHER], [None, OTHER]):
        case.submit(*answers, names=names)
        for call in calls:
            with pytest.raises(OSError, match=r"failed on rank 1 \(`no memory there`\)"):
                call()
    # Of two failures this rank's own is raised here.
    if names:
        case.core.fails_at = 0
        for answers in ([OTHER], [None, OTHER]):
            case.submit(*answers)
            with pytest.raises(OSError, match=r"^no memory here$"):
                case.gatherer.confirm()


def test_a_weight_is_waited_for_by_itself_and_the_last_for_all_ranks():
    case, gates = Case(), [Gate() for _ in range(3)]
    case.core.gates, case.peers.gates = dict(enumerate(gates[:2])), {2: gates[2]}
    case.submit(None, OTHER)
    assert case.gatherer.is_busy
    gates[0].open_soon()
    case.gatherer.wait("a", ())
    assert case.core.waited[0] == (0, 0, 3, 0)
    # Of no piece.
    case.gatherer.wait("c", ())
    gates[1].is_open.set()
    gates[2].open_soon()
    with pytest.raises(OSError, match="rank 1"):
        case.gatherer.wait("b", ())
    assert not any(gate.was_late for gate in gates)


def test_a_failure_here_is_raised_before_the_others_are_told():
    case, gate = Case(), Gate()
    case.peers.gates = {2: gate}
    case.core.fails_at = 0
    case.submit(None, OSError("told"))
    for name in "ba":
        with pytest.raises(OSError, match=r"^no memory here$"):
            case.gatherer.wait(name, ())
    gate.is_open.set()
    with pytest.raises(OSError, match=r"^no memory here$"):
        case.gatherer.confirm()
    assert not gate.was_late


def test_a_step_that_this_rank_has_left_is_told_and_not_gathered():
    case = Case()
    for error in (None, OSError("others have taken it")):
        case.peers.answers.append(error)
        case.gatherer.leave("KeyError: 'no memory'")
        if error is None:
            case.gatherer.confirm()
    with pytest.raises(OSError, match="others have taken it"):
        case.gatherer.confirm()
    assert case.peers.told == [("KeyError: 'no memory'", False)] * 2
    assert not case.core.waited


def test_a_forked_child_is_told():
    case = Case()
    case.peers.is_forked = True
    waits = case.gatherer.wait, case.gatherer.finish
    calls = [partial(waits[0], "a", ()), partial(waits[1], ())]
    for call in (*calls, case.gatherer.confirm, case.gatherer.synchronize):
        with pytest.raises(ValueError, match="a forked child"):
            call()


class Copy:
    """The event of a copy that has ended when it is looked at for the third time."""

    num_looks = 0

    def query(self):
        self.num_looks += 1
        return self.num_looks > 2


def test_copies_are_waited_for():
    case = Case()
    case.submit(None, None)
    case.gatherer.confirm()
    copies = Copy(), Copy()
    for copy in copies:
        case.gatherer._last[0].mark(copy)
    case.gatherer.synchronize()
    # The last is behind the others.
    assert [copy.num_looks for copy in copies] == [0, 3]


def test_a_step_is_waited_for_when_its_optimizer_goes():
    step, copy = _GatheredStep([], None, {}), Copy()
    step.mark(copy)
    threading.Timer(SOON, step.end, [None]).start()
    _close(threading.current_thread(), queue.SimpleQueue(), [step], os.getpid())
    assert step.is_over
    assert copy.num_looks == 3


def test_a_forked_child_waits_for_no_thread_of_its_parent():
    steps, last = queue.SimpleQueue(), _GatheredStep([], None, {})
    _close(threading.current_thread(), steps, [last], os.getpid() + 1)
    assert steps.empty()


def test_the_thread_keeps_no_program_from_ending():
    case = Case()
    threads = [each for each in threading.enumerate() if each.name == "stepwell-gather"]
    assert threads
    assert all(each.daemon for each in threads)
    assert case.gatherer.bytes_received == 0


def test_what_is_received_is_what_other_ranks_have():
    case = Case()
    case.peers.world_size = 1
    case.peers.answers += [None, None]
    parts = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (12, 8)]
    for call in case.gatherer.submission([Piece(0, 0, 3, parts)] * 2, {"a": 1}):
        call()
    case.gatherer.confirm()
    assert case.gatherer.bytes_received == 16


def test_a_part_in_host_memory_is_copied_to_its_place():
    case = Case()
    case.peers.world_size = 1
    case.peers.answers += [None, None]
    weight, source = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    piece = Piece(0, 0, 3, [bytes_of(weight)], source=bytes_of(source))
    for call in case.gatherer.submission([piece], {"a": 0}):
        call()
    case.gatherer.confirm()
    assert weight.tolist() == source.tolist()


def test_the_bytes_of_a_view_are_its_own():
    whole = torch.arange(8, dtype=torch.float64)
    view = whole[3:5]
    memory = bytes_of(torch.nn.Parameter(view))
    assert type(memory) is torch.Tensor
    assert memory.nbytes == view.nbytes
    memory.view(torch.float64).fill_(-1)
    assert whole.tolist() == [0, 1, 2, -1, -1, 5, 6, 7]
    assert whole._version == 0
