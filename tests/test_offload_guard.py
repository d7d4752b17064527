"""The guard of parameters under way: what waits, for how long, and what is out of its sight."""

import gc

import pytest
import torch
from offload_landing import SIZE, Landing, old_and_new, parameters_under_way
from stepwell.access.guard import WeightGuard, clear_grads, exposed
from stepwell.access.under_way import UnderWay, as_plain, begin, end
from torch.nn import Parameter


@pytest.fixture(params=[True, False], ids=["submitted", "being submitted"])
def under_way(request):
    yield from parameters_under_way(request.param)


def are_plain(params):
    # By identity: the class of what is under way says that it equals torch.nn.Parameter.
    return all(type(param) is Parameter for param in params)


DESCRIPTIONS = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, p.numel(), len(p)),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), torch.is_complex(p), p.element_size()),
    "place": lambda p: (p.device, p.is_cuda, p.layout, p.stride(), p.is_contiguous(), p.nbytes),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p._version, p.requires_grad_()),
    "grad": lambda p: (p.grad, setattr(p, "grad", torch.ones(SIZE, SIZE)), p.grad),
    "delete grad": lambda p: (setattr(p, "grad", torch.ones(SIZE, SIZE)), delattr(p, "grad")),
    "hooks": lambda p: p.register_hook(lambda grad: grad).remove(),
    "late hooks": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove(),
    "identity": lambda p: (p in {p}, hash(p), isinstance(p, Parameter), isinstance(p, type(p))),
    "type": lambda p: (type(p) == Parameter, type(p) in (torch.Tensor, Parameter), {type(p): 1}),
    "type's name": lambda p: (type(p).__name__, type(p).__module__, issubclass(Parameter, type(p))),
    "modules": lambda p: setattr(torch.nn.Linear(SIZE, SIZE), "weight", p),
    "attributes": lambda p: (setattr(p, "note", 1), p.note, delattr(p, "note")),
}


@pytest.mark.parametrize("describe", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_descriptions_do_not_wait(under_way, describe):
    (param, _), _, uploads, _ = under_way
    describe(param)
    assert not uploads.waits


def test_accesses_wait_for_what_they_touch_only(under_way):
    (param, other), guard, uploads, _ = under_way
    torch.sum(param)
    assert uploads.waits == [1]
    # Each access waits, until a forward has waited.
    torch.sum(param)
    assert uploads.waits == [1, 1]
    assert guard.is_under_way(param)
    torch.stack([param, param, other])
    assert uploads.waits == [1, 1, 3]
    guard.wait([param])
    assert uploads.waits == [1, 1, 3, 1]
    # The step's stream has waited once and for all.
    assert guard.is_under_way(param) == (not uploads.is_last_step)
    assert guard.is_under_way(other)


def test_new_parameters_made_of_one(under_way):
    (param, _), _, uploads, (landed, _) = under_way
    made = type(param)(torch.ones(2), requires_grad=False)
    assert type(made) is Parameter
    assert not made.requires_grad
    if uploads.is_last_step:
        other = Parameter(param, requires_grad=False)
        assert type(other) is Parameter
        assert torch.equal(other, landed)
        assert not other.requires_grad
        assert other.data_ptr() == param.data_ptr()


def test_swapped_tensors(under_way):
    (param, _), guard, _, (landed, _) = under_way
    other = Parameter(torch.zeros(SIZE, SIZE))
    param.grad = None
    # Neither may be referred to by anything else.
    torch.utils.swap_tensors(param, other)
    assert torch.equal(other, landed)
    assert torch.equal(param, torch.zeros(SIZE, SIZE))
    guard.finish()
    assert torch.equal(other, landed)
    assert torch.equal(param, torch.zeros(SIZE, SIZE))
    guard.clear(guard.num_steps)
    assert type(other) is type(param) is Parameter


def test_the_class_passes_for_that_of_parameters(under_way):
    (param, other), _, uploads, _ = under_way
    kind = type(param)
    assert kind == Parameter == type(other) == kind
    assert kind != torch.Tensor
    assert hash(kind) == hash(Parameter)
    assert issubclass(Parameter, kind)
    assert not issubclass(torch.Tensor, kind)
    assert isinstance(Parameter(torch.ones(1)), kind)
    assert not isinstance(torch.ones(1), kind)
    # Methods and attributes that are looked up on it.
    assert (kind.norm, kind.real) == (Parameter.norm, Parameter.real)
    assert not uploads.waits


def test_what_a_parameter_says_that_its_class_is_makes_plain_ones(under_way):
    (param, _), _, _, _ = under_way
    kind = param.__class__
    made = kind(torch.ones(2), requires_grad=False)
    assert type(made) is Parameter
    assert isinstance(made, kind)
    assert not made.requires_grad


def test_attributes_that_came_later_wait(under_way, monkeypatch):
    (param, _), _, uploads, (landed, _) = under_way
    monkeypatch.setattr(torch.Tensor, "twice", lambda self: 2 * self, raising=False)
    assert torch.equal(param.twice(), 2 * landed)
    assert uploads.waits
    with pytest.raises(AttributeError, match="has no attribute 'thrice'"):
        param.thrice()


def test_a_gradient_that_is_deleted_is_gone(under_way):
    (param, _), _, _, _ = under_way
    param.grad = torch.ones(SIZE, SIZE)
    assert param.grad is not None
    del param.grad
    assert param.grad is None


def test_attributes_that_are_the_weight_are_written(under_way):
    (param, _), _, uploads, _ = under_way
    with torch.no_grad():
        param.real = torch.full((SIZE, SIZE), 3.0)
    assert uploads.waits
    assert torch.equal(param.detach(), torch.full((SIZE, SIZE), 3.0))


def test_a_class_that_a_program_gives_stays(under_way):
    class Special(Parameter):
        pass

    (param, other), guard, uploads, _ = under_way
    param.__class__ = Special
    assert uploads.waits == [1]
    assert type(param) is Special
    guard.clear(guard.num_steps)
    assert type(param) is Special
    assert type(other) is Parameter
    param.__class__ = Parameter


def test_what_lands_while_accesses_do_not_wait_is_plain_behind_it():
    params, _ = old_and_new()
    guard = WeightGuard(Landing())
    guard.protect(params)
    with as_plain(params):
        assert are_plain(params)
    assert not any(type(param) is Parameter for param in params)
    with as_plain(params):
        guard.clear(guard.num_steps)
    assert are_plain(params)


class Calls:
    """A guard that notes its calls."""

    was_compiled = False

    def __init__(self):
        self.seen = []

    def wait(self, params, /):
        self.seen.append(("wait", len(params)))

    def wait_and_keep(self, params, /):
        self.seen.append(("keep", len(params)))

    def finish(self):
        self.seen.append("finish")


def test_where_the_guard_is_gone_the_whole_step_is_waited_for():
    (param, other), _ = old_and_new()
    gone, guard, finished = Calls(), Calls(), []
    begin([param], gone, lambda: finished.append("all"))
    begin([other], guard, lambda: finished.append("another"))
    del gone
    param.sum()
    assert finished == ["all"]
    assert type(param) is Parameter
    end(param)
    # Whose it is cannot be told: all guards finish, also what they have deferred.
    assert guard.seen == [("wait", 0), "finish"]
    assert type(other) is UnderWay
    end(other)


def test_a_look_sees_what_is_deferred_and_known_to_be_good():
    """A forward in training does not: it waits for weights alone."""
    (param, _), _ = old_and_new()
    seen = []

    class Owner:
        def settle(self):
            seen.append("settle")

        def confirm(self):
            seen.append("confirm")

    class Noting(Landing):
        def wait(self, params, /):
            seen.append("wait")
            return super().wait(params)

    owner = Owner()
    guard = WeightGuard(Noting(), owner.settle, owner.confirm)
    guard.protect([param])
    for look in (lambda: param.sum(), lambda: guard.wait_and_keep([param])):
        look()
        assert seen == ["settle", "confirm", "wait"]
        seen.clear()
    guard.enter([param])
    assert seen == ["wait"]
    seen.clear()
    guard.protect([param])
    guard.wait([param])
    assert seen == ["settle", "confirm", "wait"]
    assert type(param) is Parameter
    del owner
    guard.protect([param])
    param.sum()
    assert seen == ["settle", "confirm", "wait", "wait"]
    guard.clear(guard.num_steps)


def test_a_guard_that_goes_leaves_plain_parameters():
    (param, _), (new, _) = old_and_new()
    uploads = Landing()
    uploads.send([param], [new])
    guard = WeightGuard(uploads)
    guard.protect([param])
    assert type(param) is not Parameter
    del guard
    gc.collect()
    assert type(param) is Parameter
    assert torch.equal(param, new)


def test_failed_uploads_are_told_at_the_access_and_again():
    (param, _), _ = old_and_new()

    class Failing(Landing):
        def wait(self, params, /):
            raise OSError("the device is gone")

    guard = WeightGuard(Failing())
    guard.protect([param])
    for _ in range(2):
        with pytest.raises(OSError, match="the device is gone"):
            param.sum()
    guard.clear(guard.num_steps)


def test_a_wait_ends_the_protection_of_its_own_step_only():
    (param, _), _ = old_and_new()

    class SteppedMeanwhile(Landing):
        def wait(self, params, /):
            # Another thread submits the next step while this one waits.
            guard.protect([param])
            return super().wait(params)

    guard = WeightGuard(SteppedMeanwhile())
    guard.protect([param])
    guard.wait([param])
    assert guard.is_under_way(param)
    step = guard.num_steps
    guard.protect([param])
    guard.clear(step)
    assert guard.is_under_way(param)
    guard.clear(guard.num_steps)
    assert type(param) is Parameter


def test_many_are_waited_for_by_one_call():
    params, _ = old_and_new(9)
    uploads = Landing()
    guard = WeightGuard(uploads)
    guard.protect(params)
    guard.wait(params)
    assert uploads.waits == [len(params)]
    assert are_plain(params)
    params[0].sum()
    guard.wait(params)
    assert uploads.waits == [len(params)]


# ---- what is reached beside a guard ----


ALIASES = {
    "view": lambda p: p.view(-1),
    "data": lambda p: p.data,
    "numpy": lambda p: p.detach().numpy(),
    "storage": lambda p: p.untyped_storage(),
    "state dict": lambda p: torch.nn.ParameterList([p]).state_dict(),
    "dlpack": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    "graph": lambda p: p.t() @ p,
    "another parameter": lambda p: Parameter(p.data),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_memory_that_others_hold_is_exposed(alias):
    params, _ = old_and_new()
    assert exposed(params, params) == []
    held = alias(params[1])
    (found,) = exposed(params, params)
    assert found is params[1]
    del held
    assert exposed(params, params) == []


def test_gradients_and_finished_graphs_are_no_aliases():
    params, _ = old_and_new()
    loss = (params[0].t() @ params[1]).sum()
    loss.backward()
    assert exposed(params, params) == []


def test_known_holders_of_one_buffer_are_no_aliases():
    buffer = torch.zeros(2 * SIZE)
    params = [Parameter(buffer[:SIZE]), Parameter(buffer[SIZE:])]
    assert len(exposed(params, params)) == 2
    assert exposed(params, [*params, buffer]) == []
    held = params[0].data
    assert len(exposed(params, [*params, buffer])) == 2
    assert exposed(params, [*params, buffer, held]) == []


def test_other_classes_are_exposed_and_left_alone():
    class Special(Parameter):
        pass

    params = [Special(torch.ones(2)), torch.ones(2, requires_grad=True)]
    assert len(exposed(params, params)) == 2
    guard = WeightGuard(Landing())
    guard.protect(params)
    assert [type(param) for param in params] == [Special, torch.Tensor]
    assert not guard.any_under_way


def test_finish_lands_all_and_ends_their_protection():
    params, new = old_and_new()
    uploads = Landing()
    uploads.send(params, new)
    guard = WeightGuard(uploads)
    guard.protect(params)
    guard.finish()
    assert are_plain(params)
    assert not guard.any_under_way
    assert all(map(torch.equal, params, new))


def test_a_storage_that_is_held_has_one_more_reference():
    params, _ = old_and_new(2)
    first, second = params
    storage = first.untyped_storage()
    assert exposed(params, params) == [first]
    assert exposed(params, params, held={id(first)}) == []
    # What is said to be held, and is not, is looked at from elsewhere or was given other memory.
    assert exposed(params, params, held={id(first), id(second)}) == [second]
    view = first.data
    assert exposed(params, [*params, view], held={id(first)}) == []
    assert exposed(params, [*params, view]) == [first]
    del storage, view
    assert exposed(params, params) == []


def test_gradients_are_cleared_without_a_wait():
    params, _ = old_and_new()
    uploads = Landing()
    guard = WeightGuard(uploads)
    for param in params:
        param.grad = torch.ones(SIZE, SIZE)
    guard.protect(params)
    clear_grads(params)
    assert [param.grad for param in params] == [None, None]
    assert uploads.waits == []
    guard.clear(guard.num_steps)
