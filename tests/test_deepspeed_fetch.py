"""Offloaded weights that Stepwell's hooks fetch on one rank: as with DeepSpeed's hooks, bit by bit.

And of the parts: what is copied ahead is bounded, waited for, and never used once it is stale.
"""

import deepspeed_run
import pytest
import torch

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)

MODELS = (
    "Model",
    "Tied",
    "Twice",
    "Checkpointed",
    "Reentrant",
    "Adapted",
    "AdaptedAgain",
    "Reaching",
    "InPlace",
    "Named",
    "Paired",
    "Wandering",
    "Leafy",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run("fetch", tmp_path_factory.mktemp("fetch"), timeout=PROGRAM_TIMEOUT)


def assert_same(ours, theirs):
    assert ours["losses"] == theirs["losses"]
    assert len(set(ours["losses"])) > 1
    assert len(ours["weights"]) == len(theirs["weights"])
    assert all(map(torch.equal, ours["weights"], theirs["weights"]))


@pytest.mark.parametrize("settings", ["", ", tight"])
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_of_deepspeeds_hooks(runs, model, settings):
    ours, theirs = runs[model + settings]
    assert_same(ours, theirs)
    assert ours["most"] <= theirs["most"]


@pytest.mark.parametrize(
    "name",
    [
        *("persistent", "accumulated", "evaluated", "written", "unhooked"),
        *("failing", "failing, inferred"),
    ],
)
def test_what_programs_do_between_steps(runs, name):
    assert_same(*runs[name])


@pytest.mark.parametrize(
    "name",
    ["generate", "generate, tight", "stopped, tight", "scored, tight", "inferred, tight"],
)
def test_a_language_model_that_is_looked_at_in_evaluation_mode(runs, name):
    ours, theirs = runs[name]
    assert_same(ours, theirs)
    assert all(map(torch.equal, ours["looks"], theirs["looks"]))


def test_behind_the_end_of_a_step_no_weight_waits_for_its_part_of_it(runs):
    written, waits = runs["waits"]
    assert all(written)
    assert waits == []


def test_nothing_is_left_behind(runs):
    assert runs["counted"] == {
        "live": 0,
        "ahead": 0,
        "depth": 0,
        "class": "Fetcher",
        "plan": "stepwell",
        "is_muon_compiled": False,
    }
