"""What a gate waits for, call by call: over uploads and an optimizer that note what is called."""

import copy
import pickle
import threading

import pytest
import torch
from offload_landing import Landing
from stepwell.access.gate import Gate
from stepwell.offload import forwards as forwards_module
from stepwell.offload.forwards import Forwards
from torch import nn

SETTLE_AND_WAIT = ["settle", "confirm", ("wait", 2)]


class Owner:
    """What an optimizer is to its gate."""

    def __init__(self):
        self.calls = []
        self.pending_params = False

    def release(self):
        self.calls.append("release")

    def settle(self):
        self.calls.append("settle")

    def confirm(self):
        self.calls.append("confirm")

    def has_pending(self):
        return self.pending_params


class Noting(Landing):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def wait(self, params, /):
        params = list(params)
        if params:
            self.calls.append(("wait", len(params)))
        return super().wait(params)

    def finish(self):
        self.calls.append("finish")
        super().finish()


class Gated:
    """A model under a gate. Of each layer a forward has shown that it is called."""

    def __init__(self, net=None, shown=True, **options):
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) if net is None else net
        self.params = list(self.net.parameters())
        self.owner = owner = Owner()
        options = {"confirm": owner.confirm, "has_pending": owner.has_pending, **options}
        uploads = Noting(owner.calls)
        self.gate = Gate(self.params, uploads, owner.release, owner.settle, **options)
        if shown:
            self.forward()

    def forward(self, net=None):
        (self.net if net is None else net)(torch.ones(1, 3))

    def step(self, exposed=()):
        self.gate.open(self.params, exposed)
        self.gate.wait_for_uncovered()
        return self.calls()

    def calls(self):
        """Those since the last time."""
        found, self.owner.calls[:] = list(self.owner.calls), []
        return found


def test_a_step_waits_for_what_no_forward_waits_for():
    model = Gated(shown=False)
    assert model.step() == ["confirm", ("wait", 4)]
    model.forward(model.net[1])
    assert model.step() == ["confirm", ("wait", 2)]
    model.forward()
    assert model.calls() == [("wait", 2)]
    # Now both are known; but of one parameter others have the memory.
    assert model.step(exposed=[model.params[3]]) == ["confirm", ("wait", 1)]
    model.forward()
    assert model.calls() == [("wait", 2), ("wait", 1)]
    assert model.step() == []
    model.forward()
    model.forward()
    assert model.calls() == [("wait", 2), ("wait", 2)]


def test_forwards_before_the_gate_are_noted_for_it(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other = nn.Linear(3, 3)
    forwards = Forwards(net.parameters(), [net[0]])
    model = nn.Sequential(copy.deepcopy(net), other)
    for each in (model, pickle.loads(pickle.dumps(net))):
        each(torch.ones(1, 3))
    with monkeypatch.context() as traced:
        traced.setattr(torch._C, "_is_tracing", lambda: True)
        net[1](torch.ones(1, 3))
    net[1].eval()
    net[1](torch.ones(1, 3))
    called = forwards.end()
    assert called == [net[0]]
    gated = Gated(net, shown=False, called=[*called, other])
    assert gated.gate.called == called
    assert gated.step() == ["confirm", ("wait", 2)]
    gated.forward(net[0])
    assert gated.calls() == [("wait", 2)]

    # They end with the gate, and where it hands on what it has seen.
    forwards = Forwards(net.parameters(), gated.gate.called)
    net[1].train()
    net[1](torch.ones(1, 3))
    assert set(forwards.end()) == {net[0], net[1]}
    assert all(len(each._forward_pre_hooks) == 1 for each in net)
    forwards = Forwards(net.parameters())
    assert all(len(each._forward_pre_hooks) == 2 for each in net)
    del forwards
    assert all(len(each._forward_pre_hooks) == 1 for each in net)


def test_forwards_of_compiled_code_are_not_noted(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 3))
    forwards = Forwards(net.parameters())
    forwards.note_trace()
    monkeypatch.setattr(forwards_module, "something_is_compiled", lambda: True)
    # Without its hook the code would be compiled again.
    assert forwards.end() == []
    del forwards
    assert len(net[0]._forward_pre_hooks) == 1
    net(torch.ones(1, 3))
    assert Forwards(net.parameters()).end() == []
    assert len(net[0]._forward_pre_hooks) == 1
    monkeypatch.undo()
    net.compile()
    assert Forwards(net.parameters()).end() == []
    assert len(net[0]._forward_pre_hooks) == 1


def test_evaluation_waits_for_all_updates_and_training_for_weights_alone():
    model = Gated()
    model.step()
    model.net.eval()
    model.forward()
    assert model.calls()[:3] == ["settle", "confirm", ("wait", 4)]
    # Nothing is under way any more.
    model.forward(model.net[1])
    assert model.calls() == ["settle"]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_part_in_evaluation_mode_reads_what_the_other_parts_have_read(is_trained):
    model = Gated()
    model.net[1].eval()
    model.step()
    with torch.set_grad_enabled(is_trained):
        model.forward()
    expected = [("wait", 2)] if is_trained else SETTLE_AND_WAIT
    assert model.calls() == [("wait", 2), *expected]
    # By itself, behind a step of which no forward in training has read a weight.
    model.step()
    model.forward(model.net[1])
    assert model.calls() == SETTLE_AND_WAIT
    # As a part of nothing that trains.
    model.forward(model.net[0])
    model.net.eval()
    model.forward(model.net[1])
    assert model.calls() == [("wait", 2), "settle"]


def test_a_module_that_is_gone_trains_no_more():
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    outer = nn.Sequential(inner)
    model = Gated(inner)
    del outer
    model.step()
    model.forward(inner[0])
    inner.eval()
    model.forward(inner[1])
    assert model.calls() == [("wait", 2), *SETTLE_AND_WAIT]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_forward_ends_a_step_that_was_interrupted(shown, is_training):
    model = Gated(shown=shown)
    model.gate.open(model.params)
    model.net.train(is_training)
    model.forward()
    found = model.calls()
    assert found[: 1 if shown else 3] == (
        ["release"] if shown else ["release", "confirm", ("wait", 4)]
    )
    assert found.count("release") == 1
    # The next step, whose optimizer goes before it has ended.
    model.gate.open(model.params)
    calls = model.owner.calls
    model.owner = None
    model.forward()
    assert "release" not in calls
    assert not model.gate.guard.any_under_way


def test_another_thread_only_waits_while_a_step_goes_on():
    model = Gated()
    model.gate.open(model.params, exposed=model.params[:1])
    thread = threading.Thread(target=model.forward)
    thread.start()
    thread.join(60)
    assert model.calls() == ["confirm", ("wait", 1), ("wait", 1), ("wait", 2)]


def test_arrived_weights_end_the_step_that_they_are_of():
    model = Gated()
    model.gate.open(model.params, exposed=model.params)
    old, now = model.gate.guard.num_steps - 1, model.gate.guard.num_steps
    model.gate.clear(old)
    assert model.gate.uncovered == model.params
    model.gate.clear(now)
    assert model.gate.uncovered == []
    model.forward()
    assert model.calls() == []
    model.gate.open(model.params, exposed=model.params)
    model.gate.finish()
    assert model.gate.uncovered == []


def test_a_closed_gate_waits_no_more_but_state_dicts_see_all_updates():
    model = Gated()
    model.step()
    model.gate.close()
    assert model.calls() == ["settle", "finish"]
    assert not model.gate.is_open
    model.net.state_dict()
    assert set(model.calls()) == {"settle"}
    # The guard waits, at the first access.
    model.gate.guard.protect(model.params)
    model.forward()
    assert model.calls()[0] == "settle"


def test_a_state_dict_waits_for_all_at_once():
    model = Gated()
    model.step()
    model.net.state_dict()
    assert [call for call in model.calls() if call != "settle"] == ["confirm", ("wait", 4)]
    model.net.load_state_dict(model.net.state_dict())
    assert set(model.calls()) == {"settle"}


def test_a_gate_that_closes_in_a_forward_leaves_what_is_deferred():
    """Of the weights that are still to be used those that have landed are read."""
    model = Gated()
    model.step()
    model.forward(model.net[0])
    model.calls()
    with torch.no_grad():
        model.gate.close()
    assert model.calls() == ["settle", "finish"]
    model = Gated()
    model.step()
    model.forward(model.net[0])
    model.calls()
    model.gate.close()
    assert model.calls() == ["finish"]


def test_a_gate_closes_where_an_access_was_compiled():
    model = Gated()
    model.gate.guard.was_compiled = True
    model.gate.open(model.params)
    assert not model.gate.is_open
    assert not model.gate.guard.any_under_way


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_training", [True, False])
def test_a_forward_that_is_traced_closes_the_gate(is_training):
    """Within a forward in training it reads what has landed."""
    model = Gated()
    model.step()
    model.forward(model.net[0])
    model.net.train(is_training)
    # A trace of a function takes them for constants; one of the module would look at them first.
    model.net.requires_grad_(requires_grad=False)
    torch.jit.trace(lambda x: model.net(x), torch.ones(1, 3), check_trace=False)
    assert not model.gate.is_open
    assert not model.gate.guard.any_under_way
    assert ("settle" in model.calls()) == (not is_training)


@pytest.mark.parametrize("is_capturing", [True, False])
def test_a_forward_on_a_stream_that_captures(is_capturing, monkeypatch):
    model = Gated()
    model.step()
    model.gate.is_on_cuda = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    if is_capturing:
        with pytest.raises(ValueError, match="captured while new weights"):
            model.forward()
    else:
        model.forward()
        assert model.calls() == [("wait", 2), ("wait", 2)]


def test_a_capture_waits_for_no_weight():
    model = Gated()
    model.step()
    with pytest.raises(ValueError, match="captured while new weights"):
        model.gate.capture()
    model.forward()
    model.owner.pending_params = True
    with pytest.raises(ValueError, match="captured while new weights"):
        model.gate.capture()
    assert model.gate.is_open
    model.owner.pending_params = False
    model.gate.capture()
    assert not model.gate.is_open
    # Where none is ever deferred, and where the optimizer is gone.
    Gated(has_pending=None).gate.capture()
    model = Gated()
    model.owner.pending_params, model.owner = True, None
    model.gate.capture()
    assert not model.gate.is_open


def test_hooks_are_on_what_leads_to_a_parameter():
    inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    inner.register_module("nothing", None)
    net = nn.Sequential(inner, nn.Linear(3, 3))
    gate = Gate(list(inner.parameters()), Landing())
    assert gate.is_open
    hooked = {module for module in net.modules() if module._forward_pre_hooks}
    assert hooked == {net, inner, inner[0], inner[2]}


class Shares(nn.Module):
    """Computes with the weight of a layer that it does not call, and holds twice."""

    def __init__(self, layer):
        super().__init__()
        self.held, self.again = nn.ModuleList([layer]), nn.ModuleList([layer])

    def forward(self, x):
        return x @ self.held[0].weight


def test_each_user_of_a_weight_waits_for_it():
    layer = nn.Linear(3, 3, bias=False)
    one, two = Shares(layer), Shares(layer)
    model = Gated(nn.Sequential(one, two))
    for first in (one, two):
        assert model.step() == []
        model.forward(first)
        assert model.calls() == [("wait", 1)]
        model.forward()
        assert model.calls() == []


def test_what_is_beneath_is_waited_for_at_once_up_to_a_limit():
    """A module that no forward calls is passed by, and one within two others waits by itself."""
    layers = [nn.Linear(3, 3) for _ in range(4)]
    shared = nn.Sequential(layers[3])
    inner = nn.Sequential(nn.Sequential(layers[0], layers[1]), layers[2])
    net = nn.Sequential(inner, shared, nn.Sequential(shared))
    nbytes = sum(param.nbytes for param in layers[0].parameters())
    for limit, expected in (
        (2 * nbytes - 1, [2, 2, 2, 2]),
        (2 * nbytes, [4, 2, 2]),
        (3 * nbytes, [6, 2]),
        (9 * nbytes, [6, 2]),
    ):
        model = Gated(net, wait_bytes_max=limit)
        assert model.step() == []
        model.forward()
        assert model.calls() == [("wait", count) for count in expected], limit


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_script_of_a_gated_module_says_what_to_do():
    model = Gated()
    with pytest.raises((RuntimeError, AttributeError), match="before the first step"):
        torch.jit.script(model.net)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_gate_over_a_script_is_closed_before_it_runs(caplog):
    net = torch.jit.script(nn.Linear(3, 3))
    with caplog.at_level("INFO", logger="stepwell"):
        assert not Gate(list(net.parameters()), Landing()).is_open
    assert "is compiled" in caplog.text
