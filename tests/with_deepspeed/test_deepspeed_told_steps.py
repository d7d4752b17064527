"""What ranks tell each other of steps at whose end they gather."""

import threading

import pytest
from stepwell.deepspeed.zero.told_steps import ToldSteps

SECONDS_MAX = 30


class Round:
    """Two ranks, on threads: what each has told in turn."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=SECONDS_MAX)
        self.told = [None, None]

    def of(self, rank):
        return Rank(self, rank)


class Rank:
    world_size = 2

    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank

    def tell_of_step(self, step, failure):
        return step, failure

    def who_failed(self, told, failure):
        assert told[1] == failure
        self.shared.told[self.rank] = told
        self.shared.barrier.wait()
        both = list(self.shared.told)
        self.shared.barrier.wait()
        assert both[0][0] == both[1][0]
        failed = [rank for rank, (_, why) in enumerate(both) if why is not None]
        return failed, both[failed[-1]][1] if failed else ""


def stepped(endings):
    """What each of two ranks raises in a step that ends so, and before the next."""
    shared, found = Round(), [None, None]

    def run(rank):
        steps, (is_taken, error) = ToldSteps(shared.of(rank)), endings[rank]
        said = []
        try:
            with steps.decided():
                if is_taken:
                    steps.is_taken = True
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


def test_ranks_that_have_taken_a_step_go_on():
    assert stepped([(True, None), (True, None)]) == [[], []]


def test_ranks_go_on_where_none_has_taken_the_step():
    assert stepped([(False, MemoryError("a")), (False, KeyboardInterrupt())]) == [
        ["MemoryError: a"],
        ["KeyboardInterrupt: "],
    ]


@pytest.mark.parametrize("taken", [(True, False), (False, True), (True, True)])
def test_ranks_that_have_all_left_do_not_go_on_where_one_has_taken_the_step(taken):
    """As where Ctrl-C ends one before it has submitted the step, and another behind that."""
    for said in stepped([(each, KeyboardInterrupt()) for each in taken]):
        assert said[0] == "KeyboardInterrupt: "
        assert said[1].startswith("then this rank has left a step (`KeyboardInterrupt: `)")


def test_a_rank_that_has_failed_is_named():
    good, bad = stepped([(True, None), (True, OSError("a drive"))])
    assert bad[0] == "OSError: a drive"
    assert bad[1].startswith("then this rank has left a step (`OSError: a drive`)")
    assert good[0].startswith("OSError: the step has failed on rank 1 (`OSError: a drive`)")
    assert good[1].startswith("then the step has failed on rank 1")


class Gone:
    """The other rank is not there any more."""

    world_size = 2

    def tell_of_step(self, *_):
        raise RuntimeError("Connection closed by peer")

    def who_failed(self, *_):
        raise AssertionError("nothing was told")


def test_without_the_other_rank_a_step_is_not_gathered():
    steps = ToldSteps(Gone())
    with pytest.raises(OSError, match="the step is not gathered"), steps.decided():
        steps.is_taken = True
    with pytest.raises(OSError, match="the step is not gathered"):
        steps.check()


def test_an_error_is_a_ranks_own_without_the_other():
    steps = ToldSteps(Gone())
    with pytest.raises(MemoryError, match="mine"), steps.decided():
        raise MemoryError("mine")
    with pytest.raises(OSError, match="MemoryError: mine"):
        steps.check()
