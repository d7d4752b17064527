"""State dicts of OffloadAdamW.

Exact resumption, exchange with torch.optim.AdamW, torch.distributed.checkpoint.
"""

import copy

import pytest
import stepwell
import torch
import torch.distributed.checkpoint as dcp
from offload_cases import assert_equal, pair, small, train
from optim_cases import LAYOUT_IDS, LAYOUTS
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)


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
