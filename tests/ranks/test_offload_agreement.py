"""What ranks of ZeRO agree on, with stand-ins for the other ranks; and two of them on threads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from stepwell.ranks import agreement as agreement_module
from stepwell.ranks import peers as peers_module
from stepwell.ranks.agreement import NORM_DTYPE, WIDE_NORM_DTYPE, Agreement
from stepwell.ranks.peers import Peers
from stepwell.weights.gather_order import GatherOrder

CPU = torch.device("cpu")
NORM = torch.tensor(3.0, dtype=NORM_DTYPE)
SECONDS_MAX = 30


class LeftError(Exception):
    pass


# ---- before a step ----


@pytest.fixture
def ranks(monkeypatch):
    """Rank 1 of three, all of which say the same but for what `others` adds; what went around."""
    found = SimpleNamespace(others=lambda sums: None, num=3, seen=[])

    def all_reduce(sums, group):
        assert group == "a group"
        found.seen.append(sums.clone())
        sums.mul_(found.num)
        found.others(sums)

    stand_in = SimpleNamespace(
        all_reduce=all_reduce, get_rank=lambda: 1, get_world_size=lambda _: found.num
    )
    monkeypatch.setattr(agreement_module, "dist", stand_in)
    return found


def made(**options):
    return Agreement("a group", CPU, **options)


def others_say(**facts):
    """What has other ranks say how many of them cannot step, or have left, and which."""

    def others(sums):
        for at, (count, which) in {1: facts.get("unable"), 3: facts.get("left")}.items():
            sums[at], sums[at + 1] = count, which

    facts = {"unable": (0, 0), "left": (0, 0)} | facts
    return others


@pytest.mark.parametrize("dtype", [NORM_DTYPE, WIDE_NORM_DTYPE])
def test_ranks_add_up_their_norms(ranks, dtype):
    assert made().add_up(NORM.to(dtype)) == 9.0
    assert [each.tolist() for each in ranks.seen] == [[3, 0, 0, 0, 0]]
    assert ranks.seen[0].dtype == dtype


def test_a_rank_alone_tells_nobody(ranks):
    ranks.num = 1
    found = made()
    with pytest.raises(LeftError), found.awaited():
        assert found.add_up(NORM) == 3.0
        raise LeftError
    assert not ranks.seen


@pytest.mark.parametrize(("unable", "who"), [((1, 2), "rank 2"), ((2, 3), "2 ranks")])
def test_ranks_that_cannot_step_end_the_step_of_the_others(ranks, unable, who):
    # One that cannot has left the last step, and gathered other weights, too.
    ranks.others = others_say(unable=unable, left=(1, 2))
    match = rf"^{who} cannot take this step, so none has (.|\n)*hint"
    with pytest.raises(OSError, match=match):
        made().add_up(NORM)


def test_a_rank_that_cannot_step_says_so_where_it_is_waited_for(ranks):
    found = made()
    with pytest.raises(LeftError), found.awaited():
        raise LeftError
    assert [each.tolist() for each in ranks.seen] == [[0, 1, 1, 0, 0]]
    # Behind the round nobody waits for it.
    for each in (LeftError, KeyboardInterrupt):
        with pytest.raises(each), found.awaited():
            found.add_up(NORM)
            raise each
    with pytest.raises(KeyboardInterrupt), found.awaited():
        raise KeyboardInterrupt
    assert len(ranks.seen) == 3


def test_a_rank_that_fails_between_two_sums_says_so_in_the_second(ranks):
    found = made()
    with pytest.raises(LeftError), found.awaited():
        found.add_up(torch.tensor(torch.inf))
        raise LeftError
    assert [each[:3].tolist() for each in ranks.seen] == [[torch.inf, 0, 0], [0, 1, 1]]
    assert ranks.seen[1].dtype == WIDE_NORM_DTYPE
    # The second sum is the last.
    with pytest.raises(LeftError), found.awaited():
        found.add_up(torch.tensor(torch.inf))
        found.add_up(torch.tensor(torch.inf, dtype=WIDE_NORM_DTYPE))
        raise LeftError
    assert len(ranks.seen) == 4


def test_a_rank_that_is_gone_is_waited_for_no_more(ranks):
    def lost(_):
        raise RuntimeError("Connection closed by peer")

    ranks.others = lost
    found = made()
    with pytest.raises(RuntimeError, match="closed"), found.awaited():
        found.add_up(NORM)
    assert len(ranks.seen) == 1
    # Its own error is raised by one that cannot step, also then.
    with pytest.raises(LeftError), found.awaited():
        raise LeftError


@pytest.mark.parametrize(("left", "who"), [((1, 0), "rank 0 has"), ((2, 2), "2 ranks have")])
def test_some_ranks_have_left_a_step_that_others_have_taken(ranks, left, who):
    ranks.others = others_say(left=left)
    with pytest.raises(OSError, match=rf"^{who} left a step by an error, and others (.|\n)*hint"):
        made().add_up(NORM)


def test_where_all_have_left_a_step_they_go_on(ranks):
    found = made()
    with pytest.raises(LeftError), found.decided():
        raise LeftError
    assert found.add_up(NORM) == 9.0
    with found.decided():
        found.taking()
    assert found.add_up(NORM) == 9.0
    assert [each[3:].tolist() for each in ranks.seen] == [[1, 1], [0, 0]]


def test_ranks_that_have_gathered_other_weights_are_told_once(ranks):
    forgotten, order = [], GatherOrder()
    found = made(order=order, forget_order=lambda: forgotten.append("forgotten"))
    order.note([4, 5])
    assert found.add_up(NORM) == 9.0
    ranks.others = lambda sums: sums[-1].add_(1.0)
    with pytest.raises(RuntimeError, match=r"ranks have gathered other weights(.|\n)*hint"):
        found.add_up(NORM)
    assert forgotten == ["forgotten"]
    ranks.others = lambda sums: None
    assert found.add_up(NORM) == 9.0


# ---- a step ----


class Status:
    """The status group of two ranks, on threads."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=SECONDS_MAX)
        self.told = [None, None]

    def of(self, rank):
        peers = Peers.__new__(Peers)
        peers.ranks, peers.rank, peers._num_told = [0, 1], rank, 0
        peers.status = (self, rank)
        return peers

    def meet(self, rank, mine):
        self.told[rank] = mine
        self.barrier.wait()
        both = list(self.told)
        self.barrier.wait()
        return both


class Work:
    """A collective, which is made when it is waited for."""

    def __init__(self, function):
        self.wait = function

    def is_completed(self):
        return True


@pytest.fixture
def status(monkeypatch):
    def all_reduce(words, op, *, group, async_op):
        shared, rank = group
        return Work(lambda: words.copy_(torch.stack(shared.meet(rank, words.clone())).amax(0)))

    def broadcast(memory, source, *, group, async_op):
        shared, rank = group
        return Work(lambda: memory.copy_(shared.meet(rank, memory.clone())[source]))

    stand_in = SimpleNamespace(
        all_reduce=all_reduce, broadcast=broadcast, ReduceOp=torch.distributed.ReduceOp
    )
    monkeypatch.setattr(peers_module, "dist", stand_in)
    alone = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda _: 2, is_initialized=bool)
    monkeypatch.setattr(agreement_module, "dist", alone)
    return Status()


def stepped(status, endings):
    """What each of two ranks raises in a step that ends so, and before the next."""
    found = [None, None]

    def run(rank):
        steps, (is_taken, error) = made(peers=status.of(rank)), endings[rank]
        said = []
        try:
            with steps.decided():
                if is_taken:
                    steps.taking()
                if error is not None:
                    raise error
        except (OSError, MemoryError, KeyboardInterrupt) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
        try:
            steps.check()
        except OSError as caught:
            said.append(f"then {caught}")
        found[rank] = said

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()
    return found


def test_ranks_that_have_taken_a_step_go_on(status):
    assert stepped(status, [(True, None), (True, None)]) == [[], []]


def test_ranks_go_on_where_none_has_taken_the_step(status):
    assert stepped(status, [(False, MemoryError("a")), (False, KeyboardInterrupt())]) == [
        ["MemoryError: a"],
        ["KeyboardInterrupt: "],
    ]


@pytest.mark.parametrize("taken", [(True, False), (False, True), (True, True)])
def test_ranks_that_have_all_left_do_not_go_on_where_one_has_taken_the_step(status, taken):
    """As where Ctrl-C ends one before it has submitted the step, and another behind that."""
    for said in stepped(status, [(each, KeyboardInterrupt()) for each in taken]):
        assert said[0] == "KeyboardInterrupt: "
        assert said[1].startswith("then this rank has left a step (`KeyboardInterrupt: `)")


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_rank_that_has_failed_is_named(status, is_taken):
    good, bad = stepped(status, [(True, None), (is_taken, OSError("a drive"))])
    assert bad[0] == "OSError: a drive"
    assert bad[1].startswith("then this rank has left a step (`OSError: a drive`)")
    assert good[0].startswith("OSError: the step has failed on rank 1 (`OSError: a drive`)")
    assert good[1].startswith("then the step has failed on rank 1")


def gone():
    """The other rank is not there any more."""

    def tell(*_, **__):
        raise RuntimeError("Connection closed by peer")

    return SimpleNamespace(tell=tell)


def test_without_the_other_rank_a_step_is_not_gathered(status):
    steps = made(peers=gone())
    with pytest.raises(OSError, match="the step is not gathered"), steps.decided():
        steps.taking()
    with pytest.raises(OSError, match="the step is not gathered"):
        steps.check()


def test_an_error_is_a_ranks_own_without_the_other(status):
    steps = made(peers=gone())
    with pytest.raises(MemoryError, match="mine"), steps.decided():
        raise MemoryError("mine")
    with pytest.raises(OSError, match="MemoryError: mine"):
        steps.check()


def test_a_step_that_is_gathered_is_told_of_by_the_thread(status):
    told = []
    steps = made(gatherer=SimpleNamespace(leave=told.append), peers=gone())
    with steps.decided():
        steps.taking()
    with pytest.raises(MemoryError), steps.decided():
        raise MemoryError("mine")
    assert told == ["MemoryError: mine"]
    # What fails behind the submit it says when the weights have gone around.
    with pytest.raises(MemoryError), steps.decided():
        steps.taking()
        raise MemoryError
    assert len(told) == 1
    steps.check()
