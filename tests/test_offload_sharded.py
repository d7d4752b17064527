"""OffloadAdamW(shard=True): two gloo ranks that share the step of a replicated model."""

import gc
import io
import os
import queue
import signal
import threading
import time
from hashlib import blake2b

import pytest
import stepwell
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_ranks import Net, Ranks
from stepwell.offload import gathering
from stepwell.offload.guard import WeightGuard
from stepwell.offload.peers import Peers, StepFacts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CPU = torch.device("cpu")
SECONDS_MAX = 20


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.stop()


class Wide(torch.nn.Module):
    """Pieces of chunks: one parameter for both ranks, uneven; small ones of one rank each."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(96, 2100)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.down = torch.nn.Linear(2100, 96)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def make(dtype=torch.float32, seed=0, kind=Wide):
    torch.manual_seed(seed)
    return kind().to(dtype)


def batch(step, rank, dtype, width=96):
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, width).to(dtype)


def train(model, optimizer, steps, first=0):
    dtype = next(model.parameters()).dtype
    norms = []
    for step in range(first, first + steps):
        model(batch(step, dist.get_rank(), dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


def bits(tensor):
    # A digest: lists of bytes take long between processes.
    return blake2b(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def same_as_unsharded(dtype, moments):
    nets = [make(dtype), make(dtype)]
    ddps = [DistributedDataParallel(net) for net in nets]
    options = {"lr": 1e-2, "clip_norm": 0.5, "moments": moments}
    ours = stepwell.OffloadAdamW(nets[0].named_parameters(), shard=True, **options)
    theirs = stepwell.OffloadAdamW(nets[1].named_parameters(), **options)
    assert train(ddps[0], ours, 4) == train(ddps[1], theirs, 4)
    assert ours._gate.is_open
    ours.synchronize()
    theirs.synchronize()
    for mine, expected in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(mine, expected)
    whole, expected = ours.full_state_dict(rank=None), theirs.state_dict()
    assert whole["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        assert whole["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(whole["state"][index][name], value), (index, name)
    return sum(v.nbytes for s in ours.state.values() for k, v in s.items() if k != "step")


@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_without_shard(two, dtype, moments):
    two.run(same_as_unsharded, dtype, moments)


def rows_are_dealt_out():
    net = make(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(DistributedDataParallel(net).parameters(), shard=True)
    net(batch(0, 0, torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.timing["bytes_gathered"] > 0
    return [tuple(state["exp_avg"].shape) for state in optimizer.state.values()]


def test_each_rank_has_state_of_its_rows_only(two):
    first, second = two.run(rows_are_dealt_out)
    whole = [tuple(param.shape) or (1,) for param in Wide().parameters()]
    assert [a[0] + b[0] for a, b in zip(first, second, strict=True)] == [w[0] for w in whole]
    # Chunks of 2048 rows: one, and a short one.
    assert sorted((first[1][0], second[1][0])) == [52, 2048]


def differences_are_errors():
    rank = dist.get_rank()
    # Weights of another seed, without DDP.
    net = make(seed=rank)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"`up.weight`.*not the same on all ranks(.|\n)*hint"):
        optimizer.step()
    net.load_state_dict(make().state_dict())
    optimizer.step()
    # Gradients that were not reduced.
    net.up.bias.grad[0] = 2 + rank
    before = optimizer.full_state_dict(rank=None)
    with pytest.raises(ValueError, match=r"norm of the gradients(.|\n)*DistributedDataParallel"):
        optimizer.step()
    # A gradient that one rank does not have; an error on one rank.
    grad, net.up.bias.grad = net.up.bias.grad, None if rank else net.up.bias.grad
    with pytest.raises(ValueError, match="step different parameters"):
        optimizer.step()
    net.up.bias.grad = torch.ones_like(grad)
    optimizer.param_groups[0]["lr"] = -1.0 if rank else 1e-2
    with pytest.raises(ValueError, match="lr" if rank else "another rank could not step"):
        optimizer.step()
    # Other hyper-parameters on one rank, as of a scheduler that follows the rank's own loss.
    optimizer.param_groups[0]["lr"] = 2e-2 if rank else 1e-2
    with pytest.raises(ValueError, match=r"different lr(.|\n)*hint"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.clip_norm = 1.0 if rank else None
    with pytest.raises(ValueError, match="clip_norm"):
        optimizer.step()
    optimizer.clip_norm = None
    # Where one skips a step, the other would gather its weights.
    other = stepwell.OffloadAdamW(
        net.parameters(), nonfinite="propagate" if rank else "skip", shard=True
    )
    with pytest.raises(ValueError, match="nonfinite"):
        other.step()
    # Other dither on one rank: a checkpoint has one seed.
    coded = stepwell.OffloadAdamW(net.parameters(), moments="q8", seed=rank, shard=True)
    with pytest.raises(ValueError, match=r"seed(.|\n)*hint"):
        coded.step()
    net.up.bias.grad[0] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    # A write on one rank.
    net.up.bias.grad[0] = 1
    if rank:
        with torch.no_grad():
            net.down.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"`down.weight`.*not the same"):
        optimizer.step()
    after = optimizer.full_state_dict(rank=None)
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["state"][index][name])
    # The ranks are together.
    with torch.no_grad():
        dist.broadcast(net.down.weight, 0)
    optimizer.step()
    # State that one rank has loaded.
    whole = optimizer.full_state_dict(rank=None)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
    if not rank:
        optimizer.load_state_dict(whole)
    with pytest.raises(ValueError, match="different numbers of steps"):
        optimizer.step()
    optimizer.load_state_dict(whole)
    optimizer.step()
    optimizer.synchronize()
    return [bits(param) for param in net.parameters()]


def test_differences_are_errors_on_all_ranks_and_change_nothing(two):
    first, second = two.run(differences_are_errors)
    assert first == second


def accesses():
    rank = dist.get_rank()
    net, other = make(), make()
    for model in (net, other):
        model.up.bias.requires_grad_(False)
    ddp, other_ddp = DistributedDataParallel(net), DistributedDataParallel(other)
    ours = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
    theirs = stepwell.OffloadAdamW(other.named_parameters(), lr=1e-2)
    for step in range(3):
        for model, optimizer in ((ddp, ours), (other_ddp, theirs)):
            with model.no_sync():
                model(batch(step, rank, torch.float32)).square().mean().backward()
            model(batch(step + 9, rank, torch.float32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # One rank looks, the other does not.
        if rank == step % 2:
            assert torch.equal(net.down.weight, other.down.weight)
            net.eval()
            net(batch(step, 0, torch.float32))
            net.train()
    ours.synchronize()
    for mine, expected in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, expected)
    with pytest.raises(ValueError, match=r"`shard` and `deferred`(.|\n)*hint"):
        stepwell.OffloadAdamW(net.parameters(), shard=True, deferred=stepwell.offload.Deferred())
    with pytest.raises(ValueError, match=r"`accumulate` is `host`(.|\n)*hint"):
        stepwell.OffloadAdamW(net.parameters(), shard=True, accumulate="host")
    with pytest.raises(TypeError, match=r"this rank's share(.|\n)*hint"):
        torch.save(ours.state_dict(), io.BytesIO())
    with pytest.raises(ValueError, match=r"decoded_state_dict(.|\n)*hint"):
        ours.decoded_state_dict()


def test_accesses_accumulation_and_frozen_parameters(two):
    two.run(accesses)


def frozen_and_written():
    nets = make(), make()
    for net, options in zip(nets, ({"shard": True}, {}), strict=True):
        optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, **options)
        for step in range(6):
            net.up.weight.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            net(batch(step, 0, torch.float32)).square().mean().backward()
            optimizer.step()
            net(batch(step, 0, torch.float32))
            if step in (1, 2, 3):
                net.up.weight.data.mul_(0.5)
                if not options:
                    optimizer.reread_parameters()
        optimizer.synchronize()
    for mine, expected in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(mine, expected)


def test_writes_through_data_to_frozen_parameters_count(two):
    two.run(frozen_and_written)


# ---- checkpoints ----


def save(folder, moments):
    net = make(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True, moments=moments)
    ddp = DistributedDataParallel(net)
    train(ddp, optimizer, 2)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp")
    whole = optimizer.full_state_dict()
    assert bool(whole) == (dist.get_rank() == 0)
    if whole:
        torch.save({"model": net.state_dict(), "optimizer": whole}, folder / "whole.pt")
    return resumed_bits(net, optimizer)


def resumed_bits(net, optimizer):
    """Weights and state after a step that does not depend on the number of ranks."""
    for seed, param in enumerate(net.parameters()):
        torch.manual_seed(seed)
        param.grad = torch.randn(param.shape).to(param.dtype)
    optimizer.step()
    state = optimizer.full_state_dict(rank=None)["state"]
    found = [bits(param) for param in net.parameters()]
    return found + [bits(state[index][name]) for index in state for name in sorted(state[index])]


def load(folder, moments):
    # Both ranks together, and each alone.
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = []
    for kind, shard in (("dcp", True), ("dcp", alone), ("whole", True), ("whole", alone)):
        net = make(torch.bfloat16, seed=7)
        optimizer = stepwell.OffloadAdamW(
            net.named_parameters(), lr=1e-2, shard=shard, moments=moments
        )
        if kind == "dcp":
            model_state, optimizer_state = get_state_dict(net, optimizer)
            loaded = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(loaded, checkpoint_id=folder / "dcp")
            set_state_dict(
                net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
            )
        else:
            saved = torch.load(folder / "whole.pt")
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        found.append(resumed_bits(net, optimizer))
    return found


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_resumes_at_another_number_of_ranks(two, tmp_path, moments):
    saved = two.run(save, tmp_path, moments)
    assert saved[0] == saved[1]
    for found in two.run(load, tmp_path, moments):
        assert found == [saved[0]] * 4


# ---- ranks without a share, and ranks that go ----


def more_ranks_than_chunks():
    net = torch.nn.Linear(6, 1, bias=False)
    optimizer = stepwell.OffloadAdamW(
        DistributedDataParallel(net).parameters(), lr=1e-2, shard=dist.group.WORLD
    )
    for step in range(2):
        net(batch(step, 0, torch.float32, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return bits(net.weight), optimizer.state[net.weight]["exp_avg"].numel()


def test_more_ranks_than_chunks(two):
    (first, numel), (second, none) = two.run(more_ranks_than_chunks)
    assert first == second
    assert (numel, none) == (6, 0)


def with_core(kind):
    """A model, its optimizer, and the `kind` that its gathering thread has as the engine's core."""
    net = make(kind=Net)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
    return net, optimizer, wrap_core(optimizer, kind)


def wrap_core(optimizer, kind):
    """The `kind` that the gathering thread of a new optimizer has as the engine's core."""
    made, cores = gathering._GatherThread, []

    def wrapped(core, *rest, **options):
        cores.append(kind(core))
        return made(cores[-1], *rest, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathering, "_GatherThread", wrapped)
        optimizer._opened_engine()
    return cores[-1]


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
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
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


@pytest.mark.parametrize("place", ["_updates", "_refuse_lost_writes", "_bind"])
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
    optimizer = stepwell.OffloadAdamW(net.parameters(), shard=True)
    train_alike(net, optimizer)
    call, other = optimizer.full_state_dict, optimizer.step
    if dist.get_rank():
        call, other = other, call
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(
        OSError, match=r"full_state_dict\(\), and another one step|step\(\), and ano"
    ):
        call()


def train_alike(net, optimizer):
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_the_whole_state_is_a_call_of_all_ranks(two):
    two.run(whole_state_on_one_rank)


def uneven_batches(*, throws):
    net = make(kind=Net)
    ddp = DistributedDataParallel(net)
    optimizer = stepwell.OffloadAdamW(net.parameters(), shard=True)
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
    optimizer = stepwell.OffloadAdamW(net.parameters(), shard=True)
    children = []
    for is_over in (False, True):
        for _ in range(2):
            # Without a forward a step waits by itself.
            net(torch.ones(2, 6))
            train_alike(net, optimizer)
        if is_over:
            optimizer._engine._gatherer.finish(())
        child = os.fork()
        if child == 0:
            code = 3
            try:
                net.first.weight.sum()
            except ValueError as error:
                code = 0 if "forking" in str(error) else 4
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
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


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


def calls_differ():
    # By gloo, rounds of other sizes would end the process.
    facts = StepFacts(has_error=False, found_inf=False, is_written=False)
    calls = [
        lambda peers: peers.agree_on_step(facts, 1, 2),
        lambda peers: peers.check_norm(1.0),
        lambda peers: peers.first_difference(list(range(20))),
        lambda peers: peers.objects("catalog"),
    ]
    for nth in range(len(calls)):
        peers = Peers(None)
        for _ in range(2):
            with pytest.raises(OSError, match=r"not at the same step(.|\n)*hint"):
                calls[(nth + dist.get_rank()) % len(calls)](peers)


def test_ranks_that_call_differently_are_told(two):
    two.run(calls_differ)


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
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        if dist.get_rank() == 1 and optimizer.grad_norm is not None:
            os._exit(9)
        optimizer.step()


def test_a_rank_that_dies_stops_all(two):
    # They are started, whichever test runs first, and by the next test anew.
    two.run(more_ranks_than_chunks)
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
        optimizer = stepwell.OffloadAdamW(net.named_parameters(), lr=1e-2, shard=True)
        train_alike(net, optimizer)
        del optimizer
        gc.collect()
    assert len(ended) == 1


def test_the_thread_that_gathers_ends_with_its_optimizer(two):
    two.run(closed)
