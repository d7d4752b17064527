"""ZeRO-3 with `offload_param`: whatever uses what a step writes in host memory waits for it.

In these programs no step begins before something waits for it.
"""

import deepspeed_run
import pytest
import torch

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)

READERS = [
    *("forward", "evaluation", "gathered", "partition", "flat", "memory", "numpy", "data"),
    *("master", "local master", "moment", "state", "state dict", "16 bits"),
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


def test_all_readers_are_named(runs):
    assert sorted(runs["late"]) == sorted(READERS)


@pytest.mark.parametrize("reader", [name for name in READERS if "persistent" not in name])
def test_what_does_not_wait_is_stale(runs, reader):
    found, was_late = runs["stale"][reader]
    expected, _ = runs["in time"][reader]
    assert was_late
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "is_late"),
    [
        *((name, True) for name in ("bf16", "sub-groups", "persistent", "all persistent")),
        *(
            (name, True)
            for name in ("large", "large, q8", "accumulated", "q8", "clipped", "fp16", "torch's")
        ),
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


def test_nothing_is_prefetched_while_a_step_runs(runs):
    assert runs["prefetch"] == [True, 50_000_000, False]


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


def test_states_go_to_host_memory_and_back(runs):
    (losses, weights), (expected_losses, expected) = runs["moved"]
    assert losses == expected_losses
    assert_all_equal(weights, expected)
    # What is there already is not moved, as DeepSpeed has it.
    ours, theirs = runs["not moved"]
    assert ours == theirs
    assert "not supported for offloaded parameters" in ours


def test_two_ranks(tmp_path):
    ranks = deepspeed_run.run("late_ranks", tmp_path, timeout=PROGRAM_TIMEOUT, ranks=2)
    for persistent in (0, 100):
        _, _, expected = ranks[0][persistent, False]
        for rank in ranks:
            was_late, losses, weights = rank[persistent, True]
            # Persistent parameters are gathered in the step.
            assert was_late == (persistent == 0)
            assert losses == rank[persistent, False][1]
            assert_all_equal(weights, expected)
