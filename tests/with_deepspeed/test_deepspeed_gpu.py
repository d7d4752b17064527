"""ZeRO with CPU offload where the model is on a GPU: DeepSpeed's partitions cross the bus.

Everything else runs on DeepSpeed's accelerator for the CPU. This file runs alone, on one GPU:
`pytest tests/with_deepspeed/test_deepspeed_gpu.py`.
"""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions

PROGRAM_TIMEOUT = 240
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(PROGRAM_TIMEOUT + 30)]
NAMES = (
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-2, fp32",
    "ZeRO-2, fp16",
    "ZeRO-2, clipped, accumulated",
    "ZeRO-2, overlap_comm",
    "ZeRO-3",
    "ZeRO-3, fp16",
    "ZeRO-3, clipped, accumulated",
    "ZeRO-3, offload_param",
    "ZeRO-3, offload_param, fp32",
    "ZeRO-3, offload_param, accumulated",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    environment = {"DS_ACCELERATOR": "cuda"}
    return deepspeed_run.run("gpu", folder, timeout=PROGRAM_TIMEOUT, environment=environment)


def test_all_cases_are_named(runs):
    assert sorted(runs) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_trains_as_on_deepspeeds_path(runs, name):
    ours, theirs = runs[name]
    assert ours["class"].startswith("Offload")
    assert not theirs["class"].startswith("Offload")
    assert ours["device"] == theirs["device"] == "cuda"
    assert ours["skipped"] == theirs["skipped"]
    # Norms, and with them clip coefficients, are summed in another order.
    torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-5, atol=0)
    exact = {"rtol": 0, "atol": 0}
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if "clipped" in name else exact
    torch.testing.assert_close(ours["losses"], theirs["losses"], **tolerance)
    for (flat, state), (other, other_state) in zip(
        ours["partitions"], theirs["partitions"], strict=True
    ):
        torch.testing.assert_close(flat, other, **tolerance)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key], other_state[key], **tolerance)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_on_deepspeeds_path(tmp_path):
    environment = {"DS_ACCELERATOR": "cuda"}
    ranks = deepspeed_run.run(
        "two_gpus", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2, environment=environment
    )
    for runs in ranks:
        for name, (ours, theirs) in runs.items():
            assert ours["class"].startswith("Offload"), name
            assert not theirs["class"].startswith("Offload"), name
            assert ours["losses"] == theirs["losses"], name
            assert_same_partitions(ours["partitions"], theirs["partitions"])


def test_a_volume_has_the_bits_of_host_memory_on_a_gpu(tmp_path):
    """There gradients come down to memory that is not pinned."""
    found = deepspeed_run.run(
        "gpu_volume",
        tmp_path,
        timeout=PROGRAM_TIMEOUT,
        environment={"DS_ACCELERATOR": "cuda"},
        drive=str(tmp_path),
    )
    assert len(found) == 3
    for on_volume, in_memory in found.values():
        assert on_volume["read"] > 0
        assert (on_volume["losses"], on_volume["norms"]) == (
            in_memory["losses"],
            in_memory["norms"],
        )
        assert_same_partitions(on_volume["partitions"], in_memory["partitions"])


def test_deferred_updates_of_a_gpu_are_all_applied(tmp_path):
    """Gradients do not depend on how late weights are; selected channels are stepped on the GPU."""
    names = ["ZeRO-2", "ZeRO-1, fp32", "fp16", "accumulated"]
    found = deepspeed_run.run(
        "zenflow_exact_sums",
        tmp_path,
        timeout=PROGRAM_TIMEOUT,
        environment={"DS_ACCELERATOR": "cuda"},
        cases=names,
    )
    for name in (*names, "poisoned"):
        ours, exact = found[name, True], found[name, False]
        assert any(ours["late"])
        assert_same_partitions(ours["partitions"], exact["partitions"])
        for weight, expected in zip(ours["weights"], exact["weights"], strict=True):
            assert torch.equal(weight, expected)
