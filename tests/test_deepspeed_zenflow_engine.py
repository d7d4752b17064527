"""ZenFlow on the offload engine: each gradient once; looks and checkpoints see all updates."""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_zenflow_programs import CASES
from stepwell.deepspeed.state.decoding import MOMENT_NAMES

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(2 * PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return deepspeed_run.run(
        "zenflow_exact_sums",
        tmp_path_factory.mktemp("sums"),
        timeout=PROGRAM_TIMEOUT,
        cases=list(CASES),
    )


def assert_same_ends(ours, exact):
    assert_same_partitions(ours["partitions"], exact["partitions"])
    for weight, expected in zip(ours["weights"], exact["weights"], strict=True):
        assert torch.equal(weight, expected)
    assert (ours["norm"], ours["skipped"]) == (exact["norm"], exact["skipped"])


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_applied_once_with_its_own_coefficients(sums, case):
    ours, exact = sums[case, True], sums[case, False]
    assert ours["class"] == "DeferredZeroOptimizer"
    assert exact["class"] == "OffloadZeroOptimizer"
    # Two steps warm up.
    assert ours["late"] == [False] * 2 + [True] * (len(ours["late"]) - 2)
    assert_same_ends(ours, exact)


def test_steps_that_are_not_finite_are_dropped(sums):
    ours, exact = sums["poisoned", True], sums["poisoned", False]
    assert ours["skipped"] == 2
    # What was pending is applied there, and the step after it is exact.
    assert [step for step in range(2, 11) if not ours["late"][step]] == [4, 5, 7, 8]
    assert_same_ends(ours, exact)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return deepspeed_run.run(
        "zenflow_on_engine", tmp_path_factory.mktemp("one"), timeout=PROGRAM_TIMEOUT
    )


def test_a_run_has_the_bits_of_the_deferred_optimizer(one_rank):
    assert one_rank["losses"] == one_rank["expected losses"]
    assert one_rank["oldest"] == 1
    for weight, expected in zip(one_rank["weights"], one_rank["expected weights"], strict=True):
        assert torch.equal(weight, expected)


def test_every_look_sees_all_updates(one_rank):
    assert one_rank["exact after a look"]
    assert one_rank["late"]
    assert one_rank["master"]
    assert not one_rank["late after a look"]


def test_gradients_are_read_before_the_step_only(one_rank):
    assert one_rank["gradient"] > 0
    assert "a gradient is set" in one_rank["refused"][0]
    assert "between backward and step" in one_rank["refused"][1]


def test_warming_up_is_exact(one_rank):
    (ours, at_end), (exact, expected) = one_rank["warm-up"], one_rank["exact"]
    assert ours == exact
    assert_same_partitions(at_end, expected)


def test_coded_moments_are_refused(one_rank):
    assert "moments of `StepwellAdamW` are not fp32" in one_rank["q8"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(tmp_path, ranks):
    folder = str(tmp_path / "saved")
    options = {"timeout": PROGRAM_TIMEOUT, "folder": folder}
    found = deepspeed_run.run("zenflow_saves", tmp_path, ranks=ranks, **options)
    for each in found if ranks > 1 else [found]:
        saved, weights, losses, at_end = each["went on"]
        assert each["late"]
        for name in ("again", "anew"):
            assert_same_partitions(each["loaded", name], saved)
            assert each["resumed", name][0] == losses
            assert_same_partitions(each["resumed", name][1], at_end)
        assert each["looked", "anew"][0] == each["looked", "again"][0]
        assert_same_partitions(each["looked", "anew"][1], each["looked", "again"][1])
        # On one rank it applies what is pending.
        assert (each["looked", "anew"][0] == losses) == (ranks > 1)
    if ranks == 1:
        loaded = deepspeed_run.run("zenflow_loads", tmp_path, **options)
        assert loaded["class"] == "DeepSpeedZeroOptimizer"
        for (flat, state), (expected, saved_state) in zip(loaded["loaded"], saved, strict=True):
            assert torch.equal(flat, expected)
            assert all(torch.equal(state[name], saved_state[name]) for name in MOMENT_NAMES)
            assert int(state["step"]) == saved_state["step"] == 7
        for weight, expected in zip(loaded["weights"], weights, strict=True):
            assert torch.equal(weight, expected)
        return
    # Of a state dict of the module, and of an evaluation; a checkpoint has all updates.
    of_state_dict, of_evaluation = found[0]["warnings"]
    assert "a state dict of the module" in of_state_dict
    assert "a forward in evaluation mode" in of_evaluation
    for one, other in zip(found[0]["weights"], found[1]["weights"], strict=True):
        assert torch.equal(one, other)


def test_ranks_apply_every_gradient_once(tmp_path):
    ranks = deepspeed_run.run(
        "zenflow_exact_sums",
        tmp_path,
        ranks=2,
        timeout=PROGRAM_TIMEOUT,
        cases=["ZeRO-2", "accumulated", "ZeRO-1, fp32"],
    )
    for found in ranks:
        for case in ("ZeRO-2", "accumulated", "ZeRO-1, fp32", "poisoned"):
            ours, exact = found[case, True], found[case, False]
            assert any(ours["late"])
            assert_same_ends(ours, exact)
