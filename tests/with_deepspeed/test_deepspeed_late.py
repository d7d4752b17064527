"""ZeRO-3 with `offload_param`, and ZeRO on two ranks: what uses what a step writes waits for it.

In these programs no step begins before something waits for it.
"""

import deepspeed_run
import pytest
import torch
from deepspeed_late_programs import ON_ONE_RANK, RANKS

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)

READERS = [
    *("forward", "evaluation", "gathered", "partition", "flat", "numpy", "data"),
    *("master", "moment", "state", "state dict", "16 bits"),
    *("persistent", "persistent data"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return deepspeed_run.run("late", tmp_path_factory.mktemp("late"), timeout=PROGRAM_TIMEOUT)


def assert_all_equal(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_waits(runs, reader):
    found, was_late = runs["late"][reader]
    expected, _ = runs["in time"][reader]
    assert was_late
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "is_late"),
    [
        *((name, True) for name in ("sub-groups", "persistent", "all persistent", "accumulated")),
        *((name, False) for name in ("fp32", "gate of the step", "breakdown")),
    ],
)
def test_a_step_returns_before_it_ends(runs, name, is_late):
    was_late, losses, weights = runs["gates"][name, True]
    _, expected_losses, expected = runs["gates"][name, False]
    assert was_late == is_late
    assert losses == expected_losses
    assert_all_equal(weights, expected)


def test_a_forward_waits_for_what_it_gathers(runs):
    fragments = runs["fragments"]
    expected = []
    for module, waits in runs["waits"]:
        for parameter in ("weight", "bias"):
            group, begin, numel = fragments[f"{module}.{parameter}"]
            expected.append(("wait", group, begin, begin + numel))
        assert sorted(waits) == sorted(expected)
    assert len(runs["waits"]) == 2


def test_what_a_program_writes_comes_after_the_step(runs):
    losses, found = runs["written", True]
    expected_losses, expected = runs["written", False]
    assert losses == expected_losses
    assert_all_equal(found, expected)
    assert torch.equal(found[0], torch.full_like(found[0], 2.0))


def test_a_step_waits_for_what_can_be_reached_otherwise(runs):
    was_late, kept, weight = runs["exposed"]
    assert not was_late
    assert torch.equal(kept, weight)
    assert runs["exposed no more"]


def test_a_step_that_has_not_begun_leaves_persistent_weights(runs):
    assert torch.equal(*runs["not begun"])
    assert not torch.equal(*runs["begun"])


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_zero_2_on_one_rank_waits(runs, name):
    (was_late, found), (_, expected) = runs["on one rank"][name]
    assert was_late == (not name.startswith("kept"))
    assert found.any()
    assert torch.equal(found, expected)


def test_states_go_to_host_memory_and_back(runs):
    (losses, weights), (expected_losses, expected) = runs["moved"]
    assert losses == expected_losses
    assert_all_equal(weights, expected)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return deepspeed_run.run("late_ranks", folder, timeout=PROGRAM_TIMEOUT, ranks=2)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_wait_where_they_use_something(ranks, name):
    for rank in ranks:
        losses, found, weights = rank[name, "module"]
        expected_losses, expected_found, expected = rank[name, "step"]
        assert losses == expected_losses
        assert_all_equal(weights, expected)
        assert all(found[at] for at in range(len(found)) if isinstance(found[at], bool))
        assert_all_equal(tensors(found), tensors(expected_found))


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3"])
def test_a_rank_that_leaves_a_step_is_named_to_the_others(ranks, name):
    first, second = (rank["left"][name] for rank in ranks)
    for losses in first, second:
        assert losses[1:3] == ["LeftError: no memory"] * 2
        assert all(isinstance(loss, float) for loss in (losses[0], losses[3]))
    assert second[4:] == ["LeftError: no memory"]
    assert first[5].startswith("OSError: the step has failed on rank 1 (`LeftError: no memory`)")


def test_ranks_of_which_one_has_left_a_step_all_refuse_the_next(ranks):
    first, second = (rank["left alone"] for rank in ranks)
    for found in first, second:
        assert found[1] == "LeftError: no memory"
        assert all(isinstance(loss, float) for loss in (found[0], found[2]))
        for said in found[4:]:
            assert said.startswith("OSError: rank 1 has left a step by an error, and others")
    assert second[3] == "LeftError: no memory"
    assert isinstance(first[3], float)


def test_ranks_that_gather_in_the_step_do_not_wait_for_one_that_has_failed(ranks):
    first, second = (rank["left, gate of the step"] for rank in ranks)
    for found in first, second:
        assert found[1] == "LeftError: no memory"
        assert all(isinstance(loss, float) for loss in (found[0], found[2]))
    assert second[3] == "LeftError: no memory"
    for said in first[3:]:
        assert said.startswith("OSError: the step has failed on rank 1 (`LeftError: no memory`)")
    for said in second[4:]:
        assert said.startswith("OSError: this rank has left a step (`LeftError: no memory`)")
    assert len(first) == len(second) == 6


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3", "ZenFlow"])
def test_a_rank_that_cannot_step_ends_the_step_of_the_others_and_they_go_on(ranks, name):
    for rank, result in enumerate(ranks):
        found, (expected, *runs) = result["refused"][name]
        others = f"OSError: rank {1 - rank} cannot take this step, so none"
        assert found[0].startswith(others if rank == 0 else "ValueError: refused")
        assert found[1].startswith(others if rank == 1 else "ValueError: refused")
        assert found[2:] == ["ValueError: refused"]
        if name == "ZenFlow":
            # What was deferred is applied then, and the step after that is exact.
            expected = runs[0]
        for run in runs:
            assert_all_equal(run, expected)


def tensors(found):
    return [each for each in found if isinstance(each, torch.Tensor)]
