"""How weights of several ranks are cut into the pieces that are gathered behind a step."""

from types import SimpleNamespace

import torch
from stepwell.deepspeed.zero import gathers
from stepwell.deepspeed.zero.gathers import GatheredPersistents, GatheredWeights
from stepwell.deepspeed.zero.partition import Fragment
from stepwell.deepspeed.zero.persistent import Upload


class Gathered:
    """Of partitions: what they gather with."""

    engine = None

    def gather(self, peers):
        return self

    def submission(self, pieces, places):
        return pieces, places


def peers_of(world_size, rank):
    return SimpleNamespace(world_size=world_size, rank=rank)


def values(tensors):
    """The elements of float32 tensors whose bytes these are."""
    return [each.view(torch.float32).tolist() for each in tensors]


def test_persistent_weights_are_pieces_of_their_own():
    found = GatheredPersistents(Gathered(), peers_of(2, 1))
    uploads = {
        torch.zeros(1): Upload(Fragment(4, 6, 2), torch.ones(2), torch.arange(4.0)),
        torch.zeros(1): Upload(Fragment(5, 0, 1), torch.full((1,), 9.0), torch.arange(2.0)),
    }
    pieces, places = found.submission(uploads)
    assert [piece[:3] for piece in pieces] == [(4, 6, 8), (5, 0, 1)]
    assert [values(piece.parts) for piece in pieces] == [[[0, 1], [2, 3]], [[0], [1]]]
    assert values(piece.whole for piece in pieces) == [[0, 1, 2, 3], [0, 1]]
    assert values(piece.source for piece in pieces) == [[1, 1], [9]]
    assert places == {id(param): nth for nth, param in enumerate(uploads)}


def test_groups_are_gathered_in_buckets_of_all_ranks(monkeypatch):
    monkeypatch.setattr(gathers, "_BUCKET_LEN", 3)
    flats = [torch.arange(9.0), torch.arange(13.0)]
    # The last part of a group may be shorter. Parameters lie over the borders of parts, or nowhere.
    weights = [[flats[0][:5], flats[0][5:]], [flats[1][:7], flats[1][7:]]]
    groups = [
        [flats[0][:3], flats[0][3:5], flats[0][5:8], flats[0][8:], flats[0][:0]],
        [flats[1][:1], flats[1][1:9], flats[1][9:]],
    ]
    for rank, ends in ((0, [3, 6, 7, 3, 5]), (1, [3, 6, 6, 3, 4])):
        found = GatheredWeights(Gathered(), peers_of(2, rank), groups)
        pieces, places = found.submission([1, 0], weights)
        assert [(piece.place, piece.begin) for piece in pieces] == [
            *((1, begin) for begin in (0, 3, 6)),
            *((0, begin) for begin in (0, 3)),
        ]
        assert [piece.end for piece in pieces] == ends
        assert [values(piece.parts) for piece in pieces] == [
            [[0, 1, 2], [7, 8, 9]],
            [[3, 4, 5], [10, 11, 12]],
            [[6], []],
            [[0, 1, 2], [5, 6, 7]],
            [[3, 4], [8]],
        ]
        assert all(piece.whole is piece.source is None for piece in pieces)
        assert [[places.get(id(param)) for param in group] for group in groups] == [
            [3, 4, 3, 4, None],
            [0, 2, 1],
        ]
