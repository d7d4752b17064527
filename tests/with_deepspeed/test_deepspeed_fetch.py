"""Weights that Stepwell's hooks fetch: as with DeepSpeed's hooks, bit by bit.

And of the parts: what is copied ahead is bounded, waited for, and never used once it is stale. On
several ranks a fetch is a gather; ranks that part are told before anything is stepped.
"""

import deepspeed_run
import pytest
import torch
from deepspeed_fetch_programs import MODELS
from deepspeed_release import IS_OLDER

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run("fetch", tmp_path_factory.mktemp("fetch"), timeout=PROGRAM_TIMEOUT)


def assert_same(ours, theirs):
    assert ours["losses"] == theirs["losses"]
    assert len(set(ours["losses"])) > 1
    assert len(ours["weights"]) == len(theirs["weights"])
    assert all(map(torch.equal, ours["weights"], theirs["weights"]))


@pytest.mark.parametrize("name", [*(model.__name__ for model in MODELS), "roomy"])
def test_the_bits_are_those_of_deepspeeds_hooks(runs, name):
    ours, theirs = runs[name]
    assert_same(ours, theirs)
    assert ours["most"] <= theirs["most"]


@pytest.mark.parametrize(
    "name",
    ["persistent", "accumulated", "evaluated", "written", "unhooked", "failing"],
)
def test_what_programs_do_between_steps(runs, name):
    assert_same(*runs[name])


@pytest.mark.parametrize("name", ["generate", "inferred"])
def test_a_language_model_that_is_looked_at_in_evaluation_mode(runs, name):
    ours, theirs = runs[name]
    assert_same(ours, theirs)
    assert all(map(torch.equal, ours["looks"], theirs["looks"]))


def test_nothing_is_left_behind(runs):
    assert runs["counted"] == {
        "live": 0,
        "ahead": 0,
        "depth": 0,
        "class": "Coordinator",
        "plan": "stepwell",
        # By DeepSpeed's own import, before 0.19.8.
        "is_muon_compiled": IS_OLDER,
    }


def test_where_deepspeeds_coordinator_is_another_it_fetches_for_the_engine(runs):
    assert runs["changed"] == ["OffloadZeroOptimizerStage3", "PartitionedParameterCoordinator"]


def test_an_engine_that_is_destroyed_can_be_freed(runs):
    assert runs["destroyed"] == [(False, 0), (False, 0)]


# ---- several ranks ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fetch_ranks")
    return deepspeed_run.run("fetch_ranks", folder, timeout=PROGRAM_TIMEOUT, ranks=2)


@pytest.mark.parametrize(
    "model",
    ["AdaptedAgain", "Reaching", "Tied", "Uneven, on the device"],
)
def test_several_ranks_gather_to_the_bits_of_deepspeeds_hooks(ranks, model):
    for rank in ranks:
        ours, theirs = rank[model]
        assert_same(ours, theirs)
        assert ours["most"] <= theirs["most"]
    # Each has batches of its own.
    assert ranks[0][model][0]["losses"] != ranks[1][model][0]["losses"]


def test_weights_come_one_by_one_where_the_backend_does_not_coalesce(ranks):
    for rank in ranks:
        assert_same(*rank["one by one"])


@pytest.mark.parametrize("name", ["written", "looked at"])
def test_what_one_rank_has_or_does_alone_changes_no_gather(ranks, name):
    for rank in ranks:
        assert_same(*rank[name])


def test_ranks_that_have_parted_step_nothing_and_go_on(ranks):
    for rank in ranks:
        found = rank["parted"]
        assert "ranks have gathered other weights" in found["said"]
        assert found["is_same"]
        assert len(set(found["losses"])) == len(found["losses"])
