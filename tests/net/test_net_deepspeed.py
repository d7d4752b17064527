"""Engines of DeepSpeed, by `stepwell run`: beside torch, looked at, written, resumed, on drives."""

import pytest
from net_cases import assert_near, assert_same_bits, run_deepspeed


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return run_deepspeed(tmp_path_factory.mktemp("programs"))


PLACES = [f"{stage} {device}" for stage in (1, 2, 3) for device in ("cpu", "nvme")]


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_trains_as_torch(programs, place):
    found = programs[f"{place} fp32"]
    expected = programs["torch, two micro-batches" if place[0] == "2" else "torch"]
    assert found["on the engine"]
    assert_near(found["gradients"], expected["gradients"])
    assert_near(found["contents"], expected["contents"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_engine_has_the_bits_of_one_that_went_on(programs, place, dtype):
    found = programs[f"{place} {dtype}"]
    assert_same_bits(found["resumed"], found["contents"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_drive_changes_no_bit(programs, stage, dtype):
    drive, memory = (programs[f"{stage} {device} {dtype}"] for device in ("nvme", "cpu"))
    assert_same_bits(drive["contents"], memory["contents"])
