"""torch's Adam and AdamW under ZeRO with CPU offload: the engine steps them, or says why not."""

import deepspeed_run
import pytest
import torch
from deepspeed_engines import LR

PROGRAM_TIMEOUT = 150
# torch rounds its steps in other places than the core does, and so do losses of a few steps.
RTOL = {"fp32": 2e-5, "bf16": 2e-2}
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_adam")
    return deepspeed_run.run(
        "torch_adam", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "saved")
    )


@pytest.fixture
def paths(runs):
    return runs["paths"]


def assert_close(one, other, rtol):
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3",
        "fp32",
        "Adam",
        "maximize",
        "groups",
        "schedule",
        "torch_adam",
    ],
)
def test_the_engine_steps_as_torch_does(paths, name):
    ours, theirs = paths[name]
    assert ours["class"].startswith("OffloadZeroOptimizer")
    assert theirs["class"].startswith("DeepSpeedZeroOptimizer")
    assert ours["base"] == theirs["base"] == ("Adam" if name == "Adam" else "AdamW")
    rtol = RTOL["bf16" if name.startswith("ZeRO") else "fp32"]
    assert_close(ours["losses"], theirs["losses"], rtol)
    assert_close(ours["norms"], theirs["norms"], rtol)
    for (flat, state), (other, other_state) in zip(
        ours["partitions"], theirs["partitions"], strict=True
    ):
        assert state.keys() == other_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert (flat - other).abs().max() < 0.05 * LR
        assert state["step"].dtype == other_state["step"].dtype == torch.float32
        assert state["step"] == other_state["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype == other_state[key].dtype
            assert state[key].shape == other_state[key].shape


def test_runs_differ_where_they_should(paths):
    names = ("fp32", "Adam", "maximize", "groups", "schedule", "ZeRO-1")
    losses = [tuple(paths[name][0]["losses"]) for name in names]
    assert len(set(losses)) == len(names)
    for name in ("fused", "lr is a tensor"):
        assert paths[name]["class"] == "OffloadZeroOptimizer"
        assert paths[name]["losses"] == paths["fp32"][0]["losses"]
    assert paths["torch_adam"][0]["losses"] == paths["fp32"][0]["losses"]
    assert paths["torch_adam, q8"] == "StepwellAdamW"


def test_schedulers_see_the_optimizer_and_its_steps(paths):
    for run in paths["schedule"]:
        assert run["same groups"]
        assert run["warnings"] == []
        assert run["lrs"] == [LR * 0.5 ** len(run["losses"])]


# ---- what keeps DeepSpeed's path ----


def test_deepspeed_forces_its_own_where_the_engine_does_not_step(runs):
    found = runs["forced"]
    assert found["forced"] == found["forced, callable"] == ("OffloadZeroOptimizer", "AdamW")
    assert found["identity"]
    for name in ("forced, off", "forced, callable, off", "forced, amsgrad"):
        assert found[name].startswith("ZeRORuntimeException: the optimizer `AdamW`, given to")
        assert '"zero_force_ds_cpu_optimizer": false' in found[name]
    for name, reason in {"off": '"engine" is false', "amsgrad": "with amsgrad"}.items():
        assert reason in found[f"forced, {name}"]
    # This one DeepSpeed refuses by itself.
    assert found["forced, another"].startswith("ZeRORuntimeException: ")


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        ("engine", "engine"),
        ("engine", "DeepSpeed"),
        ("DeepSpeed", "engine"),
        ("engine", "DeepSpeedCPUAdam"),
        ("DeepSpeedCPUAdam", "engine"),
    ],
)
def test_checkpoints_go_both_ways(runs, saves, loads):
    (losses, after), (resumed, partitions) = runs["checkpoints"][saves, loads]
    if "DeepSpeed" in (saves, loads):
        assert_close(resumed, losses, RTOL["bf16"])
    else:
        assert resumed == losses
    for (flat, state), (other, other_state) in zip(after, partitions, strict=True):
        assert (flat - other).abs().max() < 0.05 * LR
        assert int(state["step"]) == int(other_state["step"]) == 4
        if "DeepSpeed" not in (saves, loads):
            assert torch.equal(flat, other)
            assert torch.equal(state["exp_avg_sq"], other_state["exp_avg_sq"])
