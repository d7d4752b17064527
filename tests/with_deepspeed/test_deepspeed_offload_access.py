"""ZeRO on the offload engine: unusual numbers of backwards, and checkpoints of either path."""

import itertools

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    return deepspeed_run.run(
        "offload_access", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


# ---- backwards ----


@pytest.fixture
def access(runs):
    return runs["access"]


def test_gradients_of_every_backward_are_applied_once(access):
    flat, state = access["two backwards"][0]
    summed = access["two backwards, sum"]
    # m = (1 - beta1) * gradient, of a sum of two.
    torch.testing.assert_close(
        state["exp_avg"][: summed.numel()], 0.1 * summed, rtol=1e-5, atol=1e-8
    )
    assert flat.isfinite().all()


def test_no_gradient_is_a_gradient_of_zeros(access):
    first, second, third = access["forked"]
    assert first.any()
    assert torch.equal(second, first / 2)
    assert torch.equal(third, first / 4)


# ---- checkpoints ----


@pytest.fixture
def checkpoints(runs):
    return runs["checkpoints"]


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-1", "ZeRO-3"])
def test_checkpoints_are_those_of_either_path(checkpoints, name):
    for saves, loads in itertools.product((True, False), repeat=2):
        (losses, after), (resumed_losses, resumed) = checkpoints[name, saves, loads]
        assert resumed_losses == losses
        assert_same_partitions(resumed, after)


def test_checkpoints_are_read_without_stepwell(checkpoints):
    weights, keys = checkpoints["without Stepwell"]
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert keys == "['exp_avg', 'exp_avg_sq', 'step']"
