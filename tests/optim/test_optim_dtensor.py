"""Sharded parameters over two gloo ranks, and their checkpoints.

FSDP2 with CPU offload, and plain DTensors.
"""

import pytest
import stepwell
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_cases import CODECS, assert_same, bits, parameter
from optim_ranks import Net, Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


# ---- what runs on the ranks ----


def make_net(dtype, shard):
    torch.manual_seed(0)
    net = Net().to(dtype)
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return net


def train(net, optimizer, steps, first=0):
    dtype = next(net.parameters()).dtype
    for step in range(first, first + steps):
        optimizer.zero_grad()
        net(
            torch.linspace(-1, 1, 24, dtype=dtype).view(4, 6) + 0.1 * step
        ).square().sum().backward()
        optimizer.step()


def local_snapshot(optimizer):
    """All bits that this rank holds."""
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


def trains_as_unsharded(dtype, moments):
    sharded, whole = make_net(dtype, shard=True), make_net(dtype, shard=False)
    optimizers = [
        stepwell.AdamW(net.parameters(), lr=1e-2, moments=moments) for net in (sharded, whole)
    ]
    for _ in range(5):
        # Not by a backward pass: it may round otherwise where tensors lie otherwise.
        for mine, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
            expected.grad = torch.randn(expected.shape).to(dtype)
            mine.grad = distribute_tensor(expected.grad, mine.device_mesh, mine.placements)
        for optimizer in optimizers:
            optimizer.step()
    for mine, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        state, reference = optimizers[0].state[mine], optimizers[1].state[expected]
        assert state.keys() == reference.keys()
        assert state["step"] == 5
        if moments == "fp32":
            assert torch.equal(bits(full(mine)), bits(full(expected)))
            for name in sorted(state.keys() - {"step", "fingerprints"}):
                if name == "trailing":
                    # Neither gloo nor NCCL gathers 16-bit integers.
                    offset = 0 if dist.get_rank() == 0 else -(-mine.shape[0] // 2)
                    piece = state[name].to_local()
                    assert torch.equal(piece, reference[name][offset : offset + len(piece)])
                    continue
                assert isinstance(state[name], DTensor)
                assert state[name].placements == mine.placements
                assert state[name].shape == mine.shape
                assert state[name].to_local().shape == mine.to_local().shape
                assert torch.equal(bits(full(state[name])), bits(full(reference[name])))
        else:
            # The noise of a piece is its own: near, not equal.
            torch.testing.assert_close(full(mine), full(expected), rtol=0.05, atol=0.01)


def checkpoint_resumes(folder, dtype, moments):
    net = make_net(dtype, shard=True)
    optimizer = stepwell.AdamW(net.parameters(), lr=1e-2, moments=moments, seed=5)
    train(net, optimizer, 3)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    resumed_net = make_net(dtype, shard=True)
    for param in resumed_net.parameters():
        torch.nn.init.ones_(param)
    resumed = stepwell.AdamW(resumed_net.parameters(), lr=1e-2, moments=moments)
    # Makes state by a step at lr 0 with zero gradients, which must not count.
    model_state, optimizer_state = get_state_dict(resumed_net, resumed)
    assert all(state["step"] == 0 for state in resumed.state.values())
    assert len(resumed.state) == 6
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        resumed_net, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert_same(local_snapshot(optimizer), local_snapshot(resumed))
    assert resumed.param_groups[0]["seed"] == 5
    assert resumed.param_groups[0]["lr"] == 1e-2
    for one_net, one in ((net, optimizer), (resumed_net, resumed)):
        train(one_net, one, 2, first=3)
    assert_same(local_snapshot(optimizer), local_snapshot(resumed))


def checkpoint_of_another_cut_is_refused(folder, moments):
    net = make_net(torch.bfloat16, shard=True)
    optimizer = stepwell.AdamW(net.parameters(), moments=moments)
    train(net, optimizer, 1)
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    dist.barrier()
    # As if resumed on one rank: the whole parameters in one process.
    whole = make_net(torch.bfloat16, shard=False)
    resumed = stepwell.AdamW(whole.parameters(), moments=moments)
    packed = get_optimizer_state_dict(whole, resumed)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"optimizer": packed}, checkpoint_id=folder, no_dist=True)


def full_state_dict_round_trip(moments):
    net = make_net(torch.bfloat16, shard=True)
    optimizer = stepwell.AdamW(net.parameters(), moments=moments)
    train(net, optimizer, 2)
    packed = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    packed = [packed if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(packed)
    other_net = make_net(torch.bfloat16, shard=True)
    other = stepwell.AdamW(other_net.parameters(), moments=moments)
    set_optimizer_state_dict(
        other_net, other, packed[0], options=StateDictOptions(full_state_dict=True)
    )
    mine, theirs = local_snapshot(optimizer), local_snapshot(other)
    state_keys = {key for key in mine if key[1] != "param"}
    assert_same({key: mine[key] for key in state_keys}, {key: theirs[key] for key in state_keys})


def unsharded_state_is_refused():
    net, whole = make_net(torch.float32, shard=True), make_net(torch.float32, shard=False)
    reference = torch.optim.AdamW(whole.parameters())
    train(whole, reference, 1)
    optimizer = stepwell.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"plain tensor, expected a DTensor(.|\n)*hint"):
        optimizer.load_state_dict(reference.state_dict())
    assert not optimizer.state


def nonfinite_on_one_rank(nonfinite):
    net = make_net(torch.bfloat16, shard=True)
    optimizer = stepwell.AdamW(net.parameters(), nonfinite=nonfinite)
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
    return message, optimizer.skipped_steps


def error_on_one_rank():
    net = make_net(torch.float32, shard=True)
    optimizer = stepwell.AdamW(net.parameters())
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


def warm_up_from_lr_0_counts_on_all_ranks_or_none():
    # All of the gradient is on the first rank; the second sees zeros only.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = stepwell.AdamW([param], lr=0.0)
    grad = torch.zeros(4, 2)
    param.grad = distribute_tensor(grad, mesh, [Shard(0)])
    optimizer.step()
    made = optimizer.state[param]["step"].item()
    optimizer.state.clear()
    grad[0, 0] = 1.0
    param.grad = distribute_tensor(grad, mesh, [Shard(0)])
    optimizer.step()
    return made, optimizer.state[param]["step"].item()


def placements(placement, moments):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, grad = torch.arange(24.0).view(6, 4) / 7, torch.linspace(-1, 1, 24).view(6, 4)
    param = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, [placement]))
    param.grad = distribute_tensor(grad, mesh, [placement])
    optimizer = stepwell.AdamW([param], moments=moments)
    optimizer.step()
    whole = torch.nn.Parameter(values.clone())
    whole.grad = grad
    reference = stepwell.AdamW([whole], moments=moments)
    reference.step()
    # The first update is lr * sign(grad), whatever the codec.
    torch.testing.assert_close(full(param), whole.detach())
    state = optimizer.state[param]
    if moments == "q8":
        return tuple(state["exp_avg_codes"].shape), bits(state["exp_avg_codes"].to_local()).tolist()
    return tuple(state["exp_avg"].shape), None


def partial_gradient_is_summed():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    # As tensor parallelism leaves it: the sum over the ranks is 1, each rank alone has another
    # sign.
    mine = torch.full((3,), 2.0 if dist.get_rank() == 0 else -1.0)
    param.grad = DTensor.from_local(mine, mesh, [Partial("sum")], run_check=False)
    stepwell.AdamW([param], lr=0.1).step()
    torch.testing.assert_close(full(param), torch.full((3,), -0.1))


# ---- the tests ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", CODECS)
def test_fsdp2_trains_as_unsharded(ranks, dtype, moments):
    ranks.run(trains_as_unsharded, dtype, moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moments", CODECS)
def test_distributed_checkpoint_resumes_exactly(ranks, tmp_path, dtype, moments):
    ranks.run(checkpoint_resumes, tmp_path, dtype, moments)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_checkpoint_of_another_world_size_is_refused(ranks, tmp_path, moments):
    # With fp32 moments it is the fingerprints of the bf16 parameters that do not fit.
    ranks.run(checkpoint_of_another_cut_is_refused, tmp_path, moments)


@pytest.mark.parametrize("moments", CODECS)
def test_full_state_dict(ranks, moments):
    ranks.run(full_state_dict_round_trip, moments)


def test_unsharded_state_is_refused(ranks):
    ranks.run(unsharded_state_is_refused)


def test_nonfinite_gradient_on_one_rank_stops_all(ranks):
    (first, _), (second, _) = ranks.run(nonfinite_on_one_rank, "raise")
    assert "another rank" in first
    assert "index 0" in second


def test_nonfinite_gradient_on_one_rank_is_skipped_by_all(ranks):
    assert ranks.run(nonfinite_on_one_rank, "skip") == [(None, 1), (None, 1)]


def test_error_on_one_rank_stops_all(ranks):
    ranks.run(error_on_one_rank)


def test_warm_up_from_lr_0_counts_on_all_ranks_or_none(ranks):
    assert ranks.run(warm_up_from_lr_0_counts_on_all_ranks_or_none) == [(0.0, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize(
    ("placement", "shape"),
    [(Shard(0), (2, 1, 64)), (Shard(1), (1, 2, 64)), (Replicate(), (1, 1, 64))],
    ids=["rows", "columns", "replicated"],
)
def test_placements(ranks, placement, shape):
    assert ranks.run(placements, placement, "fp32") == [((6, 4), None)] * 2
    (first_shape, first), (second_shape, second) = ranks.run(placements, placement, "q8")
    assert first_shape == second_shape == shape
    # Copies of a piece draw the same noise.
    assert (first == second) == isinstance(placement, Replicate)


def test_partial_gradients_are_summed(ranks):
    ranks.run(partial_gradient_is_summed)


# ---- in this process, of one rank ----


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded_parameter(mesh, placement):
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [placement])
    return param


def test_dtensor_state_for_a_plain_parameter_is_refused(mesh):
    optimizer = stepwell.AdamW([sharded_parameter(mesh, Shard(0))])
    optimizer.step()
    other = stepwell.AdamW([parameter(4)])
    with pytest.raises(ValueError, match="is a DTensor, expected a plain tensor"):
        other.load_state_dict(optimizer.state_dict())


def test_state_that_is_placed_otherwise_is_refused(mesh):
    optimizer = stepwell.AdamW([sharded_parameter(mesh, Replicate())])
    optimizer.step()
    other = stepwell.AdamW([sharded_parameter(mesh, Shard(0))])
    with pytest.raises(ValueError, match=r"is placed as .*, expected as the parameter is"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_a_parameter_that_is_a_partial_sum_is_refused(mesh):
    part = DTensor.from_local(torch.ones(4), mesh, [Partial("sum")], run_check=False)
    with pytest.raises(ValueError, match=r"is placed as `P.*`, expected Shard or Replicate"):
        stepwell.AdamW([torch.nn.Parameter(part)])


def test_only_one_of_parameter_and_gradient_is_a_dtensor(mesh):
    param = sharded_parameter(mesh, Shard(0))
    param.grad = None
    optimizer = stepwell.AdamW([param])
    torch.Tensor.grad.__set__(param, torch.ones(4))
    with pytest.raises(ValueError, match=r"only one of .* and its gradient is a DTensor"):
        optimizer.step()
    assert not optimizer.state
    plain = parameter(4)
    optimizer = stepwell.AdamW([plain])
    plain.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"only one of .* and its gradient is a DTensor"):
        optimizer.step()


def test_gradients_come_to_where_the_parameter_is(mesh):
    param = sharded_parameter(mesh, Shard(0))
    param.grad = distribute_tensor(torch.full((4,), 2.0), mesh, [Replicate()])
    optimizer = stepwell.AdamW([param], lr=0.1, weight_decay=0.0)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].placements == (Shard(0),)
    torch.testing.assert_close(full(param), torch.full((4,), 0.9))
