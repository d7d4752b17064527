"""Weights under ZeRO on the engine between a step and the next forward.

Every access gets the new ones.
"""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_weight_programs import READS

PROGRAM_TIMEOUT = 300
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run("weights", tmp_path_factory.mktemp("weights"), timeout=PROGRAM_TIMEOUT)


def assert_all_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", READS)
def test_reads_after_a_step_are_those_of_deepspeed(runs, name):
    ours, theirs = runs["reads"]
    now, later = ours[name]
    expected, _ = theirs[name]
    assert_all_equal(now, later)
    assert_all_equal(now, expected)


def test_a_term_computed_before_the_forward(runs):
    (terms, flats), (expected, expected_flats) = runs["regularised"]
    assert terms == expected
    assert len(set(terms)) == len(terms)
    assert_same_partitions(flats, expected_flats)


@pytest.mark.parametrize("name", ["zero_", "copy_", "data"])
def test_writes_last_until_the_next_step(runs, name):
    (found, flats), (expected, expected_flats) = runs[f"written, {name}"]
    assert found == expected
    assert_same_partitions(flats, expected_flats)


def test_a_view_that_was_taken_before_the_step(runs):
    ours, theirs = runs["view"]
    for (now, weight), (expected, _) in zip(ours, theirs, strict=True):
        assert torch.equal(now, weight)
        assert torch.equal(now, expected)


def test_weights_and_masters_are_exchanged_after_the_step(runs):
    (masters, weights), (expected, expected_weights) = runs["refreshed"]
    assert_all_equal(masters, expected)
    assert_all_equal(weights, expected_weights)


def test_torchs_default_dtype_makes_no_difference(tmp_path):
    result = deepspeed_run.run("defaults", tmp_path, timeout=PROGRAM_TIMEOUT)
    for (stage, moments), (ours, theirs) in result.items():
        losses, norm, dtype, flats = ours
        assert losses == pytest.approx(theirs[0], rel=0 if stage == 2 else 1e-3)
        assert norm == pytest.approx(theirs[1], rel=1e-5)
        assert dtype == torch.float32
        for _, state in flats:
            assert int(state["step"]) == 4
            if isinstance(state["step"], torch.Tensor):
                assert state["step"].dtype == torch.float32
            assert all(
                value.dtype == torch.float32
                for key, value in state.items()
                if key in ("exp_avg", "exp_avg_sq")
            )
        assert moments == "fp32" or "exp_avg_codes" in flats[0][1]
