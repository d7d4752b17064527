"""Gradients of failed backwards, of skipped and refused steps, and of huge norms.

Under ZeRO on the engine.
"""

import math

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_gradient_programs import NOT_DROPPED, OUTSIDE

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


@pytest.mark.parametrize("kind", ["", ", overlap_comm", ", timed", ", accumulated", ", fp32 sums"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_the_hint_a_failed_backward_has_not_been(runs, stage, kind):
    undisturbed, recovered = runs["failed"][f"ZeRO-{stage}{kind}"]
    assert_same(recovered, undisturbed)


def test_a_failed_backward_takes_earlier_micro_batches_along(runs):
    theirs, first = runs["failed"]["ZeRO-1, second micro-batch"]
    assert_same(first, theirs)
    undisturbed, _ = runs["failed"]["ZeRO-1, accumulated"]
    assert first[0] != undisturbed[0]
    for stage in (2, 3):
        _, ours = runs["failed"][f"ZeRO-{stage}, second micro-batch"]
        assert ours[0] == first[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_a_step_that_was_interrupted_are_not_added_to_the_next(runs, stage):
    undisturbed, interrupted = runs[f"interrupted, ZeRO-{stage}"]
    assert_same(interrupted, undisturbed)


@pytest.mark.parametrize(
    "where", ["ZeRO-1, norm", "ZeRO-2, norm", "ZeRO-3, norm", "ZeRO-1, release", "ZeRO-2, release"]
)
def test_behind_a_step_that_was_interrupted_twice_the_next_backward_raises(runs, where):
    message, losses = runs[f"interrupted twice, {where}"]
    assert message.startswith("a step was left by an exception, and its gradients could not be")
    assert "hint: engine.optimizer.zero_grad()" in message
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("after", ["step", "backward", "plain backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_the_hint_what_comes_next_raises(runs, stage, after):
    message = runs["failed"][f"ZeRO-{stage}, {after}"]
    assert message.startswith("a backward has not ended, so its gradients are partial")
    assert "hint: engine.optimizer.zero_grad()" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_grad_between_micro_batches_is_deepspeeds(runs, stage):
    ours, theirs = runs[f"cleared, ZeRO-{stage}"]
    assert ours[0] == theirs[0]


@pytest.mark.parametrize("name", OUTSIDE)
def test_gradients_that_come_before_the_backward_of_the_forward_are_stepped(runs, name):
    ours, theirs = runs[f"outside, {name}"]
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["one backward", "two", "two on the device", "fp32 sums"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_program_leaves_out_by_zero_grad_is_not_stepped(runs, stage, name):
    undisturbed, *left_out = runs[f"left out, ZeRO-{stage}, {name}"]
    for each in left_out:
        assert_same(each, undisturbed)


@pytest.mark.parametrize("name", NOT_DROPPED)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_program_leaves_out_and_does_not_drop_is_added_to_the_next(runs, stage, name):
    theirs, _ = runs["not dropped, DeepSpeed"]
    losses, _ = runs[f"not dropped, ZeRO-{stage}"][name]
    assert losses == theirs
    undisturbed, *_ = runs[f"left out, ZeRO-{stage}, one backward"]
    assert losses != undisturbed[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_has_as_many_micro_batches_as_the_program_says_at_the_time(runs, stage):
    for (counts, *_), (ours, theirs) in runs[f"resized, ZeRO-{stage}"].items():
        assert_same(ours[:2], theirs[:2])
        assert ours[2] == theirs[2] == 2 * len(counts)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_refused_step_leaves_no_gradients(runs, stage):
    ours, theirs = runs[f"refused, ZeRO-{stage}"]
    assert "a gradient is not finite; nothing was changed. hint: " in ours["message"]
    assert_same_partitions(ours["before"], ours["after"])
    assert ours["losses"] == theirs["losses"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_leaves_no_gradients(runs, stage):
    assert not runs[f"skipped, ZeRO-{stage}"].any()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_for_which_there_is_no_memory_leaves_no_gradients(runs, stage):
    assert_same(*runs[f"without memory, ZeRO-{stage}"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_why_gradients_could_not_be_dropped_is_said_by_the_next_backward(runs, stage):
    (first, second), losses = runs[f"undropped, ZeRO-{stage}"]
    assert first == "no memory"
    assert "gradients could not be dropped: `OSError: a copy is lost`. hint: " in second
    assert math.isfinite(losses[0])


@pytest.mark.parametrize("is_scattered", [False, True])
def test_what_is_kept_of_gradients_is_no_memory_that_is_reduced(runs, is_scattered):
    assert runs["handed over"][is_scattered]["kept"] == [(True, False)] * 4


@pytest.mark.parametrize("is_scattered", [False, True])
def test_gradients_by_sub_group_are_those_of_parameters(runs, is_scattered):
    handed_over = runs["handed over"][is_scattered]
    (found,), expected = handed_over["by group"].values(), handed_over["local"]
    assert list(found) == list(range(len(expected)))
    assert all(map(torch.equal, found.values(), expected))


def assert_steps(found, plain, *, factor, rtol):
    assert found["skipped"] == 0
    assert math.isclose(found["norm"], plain["norm"] * factor, rel_tol=1e-6)
    for (_, before), (flat, state) in zip(found["before"], found["after"], strict=True):
        assert int(state["step"]) == int(before["step"]) + 1
        assert flat.isfinite().all()
        assert state["exp_avg"].isfinite().all()
    # Both are clipped to the same norm.
    for (_, state), (_, expected) in zip(found["after"], plain["after"], strict=True):
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("dtype", ["", "bf16, "])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_finite_gradients_of_a_huge_norm_are_stepped(runs, stage, dtype):
    plain, found = runs[f"huge, {dtype}ZeRO-{stage}"]
    assert found["norm"] ** 2 > torch.finfo(torch.float32).max
    assert_steps(found, plain, factor=2.0**80, rtol=1e-4)


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
