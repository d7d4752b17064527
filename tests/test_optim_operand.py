"""What a step binds is bound again only where something moved, and then always."""

import pytest
import stepwell
import torch
from optim_cases import bits, parameter
from stepwell import _state
from stepwell._operand import Rounding, bind, prepare

ROUNDING = Rounding(seed=0, ordinal=0)


class Case:
    """A parameter with its gradient and its state, and what the last step bound them as."""

    def __init__(self, dtype=torch.bfloat16, *shape):
        self.param = parameter(*(shape or (4, 4)), dtype=dtype)
        self.state = _state.new(self.param, "fp32")
        self.last = None
        self.rounding = ROUNDING
        self.is_exclusive = False

    def prepared(self):
        return prepare(self.param, self.param.grad, self.state, "fp32", lambda: "this", self.last)

    def bound(self):
        operand = self.prepared()
        state = self.state if operand.state is None else operand.state
        return bind(
            operand, state, "fp32", self.rounding, self.last, is_exclusive=self.is_exclusive
        )

    def move(self, how):
        with torch.no_grad():
            getattr(self, how)()

    def param_elsewhere(self):
        self.param.data = self.param.data.clone()

    def param_transposed(self):
        self.param.t_()

    def grad_elsewhere(self):
        self.param.grad = self.param.grad.clone()

    def grad_negated(self):
        self.param.grad = torch._neg_view(self.param.grad)

    def moment_elsewhere(self):
        self.state["exp_avg"].set_(self.state["exp_avg"].clone())

    def moment_replaced(self):
        self.state["exp_avg"] = self.state["exp_avg"].detach()

    def moments_replaced(self):
        self.state.update({name: each.detach() for name, each in self.state.items()})

    def moment_transposed(self):
        self.state["exp_avg"].t_()

    def another_rounding(self):
        self.rounding = Rounding(seed=1, ordinal=0)

    def exclusive(self):
        self.is_exclusive = True


PARAM = ["param_elsewhere", "param_transposed"]
GRAD = ["grad_elsewhere", "grad_negated"]
STATE = ["moment_elsewhere", "moment_replaced", "moments_replaced", "moment_transposed"]


def test_what_stays_is_bound_once():
    case = Case()
    operand = case.prepared()
    assert operand.is_moved
    assert operand.is_grad_moved
    case.last = case.bound()
    assert case.last.has(case.state)
    operand = case.prepared()
    assert not operand.is_moved
    assert not operand.is_grad_moved
    assert operand.grad_view is case.last.grad_view
    assert case.bound() is case.last
    assert case.last.kept() is case.last


@pytest.mark.parametrize("how", [*PARAM, *GRAD, *STATE, "another_rounding", "exclusive"])
def test_what_moved_is_bound_anew(how):
    case = Case()
    case.last = case.bound()
    case.move(how)
    operand = case.prepared()
    assert operand.is_moved == (how in PARAM + STATE)
    assert operand.is_grad_moved == (how in GRAD)
    assert case.bound() is not case.last


def test_a_state_that_is_strided_may_stay_so():
    case = Case()
    case.move("moment_transposed")
    case.last = case.bound().kept()
    assert not case.prepared().is_moved


@pytest.mark.parametrize("numel", [0, 1, 2])
def test_what_has_elements_is_stepped(numel):
    assert (Case(torch.bfloat16, numel).bound().tensor is not None) == (numel > 0)


# ---- by programs ----


def twins(*shape):
    ours, theirs = parameter(*shape), parameter(*shape)
    theirs.data.copy_(ours.data)
    theirs.grad = ours.grad.clone()
    return ours, theirs


@pytest.mark.parametrize("change", ["replaced", "transposed", "dropped"])
def test_state_that_programs_change_is_followed(change):
    """All else stays where it is: nothing but the state can be noticed."""
    ours, theirs = twins(6, 6)
    pairs = (stepwell.AdamW([ours]), ours), (torch.optim.AdamW([theirs]), theirs)
    for optimizer, param in pairs:
        optimizer.step()
        state = optimizer.state[param]
        if change == "replaced":
            kept = dict(state)
            state.update({name: value.clone() for name, value in kept.items()})
            # What the last step has bound is another's by now.
            for value in kept.values():
                value.fill_(100.0)
        elif change == "transposed":
            state["exp_avg"].t_()
        else:
            del optimizer.state[param]
        optimizer.step()
    torch.testing.assert_close(ours, theirs)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(pairs[0][0].state[ours][name], pairs[1][0].state[theirs][name])


@pytest.mark.parametrize("kind", [stepwell.AdamW, stepwell.OffloadAdamW])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_state_that_has_become_something_else_where_it_was_is_refused(kind, change):
    """Steps would write as many elements as there were, of the dtype that they had."""
    param = parameter(6, 6)
    optimizer = kind([param])
    optimizer.step()
    moment = optimizer.state[param]["exp_avg"]
    address = moment.data_ptr()
    flat = moment.data.view(-1)
    moment.data = flat.view(torch.bfloat16)[:36].view(6, 6) if change == "dtype" else flat[:6]
    assert moment.data_ptr() == address
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.step()


@pytest.mark.parametrize("kind", [stepwell.AdamW, stepwell.OffloadAdamW])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_memory_of_state_that_was_freed_is_refused(kind, left):
    param = parameter(64, 64)
    optimizer = kind([param])
    optimizer.step()
    storage = optimizer.state[param]["exp_avg_sq"].untyped_storage()
    storage.resize_(int(storage.nbytes() * left))
    with pytest.raises(ValueError, match=r"`exp_avg_sq` .* its storage was freed, or has fewer"):
        optimizer.step()


@pytest.mark.parametrize("kind", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_memory_of_a_parameter_that_was_freed_is_refused(kind):
    param = parameter(64, 64)
    optimizer = kind([param])
    optimizer.step()
    storage = param.untyped_storage()
    storage.resize_(storage.nbytes() // 2)
    with pytest.raises(ValueError, match=r"but its storage has .* hint: the program has freed it"):
        optimizer.step()


@pytest.mark.parametrize("kind", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_state_that_is_negated_lazily_where_it_was_is_read_as_it_is(kind):
    ours, theirs = twins(6, 6)
    for optimizer, param in ((kind([ours]), ours), (torch.optim.AdamW([theirs]), theirs)):
        optimizer.step()
        moment = optimizer.state[param]["exp_avg"]
        moment.data = torch._neg_view(moment.data)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_parameter_that_is_negated_lazily_is_refused_where_it_is_copied():
    param = parameter(6, 6)
    optimizer = stepwell.OffloadAdamW([param])
    optimizer.step()
    param.data = torch._neg_view(param.data)
    with pytest.raises(ValueError, match=r"negated lazily.* hint: parameter.data = "):
        optimizer.step()
    param.data = param.data.resolve_neg()
    optimizer.step()


def test_a_strided_parameter_that_is_written_between_steps_is_read_anew():
    values = torch.randn(3, 5)
    strided, straight = (torch.nn.Parameter(each) for each in (values.t(), values.t().clone()))
    strided.data = torch.randn(3, 5).t().copy_(values.t())
    optimizers = [stepwell.AdamW([param]) for param in (strided, straight)]
    for param in (strided, straight):
        param.grad = torch.ones(5, 3)
    for step in range(3):
        for optimizer, param in zip(optimizers, (strided, straight), strict=True):
            optimizer.step()
            param.data.add_(step)
    assert torch.equal(bits(strided), bits(straight))


def test_one_element_is_stepped_as_many_are():
    one, many = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(4))
    for param in (one, many):
        param.grad = torch.ones_like(param)
    stepwell.AdamW([one, many]).step()
    assert torch.equal(one, many[:1])
    assert one < 1


class OtherParameter(torch.nn.Parameter):
    pass


def test_a_parameter_of_another_class_is_stepped_as_any():
    ours, theirs = OtherParameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    for param in (ours, theirs):
        param.grad = torch.tensor([1.0, -2.0, 0.0])
        stepwell.AdamW([param]).step()
    assert torch.equal(bits(ours), bits(theirs))
