"""ZeRO-3 with `offload_param` on the offload engine: DeepSpeed's own results."""

import itertools
import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_release import told_norms

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload_param")
    return deepspeed_run.run(
        "offload_param", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


def assert_all_equal(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def assert_same_runs(ours, theirs, rtol=0.0):
    """DeepSpeed's own path on our op computes the same: to the bit, where nothing is clipped."""
    assert ours["class"] == "OffloadZeroOptimizerStage3"
    assert theirs["class"] == "DeepSpeedZeroOptimizer_Stage3"
    assert ours["skipped"] == theirs["skipped"]
    norms = told_norms(ours["norms"], theirs["norms"])
    # DeepSpeed sums squares in float32.
    torch.testing.assert_close(
        torch.tensor(ours["norms"]), torch.tensor(norms), rtol=max(rtol, 1e-6), atol=0
    )
    if rtol:
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=rtol, atol=0
        )
        return
    assert ours["losses"] == theirs["losses"]
    assert_all_equal(ours["weights"], theirs["weights"])
    assert_same_partitions(ours["partitions"], theirs["partitions"])


@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "sub-groups",
        "all persistent",
        "fp16",
        "fp32",
        "accumulated",
        "fp32 sums",
        "q8",
        "frozen",
        "zero.Init",
    ],
)
def test_both_paths_are_the_same_run(runs, name):
    assert_same_runs(*runs["paths"][name])


def test_clipping(runs):
    # The norm differs in the last bit.
    ours, theirs = runs["paths"]["clipped"]
    assert_same_runs(ours, theirs, rtol=1e-3)
    assert ours["losses"] != runs["paths"]["bf16"][0]["losses"]


def test_runs_differ_where_they_should(runs):
    ours = {name: run["losses"] for name, (run, _) in runs["paths"].items()}
    for name in ("sub-groups", "all persistent"):
        assert ours[name] == ours["bf16"]
    for one, other in itertools.combinations(
        ("bf16", "clipped", "fp32", "accumulated", "q8", "frozen"), 2
    ):
        assert ours[one] != ours[other]
    assert len(runs["paths"]["sub-groups"][0]["partitions"]) == 2
    # Weights that are frozen are neither stepped nor held.
    assert sum(flat.numel() for flat, _ in runs["paths"]["frozen"][0]["partitions"]) == 256


def test_an_overflow_skips_the_step(runs):
    ours, _ = runs["paths"]["fp16"]
    assert ours["skipped"] > 0
    assert ours["norms"][0] == math.inf
    assert int(ours["partitions"][0][1]["step"]) == len(ours["losses"]) - ours["skipped"]


def test_memory_is_what_is_announced(runs):
    memory = runs["memory"]
    assert memory["announced"] == [memory["held"]]
    assert memory["held"] == 16 * memory["numel"]
    assert memory["flat buffer"] == 0
    # Nothing beside DeepSpeed's weights, and nothing is uploaded.
    assert memory["is in place"]
    assert memory["uploaded"] == 0
    assert memory["freed"] == [True]


def test_weights_and_their_state_are_touched_and_no_bucket_is(runs):
    weight, group = 2 * 1024 * 512, 2 * (1024 * 512 + 512)
    assert runs["touched"][:2] == [weight, group]
    # Masters are the largest. DeepSpeed's bucket for gradients would be 1 GB.
    assert max(runs["touched"]) == 2 * group


def test_a_layer_waits_for_its_own_persistent_weights(runs):
    assert runs["awaited"] == {"0": ["2"], "2": []}


def test_16_bit_weights_are_gathered(runs):
    saved, weights = runs["16 bits"]
    assert list(saved) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_all_equal(list(saved.values()), weights[len(saved) :])
