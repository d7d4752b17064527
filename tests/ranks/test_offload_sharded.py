"""OffloadAdamW(shard=True): two gloo ranks that share the step of a replicated model."""

import gc
import io
import weakref
from functools import partial

import pytest
import stepwell
import torch
import torch.distributed as dist
from insides import follow_groups, forwards_wait, sharding_of
from sharded_models import (
    Wide,
    batch,
    bits,
    load_checkpoint,
    make,
    resumed_bits,
    save_checkpoints,
    train,
)
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def same_as_unsharded(dtype, moments):
    nets = [make(dtype), make(dtype)]
    ddps = [DistributedDataParallel(net) for net in nets]
    options = {"lr": 1e-2, "clip_norm": 0.5, "moments": moments}
    ours = stepwell.OffloadAdamW(nets[0], shard=True, **options)
    theirs = stepwell.OffloadAdamW(nets[1], **options)
    assert train(ddps[0], ours, 4) == train(ddps[1], theirs, 4)
    assert forwards_wait(ours)
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


def even_rows():
    """What all ranks have in one piece each, of one size, comes by one collective."""
    nets = [make(kind=partial(torch.nn.Linear, 96, 4096, bias=False)) for _ in range(2)]
    ddps = [DistributedDataParallel(net) for net in nets]
    ours = stepwell.OffloadAdamW(nets[0], lr=1e-2, shard=True)
    theirs = stepwell.OffloadAdamW(nets[1], lr=1e-2)
    assert train(ddps[0], ours, 2) == train(ddps[1], theirs, 2)
    assert torch.equal(nets[0].weight, nets[1].weight)
    timing = ours.timing
    # A look has waited.
    assert 0 < timing["gate"] < 60
    return timing["bytes_gathered"]


def test_rows_may_be_dealt_out_evenly(two):
    assert two.run(even_rows) == [2048 * 96 * 4] * 2


def rows_are_dealt_out():
    net = make(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(DistributedDataParallel(net), shard=True)
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


def parameters_that_leave_are_freed():
    """A parameter taken out of the groups is freed; the others step as if it had never come."""
    stays, alone = (torch.nn.Parameter(torch.ones(4096, 3)) for _ in range(2))
    ours = stepwell.OffloadAdamW([stays, torch.nn.Parameter(torch.ones(2100, 96))], shard=True)
    theirs = stepwell.OffloadAdamW([alone])
    params = ours.param_groups[0]["params"]
    for step in range(3):
        for param in (*params, alone):
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        ours.step()
        theirs.step()
        if step == 0:
            leaves = params.pop()
            del ours.state[leaves]
            last = weakref.ref(leaves)
            del leaves
    gc.collect()
    assert last() is None
    return torch.equal(stays, alone)


def test_a_parameter_that_leaves_goes_with_its_share(two):
    assert two.run(parameters_that_leave_are_freed) == [True, True]


def test_ranks_need_a_process_group():
    with pytest.raises(ValueError, match=r"no process group(.|\n)*hint"):
        stepwell.OffloadAdamW(make().parameters(), shard=True)


def groups_that_cannot_share():
    params, rank = list(make().parameters()), dist.get_rank()
    group = dist.new_group([0])
    if rank:
        # Before anything that the other rank would have to join.
        with pytest.raises(ValueError, match=r"ranks `\[0\]`, expected one with this rank `1`"):
            stepwell.OffloadAdamW(params, shard=group)
    else:
        stepwell.OffloadAdamW(params, shard=group)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "is_gloo_available", lambda: False)
        with pytest.raises(ValueError, match=r"has no gloo(.|\n)*hint"):
            stepwell.OffloadAdamW(params, shard=True)
    # The ranks find one another in a group, also where one of them has made others.
    dist.barrier(dist.new_group([0, 1]))


def test_ranks_that_cannot_share_are_told(two):
    two.run(groups_that_cannot_share)


def differences_are_errors():
    rank = dist.get_rank()
    # Weights of another seed, without DDP.
    net = make(seed=rank)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
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
    other = stepwell.OffloadAdamW(net, nonfinite="propagate" if rank else "skip", shard=True)
    with pytest.raises(ValueError, match="nonfinite"):
        other.step()
    # Other dither on one rank: a checkpoint has one seed.
    coded = stepwell.OffloadAdamW(net, moments="q8", seed=rank, shard=True)
    with pytest.raises(ValueError, match=r"seed(.|\n)*hint"):
        coded.step()
    net.up.bias.grad[0] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    # As a GradScaler does that has found an infinity on one rank.
    net.up.bias.grad[0] = 1
    optimizer.found_inf = torch.tensor(float(rank))
    optimizer.step()
    assert optimizer.skipped_steps == 2
    optimizer.found_inf = None
    # A write on one rank.
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
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
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


def gradient_of_a_frozen_parameter():
    rank = dist.get_rank()
    net = make()
    net.up.bias.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), model=net, lr=1e-2, shard=True)
    for param in net.parameters():
        param.grad = torch.ones_like(param) if rank or param.requires_grad else None
    told = r"`up.bias`.*frozen" if rank else "another rank could not step"
    with pytest.raises(ValueError, match=told):
        optimizer.step()


def test_a_gradient_of_a_frozen_parameter_is_an_error_on_all_ranks(two):
    two.run(gradient_of_a_frozen_parameter)


def accesses():
    rank = dist.get_rank()
    net, other = make(), make()
    for model in (net, other):
        model.up.bias.requires_grad_(False)
    ddp, other_ddp = DistributedDataParallel(net), DistributedDataParallel(other)
    ours = stepwell.OffloadAdamW(net, lr=1e-2, shard=True)
    theirs = stepwell.OffloadAdamW(other, lr=1e-2)
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
        stepwell.OffloadAdamW(net, shard=True, deferred=stepwell.offload.Deferred())
    with pytest.raises(ValueError, match=r"`accumulate` is `host`(.|\n)*hint"):
        stepwell.OffloadAdamW(net, shard=True, accumulate="host")
    with pytest.raises(TypeError, match=r"this rank's share(.|\n)*hint"):
        torch.save(ours.state_dict(), io.BytesIO())
    with pytest.raises(ValueError, match=r"decoded_state_dict(.|\n)*hint"):
        ours.decoded_state_dict()


def test_accesses_accumulation_and_frozen_parameters(two):
    two.run(accesses)


def frozen_and_written():
    nets = make(), make()
    for net, options in zip(nets, ({"shard": True}, {}), strict=True):
        optimizer = stepwell.OffloadAdamW(net, lr=1e-2, **options)
        for step in range(6):
            net.up.weight.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            net(batch(step, 0, torch.float32)).square().mean().backward()
            optimizer.step()
            net(batch(step, 0, torch.float32))
            if step in (1, 2, 3):
                net.up.weight.data.mul_(0.5)
        optimizer.synchronize()
    for mine, expected in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(mine, expected)


def test_writes_through_data_to_frozen_parameters_count(two):
    two.run(frozen_and_written)


# ---- checkpoints ----


def save(folder, moments):
    net = make(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=True, moments=moments)
    ddp = DistributedDataParallel(net)
    train(ddp, optimizer, 2)
    assert save_checkpoints(folder, net, optimizer) == (dist.get_rank() == 0)
    return resumed_bits(net, optimizer)


def load(folder, moments):
    # Both ranks together, and each alone.
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = []
    for kind, shard in (("dcp", True), ("dcp", alone), ("whole", True), ("whole", alone)):
        net = make(torch.bfloat16, seed=7)
        optimizer = stepwell.OffloadAdamW(net, lr=1e-2, shard=shard, moments=moments)
        load_checkpoint(folder, kind, net, optimizer)
        found.append(resumed_bits(net, optimizer))
    return found


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_resumes_at_another_number_of_ranks(two, tmp_path, moments):
    saved = two.run(save, tmp_path, moments)
    assert saved[0] == saved[1]
    for found in two.run(load, tmp_path, moments):
        assert found == [saved[0]] * 4


def frozen_at_first(shard, whole, moments):
    net = make(torch.bfloat16, seed=3)
    net.up.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(
        net.named_parameters(), model=net, lr=1e-2, moments=moments, shard=shard
    )
    optimizer.load_state_dict(whole)
    return net, optimizer


def state_of_a_frozen_layer(folder, saved_as, moments):
    """Loaded state of a layer that is frozen from the beginning is kept, and good once it thaws."""
    net = make(torch.bfloat16)
    trained = stepwell.OffloadAdamW(net, lr=1e-2, moments=saved_as)
    train(DistributedDataParallel(net), trained, 2)
    whole = trained.state_dict()
    (ours_net, ours), (theirs_net, theirs) = (
        frozen_at_first(shard, whole, moments) for shard in (True, False)
    )
    rank = dist.get_rank()
    found, expected = ours.full_state_dict(rank=None), theirs.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found["state"][index][name], value), (index, name)
    piece, all_of_it = ours.state[ours_net.up.weight], theirs.state[theirs_net.up.weight]
    assert sum(map(torch.numel, piece.values())) < sum(map(torch.numel, all_of_it.values()))
    # What is saved, and its own state dict, are loaded by ranks that have it frozen too.
    assert save_checkpoints(folder, ours_net, ours) == (rank == 0)
    dist.barrier()
    ours.load_state_dict(ours.state_dict())
    other_net, other = frozen_at_first(True, torch.load(folder / "whole.pt")["optimizer"], moments)
    other.load_state_dict(ours.state_dict())
    nets = theirs_net, ours_net, other_net
    for net, optimizer in zip(nets, (theirs, ours, other), strict=True):
        net.up.requires_grad_(True)
        train(DistributedDataParallel(net), optimizer, 2, first=2)
        optimizer.synchronize()
        for mine, expected in zip(net.parameters(), theirs_net.parameters(), strict=True):
            assert torch.equal(mine, expected)
        assert int(optimizer.state[net.up.weight]["step"]) == 4


@pytest.mark.parametrize(("saved_as", "moments"), [("fp32", "fp32"), ("q8", "q8"), ("fp32", "q8")])
def test_loaded_state_of_a_frozen_layer_is_kept(two, tmp_path, saved_as, moments):
    two.run(state_of_a_frozen_layer, tmp_path, saved_as, moments)


def rows_of_a_frozen_layer():
    """They are dealt out by a load that succeeds, for as long as the layer is in a group."""
    net = make()
    trained = stepwell.OffloadAdamW(net, lr=1e-2)
    train(DistributedDataParallel(net), trained, 1)
    net.up.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), model=net, lr=1e-2, shard=True)
    shares = sharding_of(optimizer).shares
    dealt_out = list(shares)
    whole = trained.state_dict()
    frozen, last = (index for index, param in enumerate(net.parameters()) if param.dim() == 2)
    broken = {**whole["state"], last: {**whole["state"][last], "exp_avg": torch.ones(3)}}
    with pytest.raises(ValueError, match=r"`exp_avg`.*has the shape"):
        optimizer.load_state_dict({**whole, "state": broken})
    assert list(map(id, shares)) == list(map(id, dealt_out))
    optimizer.load_state_dict(whole)
    assert net.up.weight in shares
    leaves = optimizer.param_groups[0]["params"].pop(frozen)
    assert leaves is net.up.weight
    follow_groups(optimizer)
    # Its state is of these rows.
    assert leaves in shares
    del optimizer.state[leaves]
    follow_groups(optimizer)
    assert leaves not in shares
    assert all(param in shares for param in dealt_out)


def test_rows_of_a_frozen_layer_come_with_its_state(two):
    two.run(rows_of_a_frozen_layer)


def parameters_that_come_back():
    """In another order than at first, in which their rows would be dealt out otherwise."""
    found = []
    for options in ({"shard": True}, {}):
        stays, *leave = (torch.nn.Parameter(torch.ones(3 * 2048, 96)) for _ in range(3))
        optimizer = stepwell.OffloadAdamW([stays, *leave], lr=1e-2, **options)
        params = optimizer.param_groups[0]["params"]
        for step in range(4):
            if step == 1:
                del params[1:]
            if step == 2:
                params += leave[::-1]
            for nth, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (step + 1) * (nth + 1))
            optimizer.step()
        optimizer.synchronize()
        found.append([bits(param) for param in (stays, *leave)])
    return found


def test_parameters_that_come_back_go_on_with_their_state(two):
    for sharded, whole in two.run(parameters_that_come_back):
        assert sharded == whole


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
