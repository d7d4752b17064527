"""Volumes of several ranks, made and gone on from together. The ranks are threads."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from stepwell import _core
from stepwell.ranks.collective import Ranks
from stepwell.store.sharded_volume import agree_on_counts, explain, open_together
from stepwell.store.volume import Volume

# Of the default group.
RANKS = [4, 7, 9]
SECONDS_MAX = 60


class ThreadRanks(Ranks):
    def __init__(self, rank, barrier, table):
        self.ranks, self._num_met = RANKS, 0
        self.rank, self._barrier, self._table = rank, barrier, table

    def _gather(self, mine):
        self._table[self.rank] = mine
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found


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
    """A volume at a step, of a run, and the commit before; None: it is new."""

    def __init__(self, step, run, before, maker):
        self.step_before, self._maker = before, maker
        self.step, self.counts, self.name = step, None if step is None else [step], "volume"
        self.resumed_run = run
        self.closed = []

    def close(self, keep):
        self.closed.append(keep)
        if not keep:
            self._maker.step = self._maker.before = None


class Maker:
    """Makes the volume of a rank, or fails: at a step, None being its last one.

    Args:
        step: the last one; None: it is new.
        fails_at: steps that it cannot be opened at.
        runs: those of its last step and of the one before.
        interval: steps between the two.
    """

    def __init__(self, step, fails_at=(), runs=(1, 1), interval=1):
        self.step, self.fails_at, self.runs = step, fails_at, runs
        self.before = step - interval or None if step else None
        self.made = []
        self.told = []

    def __call__(self, step, run):
        self.told.append(run)
        if step in self.fails_at:
            raise OSError(f"the drive is full at {step}")
        found = self.step if step is None else step
        is_last = found == self.step
        run = None if found is None else self.runs[not is_last]
        self.made.append(Swap(found, run, self.before if is_last else None, self))
        return self.made[-1]


def opened(ranks, make, commit_interval=1):
    return open_together(ranks, make, commit_interval=commit_interval)


def closed(makers):
    return [[swap.closed for swap in maker.made] for maker in makers]


@pytest.mark.parametrize("step", [None, 1, 5])
def test_volumes_at_one_step_are_gone_on_from(step):
    makers = [Maker(step) for _ in RANKS]
    assert on_ranks(opened, makers) == [maker.made[0] for maker in makers]
    assert closed(makers) == [[[]]] * 3


def test_ranks_may_need_no_volume():
    assert on_ranks(opened, [lambda *_: None] * 3) == [None] * 3
    # Those without one are at no step, as new ones are.
    makers = [Maker(None), lambda *_: None, Maker(None)]
    assert on_ranks(opened, makers) == [makers[0].made[0], None, makers[2].made[0]]


def test_volumes_that_are_one_step_ahead_go_back(caplog):
    makers = [Maker(5), Maker(4), Maker(5)]
    with caplog.at_level("WARNING", logger="stepwell"):
        found = on_ranks(opened, makers)
    assert [swap.step for swap in found] == [4, 4, 4]
    assert [found[rank] is maker.made[-1] for rank, maker in enumerate(makers)] == [True] * 3
    assert closed(makers) == [[[True], []], [[]], [[True], []]]
    assert caplog.text.count("goes back from step 5 to 4") == 2


def test_volumes_that_are_one_commit_ahead_go_back(caplog):
    makers = [Maker(12, interval=4), Maker(8, interval=4), Maker(8, interval=8)]
    with caplog.at_level("WARNING", logger="stepwell"):
        found = on_ranks(opened, makers, [4] * 3)
    assert [swap.step for swap in found] == [8, 8, 8]
    assert caplog.text.count("goes back from step 12 to 8") == 1
    # A step that lies between two commits of one of them.
    makers = [Maker(12, interval=4), Maker(10, interval=1), Maker(12, interval=4)]
    for error in on_ranks(opened, makers, [4] * 3):
        assert "not of one run" in str(error)


@pytest.mark.parametrize("steps", [(13, 12, 13), (13, 8, 12), (8, 13, 8), (13, 13, 8)])
def test_volumes_whose_ranks_have_ended_at_several_steps_go_back(steps):
    makers = [Maker(step, interval=step - 8 or 7) for step in steps]
    found = on_ranks(opened, makers, [8] * 3)
    assert [swap.step for swap in found] == [8, 8, 8]
    assert [[each.step for each in maker.made] for maker in makers] == [
        [8] if step == 8 else [step, 8] for step in steps
    ]


def test_volumes_whose_ranks_have_ended_at_one_step_are_gone_on_from():
    makers = [Maker(13, interval=5) for _ in RANKS]
    assert [swap.step for swap in on_ranks(opened, makers, [8] * 3)] == [13, 13, 13]
    assert [len(maker.made) for maker in makers] == [1, 1, 1]


def test_ranks_commit_the_same_steps():
    makers = [Maker(8, interval=4), Maker(8, interval=4), Maker(None)]
    for error in on_ranks(opened, makers, [4, 4, 2]):
        assert isinstance(error, ValueError)
        assert "have the `commit_interval`s `[4, 4, 2]`, expected one" in str(error)
    assert closed(makers) == [[[True]], [[True]], [[False]]]


@pytest.mark.parametrize("steps", [(1, None, 1), (None, 1, None)])
def test_where_a_rank_has_not_committed_the_first_step_all_begin(steps, caplog):
    makers = [Maker(step) for step in steps]
    with caplog.at_level("WARNING", logger="stepwell"):
        found = on_ranks(opened, makers)
    assert [(swap.step, swap.counts) for swap in found] == [(None, None)] * 3
    assert closed(makers) == [[[False], []] if step else [[]] for step in steps]
    assert caplog.text.count("goes back from step 1 to 0") == steps.count(1)


@pytest.mark.parametrize(
    "steps", [(5, 3, 5), (5, 5, None), (None, 2, 2), (3, 4, 5), (1, 3, 3), (None, 1, 2)]
)
def test_volumes_that_are_not_of_one_run_are_refused(steps):
    makers = [Maker(step) for step in steps]
    for error in on_ranks(opened, makers):
        assert isinstance(error, ValueError)
        assert "not of one run" in str(error)
    # What was made now goes; what was resumed stays.
    assert closed(makers) == [[[step is not None]] for step in steps]


def test_volumes_are_opened_for_one_run_and_for_another_the_next_time():
    makers = [Maker(5) for _ in RANKS]
    on_ranks(opened, makers)
    on_ranks(opened, makers)
    (told,) = {tuple(maker.told) for maker in makers}
    assert len(set(told)) == 2


@pytest.mark.parametrize(
    "makers",
    [
        [Maker(5), Maker(5, runs=(2, 1)), Maker(5)],
        [Maker(5), Maker(4), Maker(5, runs=(1, 2))],
    ],
)
def test_volumes_of_several_runs_at_one_step_are_refused(makers):
    for error in on_ranks(opened, makers):
        assert isinstance(error, ValueError)
        assert "expected one run" in str(error)
    assert all(made.closed == [True] for maker in makers for made in maker.made)


def test_a_step_that_a_resumed_run_has_made_on_some_ranks_is_gone_back_from():
    makers = [Maker(5, runs=(2, 1)), Maker(4), Maker(5, runs=(2, 1))]
    found = on_ranks(opened, makers)
    assert [(swap.step, swap.resumed_run) for swap in found] == [(4, 1)] * 3


@pytest.mark.parametrize(("steps", "fails_at"), [((5, 5, 5), None), ((4, 5, 5), 4)])
def test_where_one_fails_all_do(steps, fails_at):
    makers = [Maker(step) for step in steps]
    makers[1].fails_at = [fails_at]
    errors = on_ranks(opened, makers)
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
    assert on_ranks(agree_on_counts, counts) == [[3, 2, 0, 0]] * 3
    counts[1][0] = 2
    for error in on_ranks(agree_on_counts, counts):
        assert isinstance(error, ValueError)
        assert "`[2, 3]` updates" in str(error)


@pytest.mark.parametrize("fails", [(), (1,), (0, 1, 2)])
def test_a_rank_that_others_wait_for_tells_them_why_it_does_not_come(fails):
    def meet(ranks):
        with ranks.awaited():
            if ranks.rank in fails:
                raise ValueError(f"no memory on {ranks.rank}")
        ranks.meet()

    found = on_ranks(meet)
    own = [f"no memory on {rank}" for rank in range(3)]
    others = "; ".join(f"on rank {RANKS[rank]}: ValueError: {own[rank]}" for rank in fails)
    for rank, error in enumerate(found):
        if fails:
            assert isinstance(error, ValueError if rank in fails else OSError)
            assert str(error) == (own[rank] if rank in fails else others)
        else:
            assert error is None


def test_an_error_behind_what_the_others_wait_for_is_not_told():
    def meet(ranks):
        with contextlib.suppress(ValueError), ranks.awaited():
            ranks.meet()
            if ranks.rank:
                raise ValueError
        # All are together.
        return ranks.meet(ranks.rank)

    assert on_ranks(meet) == [[0, 1, 2]] * 3


def test_an_own_failure_is_told_before_that_others_are_gone():
    class Alone(Ranks):
        def __init__(self):
            self.ranks, self._num_met = [0], 0

        def _gather(self, mine):
            raise RuntimeError("Connection closed by peer")

    for kind, match in ((OSError, "An optimizer is made"), (ValueError, "mine")):
        with pytest.raises(kind, match=match), Alone().awaited():
            if kind is ValueError:
                raise ValueError("mine")
            Alone().meet()


# Of the ranks 4 and 7 this is 7.
@pytest.mark.parametrize(
    ("made", "is_explained"),
    [([], False), ([4, 7], False), ([0, 1], False), ([4], False), ([7], True), ([4, 7, 9], True)],
    ids=str,
)
def test_volumes_of_other_ranks_are_named(tmp_path, monkeypatch, made, is_explained):
    names = ["run", "rerun-4", "run-x", "run-1-2", "other-3", *(f"run-{rank}" for rank in made)]
    members = [SimpleNamespace(name=each) for each in names[::-1] * 2]
    monkeypatch.setattr(_core, "list_members", lambda _: members)
    error, volume = ValueError("other"), Volume([tmp_path], name="run", resume=True)
    with pytest.raises(ValueError, match="other") if is_explained else nullcontext() as raised:
        explain(error, volume, 7, [4, 7], "by a way")
    if raised:
        assert f"{error}; `run` is there for the ranks `{made}`" in str(raised.value)
        assert "of rank `7`, and `[4, 7]` step together" in str(raised.value)
        assert str(raised.value).endswith("by a way")
    # The order in which a program names its ranks is nothing; nor is there more to say of a volume
    # that is new.
    if made == [4, 7]:
        explain(error, volume, 7, [7, 4], "by a way")
    explain(error, Volume([tmp_path], name="run", resume=False), 7, [4, 7], "by a way")
