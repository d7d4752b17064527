"""ZeRO-3 with `offload_param` on the offload engine: DeepSpeed's own results."""

import itertools
import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_release import told_norms
from stepwell import _core
from stepwell.deepspeed.zero.touched import TouchedMemory

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
        "persistent biases",
        "all persistent",
        "fp16",
        "fp32",
        "accumulated",
        "fp32 sums",
        "pinned",
        "bf16 moments",
        "q8",
        "bf16 masters",
        "groups",
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
    for name in ("sub-groups", "persistent biases", "all persistent", "pinned"):
        assert ours[name] == ours["bf16"]
    for one, other in itertools.combinations(
        ("bf16", "clipped", "fp32", "accumulated", "bf16 moments", "q8", "groups", "frozen"), 2
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


def test_gradients_are_unscaled_by_the_scale_that_they_have(runs):
    steps = runs["growing"]
    assert any(later["scale"] > earlier["scale"] for earlier, later in itertools.pairwise(steps))
    applied = [step for step in steps if not step["overflow"]]
    assert len(applied) >= 6
    for step in applied:
        (before,), (after,) = step["m"]
        grad = (after - (0.9 * before if before is not None else 0.0)) / 0.1
        torch.testing.assert_close(grad.norm(), step["norm"], rtol=1e-4, atol=0)


def test_a_nonfinite_gradient_skips_the_step(runs):
    run = runs["poisoned"]
    assert run["norm"] == math.inf
    assert run["skipped"] == 1
    (before, weights), (after, weights_after) = run["before"], run["after"]
    assert_same_partitions(before, after)
    assert_all_equal(weights, weights_after)
    assert torch.tensor(run["losses"]).isfinite().all()
    assert run["steps"] == [5]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_interrupted_step_is_taken_as_a_whole(runs, dtype):
    (weights, partitions), (expected, expected_partitions) = runs["interrupted", dtype]
    assert_all_equal(weights, expected)
    assert_same_partitions(partitions, expected_partitions)


@pytest.mark.parametrize(("saves", "loads"), [*itertools.product((True, False), repeat=2)])
def test_checkpoints_are_those_of_either_path(runs, saves, loads):
    (losses, after, weights), (resumed_losses, resumed, weights_resumed) = runs["checkpoints"][
        saves, loads
    ]
    assert resumed_losses == losses
    assert_same_partitions(resumed, after)
    assert_all_equal(weights_resumed, weights)


def test_16_bit_weights_are_gathered(runs):
    for saves in (True, False):
        saved, weights = runs["checkpoints"]["16 bits", saves]
        assert list(saved) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert_all_equal(list(saved.values()), weights[len(saved) :])


def test_memory_is_what_is_announced(runs):
    memory = runs["memory"]
    assert memory["announced"] == [memory["held"]]
    assert memory["held"] == 16 * memory["numel"]
    assert memory["flat buffer"] == 0
    # Nothing beside DeepSpeed's weights, and nothing is uploaded.
    assert memory["is in place"]
    assert memory["uploaded"] == 0
    assert memory["freed"] == [True]


def test_weights_are_not_pinned_one_by_one(runs):
    # The engine pins them when they lie side by side.
    assert runs["pins"]["dict"] == runs["pins"]["file"] == (0, True)
    assert runs["pins"]["theirs"][0] > 0


def test_weights_go_to_memory_that_the_pool_touches(monkeypatch):
    sizes, buffer_of = [], _core.Buffer
    monkeypatch.setattr(_core, "Buffer", lambda nbytes: sizes.append(nbytes) or buffer_of(nbytes))
    device = "cpu"
    with TouchedMemory():
        weight = torch.empty(1 << 20, dtype=torch.bfloat16, device=device)
        others = [
            torch.empty(1 << 10, dtype=torch.bfloat16, device=device),
            torch.empty(1 << 20, dtype=torch.bfloat16, device="meta"),
            torch.empty((1 << 10, 1 << 10), dtype=torch.bfloat16, device=device),
            torch.empty(1 << 20),
            torch.ones(1 << 20, dtype=torch.bfloat16, device=device),
        ]
    assert sizes == [2 << 20]
    assert (weight.shape, weight.dtype, weight.device.type) == ((1 << 20,), torch.bfloat16, "cpu")
    assert [each.numel() for each in others] == [1 << 10, *[1 << 20] * 4]
    assert others[-1].eq(1).all()
    # It lives as long as what is left of it.
    view = weight[-1:]
    del weight
    assert view.fill_(1).item() == 1


def test_weights_and_their_state_are_touched_and_no_bucket_is(runs):
    weight, group = 2 * 1024 * 512, 2 * (1024 * 512 + 512)
    assert runs["touched"][:2] == [weight, group]
    # Masters are the largest. DeepSpeed's bucket for gradients would be 1 GB.
    assert max(runs["touched"]) == 2 * group


@pytest.mark.gpu
def test_a_gpu_is_the_device_of_both_paths(tmp_path):
    runs = deepspeed_run.run(
        "offload_device",
        tmp_path,
        timeout=PROGRAM_TIMEOUT,
        environment={"DS_ACCELERATOR": "cuda"},
    )
    for name, (ours, theirs) in runs.items():
        assert ours["class"].startswith("OffloadZeroOptimizer"), name
        assert theirs["class"].startswith("DeepSpeedZeroOptimizer"), name
        assert ours["losses"] == theirs["losses"], name
        assert_all_equal(ours["weights"], theirs["weights"])
        assert_same_partitions(ours["partitions"], theirs["partitions"])
    assert runs["parameters, fp16"][0]["skipped"] > 0
