"""ZeRO on the offload engine: DeepSpeed's own results, its loss scaling, several ranks."""

import itertools
import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import (
    ZERO_3_NORM_RTOL,
    assert_same_partitions,
    assert_same_runs,
    assert_same_values,
)
from deepspeed_release import HAS_FP32_SUMS

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    return deepspeed_run.run("offload", folder, timeout=PROGRAM_TIMEOUT)


# ---- one rank ----


@pytest.fixture
def paths(runs):
    return runs["paths"]


@pytest.mark.parametrize(
    "name",
    [
        "ZeRO-2",
        "ZeRO-1",
        "clipped",
        "fp32",
        "Adam",
        "accumulated",
        "accumulated on the device",
        "accumulated, ZeRO-1",
        "fp32 sums",
        "fp32 sums, ZeRO-1",
        "q8",
        "ZeRO-3",
        "ZeRO-3, accumulated",
        "ZeRO-3, accumulated on the device",
        "ZeRO-3, fp32 sums",
        "autocast",
        "ZeRO-3, autocast",
    ],
)
def test_both_paths_are_the_same_run(paths, name):
    assert_same_runs(*paths[name])


def test_experts(paths):
    ours, theirs = paths["experts"]
    assert ours["class"] == "OffloadZeroOptimizer"
    assert len(ours["partitions"]) == 2
    assert ours["losses"] == theirs["losses"]
    # DeepSpeed adds the norms of groups in float32.
    torch.testing.assert_close(
        torch.tensor(ours["norms"]), torch.tensor(theirs["norms"]), rtol=1e-6, atol=0
    )
    assert_same_partitions(ours["partitions"], theirs["partitions"])


def test_zero_3_clips(paths):
    ours, theirs = paths["ZeRO-3, clipped"]
    assert ours["class"] == "OffloadZeroOptimizerStage3"
    # Its norm differs in the last bit.
    torch.testing.assert_close(
        torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=1e-3, atol=0
    )
    assert ours["losses"] != paths["ZeRO-3"][0]["losses"]


def test_runs_differ_where_they_should(paths):
    ours = {
        name: runs[0]["losses"]
        for name, runs in paths.items()
        if not name.startswith(("waits", "held"))
    }
    assert ours["ZeRO-2"] == ours["ZeRO-1"]
    for one, other in itertools.combinations(
        ("ZeRO-2", "clipped", "Adam", "q8", "accumulated", "autocast", "fp32"), 2
    ):
        assert ours[one] != ours[other]
    is_same = ours["accumulated, ZeRO-1"] == ours["fp32 sums, ZeRO-1"]
    assert is_same == (not HAS_FP32_SUMS)
    assert paths["q8"][0]["base"] == "StepwellAdamW"
    assert "exp_avg_codes" in paths["q8"][0]["partitions"][0][1]


def test_groups(paths):
    ours, theirs = paths["groups"]
    assert len(ours["partitions"]) == 2
    assert ours["losses"] == theirs["losses"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])


@pytest.mark.parametrize("stage", [2, 3])
def test_the_device_holds_no_sum_that_is_in_host_memory(paths, stage):
    numel = 32 * 64 + 64 + 64 * 32 + 32
    assert paths[f"held, ZeRO-{stage}"] == {"host": [0, 0, 0], "device": [numel, numel, 0]}


def test_forwards_wait_for_their_own_weights(paths):
    calls, is_new = paths["waits"]
    # Weight and bias of a layer at a time.
    assert [sorted(call) for call in calls] == [
        [(0, 0, 2048), (0, 2048, 64)],
        [(0, 2112, 2048), (0, 4160, 32)],
    ]
    assert is_new


# ---- gradients that are not finite ----


@pytest.fixture
def fp16(runs):
    return runs["fp16"]


def test_dynamic_loss_scale(fp16):
    ours, theirs = fp16["dynamic"]
    assert_same_runs(ours, theirs)
    assert ours["skipped"] > 0
    assert ours["norms"][0] == math.inf
    assert ours["partitions"][0][1]["step"] == len(ours["losses"]) - ours["skipped"]


@pytest.mark.parametrize("name", ["growing", "growing, ZeRO-3"])
def test_gradients_are_unscaled_by_the_scale_that_they_have(fp16, name):
    steps = fp16[name]
    applied = [step for step in steps if not step["overflow"]]
    scales = [step["scale"] for step in applied]
    assert any(later["scale"] > earlier["scale"] for earlier, later in itertools.pairwise(steps))
    assert len(scales) >= 6
    for step in applied:
        (before,), (after,) = step["m"]
        grad = (after - (0.9 * before if before is not None else 0.0)) / 0.1
        # Also in the steps by which the scale grows. The moments are float32, and differences of
        # such.
        torch.testing.assert_close(grad.norm(), step["norm"], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "nonfinite, bf16",
        "nonfinite, accumulated",
        "nonfinite, accumulated on the host",
        "nonfinite, ZeRO-3",
    ],
)
def test_a_nonfinite_gradient_skips_the_step(fp16, name):
    run = fp16[name]
    assert run["norm"] == math.inf
    assert run["skipped"] == 1
    (before, weights), (after, weights_after) = run["before"], run["after"]
    assert_same_partitions(before, after)
    assert all(
        torch.equal(weight, kept) for weight, kept in zip(weights, weights_after, strict=True)
    )
    assert torch.tensor(run["losses"]).isfinite().all()
    assert run["steps"] == [5]


# ---- ranks ----


def test_two_ranks(tmp_path):
    ranks = deepspeed_run.run("offload_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)
    (line,), nothing = (result.pop("said") for result in ranks)
    assert "`stepwell.gate` is `module`, but with wall_clock_breakdown" in line
    assert nothing == []
    for result in ranks:
        before, after, skipped = result.pop("nonfinite")
        assert skipped == 1
        assert_same_partitions(before, after)
        # ZeRO-3 does not initialize what pads its partitions.
        ours, theirs = result.pop("uneven, ZeRO-3")
        assert ours["class"] == "OffloadZeroOptimizerStage3"
        assert ours["losses"] == theirs["losses"]
        for name in [name for name in result if name.startswith("access")]:
            # What is clipped has the rounding of the norm.
            rtol = ZERO_3_NORM_RTOL if name == "access, ZeRO-3" else 0.0
            assert_same_values(*result.pop(name), rtol=rtol)
        for runs in result.values():
            assert_same_runs(*runs)
    first, second = (result["ZeRO-2"][0] for result in ranks)
    assert first["norms"] == second["norms"]
    assert first["losses"] != second["losses"]
