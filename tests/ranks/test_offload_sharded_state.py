"""State of ranks as `Rows`, and as a whole: how it is cut, loaded and gathered, without processes.

The ranks are threads. `test_offload_sharded.py` has processes that train.
"""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from stepwell import _core, _state
from stepwell.ranks.sharded_state import Rows, of_rank, own, whole
from stepwell.ranks.shares import Shares
from torch.distributed.checkpoint.metadata import MetadataIndex

NUM_RANKS = 3
SECONDS_MAX = 60
LONG = 2 * _core.CHUNK_LEN + 5
# A scalar, none, fewer chunks than ranks, rows of several elements, an uneven number of chunks.
SHAPES = [(), (0,), (4, 0), (5,), (LONG // 96 + 1, 4, 24), (LONG + _core.CHUNK_LEN,)]


class ThreadPeers:
    """What `Peers` has of ranks that are threads."""

    def __init__(self, rank, barrier, table):
        self.rank, self._barrier, self._table = rank, barrier, table

    def objects(self, mine):
        self._table[self.rank] = mine
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def broadcast(self, memory, owner):
        assert memory.is_contiguous()
        given = self.objects(memory)[owner]
        memory.copy_(given)
        self._barrier.wait()


def on_ranks(function):
    """What `function` returns, of each rank's `Sharding`; raises what it raised on any."""
    barrier = threading.Barrier(NUM_RANKS, timeout=SECONDS_MAX)
    table = [None] * NUM_RANKS

    def run(rank):
        shares = Shares(rank, NUM_RANKS)
        shares.add(PARAMS)
        peers = ThreadPeers(rank, barrier, table)
        try:
            return function(SimpleNamespace(shares=shares, peers=peers), rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(run, range(NUM_RANKS)))


PARAMS = [torch.empty(shape) for shape in SHAPES]


def state_of(index):
    """The whole state of a parameter: tensors per element and per chunk, and a count."""
    param = PARAMS[index]
    generator = torch.Generator().manual_seed(index)
    parts = [
        part
        for codec in _core.moments_codecs()
        for part in (*_core.moments_parts(codec), *_core.master_parts("bfloat16"))
    ]
    state = {"step": torch.tensor(7.0), "note": "a note"}
    for part in parts:
        length = _state.part_length(part.name)
        shape = (length(param.numel()),) if length else param.shape
        state[part.name] = torch.randint(0, 100, shape, generator=generator).to(
            getattr(torch, part.dtype)
        )
    return state


STATES = [state_of(index) for index in range(len(SHAPES))]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert type(ours[name]) is torch.Tensor
            assert ours[name].shape == value.shape, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value


def pieces_of(sharding, index):
    return own(sharding, PARAMS[index], STATES[index], "it")


@pytest.mark.parametrize("to", [None, 0, 1, NUM_RANKS - 1])
def test_the_whole_is_what_ranks_have_taken_of_it(to):
    def there_and_back(sharding, _):
        states = {index: pieces_of(sharding, index) for index in range(len(SHAPES))}
        return whole(sharding, PARAMS, states, to)

    for rank, found in enumerate(on_ranks(there_and_back)):
        if to not in (None, rank):
            assert found is None
            continue
        assert list(found) == list(range(len(SHAPES)))
        for index, state in found.items():
            assert_same(state, STATES[index])
            assert state["step"] is not STATES[index]["step"]


def test_a_piece_is_the_elements_of_its_rank_in_their_memory():
    def pieces(sharding, _):
        return [(sharding.shares.elements(PARAMS[at]), pieces_of(sharding, at)) for at in range(6)]

    for found in on_ranks(pieces):
        for index, ((begin, end), piece) in enumerate(found):
            moment = STATES[index]["exp_avg"]
            assert torch.equal(piece["exp_avg"].flatten(), moment.flatten()[begin:end])
            if end > begin:
                of_whole = moment.data_ptr() + begin * moment.itemsize
                assert piece["exp_avg"].data_ptr() == of_whole
            assert piece["exp_avg"].shape[1:] == moment.shape[1:]
            assert piece["step"] is STATES[index]["step"]


def test_rows_are_loaded_where_they_are_from_and_nowhere_else():
    def rows_of(sharding, _):
        return [of_rank(sharding, PARAMS[at], pieces_of(sharding, at)) for at in range(len(SHAPES))]

    rows = on_ranks(rows_of)

    def load(sharding, rank):
        for index, param in enumerate(PARAMS):
            assert_same(own(sharding, param, rows[rank][index], "it"), pieces_of(sharding, index))
        # Of the last each rank has one chunk, but the first also what is left over.
        (_, longest), (_, one), (_, other) = ((each, rows[each][-1]) for each in range(NUM_RANKS))
        return longest, one, other

    longest, one, other = on_ranks(load)[0]
    assert len({each["exp_avg"].begin for each in (longest, one, other)}) == NUM_RANKS

    def refuse(sharding, rank):
        for each in range(NUM_RANKS):
            if each != rank:
                with pytest.raises(ValueError, match=r"`exp_avg`.*of it has the rows(.|\n)*hint"):
                    own(sharding, PARAMS[-1], {"exp_avg": rows[each][-1]["exp_avg"]}, "it")
        mine = rows[rank][-1]["exp_avg"]
        cut = Rows.of(mine.plain[:-1], mine.begin, mine.whole_shape)
        moved = Rows.of(mine.plain, mine.begin + 1, mine.whole_shape)
        longer = Rows.of(mine.plain, mine.begin, [mine.whole_shape[0] + 1])
        for wrong in (cut, moved, longer):
            with pytest.raises(ValueError, match="expected those of this rank"):
                own(sharding, PARAMS[-1], {"exp_avg": wrong}, "it")

    on_ranks(refuse)


def test_what_is_no_piece_of_the_state_is_taken_as_it_is():
    def take(sharding, _):
        other = torch.ones(3)
        loaded = {"exp_avg": other, "exp_avg_sq": None, "step": 3, "another": other}
        return own(sharding, PARAMS[-1], loaded, "it"), loaded

    # What has another shape, or is no tensor, is for the checks of what loads it.
    for taken, loaded in on_ranks(take):
        assert taken == loaded


def test_ranks_with_other_state_are_told():
    def differ(sharding, rank):
        states = {3: pieces_of(sharding, 3)}
        if rank == 1:
            del states[3]["exp_avg"]
        with pytest.raises(ValueError, match=r"different parameters(.|\n)*hint"):
            whole(sharding, PARAMS, states, None)

    on_ranks(differ)


def test_state_that_was_not_dealt_out_is_of_every_rank():
    """As of a frozen parameter, which the program has given it."""
    param = torch.empty(LONG, requires_grad=False)
    given = {"step": torch.tensor(2.0), "exp_avg": torch.arange(float(LONG))}

    def all_of_it(sharding, _):
        assert_same(of_rank(sharding, param, given), given)
        return whole(sharding, [param], {0: given}, None)

    for found in on_ranks(all_of_it):
        assert_same(found[0], given)
        assert found[0]["exp_avg"] is not given["exp_avg"]


# ---- what torch.distributed.checkpoint asks ----


def test_rows_describe_the_whole_and_are_plain_in_use():
    memory = torch.arange(6.0).view(2, 3)
    rows = Rows.of(memory, 4, [9, 3])
    assert (rows.size(), rows.size(0), rows.size(1)) == ((9, 3), 9, 3)
    assert rows.shape == (2, 3)
    assert type(rows + 1) is torch.Tensor
    assert type(rows.plain) is torch.Tensor
    assert rows.plain.data_ptr() == memory.data_ptr()
    shard = rows.__get_tensor_shard__(MetadataIndex("it"))
    assert (type(shard), shard.data_ptr()) == (torch.Tensor, memory.data_ptr())
    (chunk,) = rows.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == ((4, 0), (2, 3))
    (item,) = rows.__create_write_items__("it", None)
    assert item.index == MetadataIndex("it", torch.Size((4, 0)))
    assert (item.tensor_data.chunk, item.tensor_data.size) == (chunk, (9, 3))
    assert item.tensor_data.properties.dtype == torch.float32


def test_a_rank_without_rows_saves_nothing_and_loads_nothing():
    rows = Rows.of(torch.empty(0, 3), 0, [9, 3])
    assert rows.__create_write_items__("it", None) == []
    assert rows.__create_chunk_list__() == []
    # Of a tensor that has no element all save that.
    (item,) = Rows.of(torch.empty(0, 3), 0, [0, 3]).__create_write_items__("it", None)
    assert item.tensor_data.size == (0, 3)


def test_a_copy_of_rows_is_its_own_memory_and_no_pickle():
    rows = Rows.of(torch.arange(6.0).view(2, 3), 4, [9, 3])
    copied, again = copy.deepcopy([rows, rows])
    assert copied is again
    assert type(copied) is Rows
    assert (copied.begin, copied.whole_shape) == (4, [9, 3])
    assert copied.data_ptr() != rows.data_ptr()
    assert torch.equal(copied.plain, rows.plain)
    with pytest.raises(TypeError, match=r"is not pickled(.|\n)*hint"):
        pickle.dumps(rows)
