"""SuperOffload's optimizer process on Stepwell. The rest of SuperOffload needs a GPU."""

import deepspeed_engines
import deepspeed_run
import pytest
import torch

PROGRAM_TIMEOUT = 120

# Five steps of Adam, rounded elsewhere.
STEPS_ATOL = 1e-6
# What a rollback by inverse arithmetic leaves.
ROLLBACK_ATOL = 1e-6


@pytest.mark.slow
@pytest.mark.timeout(PROGRAM_TIMEOUT + 60)
def test_superoffload_survives_an_overflow(tmp_path):
    result = deepspeed_run.run("superoffload", tmp_path, timeout=PROGRAM_TIMEOUT)
    before, overflow, after = (result[when] for when in ("before", "overflow", "after"))
    # The finite one was stepped and is back; the other one never moved.
    assert not torch.allclose(overflow[0], before[0], atol=deepspeed_engines.LR / 10)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=ROLLBACK_ATOL)
    assert torch.equal(overflow[1], before[1])
    assert torch.equal(after[1], before[1])
    # Their moments and counts are back too: what follows is what would have followed.
    for ours, theirs in zip(result["end"], result["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=STEPS_ATOL)
    assert not result["is_alive"]
