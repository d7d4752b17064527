"""What ranks tell each other by process groups of their own, and the thread that gathers there."""

import contextlib
import gc
import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import optim_ranks
import pytest
import torch
import torch.distributed as dist
from insides import begin
from stepwell.access.guard import WeightGuard
from stepwell.ranks import gathering
from stepwell.ranks.agreement import Agreement
from stepwell.ranks.collective import Ranks
from stepwell.ranks.peers import Peers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CPU = torch.device("cpu")
INSTEAD = "an option"
SECONDS_MAX = 20


class LeftError(Exception):
    pass


def made(group=None, device=CPU):
    return Peers(group, device, instead=INSTEAD)


# ---- ranks of a group of the program's ----


def met():
    ranks, rank = Ranks(), dist.get_rank()
    assert ranks.ranks == [0, 1]
    assert ranks.meet({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    alone = [dist.new_group([each]) for each in range(2)][rank]
    assert Ranks(alone).ranks == [rank]
    assert Ranks(alone).meet(rank) == [rank]
    with pytest.MonkeyPatch.context() as patched:

        def lost(*_, **__):
            raise RuntimeError("closed by peer")

        patched.setattr(dist, "all_gather_object", lost)
        with pytest.raises(OSError, match=r"another rank is gone(.|\n)*closed by peer(.|\n)*hint"):
            ranks.meet()


def test_ranks_meet(two):
    two.run(met)


# ---- process groups ----


def opened(group):
    calls = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather_into_tensor", "broadcast"):

            def call(*args, of_torch, **options):
                calls.append(of_torch.__name__)
                return of_torch(*args, **options)

            patched.setattr(dist, name, partial(call, of_torch=getattr(dist, name)))
        made(group)
    return calls


def opened_at_once():
    # What connects NCCL: no collective of this rank is under way then.
    assert opened(None) == ["all_gather_into_tensor", "broadcast"]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert opened(alone) == []


def test_the_group_of_weights_connects_at_once(two):
    two.run(opened_at_once)


def groups_made():
    backends = []
    with pytest.MonkeyPatch.context() as patched:
        new_group = dist.new_group

        def counted(*args, backend, **options):
            backends.append(backend)
            return new_group(*args, backend=backend, **options)

        patched.setattr(dist, "new_group", counted)
        peers = made(device=None)
        patched.setattr(dist, "is_gloo_available", lambda: False)
        with pytest.raises(ValueError, match="has no gloo") as raised:
            made(device=None)
        assert f"hint: {INSTEAD}; or" in str(raised.value)
    assert backends == ["gloo"]
    assert not hasattr(peers, "data")
    assert peers.tell(None, is_taken=True).error() is None


def test_ranks_that_gather_nothing_have_no_group_for_it(two):
    two.run(groups_made)


def own_timeouts():
    timeouts = [timedelta(seconds=50 + rank) for rank in range(2)]
    alone = [dist.new_group([rank], timeout=timeout) for rank, timeout in enumerate(timeouts)]
    rank = dist.get_rank()
    whole = timedelta(seconds=optim_ranks.COLLECTIVE_SECONDS_MAX)
    for group, expected in ((None, whole), (alone[rank], timeouts[rank])):
        peers = made(group)
        for own in (peers.status, peers.data):
            assert own._get_backend(CPU).options._timeout == expected


def test_ranks_are_waited_for_as_long_as_in_their_group(two):
    two.run(own_timeouts)


# ---- of steps in the background ----


def failures_of_some():
    peers, rank = made(), dist.get_rank()

    def said(failing, taken=(0, 1)):
        why = f"no memory on {rank}" if rank in failing else None
        error = peers.tell(why, is_taken=rank in taken).error()
        return "" if error is None else str(error)

    named = "the step has failed on rank {0} (`no memory on {0}`)"
    assert said(()) == ""
    for failing in ((0,), (1,)):
        expected = f"this rank has left a step (`no memory on {rank}`)"
        expected = expected if rank in failing else named.format(failing[0])
        for taken in ((0, 1), (1 - failing[0],)):
            assert said(failing, taken).startswith(expected)
    assert "this rank has left" in said((0, 1))
    # Nothing was changed.
    assert said((0, 1), taken=()) == ""
    peers._num_told += rank
    with pytest.raises(OSError, match="not at the same step any more"):
        said(())


def test_the_ranks_whose_step_has_failed_are_told(two):
    two.run(failures_of_some)


class Core:
    """The core of an engine, which makes a weight 1, or fails."""

    def __init__(self, weight, *, fails):
        self.weight, self.fails = weight, fails
        self.goes_on = threading.Event()

    def wait(self, *_, **__):
        assert self.goes_on.wait(SECONDS_MAX)
        if self.fails:
            raise OSError("the step has failed here")
        self.weight.fill_(dist.get_rank() + 1)


def gathered(fails):
    """A gatherer of one element of each rank, which waits for its core; and what begins a step."""
    peers, whole, rank = made(), torch.zeros(2), dist.get_rank()
    core = Core(whole[rank : rank + 1], fails=fails and rank == 1)
    gatherer = gathering.Gatherer(core, peers, CPU)
    memory = gathering.bytes_of(whole)
    piece = gathering.Piece(0, 0, 1, memory.chunk(2), whole=memory)

    def begin():
        for call in gatherer.submission([piece], {"a": 0}):
            call()

    return gatherer, core, whole, begin


def a_failed_step():
    gatherer, core, _, begin = gathered(fails=True)
    begin()
    core.goes_on.set()
    what = "failed here" if dist.get_rank() else r"on rank 1 \(`the step has failed here`\)"
    for call in (partial(gatherer.wait, "a", ()), gatherer.confirm, partial(gatherer.finish, ())):
        with pytest.raises(OSError, match=what):
            call()


def test_a_step_that_fails_on_one_rank_fails_on_all(two):
    two.run(a_failed_step)


def a_step_that_was_left():
    gatherer, core, whole, begin = gathered(fails=False)
    core.goes_on.set()
    begin()
    gatherer.finish(())
    assert whole.tolist() == [1, 2]
    steps = Agreement(dist.group.WORLD, CPU, gatherer=gatherer)
    with contextlib.suppress(LeftError), steps.decided():
        if dist.get_rank():
            raise LeftError("no memory")
        steps.taking()
        begin()
    what = "this rank has left" if dist.get_rank() else "failed on rank 1 "
    with pytest.raises(OSError, match=rf"{what}(.|\n)*LeftError: no memory"):
        gatherer.confirm()


def test_a_step_that_one_rank_has_left_fails_on_all(two):
    two.run(a_step_that_was_left)


def destroyed(folder):
    """The process group goes while weights are on their way."""
    rank = dist.get_rank()
    gatherer, core, _, begin = gathered(fails=False)
    begin()
    dist.barrier()
    dist.destroy_process_group()
    core.goes_on.set()
    try:
        with pytest.raises(OSError, match=r"destroy_process_group\(\)(.|\n)*hint"):
            gatherer.confirm()
    finally:
        store = f"file://{folder / 'again'}"
        timeout = timedelta(seconds=optim_ranks.COLLECTIVE_SECONDS_MAX)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)


def test_a_wait_behind_the_process_group_says_what_happened(two, tmp_path):
    two.run(destroyed, tmp_path)


# ---- the thread that gathers ----


class CollectingCore:
    """The core of an engine whose owner is collected on the thread that gathers."""

    def __init__(self, new):
        self.new = new
        self.is_dropped, self.is_collected, self.is_waited_for = (threading.Event() for _ in "abc")

    def wait(self, *_, **__):
        self.is_dropped.wait(SECONDS_MAX)
        gc.collect()
        self.is_collected.set()
        self.is_waited_for.wait(SECONDS_MAX)
        self.new()


class OnePeer:
    rank, world_size = 0, 1

    def check_process(self):
        pass

    def tell(self, *_, **__):
        return SimpleNamespace(error=lambda: None)


class Uploads:
    def __init__(self, gatherer, core):
        self.gatherer, self.core = gatherer, core

    def wait(self, _):
        self.finish()

    def finish(self):
        self.core.is_waited_for.set()
        self.gatherer.finish(())


def test_what_is_collected_on_the_gathering_thread_waits_for_it_later():
    param = torch.nn.Parameter(torch.zeros(3))
    weight = param.detach()
    core = CollectingCore(lambda: weight.fill_(1))
    gatherer = gathering.Gatherer(core, OnePeer(), CPU)
    calls = gatherer.submission([gathering.Piece(0, 0, 3, [gathering.bytes_of(weight)])], {0: 0})
    gc.disable()
    try:
        guard = WeightGuard(Uploads(gatherer, core))
        guard.itself = guard
        begin(guard.protection([param]))
        for call in calls:
            call()
        del guard, gatherer, calls, call
        core.is_dropped.set()
        assert core.is_collected.wait(SECONDS_MAX)
        assert param.tolist() == [1, 1, 1]
    finally:
        core.is_waited_for.set()
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "stepwell-gather":
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()
    assert type(param) is torch.nn.Parameter
