"""ZeRO on the offload engine.

DeepSpeed's own results, its loss scaling, its checkpoints, its accessors.
"""

import itertools
import math

import deepspeed_run
import pytest
import test_deepspeed_access
import torch

PROGRAM_TIMEOUT = 150
CLASSES = (
    ("OffloadZeroOptimizer", "DeepSpeedZeroOptimizer"),
    ("OffloadZeroOptimizerStage3", "DeepSpeedZeroOptimizer_Stage3"),
)
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    return deepspeed_run.run(
        "offload", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


def assert_same_partitions(ours, theirs):
    for (flat, state), (other, other_state) in zip(ours, theirs, strict=True):
        assert torch.equal(flat, other)
        assert state.keys() == other_state.keys()
        for key, value in state.items():
            expected = other_state[key]
            assert type(value) is type(expected), key
            assert (
                torch.equal(value, expected)
                if isinstance(value, torch.Tensor)
                else value == expected
            ), key


def assert_same_runs(ours, theirs):
    """DeepSpeed's own path on our op computes the same: to the bit."""
    assert (ours["class"], theirs["class"]) in CLASSES
    assert ours["base"] == theirs["base"]
    assert ours["losses"] == theirs["losses"]
    # ZeRO-3 sums squares in float32.
    rtol = 1e-6 if ours["class"].endswith("Stage3") else 0.0
    torch.testing.assert_close(
        torch.tensor(ours["norms"]), torch.tensor(theirs["norms"]), rtol=rtol, atol=0
    )
    assert ours["skipped"] == theirs["skipped"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])


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
        "overlap_comm",
        "accumulated",
        "accumulated on the device",
        "accumulated, ZeRO-1",
        "fp32 sums",
        "fp32 sums, ZeRO-1",
        "aligned",
        "gate step",
        "one thread",
        "StepwellAdam",
        "q8",
        "bf16 moments",
        "split",
        "wide",
        "ZeRO-3",
        "ZeRO-3, fp32",
        "ZeRO-3, accumulated",
        "ZeRO-3, accumulated on the device",
        "ZeRO-3, fp32 sums",
        "ZeRO-3, q8",
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
    assert (
        ours["ZeRO-2"] == ours["ZeRO-1"] == ours["gate step"] == ours["one thread"] == ours["split"]
    )
    for one, other in itertools.combinations(
        ("ZeRO-2", "clipped", "Adam", "q8", "bf16 moments", "accumulated", "autocast", "fp32"), 2
    ):
        assert ours[one] != ours[other]
    assert ours["accumulated, ZeRO-1"] != ours["fp32 sums, ZeRO-1"]
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
        "nonfinite, fp32",
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


# ---- ranks, options ----


def test_two_ranks(tmp_path):
    ranks = deepspeed_run.run("offload_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)
    (line,), nothing = (result.pop("said") for result in ranks)
    assert "`stepwell.gate` is `module`, but with several ranks" in line
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
            test_deepspeed_access.assert_same_values(*result.pop(name))
        for runs in result.values():
            assert_same_runs(*runs)
    first, second = (result["ZeRO-2"][0] for result in ranks)
    assert first["norms"] == second["norms"]
    assert first["losses"] != second["losses"]


def test_options(runs):
    result = runs["options"]
    expected = {
        "unknown": "`engin` in the block `stepwell` of the DeepSpeed JSON, "
        "expected engine, moments, gate, accumulate, threads, host_bytes_max",
        "no block": "`stepwell` is `[1]`",
        "engine": "`stepwell.engine` is `1`",
        "moments": "`stepwell.moments` is `fp8`",
        "gate": "`stepwell.gate` is `layer`",
        "accumulate": "`stepwell.accumulate` is `gpu`",
        "threads": "`stepwell.threads` is `0`",
        "host_bytes_max": "`stepwell.host_bytes_max` is `1 GB`",
        "too little": "`1000` are left of `host_bytes_max`",
        "twice": "`moments` is `bf16` in the params of optimizer `StepwellAdamW`, but `q8`",
        "client": "`stepwell.moments` is `q8`, but the optimizer is `AdamW`",
    }
    for name, part in expected.items():
        assert part in result[name]
    ours = "DeepSpeedCPUAdam"
    zero = "DeepSpeedZeroOptimizer"
    off = '"engine" is false in the block `stepwell`'
    kept_so = '"stepwell": {"engine": false} in the JSON keeps it so without this warning'
    idle_gate = "without effect in the block `stepwell`: `gate`"
    paths = {
        "off": (zero, ours),
        "off, keys": (zero, ours, off, idle_gate),
        "nvme": ("OffloadZeroOptimizer", ours, "device is `nvme`, but below stage 3", "hint: "),
        "ratio": (
            "DeepSpeedZeroOptimizer_Stage3",
            ours,
            "ratio is `0.5`, and masters are in 16 bits. What steps: DeepSpeed's Twin-Flow: ",
            "the share in host memory, on Stepwell's kernels. hint: leave out ratio",
            kept_so,
        ),
        "no offload": (zero, "FusedAdam"),
        "no offload, keys": (zero, "FusedAdam", "nothing is offloaded", "`threads`"),
        "torch": (
            zero,
            "AdamW",
            "torch's `AdamW` with amsgrad. What steps: DeepSpeed's own path, with torch's `AdamW`",
            "hint: optimizer type Adam or AdamW in the JSON",
            kept_so,
        ),
        "ZeRO-3": ("OffloadZeroOptimizerStage3", ours),
        "ZeRO-3, gate": ("OffloadZeroOptimizerStage3", ours, "under ZeRO-3", '"gate": "step"'),
        "ZeRO-3, q8": ("OffloadZeroOptimizerStage3", "StepwellAdamW"),
        "parameters": ("OffloadZeroOptimizerStage3", ours),
        "idle keys": (
            zero,
            "StepwellAdamW",
            "without effect in the block `stepwell`: `gate`, `threads`.",
        ),
        "ZeRO-2, parameters": ("OffloadZeroOptimizer", ours),
        "several": (zero, "SGD"),
        "other version": (
            zero,
            ours,
            "which was tested, in `deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.",
            "reduce_ipg_grads` (STEPWELL_UNTESTED_DEEPSPEED=1",
            "What steps: DeepSpeed's own path, on Stepwell's kernels",
            "hint: pip install",
            kept_so,
        ),
    }
    for name, (cls, base, *parts) in paths.items():
        found_cls, found_base, lines = result[f"path, {name}"]
        assert (found_cls, found_base) == (cls, base), name
        assert len(lines) == bool(parts), (name, lines)
        for part in parts:
            assert part in lines[0], (name, lines)
        # One line each, and the same.
        assert result.get(f"said by DeepSpeed, {name}", lines) == lines
    (no_zero,) = result["path, no ZeRO"]
    assert "stage is `0`, at which DeepSpeed offloads nothing" in no_zero
    assert 'DeepSpeed without ZeRO, on Stepwell\'s kernels. hint: set "stage": 2' in no_zero


def test_plans(runs):
    found = {
        name.removeprefix("plan, "): plan
        for name, plan in runs["options"].items()
        if name.startswith("plan, ")
    }
    expected = {
        "ZeRO-2": ("OffloadZeroOptimizer", "ram", "module", ()),
        "gate step": ("OffloadZeroOptimizer", "ram", "step", ()),
        "ZeRO-3": ("OffloadZeroOptimizerStage3", "ram", "step", ()),
        "no offload": (None, None, None, ()),
        "several": (
            None,
            None,
            None,
            ('"engine" is false in the block `stepwell`', "the optimizer is `SGD`"),
        ),
        "inference": (None, None, None, ()),
    }
    assert {
        name: (plan.zero_class, plan.tier, plan.gate, plan.reasons) for name, plan in found.items()
    } == expected
    assert found["inference"].options.moments == "q8"
    assert len({found[name] for name in expected}) == len(expected)
