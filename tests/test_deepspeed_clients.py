"""Libraries that come between the user and DeepSpeed.

Stepwell's optimizers arrive as they were made.
"""

import deepspeed_run
import pytest
import torch

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_keeps_the_optimizer(tmp_path, when):
    result = deepspeed_run.run("accelerate", tmp_path, timeout=PROGRAM_TIMEOUT, when=when)
    assert result["imported"] == (when == "before")
    assert result["wrapped once"]
    found, expected = result["q8"]
    assert found["class"] == "OffloadZeroOptimizer"
    assert found["base"] == "stepwell.optim.AdamW"
    assert "exp_avg_codes" in found["state"]
    assert found["losses"] == expected["losses"]
    assert torch.equal(found["flat"], expected["flat"])
    # Others are accelerate's affair.
    assert result["torch's"] == ("DeepSpeedCPUAdam", True)
    assert "hint: stepwell.AdamW under DeepSpeed" in result["OffloadAdamW"]
    (line,) = result["missing"]
    assert "map_pytorch_optim_to_deepspeed` does not exist" in line
    assert "StepwellAdamW" in line
