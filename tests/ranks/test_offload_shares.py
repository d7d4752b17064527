"""Which rows each rank steps: whole chunks, all of them once, about as many on each rank."""

import math

import pytest
import torch
from stepwell import _core
from stepwell.ranks.shares import Shares

CHUNK = _core.CHUNK_LEN
SHAPES = [(3 * CHUNK + 5,), (), (0, 4), (7, CHUNK // 2), (5 * CHUNK // 96 + 1, 4, 24), (9,), (0,)]


def shares_of(world_size, params):
    found = [Shares(rank, world_size) for rank in range(world_size)]
    for shares in found:
        shares.add(params)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_element_is_one_ranks_and_every_chunk_too(world_size):
    params = [torch.arange(float(math.prod(shape))).view(shape) for shape in SHAPES]
    found = shares_of(world_size, params)
    loads = [0] * world_size
    for param in params:
        end = 0
        for rank, shares in enumerate(found):
            begin, behind = shares.elements(param)
            # All ranks know the cuts of all.
            assert all(each.elements(param, rank) == (begin, behind) for each in found)
            assert begin == end
            assert begin % CHUNK == 0 or begin == param.numel()
            piece = shares.piece(param, param)
            assert torch.equal(piece.flatten(), param.flatten()[begin:behind])
            assert piece.dim() == max(param.dim(), 1)
            loads[rank] += behind - begin
            end = behind
        assert end == param.numel()
    # Rows of a unit are of one rank.
    unit = max(math.lcm(CHUNK, math.prod(shape[1:])) for shape in SHAPES if math.prod(shape))
    assert max(loads) - min(loads) <= unit


def test_what_is_left_over_is_the_rank_that_has_least():
    params = [torch.empty(shape) for shape in ((2 * CHUNK,), (CHUNK,), (9,), (CHUNK,), (CHUNK,))]
    shares = shares_of(2, params)[0]
    # Two of one rank, one each; what comes next is the first rank's, the second's, ...
    owners = [[shares.elements(param, rank)[0] == 0 for rank in range(2)] for param in params]
    assert [shares.elements(param, 0)[1] for param in params] == [CHUNK, CHUNK, 0, 0, CHUNK]
    assert owners[0] == [True, False]


def test_a_parameter_that_goes_leaves_its_load():
    params = [torch.empty(CHUNK), torch.empty(3), torch.empty(CHUNK, 3)]
    (shares, _) = shares_of(2, params[:1])
    assert shares.elements(params[0], 0) == (0, CHUNK)
    shares.add(params[1:])
    assert shares.elements(params[1], 0) == (0, 0)
    assert params[1] in shares
    shares.remove(params)
    assert params[1] not in shares
    # One that has none is none's.
    shares.remove(params)
    for each in (params[:1], params[1:2]):
        shares.add(each)
    assert shares.elements(params[0], 0) == (0, CHUNK)
    assert shares.elements(params[1], 0) == (0, 0)


def test_a_digest_tells_cuts_dtypes_and_order():
    params = [torch.empty(CHUNK), torch.empty(2, CHUNK), torch.empty(2, CHUNK)]
    one, other = shares_of(2, params)
    digest = one.digest(params)
    assert 0 <= digest < 2**62
    # All of its bits.
    assert max(one.digest(params[:n] * n) for n in range(1, 30)) >= 2**61
    assert other.digest(params) == digest
    assert one.digest([params[0], params[2], params[1]]) == digest
    coded = [param.to(torch.bfloat16) for param in params]
    for others in (coded, [torch.empty(CHUNK), *[torch.empty(CHUNK, 2)] * 2]):
        assert shares_of(2, others)[0].digest(others) != digest
    assert shares_of(3, params)[0].digest(params) != digest
    assert one.digest(params[:2]) != digest
    assert one.digest(params[::-1]) != digest
