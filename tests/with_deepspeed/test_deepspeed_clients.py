"""Libraries that come between the user and DeepSpeed.

Stepwell's optimizers arrive as they were made; the others' runs are those of DeepSpeed's own path.
"""

import deepspeed_run
import pytest
import torch
from deepspeed_client_programs import OPTIONS

PROGRAM_TIMEOUT = 240
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


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    return deepspeed_run.run(
        "clients", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


def assert_same(ours, theirs, stage, *, is_exact):
    assert ours["class"] == ("OffloadZeroOptimizerStage3" if stage == 3 else "OffloadZeroOptimizer")
    assert not theirs["class"].startswith("Offload")
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - {"class", "base"}:
        tolerance = {"rtol": 0, "atol": 0}
        if not is_exact:
            # DeepSpeed sums the squares in float32, by groups or partitions. So the clip
            # coefficient differs in its last bit, which Adam shows where gradients are tiny, and a
            # weight of 16 bits where it is between two.
            rtol = {"masters": 1e-5, "saved": 2**-7}.get(key, 1e-6)
            atol = OPTIONS["lr"] / 100 if key in ("masters", "saved") else 0
            tolerance = {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(ours[key], theirs[key], **tolerance)


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_with_auto_trains_as_on_deepspeeds_path(clients, stage):
    """With the optimizer of the JSON, and with Trainer's own."""
    ours, theirs = clients["trainer", stage]
    assert_same(ours, theirs, stage, is_exact=stage == 2)
    assert ours["base"] == theirs["base"] == "DeepSpeedCPUAdam"
    assert len(set(ours["losses"])) == len(ours["losses"]) == 3
