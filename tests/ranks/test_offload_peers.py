"""What ranks tell each other by process groups of their own, and the thread that gathers there."""

import contextlib
import gc
import threading
from datetime import timedelta
from functools import partial

import optim_ranks
import pytest
import torch
import torch.distributed as dist
from stepwell.access.guard import WeightGuard
from stepwell.ranks import gathering
from stepwell.ranks import peers as peers_module
from stepwell.ranks.collective import WholeWorld
from stepwell.ranks.peers import Peers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CPU = torch.device("cpu")
INSTEAD = "an option"
SECONDS_MAX = 20


class LeftError(Exception):
    pass


# ---- rounds ----


def objects_of_each():
    world = WholeWorld()
    assert world.ranks == [0, 1]
    return [ranks.objects({"rank": dist.get_rank()}) for ranks in (world, made())]


def made(group=None, **options):
    return Peers(group, instead=INSTEAD, **options)


def test_objects_of_each_rank_come_to_all(two):
    both = [{"rank": 0}, {"rank": 1}]
    assert two.run(objects_of_each) == [[both, both]] * 2


def left_in_a_round():
    """Both ranks leave; and then one, behind what the other has waited for, and before it."""
    peers = made()
    with contextlib.suppress(LeftError), peers.awaited():
        raise LeftError
    assert peers.objects("together") == ["together"] * 2
    with contextlib.suppress(LeftError), peers.awaited():
        peers.objects("there")
        if dist.get_rank():
            raise LeftError
    peers.objects("still there")
    kind, match = (LeftError, None) if dist.get_rank() else (OSError, "rank 1 has left by an error")
    with pytest.raises(kind, match=match), peers.awaited():
        if dist.get_rank():
            raise LeftError
        peers.objects("waits")
    for _ in range(2):
        with pytest.raises(OSError, match=r"not at the same step any more(.|\n)*hint"):
            peers.objects("apart")


def test_a_rank_that_leaves_is_named_to_those_that_wait(two):
    two.run(left_in_a_round)


def ended(module, name, error, call):
    """What a call raises in which this function of a module raises an error."""

    def fail(*_, **__):
        raise error

    peers = made()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, fail)
        with pytest.raises((OSError, KeyboardInterrupt)) as raised:
            call(peers)
    for _ in range(2):
        with pytest.raises(OSError, match="not at the same step any more: one was interrupted"):
            call(peers)
    return raised.value


def ended_waits():
    def objects(peers):
        peers.objects("mine")

    places = (peers_module, "wait_for_work"), (dist, "all_gather_object")
    for module, name in places:
        assert isinstance(ended(module, name, KeyboardInterrupt(), objects), KeyboardInterrupt)
    for module, name in (*places, (dist, "all_reduce")):
        error = str(ended(module, name, RuntimeError("closed by peer"), objects))
        assert error.startswith("another rank is gone")
        assert "closed by peer" in error


def test_a_wait_that_ends_by_an_error_leaves_the_ranks_apart(two):
    two.run(ended_waits)


def opened(group):
    calls = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather_into_tensor", "broadcast"):

            def call(*args, of_torch, **options):
                calls.append(of_torch.__name__)
                return of_torch(*args, **options)

            patched.setattr(dist, name, partial(call, of_torch=getattr(dist, name)))
        peers = made(group)
        for _ in range(2):
            peers.open_data(CPU)
    return calls


def opened_once():
    # What connects NCCL: no collective of this rank is under way then.
    assert opened(None) == ["all_gather_into_tensor", "broadcast"]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert opened(alone) == []


def test_the_group_of_weights_connects_once(two):
    two.run(opened_once)


def groups_made():
    backends = []
    with pytest.MonkeyPatch.context() as patched:
        new_group = dist.new_group

        def counted(*args, backend, **options):
            backends.append(backend)
            return new_group(*args, backend=backend, **options)

        patched.setattr(dist, "new_group", counted)
        peers = made(gathers=False)
        patched.setattr(dist, "is_gloo_available", lambda: False)
        with pytest.raises(ValueError, match="has no gloo") as raised:
            made(gathers=False)
        assert f"hint: {INSTEAD}; or" in str(raised.value)
    assert backends == ["gloo", "gloo"]
    assert not hasattr(peers, "data")
    assert peers.who_failed(peers.tell_of_step(1, None), None) == ([], "")


def test_ranks_that_gather_nothing_have_no_group_for_it(two):
    two.run(groups_made)


def own_timeouts():
    timeouts = [timedelta(seconds=50 + rank) for rank in range(2)]
    alone = [dist.new_group([rank], timeout=timeout) for rank, timeout in enumerate(timeouts)]
    rank = dist.get_rank()
    whole = timedelta(seconds=optim_ranks.COLLECTIVE_SECONDS_MAX)
    for group, expected in ((None, whole), (alone[rank], timeouts[rank])):
        peers = made(group)
        for own in (peers._agreeing, peers.status, peers.data):
            assert own._get_backend(CPU).options._timeout == expected


def test_ranks_are_waited_for_as_long_as_in_their_group(two):
    two.run(own_timeouts)


# ---- of steps in the background ----


def failures_of_some():
    peers, rank = made(), dist.get_rank()
    for step, failing in enumerate([(), (0,), (1,), (0, 1)]):
        why = f"no memory on {rank}" if rank in failing else None
        told = peers.who_failed(peers.tell_of_step(step, why), why)
        assert told == (list(failing), f"no memory on {failing[-1]}" if failing else "")
    with pytest.raises(OSError, match="not at the same step any more"):
        peers.who_failed(peers.tell_of_step(rank, None), None)


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
    peers.open_data(CPU)
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
    with contextlib.suppress(LeftError), gatherer.decided():
        if dist.get_rank():
            raise LeftError("no memory")
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

    def tell_of_step(self, *_):
        pass

    def who_failed(self, *_):
        return [], ""


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
        guard.protect([param])
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
