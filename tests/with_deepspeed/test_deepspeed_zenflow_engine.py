"""ZenFlow on the offload engine: each gradient once; looks and checkpoints see all updates."""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_zenflow_programs import CASES, SAVED_AT, STAGES
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
    assert one_rank["moment"]
    assert not one_rank["late after a look"]


def test_the_end_of_an_engine_applies_all_updates(one_rank):
    drained, ended = one_rank["ended"]
    assert all(map(torch.equal, drained, ended))


def test_gradients_are_read_before_the_step_only(one_rank):
    assert one_rank["gradient"] > 0
    assert "a gradient is set" in one_rank["refused"][0]
    assert "between backward and step" in one_rank["refused"][1]


def test_warming_up_is_exact(one_rank):
    (ours, at_end), (exact, expected) = one_rank["warm-up"], one_rank["exact"]
    assert ours == exact
    assert_same_partitions(at_end, expected)


@pytest.fixture(scope="module", params=[1, 2])
def saved(request, tmp_path_factory):
    """What ranks found that have saved and resumed, and what DeepSpeed did without Stepwell."""
    folder, ranks = tmp_path_factory.mktemp("saved"), request.param
    options = {"ranks": ranks, "timeout": PROGRAM_TIMEOUT, "folder": str(folder / "saved")}
    found = [
        deepspeed_run.run(program, folder, **options)
        for program in ("zenflow_saves", "zenflow_loads")
    ]
    return found if ranks > 1 else [[each] for each in found]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(saved, stage):
    ranks, _ = saved
    for found in (each[stage] for each in ranks):
        at_first, _, losses, at_end = found["went on"]
        assert found["late"]
        assert_same_partitions(found["loaded"], at_first)
        assert found["resumed"][0] == losses
        assert_same_partitions(found["resumed"][1], at_end)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_saved_have_all_updates(saved, stage):
    ranks = [each[stage] for each in saved[0]]
    # Each rank has a part of every parameter group, and there is one group.
    (masters,) = zip(*([flat for flat, _ in each["went on"][0]] for each in ranks), strict=True)
    for each in ranks:
        assert each["late before"]
        weights = torch.cat([weight.flatten() for weight in each["went on"][1]])
        assert torch.equal(weights, torch.cat(masters)[: len(weights)].bfloat16())


@pytest.mark.parametrize("stage", STAGES)
def test_a_look_at_masters_sees_all_updates(saved, stage):
    for found in (each[stage] for each in saved[0]):
        assert found["late"]
        masters = [master.bfloat16() for master in found["masters"]]
        assert all(map(torch.equal, masters, found["weights"]))


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_loads_what_was_saved_and_goes_on(saved, stage):
    for found, loaded in ((one[stage], other[stage]) for one, other in zip(*saved, strict=True)):
        assert (loaded["class"], loaded["base"]) == ("DeepSpeedZeroOptimizer", "torch.optim.adamw")
        at_first, weights, _, _ = found["went on"]
        for (flat, state), (expected, expected_state) in zip(
            loaded["loaded"], at_first, strict=True
        ):
            assert torch.equal(flat, expected)
            assert all(torch.equal(state[name], expected_state[name]) for name in MOMENT_NAMES)
            assert int(state["step"]) == expected_state["step"] == SAVED_AT
        for weight, expected in zip(loaded["weights"], weights, strict=True):
            assert torch.equal(weight, expected)
        # The first step behind a checkpoint is exact. torch's Adam rounds otherwise.
        (losses, after), (expected_losses, expected_after) = (
            each["one step"] for each in (loaded, found)
        )
        assert losses == expected_losses
        for (flat, state), (expected, expected_state) in zip(after, expected_after, strict=True):
            torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-7)
            for name in MOMENT_NAMES:
                torch.testing.assert_close(state[name], expected_state[name], rtol=1e-5, atol=1e-9)
            assert int(state["step"]) == expected_state["step"] == SAVED_AT + 1


@pytest.mark.parametrize("stage", STAGES)
def test_late_weights_of_several_ranks_are_warned_of_and_equal(saved, stage):
    ranks = [each[stage] for each in saved[0]]
    if len(ranks) == 1:
        assert ranks[0]["warnings"] == []
        return
    # Of a state dict of the module, and of an evaluation; a checkpoint has all updates.
    of_state_dict, of_evaluation = ranks[0]["warnings"]
    assert "a state dict of the module" in of_state_dict
    assert "a forward in evaluation mode" in of_evaluation
    for name in ("weights", "late weights"):
        assert all(map(torch.equal, ranks[0][name], ranks[1][name]))


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
