"""Volumes of several ranks, made and gone on from together. The ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from stepwell import _core
from stepwell.offload.ranks import Call, Ranks
from stepwell.offload.sharded_volume import agree_on_counts, fetch_rows, open_together
from stepwell.offload.shares import Shares

# Of the default group.
RANKS = [4, 7, 9]
SECONDS_MAX = 60


class ThreadRanks(Ranks):
    def __init__(self, rank, barrier, table):
        super().__init__(RANKS)
        self.rank, self._barrier, self._table = rank, barrier, table

    def objects(self, mine, call=Call.OBJECTS):
        self._table[self.rank] = mine, call
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        assert {call for _, call in found} == {call}
        return [each for each, _ in found]

    def broadcast(self, memory, owner, call=Call.BROADCAST):
        memory.view(-1).copy_(self.objects(memory, call)[owner].view(-1))
        self.objects(None, call)


def on_ranks(function, *of_each):
    """What `function` returns or raises, with each rank and what it is given."""
    barrier = threading.Barrier(len(RANKS), timeout=SECONDS_MAX)
    table = [None] * len(RANKS)

    def run(rank, *arguments):
        try:
            return function(ThreadRanks(rank, barrier, table), *arguments)
        except (ValueError, OSError) as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(run, range(len(RANKS)), *of_each))


class Swap:
    """A volume at a step; None: it is new."""

    def __init__(self, step):
        self.step, self.counts, self.name = step, None if step is None else [step], "volume"
        self.closed = []

    def close(self, keep):
        self.closed.append(keep)


class Maker:
    """Makes the volume of a rank, or fails: at a step, None being its last one."""

    def __init__(self, step, fails_at=()):
        self.step, self.fails_at = step, fails_at
        self.made = []

    def __call__(self, step):
        if step in self.fails_at:
            raise OSError(f"the drive is full at {step}")
        self.made.append(Swap(self.step if step is None else step))
        return self.made[-1]


def closed(makers):
    return [[swap.closed for swap in maker.made] for maker in makers]


@pytest.mark.parametrize("step", [None, 0, 5])
def test_volumes_at_one_step_are_gone_on_from(step):
    makers = [Maker(step) for _ in RANKS]
    assert on_ranks(open_together, makers) == [maker.made[0] for maker in makers]
    assert closed(makers) == [[[]]] * 3


def test_ranks_may_need_no_volume():
    assert on_ranks(open_together, [lambda _: None] * 3) == [None] * 3
    # Those without one are at no step, as new ones are.
    makers = [Maker(None), lambda _: None, Maker(None)]
    assert on_ranks(open_together, makers) == [makers[0].made[0], None, makers[2].made[0]]


def test_volumes_that_are_one_step_ahead_go_back(caplog):
    makers = [Maker(5), Maker(4), Maker(5)]
    with caplog.at_level("WARNING", logger="stepwell"):
        found = on_ranks(open_together, makers)
    assert [swap.step for swap in found] == [4, 4, 4]
    assert [found[rank] is maker.made[-1] for rank, maker in enumerate(makers)] == [True] * 3
    assert closed(makers) == [[[True], []], [[]], [[True], []]]
    assert caplog.text.count("goes back from step 5 to 4") == 2


@pytest.mark.parametrize("steps", [(5, 3, 5), (5, 5, None), (None, 0, 0)])
def test_volumes_that_are_not_of_one_run_are_refused(steps):
    makers = [Maker(step) for step in steps]
    for error in on_ranks(open_together, makers):
        assert isinstance(error, ValueError)
        assert "not of one run" in str(error)
    # What was made now goes; what was resumed stays.
    assert closed(makers) == [[[step is not None]] for step in steps]


@pytest.mark.parametrize(("steps", "fails_at"), [((5, 5, 5), None), ((4, 5, 5), 4)])
def test_where_one_fails_all_do(steps, fails_at):
    makers = [Maker(step) for step in steps]
    makers[1].fails_at = [fails_at]
    errors = on_ranks(open_together, makers)
    assert [type(error) for error in errors] == [OSError] * 3
    why = f"the drive is full at {fails_at}"
    assert [str(error) for error in errors] == [
        f"on rank 7: OSError: {why}",
        why,
        f"on rank 7: OSError: {why}",
    ]
    assert all(made.closed[-1:] == [True] for maker in makers for made in maker.made)


def test_counts_are_those_of_the_ranks_that_have_rows():
    counts = [[3, None, None, 0], [3, 2, None, None], [None, 2, None, 0]]
    assert on_ranks(agree_on_counts, counts, [None] * 3) == [[3, 2, 0, 0]] * 3
    counts[1][0] = 2
    for error in on_ranks(agree_on_counts, counts, [None] * 3):
        assert isinstance(error, ValueError)
        assert "`[2, 3]` updates" in str(error)
    failure = OSError("cannot be read")
    errors = on_ranks(agree_on_counts, counts, [None, failure, None])
    assert errors[1] is failure
    assert "on rank 7: OSError: cannot be read" in str(errors[0])


def test_an_own_failure_is_told_before_that_others_are_gone():
    class Alone(Ranks):
        def objects(self, mine, call=Call.OBJECTS):
            raise OSError("another rank is gone")

    with pytest.raises(OSError, match="another rank is gone"):
        Alone([0]).tell_failure(None)
    with pytest.raises(ValueError, match="mine"):
        Alone([0]).tell_failure(ValueError("mine"))


def test_rows_of_all_ranks_come_to_each():
    expected = [torch.randn(3 * _core.CHUNK_LEN // 8 + 1, 8), torch.randn(3), torch.tensor(2.0)]

    def fetch(ranks):
        shares, params = Shares(ranks.rank, len(RANKS)), [each.clone() for each in expected]
        shares.add(params)
        sharding = SimpleNamespace(peers=ranks, shares=shares)
        for param in params:
            own = shares.piece(param, param).clone()
            param.zero_()
            fetch_rows(sharding, param, own)
        return params

    for found in on_ranks(fetch):
        assert all(map(torch.equal, found, expected))
