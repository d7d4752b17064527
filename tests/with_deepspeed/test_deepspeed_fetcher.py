"""What decides which weights are on the device: the fetcher by itself.

On a stand-in for a device, whose copies and uses end when the test says so. DeepSpeed is not
imported: of its parameters there is what the fetcher looks at.
"""

import enum
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from insides import num_elements_ahead, num_elements_leaving, num_elements_live

FETCHER = "stepwell.deepspeed.zero.fetcher"
PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
NUMEL = 10
"""Elements of each weight here."""


@pytest.fixture(scope="module")
def fetching():
    """The module, with DeepSpeed's names of states."""
    if FETCHER in sys.modules:
        yield sys.modules[FETCHER]
        return
    status = enum.Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, PARAMETERS, SimpleNamespace(ZeroParamStatus=status))
        yield importlib.import_module(FETCHER)
        # Where DeepSpeed is imported after this, it is imported anew.
        del sys.modules[FETCHER]


class Stepped(torch.Tensor):
    """A partition that a step may write."""


class Lane:
    """A device: what it is asked for, and points that it passes when it is waited for."""

    num_ranks = 1

    def __init__(self):
        self.copied, self.waited, self.freed = [], [], []
        self.arrivals, self.marks = [], []
        self.finished = 0
        self.is_marked = True

    def copy(self, params):
        assert not torch.is_inference_mode_enabled()
        self.copied.append([param.ds_id for param in params])
        weights = [param.ds_tensor.detach().clone().view(param.ds_shape) for param in params]
        self.arrivals.append(SimpleNamespace(ids=self.copied[-1], has_passed=False))
        return weights, self.arrivals[-1]

    def wait(self, arrival):
        self.waited.append(arrival.ids)
        return arrival.has_passed

    def free(self, params):
        assert not torch.is_inference_mode_enabled()
        for param in params:
            self.freed.append(param.ds_id)
            param.data = torch.empty(0)
        if not self.is_marked:
            return None
        self.marks.append(SimpleNamespace(has_passed=False))
        return self.marks[-1]

    def has_ended(self, arrival, *, is_waiting):
        arrival.has_passed |= is_waiting
        return arrival.has_passed

    def finish(self):
        self.finished += 1


class World:
    """Modules of one weight each, and a fetcher of theirs."""

    def __init__(self, fetching, count=4, *, ahead=0, reuse=0, live=1000):
        self.fetching, self.lane = fetching, Lane()
        self.states = fetching.ZeroParamStatus
        self.fetcher = fetching.Fetcher(
            self.lane, prefetch_numel_max=ahead, reuse_numel_max=reuse, live_numel_max=live
        )
        self.params = [self.param(ds_id) for ds_id in range(count)]
        self.modules = [torch.nn.Module() for _ in range(count)]

    def param(self, ds_id, **changed):
        fields = {
            "ds_id": ds_id,
            "ds_numel": NUMEL,
            "ds_shape": (2, 5),
            "ds_tensor": torch.full((NUMEL,), float(ds_id)),
            "ds_status": self.states.NOT_AVAILABLE,
            "ds_active_sub_modules": set(),
            "partition_numel": lambda: -(-NUMEL // self.lane.num_ranks),
            "ds_persist": False,
            "is_external_param": False,
            "requires_grad": True,
            "data": torch.empty(0),
        }
        return SimpleNamespace(**(fields | changed))

    def there(self):
        """Which weights are on the device and are good."""
        found = [each for each in self.params if each.ds_status is self.states.AVAILABLE]
        for param in self.params:
            if param in found:
                assert torch.equal(param.data, param.ds_tensor.view(2, 5))
            else:
                assert param.data.numel() == 0
        return [param.ds_id for param in found]

    def copied(self):
        return [ds_id for together in self.lane.copied for ds_id in together]

    def enter(self, *indices, token=None):
        params = [self.params[index] for index in indices]
        self.fetcher.enter(self.modules[indices[0]], params, token or indices)

    def leave(self, *indices, token=None):
        params = [self.params[index] for index in indices]
        self.fetcher.leave(self.modules[indices[0]], params, token or indices)

    def forward(self, *indices):
        """A pass; returns what was copied in it."""
        before = len(self.lane.copied)
        self.fetcher.reset_step()
        for index in indices:
            self.enter(index)
            assert index in self.there()
            self.leave(index)
        return self.lane.copied[before:]


# ---- what is fetched ----


def test_a_weight_is_there_while_it_is_used(fetching):
    world = World(fetching)
    world.fetcher.reset_step()
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
def test_every_use_waits_until_a_weight_has_arrived(fetching, is_passed):
    world = World(fetching)
    world.enter(0)
    world.enter(1)
    assert world.lane.waited == [[0], [1]]
    world.lane.arrivals[0].has_passed = is_passed
    for token in ("another stream", "and another"):
        world.enter(0, token=token)
    assert world.lane.waited[2:] == [[0]] * (1 if is_passed else 2)


def test_what_has_arrived_is_not_waited_for(fetching):
    world = World(fetching)
    copy = world.lane.copy
    world.lane.copy = lambda params: (copy(params)[0], None)
    world.enter(0)
    world.leave(0)
    assert world.there() == world.lane.waited == []


def test_a_weight_that_nothing_has_used_has_arrived_before_it_is_freed(fetching):
    world = World(fetching, count=2, ahead=NUMEL)
    world.forward(0, 1)
    world.fetcher.reset_step()
    param = world.params[0]
    world.params[1].ds_status = world.states.INFLIGHT
    with pytest.raises(RuntimeError):
        world.enter(0, 1)
    world.lane.waited.clear()
    world.fetcher.release_and_reset_all(SimpleNamespace(parameters=lambda: [param]))
    assert world.lane.waited == [[0]]
    assert param.data.numel() == 0


@pytest.mark.parametrize("kept", ["ds_persist", "is_external_param"])
def test_what_deepspeed_keeps_stays(fetching, kept):
    world = World(fetching)
    world.params[0] = world.param(0, **{kept: True})
    world.enter(0)
    world.leave(0)
    assert world.there() == [0]


@pytest.mark.parametrize(("ahead", "copied"), [(0, 0), (1, 1), (NUMEL, 1), (NUMEL + 1, 2)])
def test_so_many_elements_are_copied_ahead(fetching, ahead, copied):
    world = World(fetching, ahead=ahead)
    world.forward(0, 1, 2, 3)
    world.lane.copied.clear()
    world.fetcher.reset_step()
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


def test_what_is_there_and_what_is_ahead_is_copied_once(fetching):
    world = World(fetching, ahead=100)
    world.forward(0, 1, 0, 2, 2)
    world.lane.copied.clear()
    world.enter(3)
    world.fetcher.reset_step()
    assert world.lane.copied == [[3], [0, 1, 2]]
    world.enter(0)
    world.enter(1)
    assert len(world.lane.copied) == 2
    world.leave(0)
    # Used again: those that were given ahead have passed over it.
    assert world.there() == [0, 1, 3]


def test_a_weight_that_is_ahead_for_one_use_is_ahead_for_the_next(fetching):
    world = World(fetching, ahead=NUMEL + 1)
    world.forward(0, 1, 1, 2)
    world.lane.copied.clear()
    world.fetcher.reset_step()
    assert world.lane.copied == [[0, 1]]
    world.enter(0)
    assert world.lane.copied == [[0, 1], [2]]


def test_a_module_whose_weights_are_there_is_passed_over(fetching):
    world = World(fetching, ahead=1)
    world.forward(0, 1, 2)
    world.lane.copied.clear()
    world.fetcher._fetch(world.params[:1])
    world.fetcher.reset_step()
    assert world.lane.copied == [[0], [1]]


def test_several_ranks_gather_nothing_ahead_of_which_one_has_no_elements(fetching):
    world = World(fetching, ahead=100)
    world.lane.num_ranks = 6
    # 2 for each of five ranks.
    assert world.params[0].partition_numel() == 2
    world.params[1].ds_numel = NUMEL + 1
    world.forward(0, 1)
    assert world.forward(0, 1) == [[1], [0]]


@pytest.mark.parametrize("is_collective", [False, True])
def test_one_of_several_ranks_may_use_by_itself_what_never_leaves(fetching, is_collective):
    world = World(fetching, ahead=1)
    world.lane.num_ranks = 2 if is_collective else 1
    world.params[3].ds_persist = True
    for _ in range(2):
        world.enter(3)
        world.leave(3)
        gathered = world.forward(0, 1, 2)
    world.lane.copied.clear()
    world.fetcher.reset_step()
    assert world.lane.copied == [[0]]
    world.enter(3)
    assert world.lane.copied == [[0]]
    world.leave(3)
    world.enter(0)
    # Where it is no other order, the next is gathered ahead.
    assert world.lane.copied == (gathered[:2] if is_collective else [[0]])


@pytest.mark.parametrize("change", ["written", "moved", "stepped"])
def test_what_is_stale_is_copied_again(fetching, change):
    world = World(fetching, ahead=NUMEL)
    world.forward(0, 1)
    world.lane.copied.clear()
    world.fetcher.reset_step()
    param = world.params[0]
    if change == "written":
        param.ds_tensor.add_(1.0)
    elif change == "moved":
        param.ds_tensor = param.ds_tensor + 1.0
    else:
        param.ds_tensor.__class__ = Stepped
    world.enter(0)
    assert world.lane.copied == [[0], [0], [1]]
    assert world.there() == [0]
    assert num_elements_live(world.fetcher) == 2 * NUMEL


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_a_step_may_write_is_not_copied_ahead(fetching, has_ended):
    world = World(fetching, ahead=100)
    world.forward(0, 1, 2)
    world.lane.copied.clear()
    asked, partition = [], world.params[1].ds_tensor
    partition.__class__ = Stepped

    def has_step_ended():
        asked.append(has_ended)
        if has_ended:
            partition.__class__ = torch.Tensor
        return has_ended

    world.fetcher.has_step_ended = has_step_ended
    world.fetcher.reset_step()
    assert asked
    assert world.lane.copied == ([[0, 1, 2]] if has_ended else [[0]])
    world.enter(0)
    world.leave(0)
    partition.__class__ = torch.Tensor
    world.enter(1)
    assert world.copied() == [0, 1, 2]
    assert world.there() == [1]


def test_what_a_step_may_still_write_is_not_kept_ahead(fetching):
    world = World(fetching, ahead=100)
    world.forward(0, 1)
    world.params[0].ds_tensor.__class__ = Stepped
    world.fetcher.reset_step()
    assert num_elements_ahead(world.fetcher) == num_elements_live(world.fetcher) == NUMEL
    world.params[0].ds_tensor.__class__ = torch.Tensor
    assert world.forward(0, 1) == [[0, 1]]


def test_a_weight_that_is_missing_asks_whether_the_step_has_ended(fetching):
    world = World(fetching)
    asked = []
    world.fetcher.has_step_ended = lambda: asked.append(list(world.lane.copied))
    world.enter(0)
    world.enter(0, token="again")
    assert asked == [[]]


def test_what_was_ahead_is_dropped_where_a_pass_begins_anew(fetching):
    world = World(fetching, ahead=2 * NUMEL)
    world.forward(0, 1, 2)
    for _ in range(2):
        world.fetcher.reset_step()
        assert world.lane.copied[-1] == [0, 1]
        assert num_elements_ahead(world.fetcher) == num_elements_live(world.fetcher) == 2 * NUMEL
    world.enter(2)
    assert world.there() == [2]
    assert num_elements_live(world.fetcher) == 3 * NUMEL


def test_nothing_is_copied_ahead_beyond_what_may_live(fetching):
    for live, copied in ((2 * NUMEL, [0, 1]), (2 * NUMEL - 1, [0])):
        world = World(fetching, ahead=100, live=live)
        world.forward(0, 1, 2)
        world.lane.copied.clear()
        for mark in world.lane.marks:
            mark.has_passed = True
        world.fetcher.reset_step()
        assert world.lane.copied == [copied]
        # What is needed comes all the same.
        world.enter(3)
        assert world.there() == [3]
        world.leave(3)


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_memory_that_the_device_reads_counts_as_live(fetching, passed):
    world = World(fetching, ahead=100, live=2 * NUMEL)
    world.forward(0, 1)
    world.lane.copied.clear()
    assert len(world.lane.marks) == 2
    for mark in world.lane.marks[:passed]:
        mark.has_passed = True
    world.fetcher.reset_step()
    assert world.lane.copied == ([[0, 1][:passed]] if passed else [])
    assert num_elements_leaving(world.fetcher) == (2 - passed) * NUMEL


def test_what_is_needed_waits_for_memory_that_the_device_reads(fetching):
    world = World(fetching, live=2 * NUMEL)
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


def test_where_the_device_reads_nothing_nothing_is_leaving(fetching):
    world = World(fetching, live=NUMEL)
    world.lane.is_marked = False
    world.enter(0)
    world.leave(0)
    assert num_elements_leaving(world.fetcher) == len(world.fetcher._leaving) == 0


def test_a_weight_that_a_program_has_freed_or_gathered(fetching):
    world = World(fetching)
    world.enter(0)
    param = world.params[0]
    param.data, param.ds_status = torch.empty(0), world.states.NOT_AVAILABLE
    world.leave(0)
    assert world.lane.freed == world.lane.marks == []
    assert num_elements_live(world.fetcher) == 0
    # It was freed in a use of it, and comes again.
    world.enter(0)
    param.data, param.ds_status = torch.empty(0), world.states.NOT_AVAILABLE
    world.enter(0, token="inner")
    assert world.there() == [0]
    assert num_elements_live(world.fetcher) == NUMEL
    world.leave(0, token="inner")
    world.leave(0)
    # What a program has gathered is freed as well.
    param.data, param.ds_status = param.ds_tensor.view(2, 5), world.states.AVAILABLE
    world.enter(0)
    world.leave(0)
    assert world.there() == []
    assert num_elements_live(world.fetcher) == 0


def test_a_weight_that_is_being_gathered_is_refused(fetching):
    world = World(fetching)
    world.params[0].ds_status = world.states.INFLIGHT
    with pytest.raises(RuntimeError, match="hint: wait for its handle"):
        world.enter(0)


def test_a_weight_that_is_used_again_soon_stays(fetching):
    world = World(fetching, reuse=NUMEL + 1)
    world.forward(0, 1, 0)
    assert world.forward(0, 1, 0) == [[0], [1]]
    assert world.forward(0, 1, 0) == [[0], [1]]
    assert world.there() == []


def test_weights_of_inference_serve_training(fetching):
    world = World(fetching, ahead=100)
    with torch.inference_mode():
        world.forward(0, 1)
        world.forward(0, 1)


# ---- several ranks, which gather alike ----


def test_what_is_gathered_is_noted(fetching):
    world = World(fetching, ahead=NUMEL)
    noted = []
    world.fetcher.gather_order = SimpleNamespace(note=lambda ids: noted.append(list(ids)))
    world.forward(0, 1)
    assert noted == []
    world.lane.num_ranks = 2
    world.forward(0, 1)
    assert noted == world.lane.copied[2:] == [[0], [1]]


@pytest.mark.parametrize("is_collective", [False, True])
@pytest.mark.parametrize("is_behind_step", [False, True])
def test_behind_a_step_ranks_gather_little_ahead(
    fetching, is_behind_step, is_collective, monkeypatch
):
    monkeypatch.setattr(fetching, "_NUMEL_BEHIND_STEP", NUMEL)
    world = World(fetching, ahead=3 * NUMEL)
    assert not world.fetcher.is_behind_step
    world.lane.num_ranks = 2 if is_collective else 1
    world.forward(0, 1, 2, 3)
    world.fetcher.is_behind_step = is_behind_step
    world.fetcher.reset_step()
    little = is_behind_step and is_collective
    assert world.lane.copied[-1] == ([0] if little else [0, 1, 2])
    # The smaller of both.
    world = World(fetching, ahead=1)
    world.lane.num_ranks = 2
    monkeypatch.setattr(fetching, "_NUMEL_BEHIND_STEP", 3 * NUMEL)
    world.forward(0, 1, 2, 3)
    world.fetcher.is_behind_step = is_behind_step
    world.fetcher.reset_step()
    assert world.lane.copied[-1] == [0]


def test_ranks_do_not_gather_by_how_far_each_is(fetching):
    world = World(fetching, ahead=100, live=2 * NUMEL)
    world.lane.num_ranks = 2
    world.fetcher.has_step_ended = lambda: False
    world.forward(0, 1)
    world.params[1].ds_tensor.__class__ = Stepped
    world.lane.copied.clear()
    world.fetcher.reset_step()
    # Neither by what the device still reads nor by a step that is running.
    assert world.lane.copied == [[0, 1]]


def test_an_order_that_ranks_have_parted_from_is_learnt_anew(fetching):
    world = World(fetching, ahead=100, reuse=100)
    world.forward(0, 1, 0)
    world.fetcher.reset_step()
    assert num_elements_live(world.fetcher) == 2 * NUMEL
    world.fetcher.forget_order()
    assert num_elements_live(world.fetcher) == 0
    world.fetcher.reset_step()
    assert len(world.lane.copied) == 4
    world.forward(0, 1, 0)
    world.fetcher.reset_step()
    assert world.lane.copied[-1] == [0, 1]
    world.enter(0)
    world.leave(0)
    assert world.there() == [0]


# ---- backwards ----


def test_a_backward_begins_once_and_ends_once(fetching):
    world = World(fetching)
    module, params = world.modules[0], world.params[:1]
    assert world.fetcher.enter_backward(module, params, "call")
    assert not world.fetcher.enter_backward(module, params, "call")
    assert len(world.fetcher._order._uses) == 1
    assert world.there() == [0]
    for _ in range(2):
        world.fetcher.leave_backward(module, "call")
        assert world.there() == []
    assert world.lane.freed == [0]
    # Another backward of the same graph.
    assert world.fetcher.enter_backward(module, params, "call")
    assert world.there() == [0]


def test_what_is_left_of_a_backward_is_freed_at_its_end(fetching):
    world = World(fetching)
    world.params[2] = world.param(2, ds_persist=True)
    for index in range(3):
        world.fetcher.enter_backward(world.modules[index], [world.params[index]], index)
    world.enter(1, token="a forward")
    world.fetcher.release_backward_leftovers()
    assert world.there() == [1, 2]
    world.fetcher.release_backward_leftovers()
    world.leave(1, token="a forward")
    assert world.there() == [2]
    assert world.fetcher.enter_backward(world.modules[0], world.params[:1], 0)


@pytest.mark.parametrize("is_within", [False, True])
def test_frozen_weights_of_what_is_computed_again_stay(fetching, is_within, monkeypatch):
    world = World(fetching)
    frozen, trained = world.params[1], world.params[2]
    frozen.requires_grad = False
    if is_within:
        world.fetcher.enter_backward(world.modules[3], [world.params[3]], "outer")
        world.fetcher.enter_backward(world.modules[0], [world.params[0]], "call")
    with monkeypatch.context() as patched:
        patched.setattr(fetching, "_backward_id", lambda: 1)
        for index in (1, 2):
            world.enter(index)
            world.leave(index)
    assert trained.ds_id not in world.there()
    assert frozen.ds_id in world.there()
    if is_within:
        # Those of the backward that it was computed for.
        world.fetcher.leave_backward(world.modules[0], "call")
        assert world.there() == [3]
    else:
        world.fetcher.release_backward_leftovers()
        assert world.there() == []


def test_frozen_weights_do_not_stay_behind_a_forward(fetching):
    world = World(fetching)
    world.params[0].requires_grad = False
    world.enter(0)
    world.leave(0)
    assert world.there() == []


def test_what_a_backward_itself_uses_is_not_kept(fetching, monkeypatch):
    world = World(fetching)
    world.params[0].requires_grad = False
    monkeypatch.setattr(fetching, "_backward_id", lambda: 1)
    world.fetcher.enter_backward(world.modules[0], world.params[:1], "call")
    world.fetcher.leave_backward(world.modules[0], "call")
    assert world.there() == []


@pytest.mark.parametrize("ends", ["its own backward", "another begins", "all ends"])
def test_a_forward_that_a_checkpoint_has_left_is_over_with_the_next_node(
    fetching, monkeypatch, ends
):
    world = World(fetching)
    backward = world.fetcher.enter_backward, world.fetcher.leave_backward
    monkeypatch.setattr(fetching, "_backward_id", lambda: 1)
    backward[0](world.modules[1], world.params[1:2], "call")
    # It needs nothing behind the second.
    world.enter(0)
    world.leave(0)
    world.enter(1)
    # One within a forward that is still computed again.
    monkeypatch.setattr(fetching, "_backward_id", lambda: 2)
    backward[0](world.modules[3], world.params[3:4], "inner")
    backward[1](world.modules[3], "inner")
    assert world.there() == [1]
    assert len(world.params[1].ds_active_sub_modules) == 2
    monkeypatch.setattr(fetching, "_backward_id", lambda: 1)
    if ends == "another begins":
        backward[0](world.modules[2], world.params[2:3], "other")
        assert world.params[1].ds_active_sub_modules == {"call"}
        assert world.there() == [1, 2]
        backward[1](world.modules[2], "other")
    if ends != "all ends":
        backward[1](world.modules[1], "call")
    else:
        world.fetcher.release_backward_leftovers()
    assert world.there() == []
    assert not any(param.ds_active_sub_modules for param in world.params)


def test_all_is_freed_whatever_uses_it(fetching):
    world = World(fetching, ahead=NUMEL)
    world.forward(0, 1)
    world.fetcher.reset_step()
    world.fetcher.enter_backward(world.modules[2], world.params[2:3], "call")
    world.enter(3)
    module = SimpleNamespace(parameters=lambda: iter(world.params))
    world.fetcher.release_and_reset_all(module)
    assert world.there() == []
    assert world.lane.finished == 1
    assert num_elements_live(world.fetcher) == num_elements_ahead(world.fetcher) == 0
    assert not any(param.ds_active_sub_modules for param in world.params)
    assert world.fetcher.enter_backward(world.modules[2], world.params[2:3], "call")


# ---- which weights ----


def test_programs_may_call_it_as_they_call_deepspeeds(fetching):
    world = World(fetching)
    module = torch.nn.Module()
    module.ds_id = 7
    module._parameters["weight"] = world.params[0]
    world.fetcher.fetch_sub_module(module, forward=True)
    assert world.there() == [0]
    assert world.params[0].ds_active_sub_modules == {7}
    world.fetcher.release_sub_module(module, forward=True)
    assert world.there() == []
    assert world.fetcher.is_invalid_trace()


def test_weights_of_a_module_are_its_own_and_external_ones_once(fetching):
    linear = torch.nn.Linear(2, 2)
    inner = torch.nn.Linear(2, 2, bias=False)
    linear.inner = inner
    assert all(
        one is other
        for one, other in zip(fetching.params_of(linear), [linear.weight, linear.bias], strict=True)
    )
    assert len(fetching.params_of(inner)) == 1
    assert len(fetching.params_of(torch.nn.Module())) == 0
    linear._external_params = {0: inner.weight, 1: linear.bias}
    found = [id(param) for param in fetching.params_of(linear)]
    assert found == [id(linear.weight), id(linear.bias), id(inner.weight)]
    linear._external_params = {}
    linear._z3_leaf = True
    found = [id(param) for param in fetching.params_of(linear)]
    assert found == [id(linear.weight), id(linear.bias), id(inner.weight)]
