"""OffloadAdamW over two gloo ranks: DistributedDataParallel and FSDP2 (`fully_shard`).

Their norms and their checkpoints too.
"""

import copy
import itertools
import math

import fsdp_gradient_programs
import fsdp_late_programs
import pytest
import stepwell
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from insides import forwards_wait
from optim_cases import CODECS, assert_same, bits
from optim_ranks import Net, Ranks
from stepwell.store.norm import gradient_norm
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


# ---- what runs on the ranks ----


def make_net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def sharded_net(dtype=torch.float32, **options):
    net = make_net(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(step, rank, dtype=torch.float32):
    return (torch.linspace(-1, 1, 24).view(4, 6) + 0.1 * step + 0.5 * rank).to(dtype)


def train(net, optimizer, steps, first=0, rank=None):
    """Losses; each rank has its own batch unless `rank` says whose."""
    dtype = next(net.parameters()).dtype
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = net(batch(step, dist.get_rank() if rank is None else rank, dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_both_batches(net, optimizer, steps, clip_norm=None):
    """What the ranks do together, in one process: gradients are means over the ranks."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (net(batch(step, rank)).square().mean() / dist.get_world_size()).backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm or torch.inf).item()
        )
        optimizer.step()
    return norms


def local_snapshot(optimizer):
    optimizer.state_dict()
    result = {}
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            for name, value in {"param": param.detach(), **optimizer.state[param]}.items():
                result[index, name] = bits(
                    value.to_local() if isinstance(value, DTensor) else value
                )
    return result


def full(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def ddp_trains_as_one(told, order):
    # Ranks begin with different weights: DDP makes them those of rank 0, also behind the back of an
    # optimizer that is there.
    net = make_net(seed=dist.get_rank())
    whole = make_net(seed=0)
    options = {"lr": 1e-2, "clip_norm": 0.05, "accumulation_steps": told}
    if order == "optimizer-first":
        optimizer = stepwell.OffloadAdamW(net, **options)
    ddp = DistributedDataParallel(net)
    if order == "ddp-first":
        optimizer = stepwell.OffloadAdamW(net, **options)
    norms = []
    for step in range(4):
        train(ddp, optimizer, 1, first=step)
        norms.append(optimizer.grad_norm)
    assert forwards_wait(optimizer)
    reference = stepwell.AdamW(whole.parameters(), lr=1e-2)
    assert norms == pytest.approx(
        train_on_both_batches(whole, reference, 4, clip_norm=0.05), rel=1e-4
    )
    assert min(norms) > 0.05
    optimizer.synchronize()
    for param, expected in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    return norms, [bits(param).tolist() for param in net.parameters()]


def ddp_accumulates_by_no_sync():
    nets, optimizers = [make_net(), make_net()], []
    ddps = [DistributedDataParallel(net) for net in nets]
    for net, kind in zip(nets, (stepwell.OffloadAdamW, stepwell.AdamW), strict=True):
        optimizers.append(kind(net.parameters(), lr=1e-2))
    for step in range(3):
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(batch(2 * step, dist.get_rank())).square().mean().backward()
            ddp(batch(2 * step + 1, dist.get_rank())).square().mean().backward()
            optimizer.step()
    assert_same(*(local_snapshot(optimizer) for optimizer in optimizers))


def host_sums_are_refused():
    net = make_net()
    optimizer = stepwell.OffloadAdamW(net, accumulate="host")
    with pytest.raises(ValueError, match=r"other ranks have a part in them(.|\n)*hint"):
        train(DistributedDataParallel(net), optimizer, 1)
    with pytest.raises(
        ValueError, match=r"is a DTensor, whose gradients are not summed(.|\n)*hint"
    ):
        stepwell.OffloadAdamW(sharded_net().parameters(), accumulate="host")


def fsdp_trains_as_one(reshard, clip_norm):
    net, whole = sharded_net(reshard_after_forward=reshard), make_net()
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, clip_norm=clip_norm)
    reference = stepwell.AdamW(whole.parameters(), lr=1e-2)
    norms = []
    for step in range(4):
        train(net, optimizer, 1, first=step)
        norms.append(optimizer.grad_norm)
    # The norm is that of all shards, on every rank.
    assert norms == pytest.approx(
        train_on_both_batches(whole, reference, 4, clip_norm=clip_norm), rel=1e-4
    )
    for mine, expected in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(mine), expected.detach())
    return norms


def shards_step_as_the_whole(dtype, moments):
    net, whole = sharded_net(dtype), make_net(dtype)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, moments=moments)
    reference = stepwell.AdamW(whole.parameters(), lr=1e-2, moments=moments)
    with torch.no_grad():
        for mine, expected in zip(net.parameters(), whole.parameters(), strict=True):
            mine.copy_(distribute_tensor(expected, mine.device_mesh, mine.placements))
    for _ in range(4):
        # Not by a backward pass: it may round otherwise where tensors lie otherwise.
        for mine, expected in zip(net.parameters(), whole.parameters(), strict=True):
            expected.grad = torch.randn(expected.shape).to(dtype)
            mine.grad = distribute_tensor(expected.grad, mine.device_mesh, mine.placements)
        optimizer.step()
        reference.step()
    for mine, expected in zip(net.parameters(), whole.parameters(), strict=True):
        assert optimizer.state[mine]["step"] == 4
        if moments == "fp32":
            assert torch.equal(bits(full(mine)), bits(expected))
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(
                    bits(full(optimizer.state[mine][name])), bits(reference.state[expected][name])
                )
        else:
            # The noise of a piece is its own.
            torch.testing.assert_close(full(mine), expected.detach(), rtol=0.05, atol=0.01)


def fsdp_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    nets = [sharded_net(mp_policy=policy) for _ in range(2)]
    ours = stepwell.OffloadAdamW(nets[0], lr=1e-2)
    theirs = torch.optim.AdamW(nets[1].parameters(), lr=1e-2)
    assert train(nets[0], ours, 4) == pytest.approx(train(nets[1], theirs, 4), rel=1e-2)


def steps_are_taken():
    net = sharded_net()
    train(net, stepwell.OffloadAdamW(net), 2)


def checkpoint_resumes(folder, dtype, moments):
    net = sharded_net(dtype)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, moments=moments, seed=5)
    train(net, optimizer, 3)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    resumed_net = sharded_net(dtype)
    for param in resumed_net.parameters():
        torch.nn.init.ones_(param)
    resumed = stepwell.OffloadAdamW(resumed_net, lr=1e-2, moments=moments)
    model_state, optimizer_state = get_state_dict(resumed_net, resumed)
    assert all(state["step"] == 0 for state in resumed.state.values())
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        resumed_net, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert_same(local_snapshot(optimizer), local_snapshot(resumed))
    assert train(net, optimizer, 2, first=3) == train(resumed_net, resumed, 2, first=3)
    assert_same(local_snapshot(optimizer), local_snapshot(resumed))


def full_state_dict_round_trip(moments):
    net = sharded_net(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(net, moments=moments)
    train(net, optimizer, 2)
    options = StateDictOptions(full_state_dict=True)
    packed = get_optimizer_state_dict(net, optimizer, options=options)
    packed = [packed if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(packed)
    other_net = sharded_net(torch.bfloat16)
    other = stepwell.OffloadAdamW(other_net, moments=moments)
    set_optimizer_state_dict(other_net, other, packed[0], options=options)
    mine, theirs = local_snapshot(optimizer), local_snapshot(other)
    keys = {key for key in mine if key[1] != "param"}
    assert_same({key: mine[key] for key in keys}, {key: theirs[key] for key in keys})


def nonfinite_on_one_rank(nonfinite):
    net = sharded_net(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(net, nonfinite=nonfinite)
    train(net, optimizer, 1)
    if dist.get_rank() == 1:
        net.first.weight.grad.to_local()[0, 0] = torch.inf
    before = local_snapshot(optimizer)
    message = None
    try:
        optimizer.step()
    except ValueError as error:
        message = str(error)
    assert_same(before, local_snapshot(optimizer))
    train(net, optimizer, 1)
    return message, optimizer.skipped_steps


def error_on_one_rank():
    net = sharded_net()
    optimizer = stepwell.OffloadAdamW(net)
    train(net, optimizer, 1)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = -1.0
    before = local_snapshot(optimizer)
    with (
        pytest.raises(ValueError, match="lr")
        if dist.get_rank() == 0
        else pytest.raises(ValueError, match="another")
    ):
        optimizer.step()
    assert_same(before, local_snapshot(optimizer))


def left_after_the_decision(kind):
    """Ranks leave a step by an error of their own, and go on: all of them, and then one."""
    net = sharded_net()
    optimizer = kind(net.parameters(), lr=1e-2)
    train(net, optimizer, 1)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    for leaving in ((0, 1), (1,)):
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank() in leaving:

                def leave(*_):
                    raise RuntimeError("no memory here")

                name = "_submit" if kind is stepwell.OffloadAdamW else "_apply"
                patched.setattr(optimizer, name, leave)
                with pytest.raises(RuntimeError, match="here"):
                    train(net, optimizer, 1, first=1)
            else:
                train(net, optimizer, 1, first=1)
        if len(leaving) == 2:
            train(net, optimizer, 1, first=1)
    for _ in range(2):
        with pytest.raises(OSError, match=r"^rank 1 has left a step(.|\n)*hint"):
            train(net, optimizer, 1, first=2)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, 1, first=1)


NORM_LAYOUTS = [
    [None, None, None],
    [Shard(0), Shard(0), Shard(0)],
    [Replicate(), Shard(0), None],
    [None, Shard(1), Replicate()],
]


def norms_of_layouts():
    """The norm of gradients that lie in all ways, of two dtypes, against that of the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layouts, wide, special in itertools.product(NORM_LAYOUTS, (1.0, 1e30), (None, torch.inf)):
        torch.manual_seed(0)
        wholes = [torch.randn(5, 4) * wide, torch.randn(3, 2).bfloat16(), torch.randn(4, 3)]
        if special:
            # On one rank, where it is cut.
            wholes[1][0, 0] = special
        grads = [
            whole if layout is None else distribute_tensor(whole, mesh, [layout])
            for whole, layout in zip(wholes, layouts, strict=True)
        ]
        # Finite gradients have a finite norm, also where its float32 square is none.
        expected = math.sqrt(sum(whole.double().square().sum().item() for whole in wholes))
        found = gradient_norm(grads, grads, torch.device("cpu"))
        assert found == pytest.approx(expected, rel=1e-6), layouts


# ---- the tests ----


@pytest.mark.parametrize("told", [None, 1], ids=["untold", "told"])
@pytest.mark.parametrize("order", ["ddp-first", "optimizer-first"])
def test_ddp_steps_the_mean_of_all_ranks(ranks, told, order):
    first, second = ranks.run(ddp_trains_as_one, told, order)
    assert first == second


def test_ddp_accumulates_by_no_sync(ranks):
    ranks.run(ddp_accumulates_by_no_sync)


def test_host_sums_are_refused(ranks):
    ranks.run(host_sums_are_refused)


def test_the_norm_is_that_of_the_whole(ranks):
    ranks.run(norms_of_layouts)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_fsdp2_trains_as_one(ranks, reshard, clip_norm):
    first, second = ranks.run(fsdp_trains_as_one, reshard, clip_norm)
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", CODECS)
def test_shards_step_as_the_whole(ranks, dtype, moments):
    ranks.run(shards_step_as_the_whole, dtype, moments)


def test_fsdp2_mixed_precision(ranks):
    ranks.run(fsdp_mixed_precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_distributed_checkpoint_resumes_exactly(ranks, tmp_path, dtype, moments):
    ranks.run(checkpoint_resumes, tmp_path, dtype, moments)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_full_state_dict(ranks, moments):
    ranks.run(full_state_dict_round_trip, moments)


def test_nonfinite_gradient_on_one_rank_raises_on_all(ranks):
    for message, _ in ranks.run(nonfinite_on_one_rank, "raise"):
        assert "norm of the gradients is `inf`" in message


def test_nonfinite_gradient_on_one_rank_is_skipped_by_all(ranks):
    assert ranks.run(nonfinite_on_one_rank, "skip") == [(None, 1), (None, 1)]


def test_error_on_one_rank_stops_all(ranks):
    ranks.run(error_on_one_rank)


@pytest.mark.parametrize("kind", [stepwell.OffloadAdamW, stepwell.AdamW])
def test_a_step_that_one_rank_has_left_is_the_last(ranks, kind):
    ranks.run(left_after_the_decision, kind)


# ---- steps that go on behind, under FSDP2 ----


@pytest.mark.parametrize(
    "program",
    [
        fsdp_late_programs.forwards_wait,
        fsdp_late_programs.forwards_wait_without_torch_functions,
        fsdp_late_programs.own_shards_only,
        fsdp_late_programs.readers_wait,
        fsdp_late_programs.kept_tensors_wait,
        fsdp_late_programs.tensors_that_are_placed_wait,
        fsdp_late_programs.the_tests_would_notice,
        fsdp_late_programs.late_on_one_rank,
        fsdp_late_programs.interrupted_before_a_step,
    ],
    ids=lambda program: program.__name__,
)
def test_uses_of_shards_wait_for_a_late_step(ranks, program):
    ranks.run(program)


@pytest.mark.parametrize(
    "program",
    [
        fsdp_gradient_programs.gradients_are_copied_in_the_backward,
        fsdp_gradient_programs.gradients_may_be_accumulated,
        fsdp_gradient_programs.the_last_backward_may_be_told_by_no_sync,
        fsdp_gradient_programs.gradients_that_are_changed_cross_again,
        fsdp_gradient_programs.a_backward_that_fails_leaves_nothing,
        fsdp_gradient_programs.offloaded_gradients_are_left_to_the_step,
    ],
    ids=lambda program: program.__name__,
)
def test_gradients_of_shards_are_copied_early(ranks, program):
    ranks.run(program)


def test_a_rank_whose_step_fails_ends_the_others(ranks):
    # It ends, and the ranks are started anew where another test follows.
    ranks.run(steps_are_taken)
    for tasks in ranks.tasks:
        tasks.put((fsdp_late_programs.fails_on_one_rank, ()))
    rank, failure, told = ranks.results.get(timeout=40)
    ranks.stop()
    assert (rank, failure, told) == (0, None, True)
