"""What DeepSpeed's users read, set and say: on the engine as on DeepSpeed's own path."""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import ZERO_3_NORM_RTOL, assert_same_values
from deepspeed_release import IS_OLDER, told_norms

PROGRAM_TIMEOUT = 300
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)

NAMES = (
    "read, ZeRO-2",
    "read, ZeRO-3",
    "read, scaled, ZeRO-2",
    "read, scaled, ZeRO-3",
    "read, overflow, ZeRO-2",
    "read, overflow, ZeRO-3",
    "set, ZeRO-2",
    "set, ZeRO-3",
    "set, clipped, ZeRO-2",
    "set, accumulated, ZeRO-2",
    "set early, ZeRO-2",
    "set early, ZeRO-3",
    "state, ZeRO-2",
    "state, ZeRO-3",
    "unchecked, ZeRO-2",
    "unchecked, ZeRO-3",
    "unused, ZeRO-2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run("access", tmp_path_factory.mktemp("access"), timeout=PROGRAM_TIMEOUT)


@pytest.mark.parametrize("name", NAMES)
def test_as_on_deepspeeds_own_path(runs, name):
    # Those that read norms.
    is_of_norm = name.startswith("read") and name.endswith("ZeRO-3")
    ours, theirs = runs[name]
    if IS_OLDER and name.startswith("unchecked"):
        pytest.skip("DeepSpeed's own path takes a norm that is not finite for 1 in this release")
    if name.startswith("read, overflow"):
        theirs = told_norms(ours, theirs)
    assert_same_values(ours, theirs, rtol=ZERO_3_NORM_RTOL if is_of_norm else 0.0)


def test_moments_are_there_from_the_first_step_on(runs):
    hint = "there is no `exp_avg` yet. hint: optimizer state is made by the first step"
    assert runs["too early"] == [[hint] * 2] * 2


def test_what_the_json_says_of_gradients_that_are_not_finite_wins(runs):
    weights, norm, skipped = runs["unchecked, ZeRO-2"][0][0], *runs["unchecked, ZeRO-2"][0][5:7]
    assert (norm, skipped) == (float("inf"), 0)
    # Of the others the clip coefficient leaves nothing.
    assert weights.isnan().sum() == 1


def test_unused_parameters_are_refused_where_the_json_says_so(runs):
    assert runs["unused, ZeRO-2"][0] == ["Assertion", True, True, True, True, True]


def test_what_is_set_under_zero_3_is_clipped_by_its_own_norm(runs):
    moment, norm = runs["clipped by what is set"]
    assert norm > 7 * moment.numel() ** 0.5
    expected = torch.full_like(moment, 0.1 * 7 * 1e-3 / norm)
    torch.testing.assert_close(moment, expected, rtol=1e-3, atol=0)


def test_nothing_is_pinned_where_the_json_says_so(runs):
    (nbytes, losses), *others = runs["pinned"]
    assert nbytes > 0
    assert others == [(nbytes, losses), (0, losses)]


def test_timers_time_the_step(runs):
    (timed_gate, is_busy, (elapsed_ms,), step_seconds), (gate, *_) = runs["timed"]
    assert (timed_gate, gate) == ("step", "module")
    assert not is_busy
    assert elapsed_ms >= 1000 * step_seconds > 0
