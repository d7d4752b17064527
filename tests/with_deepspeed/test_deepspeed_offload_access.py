"""ZeRO on the offload engine: what others read and write, and checkpoints."""

import itertools
import math

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


# ---- what others read and write ----


@pytest.fixture
def access(runs):
    return runs["access"]


def test_safe_get_and_set(access):
    grad, expected = access["grad"]
    assert torch.equal(grad, expected)
    assert (access["set grad"] == 1).all()
    torch.testing.assert_close(access["exp_avg"], torch.full_like(access["exp_avg"], 0.1))
    master, (flat,) = access["master"]
    assert torch.equal(master.flatten(), flat[-master.numel() :])
    assert not access["set"].any()
    assert access["set nan"] == (True, 1)


def test_safe_get_and_set_under_zero_3(access):
    grad, doubled, local = access["ZeRO-3 grad"]
    assert grad.any()
    assert torch.equal(doubled, 2 * grad)
    assert torch.equal(local, doubled.flatten())
    moment, norm, numel = access["ZeRO-3 set"]
    # Clipped by the norm of what was set.
    assert norm > 7 * numel**0.5
    torch.testing.assert_close(
        moment, torch.full_like(moment, float(0.1 * 7 * 1e-3 / norm)), rtol=1e-3, atol=0
    )


def test_reading_at_once_after_a_step(access):
    weight, flat = access["state_dict"]
    assert torch.equal(weight.flatten(), flat[-weight.numel() :].bfloat16())
    first, second = access["eval"]
    assert first == second
    assert math.isfinite(access["reloaded"][0])


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
