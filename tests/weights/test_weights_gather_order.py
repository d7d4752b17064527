"""Ranks that have gathered other weights are told, and no others are."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from stepwell.weights.gather_order import GatherOrder


def digests(gathers):
    order = GatherOrder()
    for ids in gathers:
        order.note(ids)
    return order.end()


GATHERS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6)


def is_common(all_gathers):
    sums = [sum(numbers) for numbers in zip(*map(digests, all_gathers), strict=True)]
    return GatherOrder.is_common(sums, len(all_gathers))


@given(GATHERS, st.sampled_from([2, 3, 64, 4096]))
def test_ranks_that_gather_the_same_are_told_nothing(gathers, num_ranks):
    numbers = torch.tensor(digests(gathers), dtype=torch.float32)
    # As the ranks add up.
    sums = torch.stack([numbers] * num_ranks).sum(0)
    assert GatherOrder.is_common(sums.tolist(), num_ranks)


def test_ranks_that_gather_something_else_are_told():
    gathers = [[1, 2], [3], [4, 5]]
    others = [[[1, 2], [3]], [[1, 2], [4, 5], [3]], [[1, 2, 3], [4, 5]], [[2, 1], [3], [4, 5]], []]
    for other in others:
        assert not is_common([gathers] * 3 + [other])


def test_a_digest_begins_anew():
    order = GatherOrder()
    order.note([1])
    assert order.end() == digests([[1]])
    assert order.end() == digests([])
