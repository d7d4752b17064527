"""Small parts of ZeRO on the offload engine, each by itself, without DeepSpeed."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from stepwell.deepspeed.zero import gathers
from stepwell.deepspeed.zero.backward import Backward
from stepwell.deepspeed.zero.exposure import Exposure
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.gathers import GatheredPersistents, GatheredWeights
from stepwell.deepspeed.zero.persistent import PersistentUploads, Upload
from stepwell.deepspeed.zero.prefetch import bound_prefetch, is_little_ahead

# ---- backwards that fail ----


@pytest.mark.parametrize("begin", [Backward.announce, Backward.begin])
def test_a_backward_that_has_not_ended_is_known(begin):
    backward = Backward()
    assert not backward.is_unended
    begin(backward)
    assert backward.is_unended
    backward.note_gradient()
    backward.end()
    assert not backward.is_unended
    backward.announce()
    backward.check()


@pytest.mark.parametrize("use", [Backward.announce, Backward.check])
def test_gradients_of_a_failed_backward_are_refused(use):
    backward = Backward()
    backward.announce()
    backward.note_gradient()
    with pytest.raises(ValueError, match="a backward has not ended"):
        use(backward)
    # Also those of a backward that was not announced.
    backward.note_forward()
    backward.begin()
    with pytest.raises(ValueError, match="a backward has not ended"):
        backward.note_gradient()
    backward.reset()
    assert not backward.is_unended
    use(backward)
    backward.begin()
    backward.note_gradient()
    backward.end()
    use(backward)


class NoTimers:
    """DeepSpeed's, of which none was made."""

    @staticmethod
    def get_timers():
        return {}


def test_a_step_that_was_left_is_told_with_what_came_meanwhile():
    backward, settled = Backward(), []

    def leave(drop, settle=lambda: settled.append("settled")):
        backward.leave_step(settle, drop, NoTimers)

    def interrupt():
        raise KeyboardInterrupt

    def fail():
        # As where a part of them is dropped behind this.
        backward.reset()
        raise OSError("a copy is lost")

    backward.has_left_step = True
    with pytest.raises(ValueError, match=r"dropped: another exception came meanwhile. hint: "):
        backward.check()
    # A second Ctrl-C ends the wait for the step, and is raised; so is one that ends the drop.
    for calls in ([backward.reset, interrupt], [interrupt]):
        with pytest.raises(KeyboardInterrupt):
            leave(*calls)
        with pytest.raises(ValueError, match=r"dropped: another exception came meanwhile. hint: "):
            backward.check()
    assert settled == ["settled"]
    leave(fail)
    with pytest.raises(ValueError, match=r"dropped: `OSError: a copy is lost`. hint: "):
        backward.check()
    leave(backward.reset)
    backward.check()


def test_a_forward_within_a_backward_is_no_failure():
    backward = Backward()
    backward.announce()
    weight = torch.ones(1, requires_grad=True)
    output = weight * 2

    def compute_again(grad):
        backward.note_gradient()
        backward.note_forward()
        backward.note_gradient()

    output.register_hook(compute_again)
    output.backward()
    backward.end()
    backward.check()


# ---- what is gathered ahead ----

SIZE = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"


def coordinator(**fields):
    made = SimpleNamespace()
    vars(made).update(fields)
    return made


def test_a_coordinator_prefetches_while_it_may():
    known, may_prefetch = coordinator(**{SIZE: 5, IN_FLIGHT: []}), []
    bound_prefetch(known, lambda: bool(may_prefetch))
    size = vars(known)[SIZE]
    assert size == 5
    for allowed in (False, True):
        assert (size > 4) is allowed
        assert not size > 5
        may_prefetch.append(True)
    for fields in ({}, {SIZE: 5}):
        other = coordinator(**fields)
        bound_prefetch(other, lambda: True)
        assert type(vars(other).get(SIZE)) is not type(size)


@pytest.mark.parametrize(("sizes", "is_little"), [([], True), ([2, 2], True), ([2, 3], False)])
def test_less_than_a_bucket_is_little(sizes, is_little):
    in_flight = [SimpleNamespace(ds_numel=each) for each in sizes]
    assert is_little_ahead(coordinator(**{SIZE: 5, IN_FLIGHT: in_flight})) is is_little


# ---- persistent weights, one rank ----


class Steps:
    """Of partitions: which fragments are waited for."""

    def __init__(self):
        self.waited, self.finished = [], 0
        self.is_last_step = True

    def wait_for(self, fragments):
        self.waited += fragments
        return self.is_last_step

    def finish(self):
        self.finished += 1


def uploads_of(count):
    """Weights of two elements, which go up."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
    return {
        param: Upload(Fragment(0, 2 * at, 2), torch.full((2,), at + 1.0), torch.zeros(2))
        for at, param in enumerate(params)
    }


def test_a_persistent_weight_goes_up_once_it_is_waited_for():
    steps = Steps()
    lane = PersistentUploads(steps, torch.device("cpu"))
    uploads = uploads_of(3)
    lane.expect(uploads)
    first, second, third = uploads.values()
    params = list(uploads)
    unknown = torch.nn.Parameter(torch.zeros(2))
    assert lane.wait([params[1], unknown]) is True
    assert steps.waited == [second.fragment]
    assert [each.target.tolist() for each in uploads.values()] == [[0, 0], [2, 2], [0, 0]]
    # What a program writes from now on stays.
    second.target.fill_(7.0)
    lane.wait(params[1:2])
    assert steps.waited == [second.fragment]
    lane.finish()
    assert steps.finished == 1
    assert steps.waited == [second.fragment, first.fragment, third.fragment]
    assert [each.target.tolist() for each in uploads.values()] == [[1, 1], [7, 7], [3, 3]]


def test_while_a_step_is_submitted_nothing_goes_up():
    steps = Steps()
    lane = PersistentUploads(steps, torch.device("cpu"))
    uploads = uploads_of(1)
    lane.expect(uploads)
    (param,), (upload,) = uploads, uploads.values()
    steps.is_last_step = False
    assert lane.wait([param]) is False
    assert not upload.target.any()
    assert lane.wait([]) is False
    steps.is_last_step = True
    assert lane.wait([param]) is True
    assert upload.target.tolist() == [1, 1]
    assert lane.wait([]) is True


# ---- weights of several ranks ----


class Gathered:
    """Of partitions: what they gather with, which notes what it is asked for."""

    def __init__(self):
        self.noted = []
        self.engine = SimpleNamespace(is_last_step=True, seconds_waited=0.5, streams={1, 3})

    def gather(self, peers):
        self.noted.append(peers)
        return self

    def wait(self, weights, streams):
        self.noted.append((list(weights), streams))

    def submission(self, pieces, places):
        return pieces, places

    def confirm(self):
        self.noted.append("confirmed")

    def finish(self):
        self.noted.append("finished")


def peers_of(world_size, rank):
    return SimpleNamespace(world_size=world_size, rank=rank)


def test_weights_of_several_ranks_are_waited_for(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(gathers.time, "perf_counter", lambda: float(next(clock)))
    partitions, peers = Gathered(), peers_of(2, 1)
    found = GatheredPersistents(partitions, peers)
    weights = [torch.zeros(1), torch.zeros(1)]
    assert found.wait(weights) is True
    assert partitions.noted == [peers, ([id(each) for each in weights], {1, 3})]
    partitions.engine.is_last_step = False
    assert found.wait([]) is False
    assert partitions.engine.seconds_waited == 0.5 + 2
    partitions.noted.clear()
    found.confirm()
    found.finish()
    assert partitions.noted == ["confirmed", "finished"]


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


# ---- weights that are reached past the guard ----


def grouped():
    """Two groups, each with two parameters on one memory."""
    flats = [torch.zeros(4), torch.zeros(4)]
    params = [[torch.nn.Parameter(each) for each in flat.split(2)] for flat in flats]
    return flats, params, Exposure(flats)


def test_weights_are_exposed_while_a_view_lives():
    flats, params, exposure = grouped()

    def found():
        return list(map(id, exposure.exposed(flats, params)))

    assert found() == []
    view = flats[1][:1]
    assert found() == list(map(id, params[1]))
    del view
    assert found() == []
    storage = flats[0].untyped_storage()
    assert found() == list(map(id, params[0]))
    del storage
    assert found() == []


def test_weights_of_a_type_of_its_own_are_exposed():
    class Tensor(torch.nn.Parameter):
        pass

    flats, params, exposure = grouped()
    params[1][0].__class__ = Tensor
    assert list(map(id, exposure.exposed(flats, params))) == [id(params[1][0])]


def test_what_holds_less_than_before_is_the_new_least():
    flats, params, _ = grouped()
    view = flats[0][:1]
    exposure = Exposure(flats)
    assert exposure.exposed(flats, params) == []
    del view
    assert exposure.exposed(flats, params) == []
    kept = [flats[0][:1]]
    for _ in kept * 2:
        assert list(map(id, exposure.exposed(flats, params))) == list(map(id, params[0]))
