"""ZeRO with its optimizer state on a volume: the bits of runs with the state in host memory."""

import deepspeed_run
import pytest
import torch
from deepspeed_asserts import assert_same_partitions, assert_same_values
from deepspeed_nvme_programs import STAGES

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvme")
    return deepspeed_run.run("nvme", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder / "drive"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvme_ranks")
    return deepspeed_run.run(
        "nvme_ranks", folder, timeout=PROGRAM_TIMEOUT, ranks=2, folder=str(folder / "drive")
    )


def assert_same_run(swapped, in_memory):
    assert (swapped["tier"], in_memory["tier"]) == ("volume", "ram")
    for key in ("class", "base", "losses", "norms", "skipped", "warning"):
        assert swapped[key] == in_memory[key], key
    assert swapped["warning"] is None
    assert_same_partitions(swapped["partitions"], in_memory["partitions"])


@pytest.mark.parametrize(
    "name",
    [
        "stage 1",
        "stage 2",
        "stage 3",
        "none",
        "fp16",
        "sub-groups",
        "offload_param",
        "accumulated",
        "sums in fp32",
        "fp32",
        "q8",
    ],
)
def test_the_volume_has_the_bits_of_host_memory(runs, name):
    swapped, in_memory = runs["paths"][name]
    assert_same_run(swapped, in_memory)
    bytes_read, bytes_written = swapped["moved"]
    # Coded moments are few enough for the memory that buffers leave.
    assert bytes_written > 0
    assert bytes_read > 0 or name == "q8"
    assert swapped["left"] == []


@pytest.mark.parametrize("name", ["stage 1", "stage 2", "stage 3", "accumulated", "offload_param"])
def test_weights_that_a_step_alone_copies_are_not_pinned_beside_a_volume(runs, name):
    # Gradients come down, and with `offload_param` forwards fetch weights: 16 bits each.
    beside_volume = 4 if name == "offload_param" else 2
    assert [run["pinned"] for run in runs["paths"][name]] == [beside_volume, 4]


@pytest.mark.parametrize("stage", STAGES)
def test_accessors_get_and_set_what_is_on_the_volume(runs, stage):
    swapped, in_memory = runs["accesses", stage]
    assert swapped["losses"] == in_memory["losses"]
    assert_same_values(swapped["got"], in_memory["got"])
    assert_same_partitions(swapped["partitions"], in_memory["partitions"])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "way", ["volume to volume", "volume to memory", "volume to DeepSpeed", "memory to volume"]
)
def test_a_checkpoint_goes_on_with_the_same_bits(runs, stage, way):
    found = runs["checkpoints", stage]
    assert_same_partitions(found["saved", "volume"], found["saved", "memory"])
    assert_same_partitions(*found["straight"])
    assert_same_partitions(found[way], found["straight"][1])


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_script_reads_a_checkpoint(runs, stage):
    swapped, in_memory = runs["consolidated", stage]
    assert swapped.keys() == in_memory.keys()
    assert_same_values(list(swapped.values()), list(in_memory.values()))


@pytest.mark.parametrize("stage", STAGES)
def test_a_universal_checkpoint_is_made_of_a_volume_and_loaded_into_one(runs, stage):
    found, run = runs["universal", stage], runs["checkpoints", stage]
    assert_same_partitions(found["loaded"], run["saved", "volume"])
    assert_same_partitions(found["partitions"], run["straight"][0])
    assert found["read"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_volume_with_a_name_is_resumed(runs, stage):
    found = runs["resumed", stage]
    assert found["left"] == ["run.0.stepwell"]
    assert_same_partitions(found["resumed"], found["straight"])


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_counts_are_those_of_the_volume(runs, stage):
    found = runs["resumed", stage]
    assert found["begins as it ended"] == [True] * 4
    assert found["committed"] == [0, 2, 2]
    # Without a volume, and with one that commits nothing.
    assert found["committed elsewhere"] == [None, None]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_no_volume_of_the_run_is_refused(runs, stage):
    found = runs["resumed", stage]
    kind, text = found["in use"]
    assert kind == "OSError"
    assert "one job at a time uses a volume" in text
    kind, text = found["another model"]
    assert kind == "ValueError"
    assert "the state of other parameters" in text


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_whose_volume_is_not_there_begins(runs, stage):
    assert runs["resumed", stage]["not there"] == 0


def test_a_killed_run_goes_on_from_its_last_commit(runs):
    found = runs["killed"]
    assert found["done"] in (2, 3)
    assert_same_partitions(found["resumed"], found["straight"]["partitions"])


def test_keys_of_deepspeeds_swapper_are_named(runs):
    for key in ("offload_optimizer.buffer_count", "offload_optimizer.pipeline_read", "aio"):
        assert f"`{key}`" in runs["ignored keys"]


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_share_the_drives(ranks, stage):
    for rank, found in enumerate(ranks):
        assert found[stage]["name"] == f"run-{rank}.0.stepwell"
        swapped, in_memory = found[stage]["both"]
        assert_same_run(swapped, in_memory)
        assert_same_partitions(found[stage]["resumed"], in_memory["partitions"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_ranks_goes_on_with_the_same_bits(ranks, stage):
    for found in (each["saved", stage] for each in ranks):
        straight, in_memory = found["straight"], found["in memory"]
        assert straight["losses"] == in_memory["losses"][2:]
        assert_same_partitions(straight["partitions"], in_memory["partitions"])
        assert_same_partitions(found["loaded"], found["saved"])
        assert {state["step"] for _, state in found["loaded"]} == {2}
        for way in ("anew", "again"):
            resumed = found["resumed", way]
            assert resumed["losses"] == straight["losses"]
            assert_same_partitions(resumed["partitions"], straight["partitions"])
            assert resumed["read"] == straight["read"] > 0


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_are_ahead_go_back(ranks, stage, behind):
    for found in ranks:
        done, gone_on = found[stage]["gone back", behind]
        assert done == 2
        assert_same_partitions(gone_on, found[stage]["resumed"])


@pytest.mark.parametrize("stage", STAGES)
def test_no_rank_begins_a_step_before_all_have_committed_the_last(ranks, stage):
    for found in ranks:
        assert len(found[stage]["waits"]) == 2
        assert set(found[stage]["waits"]) <= {"finish", "synchronize"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_drive_that_fails_on_one_rank_stops_all(ranks, stage):
    for rank, found in enumerate(ranks):
        for kind, text in found[stage]["fails"]:
            assert kind == "OSError"
            assert "member `0`" in text if rank == 1 else "rank" in text


def test_ranks_have_state_of_their_own(ranks):
    flats = [found[2]["both"][0]["partitions"][0][0] for found in ranks]
    assert not torch.equal(*flats)
