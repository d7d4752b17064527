"""Pieces of gradients that lie side by side: `stepwell.deepspeed.zero.adjacent`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepwell.deepspeed.zero.adjacent import clones, runs
from stepwell.deepspeed.zero.fragment import Fragment


def cut(memory, sizes, gap=0):
    """Flat pieces of `memory`, one behind the other, `gap` elements apart."""
    begins = [sum(sizes[:nth]) + nth * gap for nth in range(len(sizes))]
    return [memory.narrow(0, begin, size) for begin, size in zip(begins, sizes, strict=True)]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    gap=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_clones_are_equal_and_share_nothing_with_what_they_are_of(sizes, gap, order):
    memory = torch.randn(sum(sizes) + gap * len(sizes))
    pieces = cut(memory, sizes, gap)
    order.shuffle(pieces)
    expected = [piece.clone() for piece in pieces]
    found = clones(pieces)
    memory.fill_(float("nan"))
    assert all(map(torch.equal, found, expected))


def test_pieces_side_by_side_are_cloned_at_once():
    first, second = clones(cut(torch.arange(10.0), [4, 6]))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 40


@pytest.mark.parametrize(
    "pieces",
    [
        # Of every second rank's part, say: the memory between them is not copied.
        pytest.param(cut(torch.arange(40.0), [8, 8], gap=8), id="gaps"),
        pytest.param([torch.arange(4.0), torch.arange(4.0)], id="two memories"),
    ],
)
def test_pieces_that_are_apart_take_no_memory_but_their_own(pieces):
    assert [each.untyped_storage().nbytes() for each in clones(pieces)] == [
        piece.nbytes for piece in pieces
    ]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    data=st.data(),
)
def test_runs_are_all_pieces_in_as_few_copies_as_can_be(sizes, order, data):
    """Here and in the partition, pieces lie one behind the other, but where one has a gap."""
    here, there, pieces, fragments, joins = 0, 0, [], [], []
    memory, group = torch.arange(200.0), 0
    for size in sizes:
        gap = data.draw(st.sampled_from(["none", "here", "there", "group"]))
        here += gap == "here"
        there = 0 if gap == "group" else there + (gap == "there")
        group += gap == "group"
        pieces.append(memory[here : here + size])
        fragments.append(Fragment(group, there, size))
        joins.append(gap == "none")
        here, there = here + size, there + size
    found = list(runs(pieces, fragments))
    assert [each for _, own in found for each in own] == fragments
    assert torch.equal(torch.cat([piece for piece, _ in found]), torch.cat(pieces))
    assert len(found) == 1 + sum(not join for join in joins[1:])
    # Whatever the order, each piece goes with its own fragments.
    both = list(zip(pieces, fragments, strict=True))
    order.shuffle(both)
    expected = {fragment: piece for piece, fragment in both}
    for piece, own in runs([piece for piece, _ in both], [fragment for _, fragment in both]):
        assert torch.equal(piece, torch.cat([expected[fragment] for fragment in own]))
