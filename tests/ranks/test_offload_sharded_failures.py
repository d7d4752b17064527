"""Ranks that share a step, of which one fails, leaves, dies, forks or calls differently."""

import contextlib
import gc
import os
import queue
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import optim_ranks
import pytest
import stepwell
import torch
import torch.distributed as dist
from insides import engine_of, sharding_of
from optim_ranks import Net
from sharded_models import batch, make, train_alike, wrap_core
from stepwell.access.guard import WeightGuard
from stepwell.ranks import gathering
from stepwell.ranks import peers as peers_module
from stepwell.ranks.collective import Call, WholeWorld
from stepwell.ranks.peers import Peers, StepFacts
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CPU = torch.device("cpu")
SECONDS_MAX = 20


def with_core(kind):
    """A model, its optimizer, and the `kind` that its gathering thread has as the engine's core."""
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
    return net, optimizer, wrap_core(optimizer, kind)


class Breaking:
    """The core of an engine whose steps may fail."""

    def __init__(self, core):
        self.core = core
        self.is_broken = False

    def wait(self, *args, **options):
        if self.is_broken:
            raise OSError("the step has failed here")
        return self.core.wait(*args, **options)


def failed_step_on_one_rank():
    net, optimizer, core = with_core(Breaking)
    for is_last in (False, True):
        net(torch.ones(2, 6)).sum().backward()
        core.is_broken = is_last and dist.get_rank() == 1
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    what = "failed here" if dist.get_rank() else r"on rank 1 \(`the step has failed here`\)"
    # Old weights are in no state dict, and go through no forward.
    for call in (
        net.state_dict,
        lambda: net(torch.ones(2, 6)),
        lambda: net.eval()(torch.ones(2, 6)),
        lambda: net.last.weight.sum(),
        optimizer.synchronize,
        optimizer.step,
        optimizer.state_dict,
    ):
        with pytest.raises(OSError, match=what):
            call()


def test_a_step_that_fails_on_one_rank_stops_all(two):
    two.run(failed_step_on_one_rank)


class Waiting:
    """The core of an engine whose waits for a place end when they are told to, or fail then."""

    def __init__(self, core):
        self.core = core
        self.place = None
        self.fails = False
        self.goes_on = threading.Event()

    def wait(self, place, *args, **options):
        if place == self.place:
            assert self.goes_on.wait(SECONDS_MAX)
            if self.fails:
                raise OSError("the step has failed here")
        return self.core.wait(place, *args, **options)


def with_waiting_core():
    """A model that has been trained, whose gathers wait for a `Waiting`."""
    net, optimizer, core = with_core(Waiting)
    # Without a forward a step waits by itself.
    for _ in range(2):
        net(torch.ones(2, 6))
        train_alike(net, optimizer)
    net(torch.ones(2, 6))
    return net, optimizer, core


def look_while_a_step_fails():
    rank = dist.get_rank()
    net, optimizer, core = with_waiting_core()
    if rank:
        core.place, core.fails = 0, True
    train_alike(net, optimizer)
    first = next(net.parameters())
    # Of the engine's own work nothing is left.
    core.core.finish(stream=0)
    assert engine_of(optimizer).busy
    # It fails at the first weight, and goes on with the collectives at the second.
    core.goes_on.set()
    looked = []
    for look in (lambda: first.sum(), lambda: net.first.eval()(torch.ones(1, 6))):
        with pytest.raises(OSError) as raised:
            look()
        looked.append(str(raised.value))
    return looked


def test_a_look_while_another_rank_fails_reads_nothing_old(two):
    first, second = two.run(look_while_a_step_fails)
    assert all("failed on rank 1" in error for error in first)
    assert all("failed here" in error for error in second)


class LeftError(Exception):
    pass


def left_between(place):
    """One rank raises between two calls of all ranks; or all do."""
    rank = dist.get_rank()
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
    found = []
    for raising in ((), (0, 1), (1,), (1,)):
        with pytest.MonkeyPatch.context() as patched:
            if rank in raising:

                def leave(*_, **__):
                    raise LeftError("no memory")

                patched.setattr(optimizer, place, leave)
            try:
                net(torch.ones(2, 6)).sum().backward()
                train_alike(net, optimizer)
                optimizer.synchronize()
                found.append(None)
            except (LeftError, OSError) as error:
                found.append(f"{type(error).__name__}: {error}")
    # And from now on.
    for call in (optimizer.step, optimizer.step):
        with pytest.raises(OSError, match="hint"):
            call()
    return found


@pytest.mark.parametrize("place", ["_looked", "_submit"])
def test_a_rank_that_leaves_a_step_is_named_to_the_others(two, place):
    first, second = two.run(left_between, place)
    assert second[:3] == [None, "LeftError: no memory", "LeftError: no memory"]
    assert first[:2] == second[:2]
    assert first[2].startswith("OSError")
    assert "rank 1" in first[2]
    # It does not leave another one, to wait for the others in the next.
    assert all(error.startswith("OSError") for error in (first[3], second[3]))


def whole_state_on_one_rank():
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net, shard=True)
    train_alike(net, optimizer)
    calls = [optimizer.full_state_dict, optimizer.step]
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    names = [r"full_state_dict\(\)", r"step\(\)"]
    rank = dist.get_rank()
    with pytest.raises(OSError, match=f"called {names[rank]}, and another one {names[1 - rank]}"):
        calls[rank]()


def test_the_whole_state_is_a_call_of_all_ranks(two):
    two.run(whole_state_on_one_rank)


def uneven_batches(*, throws):
    net = make(kind=Net)
    ddp = DistributedDataParallel(net)
    optimizer = stepwell.OffloadAdamW(ddp, shard=True)
    steps = 0
    with ddp.join(throw_on_early_termination=throws):
        for _ in range(2 + dist.get_rank()):
            ddp(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def joined():
    with pytest.raises(ValueError, match=r"join\(\) is in use(.|\n)*hint"):
        uneven_batches(throws=False)
    with pytest.raises(RuntimeError, match="exhausted"):
        uneven_batches(throws=True)


def test_uneven_batches_are_refused(two):
    two.run(joined)


def forked_children():
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net, shard=True)
    peers = sharding_of(optimizer).peers
    children = []
    for is_over in (False, True):
        for _ in range(2):
            # Without a forward a step waits by itself.
            net(torch.ones(2, 6))
            train_alike(net, optimizer)
        if is_over:
            engine_of(optimizer).finish()
        child = os.fork()
        if child == 0:
            code = 3
            try:
                for call in (net.first.weight.sum, lambda: peers.check_norm(1.0)):
                    with pytest.raises(ValueError, match="before forking"):
                        call()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        begin = time.monotonic()
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() - begin > SECONDS_MAX / 2:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert ended[1] == 0
    train_alike(net, optimizer)
    optimizer.synchronize()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_looks_at_a_weight_is_told(two):
    two.run(forked_children)


def destroyed(folder):
    """The process group goes while weights are on their way."""
    rank = dist.get_rank()
    net, optimizer, core = with_waiting_core()
    core.place = 0
    train_alike(net, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    core.goes_on.set()
    try:
        for call in (lambda: net.first.weight.sum(), optimizer.synchronize, optimizer.step):
            with pytest.raises(OSError, match=r"destroy_process_group\(\)(.|\n)*hint"):
                call()
    finally:
        store = f"file://{folder / 'again'}"
        timeout = timedelta(seconds=optim_ranks.COLLECTIVE_SECONDS_MAX)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)


def test_a_look_behind_the_process_group_says_what_happened(two, tmp_path):
    two.run(destroyed, tmp_path)


def two_optimizers():
    """Over parameters of one model, whose forward runs on another thread."""
    nets, found = [make(), make()], []
    for net, options in zip(nets, ({"shard": True}, {}), strict=True):
        ddp = DistributedDataParallel(net)
        parts = list(net.up.parameters()), [net.scale, *net.down.parameters()]
        optimizers = [stepwell.OffloadAdamW(part, lr=1e-2, **options) for part in parts]
        for step in range(4):
            losses = []

            def forward(step=step, ddp=ddp, losses=losses):
                losses.append(ddp(batch(step, dist.get_rank(), torch.float32)).square().mean())

            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            losses[0].backward()
            for optimizer in optimizers if step % 2 else reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
            # The ranks look in another order each, and not at the same.
            for part in parts if dist.get_rank() else parts[:0:-1]:
                found.append(part[-1].sum().item())
        for optimizer in optimizers:
            optimizer.synchronize()
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    for mine, expected in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(mine, expected)


def test_two_optimizers_of_one_model(two):
    two.run(two_optimizers)


FACTS = StepFacts(has_error=False, found_inf=False, is_written=False)


def calls_differ():
    # By gloo, rounds of other sizes would end the process.
    calls = [
        lambda peers: peers.agree_on_step(FACTS, 1, 2),
        lambda peers: peers.check_norm(1.0),
        lambda peers: peers.first_difference(list(range(20))),
        lambda peers: peers.objects("catalog"),
        lambda peers: peers.broadcast(torch.zeros(9), 0),
        lambda peers: peers.open_data(CPU),
    ]
    for nth in range(len(calls)):
        peers = Peers(None)
        for _ in range(2):
            with pytest.raises(OSError, match=r"not at the same step(.|\n)*called(.|\n)*hint"):
                calls[(nth + dist.get_rank()) % len(calls)](peers)


def test_ranks_that_call_differently_are_told(two):
    two.run(calls_differ)


def calls_by_name():
    peers, rank = Peers(None), dist.get_rank()
    names = [r"full_state_dict\(\)", r"OffloadAdamW\(tier=...\)"]
    with pytest.raises(OSError, match=f"called {names[rank]}, and another one {names[1 - rank]};"):
        peers.objects("mine", (Call.OBJECTS, Call.VOLUME)[rank])


def test_calls_that_differ_are_named(two):
    two.run(calls_by_name)


def objects_of_each():
    world = WholeWorld()
    assert world.ranks == [0, 1]
    return [ranks.objects({"rank": dist.get_rank()}) for ranks in (world, Peers(None))]


def test_objects_of_each_rank_come_to_all(two):
    both = [{"rank": 0}, {"rank": 1}]
    assert two.run(objects_of_each) == [[both, both]] * 2


def facts_of_one_rank():
    peers, rank = Peers(None), dist.get_rank()
    for place in range(len(FACTS)):
        facts = StepFacts(*(rank == 1 and place == each for each in range(len(FACTS))))
        is_refused = facts.has_error or facts.found_inf
        # A rank that does not step has digests of nothing.
        found = peers.agree_on_step(facts, 0 if is_refused else 3, 0 if is_refused else 4)
        assert found == StepFacts(*(place == each for each in range(len(FACTS))))
    for params, settings, match in ((3 + rank, 4, "different parameters"), (3, 4 + rank, "seed")):
        with pytest.raises(ValueError, match=match):
            peers.agree_on_step(FACTS, params, settings)
    for at in (0, 5, 19, None):
        digests = [rank * (each == at) for each in range(20)]
        assert peers.first_difference(digests) == at


def test_what_one_rank_knows_all_know(two):
    two.run(facts_of_one_rank)


def failures_of_some():
    peers, rank = Peers(None), dist.get_rank()
    for step, failing in enumerate([(), (0,), (1,), (0, 1)]):
        why = f"no memory on {rank}" if rank in failing else None
        told = peers.who_failed(peers.tell_of_step(step, why), why)
        assert told == (list(failing), f"no memory on {failing[-1]}" if failing else "")
    with pytest.raises(OSError, match="not at the same step any more"):
        peers.who_failed(peers.tell_of_step(rank, None), None)


def test_the_ranks_whose_step_has_failed_are_told(two):
    two.run(failures_of_some)


def left_behind_a_round():
    peers = Peers(None)
    with contextlib.suppress(LeftError), peers.awaited():
        peers.check_norm(1.0)
        if dist.get_rank():
            raise LeftError
    # The others have got what they waited for.
    peers.check_norm(1.0)


def test_a_rank_that_leaves_behind_a_round_keeps_none_waiting(two):
    two.run(left_behind_a_round)


def ended(module, name, error, call):
    """What a call raises in which this function of a module raises an error."""

    def fail(*_, **__):
        raise error

    peers = Peers(None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, fail)
        with pytest.raises((OSError, KeyboardInterrupt)) as raised:
            call(peers)
    for _ in range(2):
        with pytest.raises(OSError, match="not at the same step any more: one was interrupted"):
            call(peers)
    return raised.value


def ended_waits():
    def norm(peers):
        peers.check_norm(1.0)

    def objects(peers):
        peers.objects("mine")

    places = (peers_module, "wait_for_work", norm), (dist, "all_gather_object", objects)
    for module, name, call in places:
        assert isinstance(ended(module, name, KeyboardInterrupt(), call), KeyboardInterrupt)
    for module, name, call in (*places, (dist, "all_reduce", norm)):
        error = str(ended(module, name, RuntimeError("closed by peer"), call))
        assert error.startswith("another rank is gone")
        assert "closed by peer" in error
        assert error.endswith("do not make it" if call is objects else "from a checkpoint")


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
        peers = Peers(group)
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
    made, instead = [], '"stepwell": {"engine": false}'
    with pytest.MonkeyPatch.context() as patched:
        new_group = dist.new_group

        def counted(*args, backend, **options):
            made.append(backend)
            return new_group(*args, backend=backend, **options)

        patched.setattr(dist, "new_group", counted)
        peers = Peers(None, gathers=False)
        patched.setattr(dist, "is_gloo_available", lambda: False)
        with pytest.raises(ValueError, match="has no gloo") as raised:
            Peers(None, gathers=False, instead=instead)
        assert f"hint: {instead}; or" in str(raised.value)
        assert "shard" not in str(raised.value)
    assert made == ["gloo", "gloo"]
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
        peers = Peers(group)
        for own in (peers._agreeing, peers.status, peers.data):
            assert own._get_backend(CPU).options._timeout == expected


def test_ranks_are_waited_for_as_long_as_in_their_group(two):
    two.run(own_timeouts)


def test_a_forked_child_waits_for_no_thread_of_its_parent():
    steps, last = queue.SimpleQueue(), gathering._GatheredStep([], None, {})
    gathering._close(threading.current_thread(), steps, [last], os.getpid() + 1)
    assert steps.empty()


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


def one_rank_dies():
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        if dist.get_rank() == 1 and optimizer.grad_norm is not None:
            os._exit(9)
        optimizer.step()


def test_a_rank_that_dies_stops_all(two):
    # They are started, whichever test runs first, and by the next test anew.
    two.run(dist.get_rank)
    for tasks in two.tasks:
        tasks.put((one_rank_dies, ()))
    rank, failure, _ = two.results.get(timeout=40)
    two.stop()
    assert rank == 0
    assert "OSError: another rank is gone" in failure


def closed():
    """The thread that gathers ends with its optimizer, before what it holds could be its alone."""
    ended, run = [], gathering._GatherThread.run

    def late(self):
        run(self)
        time.sleep(0.05)
        ended.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathering._GatherThread, "run", late)
        net = make(kind=Net)
        optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
        train_alike(net, optimizer)
        del optimizer
        gc.collect()
    assert len(ended) == 1


def test_the_thread_that_gathers_ends_with_its_optimizer(two):
    two.run(closed)
