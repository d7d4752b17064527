"""stepwell.OffloadAdamW over the host as an asynchronous device.

The same bits as stepwell.AdamW, however it is used.
"""

import copy
import pickle
import time

import pytest
import stepwell
import torch
import torch.distributed.checkpoint as dcp
from offload_cases import MODE_IDS, MODES, assert_equal, loss_of, pair, small, train
from optim_cases import DTYPES, LAYOUT_IDS, LAYOUTS
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_trains_as_adamw_bit_for_bit(dtype, moments, mode):
    ours, theirs = pair(dtype=dtype, moments=moments, seed=3, **mode)
    assert train(*ours, 5) == train(*theirs, 5)
    assert_equal(ours, theirs)


# ---- accumulation ----


def _accumulate(net, optimizer, how, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(3):
            if how == "no_sync" and micro < 2:
                with optimizer.no_sync():
                    loss_of(net, 3 * step + micro).backward()
            else:
                loss_of(net, 3 * step + micro).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["untold", "accumulation_steps", "no_sync", "wrongly told"])
def test_accumulated_gradients_are_whole(how, dtype, caplog):
    told = {"accumulation_steps": 3, "wrongly told": 2}
    ours, theirs = pair(dtype=dtype, **({"accumulation_steps": told[how]} if how in told else {}))
    _accumulate(*ours, how)
    _accumulate(*theirs, None)
    assert_equal(ours, theirs)
    nbytes = sum(param.nbytes for param in ours[0].parameters())
    # Some of what was told wrongly crosses twice.
    crossed = ours[1].timing["bytes_downloaded"]
    assert nbytes < crossed <= 2 * nbytes if how == "wrongly told" else crossed == nbytes
    assert caplog.text.count("cross the bus again") == (how == "wrongly told")


# ---- what it is used with ----


def test_autocast_with_float32_parameters():
    ours, theirs = pair(accumulation_steps=1)
    for step in range(3):
        for net, optimizer in (ours, theirs):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
    assert_equal(ours, theirs)


# ---- gradients that are not finite ----


def test_nonfinite_gradient_raises_where_asked_for():
    ours, theirs = pair(nonfinite="raise")
    train(*ours, 2)
    train(*theirs, 2)
    loss_of(ours[0], 2).backward()
    ours[0][0].weight.grad[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"norm of the gradients is `nan`; nothing was changed(.|\n)*hint"
    ):
        ours[1].step()
    assert_equal(ours, theirs)
    train(*ours, 1, first=2)
    train(*theirs, 1, first=2)
    assert_equal(ours, theirs)


# ---- what it tells, and what it refuses ----


def test_the_time_that_forwards_wait_is_of_one_step():
    net, optimizer = pair()[0]
    train(net, optimizer, 2)
    assert optimizer.timing["gate"] == 0.0
    began = time.perf_counter()
    loss_of(net, 2).backward()
    assert 0.0 < optimizer.timing["gate"] <= time.perf_counter() - began
    optimizer.step()
    assert optimizer.timing["gate"] == 0.0


def test_a_model_is_given_once():
    with pytest.raises(ValueError, match=r"`params` is a `Sequential` and `model` is given"):
        stepwell.OffloadAdamW(small(), model=small())


def test_an_optimizer_without_a_model_says_once_that_steps_wait(caplog):
    net = small()
    train(net, stepwell.OffloadAdamW(net.parameters()), 3)
    (record,) = caplog.records
    assert "hint: OffloadAdamW(model, ...)" in record.getMessage()


def test_optimizer_is_not_copied():
    (net, optimizer), _ = pair()
    train(net, optimizer, 1)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled(.|\n)*hint"):
            duplicate(optimizer)


# ---- state dicts; across places and beside torch they are those of `tests/net/` ----


def test_state_appears_with_the_first_step():
    # accelerate copies the state of a new optimizer to the accelerator and back.
    net, optimizer = pair()[0]
    packed = optimizer.state_dict()
    assert not packed["state"]
    optimizer.load_state_dict(packed)
    train(net, optimizer, 1)
    assert all(not value.is_cuda for value in optimizer.state_dict()["state"][0].values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_distributed_checkpoint_resumes_exactly(tmp_path, dtype, moments):
    net, optimizer = pair(dtype=dtype, moments=moments, seed=5)[0]
    train(net, optimizer, 3)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    resumed_net = small(dtype)
    resumed = stepwell.OffloadAdamW(resumed_net, lr=1e-2, moments=moments)
    with torch.no_grad():
        for param in resumed_net.parameters():
            param.fill_(1.0)
    # Makes state by a step at lr 0 with zero gradients, which must not count.
    model_state, optimizer_state = get_state_dict(resumed_net, resumed)
    assert len(resumed.state) == 6
    assert all(state["step"] == 0 for state in resumed.state.values())
    dcp.load(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    set_state_dict(
        resumed_net, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert resumed.param_groups[0]["seed"] == 5
    assert_equal((net, optimizer), (resumed_net, resumed))
    assert train(net, optimizer, 2, first=3) == train(resumed_net, resumed, 2, first=3)
    assert_equal((net, optimizer), (resumed_net, resumed))


def test_loaded_state_of_other_weights_is_verified():
    # The weights stay as they are, so the trailing bits that are loaded belong to none of them.
    ours, theirs = pair(dtype=torch.bfloat16)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        early = copy.deepcopy(optimizer.state_dict())
        train(net, optimizer, 3, first=2)
        optimizer.load_state_dict(early)
        train(net, optimizer, 1, first=5)
    assert_equal(ours, theirs)
