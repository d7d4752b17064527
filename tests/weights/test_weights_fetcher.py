"""What decides which weights are on the device: the fetcher by itself.

On a stand-in for a device, whose copies and uses end when the test says so.
"""

from types import SimpleNamespace

import pytest
import torch
from insides import num_elements_ahead, num_elements_leaving, num_elements_live
from stepwell.weights import fetcher as fetching
from stepwell.weights.fetcher import Fetcher

NUMEL = 10
"""Elements of each weight here."""


class Stepped(torch.Tensor):
    """A partition that a step may write."""


class Weight:
    """Is a `there` one on the device or an `absent` one; another state is that of other code."""

    def __init__(self, key, **changed):
        self.key, self.numel, self.part_numel, self.shape = key, NUMEL, NUMEL, (2, 5)
        self.source = torch.full((NUMEL,), float(key))
        self.param = SimpleNamespace(requires_grad=True, data=torch.empty(0))
        self.state, self.users = "absent", set()
        self.is_persistent = self.stays = False
        self.num_discarded = 0
        vars(self).update(changed)

    def discard(self):
        self.num_discarded += 1

    def put(self, whole):
        if self.state == "foreign":
            raise RuntimeError
        self.param.data, self.state = whole, "there"

    def rest(self):
        pass

    resume = rest

    def drop(self):
        assert not torch.is_inference_mode_enabled()
        self.param.data, self.state = torch.empty(0), "absent"


class Mark:
    """A point that the device passes."""

    has_passed = False

    def query(self):
        return self.has_passed

    def synchronize(self):
        self.has_passed = True


class Lane:
    """A device: what it is asked for, and points that it passes when it is waited for."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.copied, self.waited, self.freed = [], [], []
        self.arrivals, self.marks = [], []
        self.finished = 0

    def copy(self, weights):
        assert not torch.is_inference_mode_enabled()
        self.copied.append([weight.key for weight in weights])
        wholes = [weight.source.detach().clone().view(weight.shape) for weight in weights]
        self.arrivals.append(SimpleNamespace(keys=self.copied[-1], has_passed=False))
        return wholes, self.arrivals[-1]

    def wait(self, arrival):
        self.waited.append(arrival.keys)
        return arrival.has_passed

    def release(self, wholes):
        self.freed += [int(whole[0, 0]) for whole in wholes]
        self.marks.append(Mark())
        return self.marks[-1]

    def finish(self):
        self.finished += 1


class World:
    """Modules of one weight each, and a fetcher of theirs."""

    def __init__(self, count=4, *, ahead=0, reuse=0, live=1000, num_ranks=1):
        self.lane = Lane(num_ranks)
        self.fetcher = Fetcher(
            self.lane,
            there="there",
            absent="absent",
            prefetch_numel_max=ahead,
            reuse_numel_max=reuse,
            live_numel_max=live,
        )
        self.weights = [Weight(key, part_numel=-(-NUMEL // num_ranks)) for key in range(count)]
        self.modules = [torch.nn.Module() for _ in range(count)]

    def there(self):
        """Which weights are on the device and are good."""
        found = [each for each in self.weights if each.state == "there"]
        for weight in self.weights:
            if weight in found:
                assert torch.equal(weight.param.data, weight.source.view(2, 5))
            else:
                assert weight.param.data.numel() == 0
        return [weight.key for weight in found]

    def copied(self):
        return [key for together in self.lane.copied for key in together]

    def enter(self, *indices, token=None):
        weights = [self.weights[index] for index in indices]
        self.fetcher.enter(self.modules[indices[0]], weights, token or indices)

    def leave(self, *indices, token=None):
        self.fetcher.leave([self.weights[index] for index in indices], token or indices)

    def forward(self, *indices):
        """A pass; returns what was copied in it."""
        before = len(self.lane.copied)
        self.fetcher.begin_pass()
        for index in indices:
            self.enter(index)
            assert index in self.there()
            self.leave(index)
        return self.lane.copied[before:]


# ---- what is fetched ----


def test_a_weight_is_there_while_it_is_used():
    world = World()
    world.fetcher.begin_pass()
    assert world.lane.copied == []
    world.enter(0, 1, token="outer")
    assert world.there() == [0, 1]
    world.enter(1, token="inner")
    assert world.lane.copied == [[0, 1]]
    world.leave(0, 1, token="outer")
    assert world.there() == [1]
    world.leave(1, token="inner")
    assert world.there() == []
    assert world.lane.freed == [0, 1]


@pytest.mark.parametrize("is_passed", [False, True])
def test_every_use_waits_until_a_weight_has_arrived(is_passed):
    world = World()
    world.enter(0)
    world.enter(1)
    assert world.lane.waited == [[0], [1]]
    world.lane.arrivals[0].has_passed = is_passed
    for token in ("another stream", "and another"):
        world.enter(0, token=token)
    assert world.lane.waited[2:] == [[0]] * (1 if is_passed else 2)


def test_a_weight_that_nothing_has_used_has_arrived_before_it_is_freed():
    world = World(count=2, ahead=NUMEL)
    world.forward(0, 1)
    world.fetcher.begin_pass()
    world.weights[1].state = "foreign"
    with pytest.raises(RuntimeError):
        world.enter(0, 1)
    world.lane.waited.clear()
    world.fetcher.free_all(world.weights[:1])
    assert world.lane.waited == [[0]]
    assert world.there() == []


def test_what_stays_leaves_with_all():
    world = World()
    world.weights[0] = Weight(0, stays=True)
    world.enter(0)
    world.leave(0)
    assert world.there() == [0]


@pytest.mark.parametrize(("ahead", "copied"), [(0, 0), (1, 1), (NUMEL, 1), (NUMEL + 1, 2)])
def test_so_many_elements_are_copied_ahead(ahead, copied):
    world = World(ahead=ahead)
    world.forward(0, 1, 2, 3)
    world.lane.copied.clear()
    world.fetcher.begin_pass()
    together = [0, 1][:copied]
    assert world.lane.copied == ([together] if copied else [])
    # Of no effect yet.
    assert world.there() == []
    world.enter(0)
    assert world.copied() == list(range(max(copied + 1, 1)))
    for index in range(4):
        if index:
            world.enter(index)
        assert world.there() == [index]
        world.leave(index)
    assert world.copied() == [0, 1, 2, 3]
    assert num_elements_ahead(world.fetcher) == num_elements_live(world.fetcher) == 0


def test_what_is_there_and_what_is_ahead_is_copied_once():
    world = World(ahead=100)
    world.forward(0, 1, 0, 2, 2)
    world.lane.copied.clear()
    world.enter(3)
    world.fetcher.begin_pass()
    assert world.lane.copied == [[3], [0, 1, 2]]
    world.enter(0)
    world.enter(1)
    assert len(world.lane.copied) == 2
    world.leave(0)
    # Used again: those that were given ahead have passed over it.
    assert world.there() == [0, 1, 3]


def test_several_ranks_gather_nothing_ahead_of_which_one_has_no_elements():
    # 2 for each of five ranks.
    world = World(ahead=100, num_ranks=6)
    world.weights[1].numel = NUMEL + 1
    world.forward(0, 1)
    assert world.forward(0, 1) == [[1], [0]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_of_several_ranks_may_use_by_itself_what_never_leaves(num_ranks):
    world = World(ahead=1, num_ranks=num_ranks)
    world.weights[3] = Weight(3, is_persistent=True, stays=True)
    for _ in range(2):
        world.enter(3)
        world.leave(3)
        gathered = world.forward(0, 1, 2)
    world.lane.copied.clear()
    world.fetcher.begin_pass()
    assert world.lane.copied == [[0]]
    world.enter(3)
    assert world.lane.copied == [[0]]
    world.leave(3)
    world.enter(0)
    # Where it is no other order, the next is gathered ahead.
    assert world.lane.copied == (gathered[:2] if num_ranks > 1 else [[0]])


@pytest.mark.parametrize("change", ["written", "moved", "stepped"])
def test_what_is_stale_is_copied_again(change):
    world = World(ahead=NUMEL)
    world.forward(0, 1)
    world.lane.copied.clear()
    world.fetcher.begin_pass()
    weight = world.weights[0]
    if change == "written":
        weight.source.add_(1.0)
    elif change == "moved":
        weight.source = weight.source + 1.0
    else:
        weight.source.__class__ = Stepped
    world.enter(0)
    assert world.lane.copied == [[0], [0], [1]]
    assert world.there() == [0]
    assert num_elements_live(world.fetcher) == 2 * NUMEL


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_a_step_may_write_is_not_copied_ahead(has_ended):
    world = World(ahead=100)
    world.forward(0, 1, 2)
    world.lane.copied.clear()
    asked, partition = [], world.weights[1].source
    partition.__class__ = Stepped

    def has_step_ended():
        asked.append(has_ended)
        if has_ended:
            partition.__class__ = torch.Tensor
        return has_ended

    world.fetcher.has_step_ended = has_step_ended
    world.fetcher.begin_pass()
    assert asked
    assert world.lane.copied == ([[0, 1, 2]] if has_ended else [[0]])
    world.enter(0)
    world.leave(0)
    partition.__class__ = torch.Tensor
    world.enter(1)
    assert world.copied() == [0, 1, 2]
    assert world.there() == [1]


def test_what_a_step_may_still_write_is_not_kept_ahead():
    world = World(ahead=100)
    world.forward(0, 1)
    world.weights[0].source.__class__ = Stepped
    world.fetcher.begin_pass()
    assert num_elements_ahead(world.fetcher) == num_elements_live(world.fetcher) == NUMEL
    world.weights[0].source.__class__ = torch.Tensor
    assert world.forward(0, 1) == [[0, 1]]


def test_what_was_ahead_is_dropped_where_a_pass_begins_anew():
    world = World(ahead=2 * NUMEL)
    world.forward(0, 1, 2)
    for _ in range(2):
        world.fetcher.begin_pass()
        assert world.lane.copied[-1] == [0, 1]
        assert num_elements_ahead(world.fetcher) == num_elements_live(world.fetcher) == 2 * NUMEL
    world.enter(2)
    assert world.there() == [2]
    assert num_elements_live(world.fetcher) == 3 * NUMEL


def test_nothing_is_copied_ahead_beyond_what_may_live():
    for live, copied in ((2 * NUMEL, [0, 1]), (2 * NUMEL - 1, [0])):
        world = World(ahead=100, live=live)
        world.forward(0, 1, 2)
        world.lane.copied.clear()
        for mark in world.lane.marks:
            mark.has_passed = True
        world.fetcher.begin_pass()
        assert world.lane.copied == [copied]
        # What is needed comes all the same.
        world.enter(3)
        assert world.there() == [3]
        world.leave(3)


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_memory_that_the_device_reads_counts_as_live(passed):
    world = World(ahead=100, live=2 * NUMEL)
    world.forward(0, 1)
    world.lane.copied.clear()
    assert len(world.lane.marks) == 2
    for mark in world.lane.marks[:passed]:
        mark.has_passed = True
    world.fetcher.begin_pass()
    assert world.lane.copied == ([[0, 1][:passed]] if passed else [])
    assert num_elements_leaving(world.fetcher) == (2 - passed) * NUMEL


def test_what_is_needed_waits_for_memory_that_the_device_reads():
    world = World(live=2 * NUMEL)
    for index in range(3):
        world.enter(index)
        world.leave(index)
    assert [mark.has_passed for mark in world.lane.marks] == [True, False, False]
    world.enter(0, 1)
    assert all(mark.has_passed for mark in world.lane.marks)
    assert num_elements_leaving(world.fetcher) == 0
    assert num_elements_live(world.fetcher) == 2 * NUMEL
    world.leave(0, 1)
    assert len(world.lane.marks) == 4
    assert num_elements_leaving(world.fetcher) == 2 * NUMEL


def test_a_weight_that_a_program_has_freed_or_gathered():
    world = World()
    world.enter(0)
    weight = world.weights[0]
    weight.drop()
    world.leave(0)
    assert world.lane.freed == world.lane.marks == []
    assert num_elements_live(world.fetcher) == 0
    # It was freed in a use of it, and comes again.
    world.enter(0)
    weight.drop()
    world.enter(0, token="inner")
    assert world.there() == [0]
    assert num_elements_live(world.fetcher) == NUMEL
    world.leave(0, token="inner")
    world.leave(0)
    # What a program has gathered is freed as well.
    weight.put(weight.source.view(2, 5))
    world.enter(0)
    world.leave(0)
    assert world.there() == []
    assert num_elements_live(world.fetcher) == 0


def test_a_weight_that_is_used_again_soon_stays():
    world = World(reuse=NUMEL + 1)
    world.forward(0, 1, 0)
    assert world.forward(0, 1, 0) == [[0], [1]]
    assert world.forward(0, 1, 0) == [[0], [1]]
    assert world.there() == []


# ---- several ranks, which gather alike ----


def test_ranks_do_not_gather_by_how_far_each_is():
    world = World(ahead=100, live=2 * NUMEL, num_ranks=2)
    world.fetcher.has_step_ended = lambda: False
    world.forward(0, 1)
    world.weights[1].source.__class__ = Stepped
    world.lane.copied.clear()
    world.fetcher.begin_pass()
    # Neither by what the device still reads nor by a step that is running.
    assert world.lane.copied == [[0, 1]]


# ---- backwards ----


def test_a_backward_begins_once_and_ends_once():
    world = World()
    module, weights = world.modules[0], world.weights[:1]
    assert world.fetcher.enter_backward(module, weights, "call")
    assert not world.fetcher.enter_backward(module, weights, "call")
    assert world.there() == [0]
    for _ in range(2):
        world.fetcher.leave_backward("call")
        assert world.there() == []
    assert world.lane.freed == [0]
    # Another backward of the same graph.
    assert world.fetcher.enter_backward(module, weights, "call")
    assert world.there() == [0]


def test_what_is_left_of_a_backward_is_freed_at_its_end():
    world = World()
    world.weights[2] = Weight(2, stays=True)
    for index in range(3):
        world.fetcher.enter_backward(world.modules[index], [world.weights[index]], index)
    world.enter(1, token="a forward")
    world.fetcher.end_backward()
    assert world.there() == [1, 2]
    world.fetcher.end_backward()
    world.leave(1, token="a forward")
    assert world.there() == [2]
    assert world.fetcher.enter_backward(world.modules[0], world.weights[:1], 0)


@pytest.mark.parametrize("is_within", [False, True])
def test_frozen_weights_of_what_is_computed_again_stay(is_within, monkeypatch):
    world = World()
    frozen, trained = world.weights[1], world.weights[2]
    frozen.param.requires_grad = False
    if is_within:
        world.fetcher.enter_backward(world.modules[3], [world.weights[3]], "outer")
        world.fetcher.enter_backward(world.modules[0], [world.weights[0]], "call")
    with monkeypatch.context() as patched:
        patched.setattr(fetching, "backward_id", lambda: 1)
        for index in (1, 2):
            world.enter(index)
            world.leave(index)
    assert trained.key not in world.there()
    assert frozen.key in world.there()
    if is_within:
        # Those of the backward that it was computed for.
        world.fetcher.leave_backward("call")
        assert world.there() == [3]
    else:
        world.fetcher.end_backward()
        assert world.there() == []


@pytest.mark.parametrize("ends", ["its own backward", "another begins", "all ends"])
def test_a_forward_that_a_checkpoint_has_left_is_over_with_the_next_node(monkeypatch, ends):
    world = World()
    backward = world.fetcher.enter_backward, world.fetcher.leave_backward
    monkeypatch.setattr(fetching, "backward_id", lambda: 1)
    backward[0](world.modules[1], world.weights[1:2], "call")
    # It needs nothing behind the second.
    world.enter(0)
    world.leave(0)
    world.enter(1)
    # One within a forward that is still computed again.
    monkeypatch.setattr(fetching, "backward_id", lambda: 2)
    backward[0](world.modules[3], world.weights[3:4], "inner")
    backward[1]("inner")
    assert world.there() == [1]
    assert len(world.weights[1].users) == 2
    monkeypatch.setattr(fetching, "backward_id", lambda: 1)
    if ends == "another begins":
        backward[0](world.modules[2], world.weights[2:3], "other")
        assert world.weights[1].users == {"call"}
        assert world.there() == [1, 2]
        backward[1]("other")
    if ends != "all ends":
        backward[1]("call")
    else:
        world.fetcher.end_backward()
    assert world.there() == []
    assert not any(weight.users for weight in world.weights)


def test_all_is_freed_whatever_uses_it():
    world = World(ahead=NUMEL)
    world.forward(0, 1)
    world.fetcher.begin_pass()
    world.fetcher.enter_backward(world.modules[2], world.weights[2:3], "call")
    world.enter(3)
    world.fetcher.free_all(world.weights)
    assert world.there() == []
    assert world.lane.finished == 1
    assert num_elements_live(world.fetcher) == num_elements_ahead(world.fetcher) == 0
    assert not any(weight.users for weight in world.weights)
    assert world.fetcher.enter_backward(world.modules[2], world.weights[2:3], "call")
