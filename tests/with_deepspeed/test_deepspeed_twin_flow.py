"""`offload_optimizer.ratio` under ZeRO-3: a share of the state on the device, one step of all."""

import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_engines import LR

PROGRAM_TIMEOUT = 150
# torch rounds its steps in other places than the core does, and so do losses of a few steps.
RTOL = {"fp32": 2e-5, "bf16": 2e-2}
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin_flow")
    return deepspeed_run.run(
        "twin_flow", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


def assert_close(one, other, rtol):
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=0)


def assert_close_partitions(ours, theirs):
    for (flat, state), (other, other_state) in zip(ours, theirs, strict=True):
        assert (flat - other).abs().max() < 0.05 * LR
        assert state.keys() == other_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"] == other_state["step"]


def assert_same_training(ours, theirs, rtol):
    assert ours["class"] == "OffloadZeroOptimizerStage3"
    assert theirs["class"] == "DeepSpeedZeroOptimizer_Stage3"
    assert_close(ours["losses"], theirs["losses"], rtol)
    assert_close(ours["norms"], theirs["norms"], rtol)
    assert len(ours["partitions"]) == 4
    assert_close_partitions(ours["partitions"], theirs["partitions"])


@pytest.mark.parametrize(
    "name", ["bf16", "all on the device", "accumulated", "fp32", "Adam", "no correction"]
)
def test_the_share_is_stepped_as_deepspeeds(runs, name):
    rtol = RTOL["bf16" if name in ("bf16", "accumulated") else "fp32"]
    assert_same_training(*runs[name], rtol)


def test_each_of_two_ranks_has_a_share(tmp_path):
    ranks = deepspeed_run.run("twin_flow_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)
    for result in ranks:
        for dtype, rtol in RTOL.items():
            assert_same_training(*result[dtype], rtol)
    first, second = (result["fp32"][0] for result in ranks)
    assert first["norms"] == second["norms"]
    assert first["losses"] != second["losses"]


def test_runs_differ_where_they_should(runs):
    names = ("bf16", "fp32", "accumulated", "Adam", "no correction")
    assert len({tuple(runs[name][0]["losses"]) for name in names}) == len(names)


def test_each_sub_group_has_the_options_of_its_parameter_group(runs):
    (losses, ours), (expected, theirs) = runs["groups"]
    assert_close(losses, expected, RTOL["fp32"])
    assert_close_partitions(ours, theirs)


def test_a_share_keeps_cleared_gradients_as_long_as_the_host_does(runs):
    (losses, ours), (expected, theirs) = runs["cleared"]
    assert_close(losses, expected, RTOL["fp32"])
    assert_close_partitions(ours, theirs)


def test_a_nonfinite_gradient_skips_the_step_of_both(runs):
    run = runs["nonfinite"]
    assert run["norm"] == math.inf
    assert run["skipped"] == 1
    (before, weights), (after, weights_after) = run["before"], run["after"]
    assert_same_partitions(before, after)
    assert all(torch.equal(one, other) for one, other in zip(weights, weights_after, strict=True))
    assert set(run["steps"]) == {5}


def test_gradients_are_found_and_set(runs):
    found, expected = runs["gradients"]
    torch.testing.assert_close(found[0][0], expected)
    for _, moment, norm in found:
        # In the second step that of the first has decayed, where there was one.
        assert norm > 7.0 * math.sqrt(moment.numel())
    torch.testing.assert_close(found[0][1], torch.full_like(found[0][1], 0.7))
    first = found[1][1] - 0.7
    assert 0 < first.abs().max() < 0.1


@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_checkpoints_have_the_share(runs, saves, loads):
    (losses, after), (resumed, found) = runs["checkpoints"][saves, loads]
    if saves and loads:
        assert resumed == losses
        assert_same_partitions(after, found)
    else:
        assert_close(resumed, losses, RTOL["bf16"])
        assert_close_partitions(after, found)
