"""What runs on two paths have to have in common."""

import pytest
import torch
from deepspeed_release import told_norms

CLASSES = (
    ("OffloadZeroOptimizer", "DeepSpeedZeroOptimizer"),
    ("OffloadZeroOptimizerStage3", "DeepSpeedZeroOptimizer_Stage3"),
)
ZERO_3_NORM_RTOL = 1e-6
"""DeepSpeed's ZeRO-3 adds up the squares of all gradients in float32."""


def assert_same_values(ours, theirs, rtol=0.0):
    """To the bit unless `rtol` is given, but for which NaN it is."""
    assert len(ours) == len(theirs) > 0
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=rtol, atol=0, equal_nan=True)
        else:
            assert one == (pytest.approx(other, rel=rtol) if rtol else other), index


def assert_same_partitions(ours, theirs):
    assert len(ours) == len(theirs)
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
    rtol = ZERO_3_NORM_RTOL if ours["class"].endswith("Stage3") else 0.0
    norms = told_norms(ours["norms"], theirs["norms"])
    torch.testing.assert_close(torch.tensor(ours["norms"]), torch.tensor(norms), rtol=rtol, atol=0)
    assert ours["skipped"] == theirs["skipped"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])
