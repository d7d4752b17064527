"""Gradients of failed backwards, of skipped and refused steps, and of huge norms.

Under ZeRO on the engine.
"""

import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_gradient_programs import COUNTS, LEFT_OUT, OUTSIDE

PROGRAM_TIMEOUT = 300
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run(
        "gradients", tmp_path_factory.mktemp("gradients"), timeout=PROGRAM_TIMEOUT
    )


def assert_same(ours, theirs):
    (losses, flats), (other_losses, other_flats) = ours, theirs
    assert losses == other_losses
    assert_same_partitions(flats, other_flats)


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
def test_after_the_hint_a_failed_backward_has_not_been(runs, stage):
    for name in ("at once", "accumulated"):
        undisturbed, recovered = runs["failed", stage][name]
        assert_same(recovered, undisturbed)


@STAGES
def test_without_the_hint_what_comes_next_raises(runs, stage):
    for after in ("step", "backward", "plain backward"):
        message = runs["failed", stage][after]
        assert message.startswith("a backward has not ended, so its gradients are partial")
        assert "hint: engine.optimizer.zero_grad()" in message


@STAGES
def test_zero_grad_between_micro_batches_is_deepspeeds(runs, stage):
    ours, theirs = runs["cleared", stage]
    assert ours[0] == theirs[0]


@STAGES
def test_one_backward_of_two_forwards_has_ended_when_it_is_over(runs, stage):
    assert_same(*runs["two forwards", stage])


@pytest.mark.parametrize("name", OUTSIDE)
def test_gradients_that_come_before_the_backward_of_the_forward_are_stepped(runs, name):
    assert_same(*runs[f"outside, {name}"])


@pytest.mark.parametrize("name", LEFT_OUT)
@STAGES
def test_what_a_program_leaves_out_by_zero_grad_is_not_stepped(runs, stage, name):
    undisturbed, found = runs["left out", stage, name]
    assert_same(found, undisturbed)


@STAGES
def test_what_a_program_leaves_out_and_does_not_drop_is_added_to_the_next(runs, stage):
    theirs, _ = runs["not dropped", "DeepSpeed"]
    losses, _ = runs["not dropped", stage]
    assert losses == theirs
    assert losses != runs["left out", stage, "one backward"][0][0]


@STAGES
def test_a_step_has_as_many_micro_batches_as_the_program_says_at_the_time(runs, stage):
    ours, theirs = runs["resized", stage]
    assert_same(ours[:2], theirs[:2])
    assert ours[2] == theirs[2] == 2 * len(COUNTS)


def test_a_refused_step_leaves_no_gradients(runs):
    ours, theirs = runs["refused"]
    assert "a gradient is not finite; nothing was changed. hint: " in ours["message"]
    assert_same_partitions(ours["before"], ours["after"])
    assert ours["losses"] == theirs["losses"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])


@STAGES
def test_a_skipped_step_leaves_no_gradients(runs, stage):
    assert not runs["skipped", stage].any()


@STAGES
def test_a_step_for_which_there_is_no_memory_leaves_no_gradients(runs, stage):
    assert_same(*runs["without memory", stage])


@STAGES
def test_finite_gradients_of_a_huge_norm_are_stepped(runs, stage):
    plain, found = runs["huge", stage]
    assert found["norm"] ** 2 > torch.finfo(torch.float32).max
    assert found["skipped"] == 0
    assert math.isclose(found["norm"], plain["norm"] * 2.0**80, rel_tol=1e-6)
    for (_, before), (flat, state) in zip(found["before"], found["after"], strict=True):
        assert int(state["step"]) == int(before["step"]) + 1
        assert flat.isfinite().all()
    # Both are clipped to the same norm.
    for (_, state), (_, expected) in zip(found["after"], plain["after"], strict=True):
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-4, atol=1e-9)


def test_two_ranks(tmp_path):
    ranks = deepspeed_run.run("gradients_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)
    for result in ranks:
        for stage in (1, 2, 3):
            found = result.pop(f"huge, ZeRO-{stage}")
            assert found["skipped"] == 0
            assert math.isfinite(found["norm"])
        for name, (undisturbed, recovered) in result.items():
            assert recovered[0] == undisturbed[0], name
            # ZeRO-3 does not initialize what pads its partitions.
            if not name.startswith("ZeRO-3"):
                assert_same_partitions(recovered[1], undisturbed[1])
