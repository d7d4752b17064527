"""Training under DeepSpeed on Stepwell beside torch: optimizers, precisions, two ranks.

Nothing may be compiled.
"""

import deepspeed_engines
import deepspeed_run
import pytest
import torch

PROGRAM_TIMEOUT = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(PROGRAM_TIMEOUT + 60)]

# Losses of a few steps that differ in how each step is rounded (fused multiply-add or not; order of
# sums over partitions).
ROUNDING_RTOL = 2e-5
# What a run does with 8-bit codes of moments.
Q8_RTOL = 2e-2
# bfloat16 weights: each holds 8 bits.
BF16_RTOL = 0.05


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    return deepspeed_run.run("curves", tmp_path_factory.mktemp("curves"), timeout=PROGRAM_TIMEOUT)


def assert_same_curve(run, expected, rtol=ROUNDING_RTOL):
    losses = run["losses"] if isinstance(run, dict) else run
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=0)


def test_adam_follows_torch(curves):
    assert curves["torch Adam"] != curves["torch"]
    assert_same_curve(curves["StepwellAdam"], curves["torch Adam"])
    assert_same_curve(curves["Adam, adam_w_mode false"], curves["torch Adam"])


def test_adam_without_offload_follows_torch(curves):
    assert curves["fused_adam"]["optimizer"] == "FusedAdam"
    assert_same_curve(curves["fused_adam"], curves["torch"])
    assert_same_curve(curves["fused_adam without ZeRO"], curves["torch"])


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_masters(curves, stage):
    # DeepSpeed's: no master, so small updates are lost. Ours: the master is whole, so it is the
    # same run as with fp32 ones.
    theirs, ours = (
        curves[f"bf16 masters, {name}, ZeRO-{stage}"] for name in ("AdamW", "StepwellAdamW")
    )
    flat, state = theirs["partitions"][0]
    assert (flat.dtype, state["exp_avg"].dtype) == (torch.bfloat16, torch.float32)
    assert_same_curve(theirs, curves["bf16"]["losses"], BF16_RTOL)
    flat, state = ours["partitions"][0]
    assert (flat.dtype, state["trailing"].dtype) == (torch.bfloat16, torch.int16)
    assert ours["losses"] == curves["bf16"]["losses"]
    assert theirs["losses"] != ours["losses"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("optimizer", ["AdamW", "StepwellAdamW"])
def test_bf16_optimizer_states(curves, optimizer, stage):
    run = curves[f"bf16 states, {optimizer}, ZeRO-{stage}"]
    flat, state = run["partitions"][0]
    assert flat.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert_same_curve(run, curves["bf16"]["losses"], BF16_RTOL)


# ---- ranks ----


def test_two_ranks_follow_torch(tmp_path):
    ranks = deepspeed_run.run("two_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)

    def flat(name):
        return torch.cat([rank[name]["partitions"][0][0] for rank in ranks])[
            : len(ranks[0]["torch"])
        ]

    expected = ranks[0]["torch"]
    # As for losses; an element near 0 is as far off as its neighbours.
    torch.testing.assert_close(flat("AdamW"), expected, rtol=1e-4, atol=1e-5)
    assert (
        flat("q8") - expected
    ).abs().mean() < Q8_RTOL * deepspeed_engines.LR * deepspeed_engines.STEPS
    assert not torch.equal(flat("q8"), flat("AdamW"))
    # Also of parameters that lie in the other rank's partition: no rank goes on alone.
    for rank in ranks:
        assert all("`exp_avg` is held in codes" in said for said in rank["set in codes"])
