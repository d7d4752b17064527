"""As `zero_in_process.py`, where weights or state lie elsewhere: it is about where they are.

Weights in host memory (`offload_param`) and how they are fetched, a share of the state on the
device (`ratio`), and state on volumes.
"""

import deepspeed_fetch_programs as fetch
import deepspeed_nvme_programs as nvme
import deepspeed_offload_param_programs as offload_param
import deepspeed_twin_flow_programs as twin_flow
import pytest
import test_deepspeed_nvme
import test_deepspeed_offload_param
import torch
from deepspeed_asserts import assert_same_partitions
from deepspeed_engines import configuration
from deepspeed_paths import both
from test_deepspeed_twin_flow import assert_close, assert_close_partitions
from zero_one_rank import assert_resumed_by_both, one_rank  # noqa: F401

# The programs run without pytest's.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# ---- parameters in host memory, and shares of the device ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent": 100},
        {"dtype": "fp32", "persistent": 100},
        {"gradient_accumulation_steps": 2, "pinned": True},
        {"zero": {"sub_group_size": 3000}},
    ],
)
def test_parameters_in_host_memory(options):
    runs = offload_param.both(offload_param.offloaded(**options), steps=3)
    test_deepspeed_offload_param.assert_same_runs(*runs)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_parameters_in_host_memory_interrupted(dtype):
    found, expected = (
        offload_param.interrupted(dtype, is_interrupted=each) for each in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert_same_partitions(found[1], expected[1])


@pytest.mark.parametrize("options", [{}, {"persistent": 100}])
def test_parameters_in_host_memory_are_saved(options, tmp_path):
    assert_resumed_by_both(offload_param.offloaded(**options), tmp_path)


def test_memory():
    result = {}
    offload_param.memory(result)
    test_deepspeed_offload_param.test_memory_is_what_is_announced(result)
    result["touched"] = offload_param.touched()
    check = test_deepspeed_offload_param.test_weights_and_their_state_are_touched_and_no_bucket_is
    check(result)


test_touched_memory = test_deepspeed_offload_param.test_weights_go_to_memory_that_the_pool_touches


@pytest.mark.parametrize(
    "options", [{"clip": 0.1}, {"ratio": 0.0}, {"gradient_accumulation_steps": 2}]
)
def test_share_of_the_device(options):
    ours, theirs = both(twin_flow.halved(dtype="bf16", **options), steps=3)
    assert ours["class"] == "OffloadZeroOptimizerStage3"
    assert_close(ours["losses"], theirs["losses"], 2e-2)
    assert_close(ours["norms"], theirs["norms"], 2e-2)
    assert_close_partitions(ours["partitions"], theirs["partitions"])


def test_gradients_of_the_share():
    found, expected = twin_flow.gradients()
    torch.testing.assert_close(found[0][0], expected)
    torch.testing.assert_close(found[0][1], torch.full_like(found[0][1], 0.7))
    first, second, third = twin_flow.unused()
    assert first.any()
    assert torch.equal(second, first / 2)
    assert torch.equal(third, second / 2)


def test_share_that_fails():
    first, second = twin_flow.failing()
    assert first == second
    assert "hint: go on from a checkpoint" in first


# ---- weights that are fetched ----


@pytest.fixture
def copied(monkeypatch):
    from stepwell.deepspeed.zero.weight_lane import HostWeightLane

    monkeypatch.setattr(HostWeightLane, "copy", HostWeightLane.copy)
    fetch.copy_as_a_device_does()


def assert_same_fetches(ours, theirs):
    assert ours["losses"] == theirs["losses"]
    assert all(map(torch.equal, ours["weights"], theirs["weights"]))
    assert ours.get("most", 0) <= theirs.get("most", 0)


@pytest.mark.parametrize("zero", [None, fetch.TIGHT])
@pytest.mark.parametrize("model", fetch.MODELS)
def test_fetched(model, zero, copied):
    assert_same_fetches(*fetch.both(model, zero=zero))


@pytest.mark.parametrize("between", [fetch.evaluate, fetch.write, fetch.unhook])
def test_fetched_between(between, copied):
    if between is fetch.evaluate:
        options = {"model": fetch.Tied, "zero": fetch.TIGHT}
    else:
        options = {"model": fetch.Model}
    assert_same_fetches(*fetch.both(between=between, **options))


@pytest.mark.parametrize("is_inferred", [False, True])
def test_fetch_that_fails(is_inferred, copied):
    ours = fetch.failing("stepwell", is_inferred=is_inferred)
    assert_same_fetches(ours, fetch.failing("deepspeed"))


@pytest.mark.parametrize("look", [fetch.generate, fetch.stopped, fetch.scored, fetch.inferred])
def test_looks_of_a_language_model(look, copied):
    ours, theirs = (
        fetch.spoken(name, look, checkpoints=True, zero=fetch.TIGHT)
        for name in ("stepwell", "deepspeed")
    )
    assert_same_fetches(ours, theirs)
    assert all(map(torch.equal, ours["looks"], theirs["looks"]))


def test_waits_after_a_step():
    written, waits = fetch.waits_after_a_step()
    assert all(written)
    assert waits == []


def test_counted(copied):
    found = fetch.counted()
    assert (found["live"], found["ahead"], found["depth"]) == (0, 0, 0)


# ---- state on volumes ----


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}),
        (2, {"gradient_accumulation_steps": 2}),
        (3, {"zero": {"sub_group_size": 66_000}}),
        (3, {"zero": {"offload_param": {"device": "cpu"}}}),
    ],
)
def test_volumes(stage, options, tmp_path):
    config = configuration(stage=stage, dtype="bf16", **options)
    swapped, in_memory = nvme.both(config, tmp_path / "drive")
    test_deepspeed_nvme.assert_same_run(swapped, in_memory)
    assert min(swapped["moved"]) > 0
    assert swapped["left"] == []


def test_volumes_of_masters_alone(tmp_path):
    test_deepspeed_nvme.assert_same_run(
        *nvme.both(configuration(stage=3), tmp_path / "drive", host_bytes_max=nvme.host_bytes(8))
    )


@pytest.mark.parametrize("stage", nvme.STAGES)
def test_accesses_of_volumes(stage, tmp_path):
    config = nvme.bf16(stage)
    runs = {("accesses", stage): [nvme.accesses(nvme.on_volume(config, tmp_path))]}
    runs["accesses", stage].append(nvme.accesses(config))
    test_deepspeed_nvme.test_accessors_get_and_set_what_is_on_the_volume(runs, stage)


@pytest.mark.parametrize("stage", nvme.STAGES)
def test_looks_at_volumes(stage, tmp_path):
    runs = {("looks", stage): nvme.looks(nvme.on_volume(nvme.bf16(stage), tmp_path))}
    test_deepspeed_nvme.test_a_look_at_a_fragment_brings_its_chunks_alone(runs, stage)


@pytest.mark.parametrize("stage", nvme.STAGES)
def test_volumes_that_are_resumed(stage, tmp_path):
    result = {}
    nvme.resumed(result, tmp_path, stage)
    runs = {("resumed", stage): result}
    test_deepspeed_nvme.test_weights_and_counts_are_those_of_the_volume(runs, stage)
    test_deepspeed_nvme.test_a_volume_with_a_name_is_resumed(runs, stage)
    test_deepspeed_nvme.test_what_is_no_volume_of_the_run_is_refused(runs, stage)


@pytest.mark.parametrize("stage", nvme.STAGES)
def test_checkpoints_of_volumes(stage, tmp_path):
    result = {}
    nvme.checkpoints(result, tmp_path, stage)
    assert_same_partitions(*result["straight"])
    for way in ("volume to volume", "volume to memory", "volume to DeepSpeed", "memory to volume"):
        assert_same_partitions(result[way], result["straight"][1])


def test_drives_that_are_full(tmp_path):
    result = {}
    nvme.full_drive(result, tmp_path / "full")
    test_deepspeed_nvme.test_a_full_drive_is_named_and_harms_nothing({"full drive": result})
