"""Pinned host memory that is taken piece by piece."""

import random

import torch
from stepwell.weights.arenas import Arenas


def arenas():
    return Arenas(torch.device("cpu"), "tests", "none")


def test_pieces_of_one_size_fill_arenas():
    found = arenas()
    pieces = [found.take(100 << 10) for _ in range(8)]
    assert found.nbytes == 8 * (100 << 10)
    for piece in pieces:
        piece.give_back()
    # What was given back is one again.
    for _ in range(8):
        found.take(100 << 10)
    assert found.nbytes == 8 * (100 << 10)


def test_pieces_that_are_in_use_never_overlap():
    found, drawn, used = arenas(), random.Random(0), []
    for nth in range(2000):
        if used and drawn.random() < 0.5:
            value, piece = used.pop(drawn.randrange(len(used)))
            assert bool((piece.memory == value).all())
            piece.give_back()
        else:
            piece = found.take(drawn.randrange(1, 5000))
            piece.memory.fill_(nth % 251)
            used.append((nth % 251, piece))
    for _, piece in used:
        piece.give_back()
    # Neighbours have joined: the largest arena is one piece.
    before = found.nbytes
    found.take(before // 4)
    assert found.nbytes == before
