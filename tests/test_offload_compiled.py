"""Models that torch.compile has compiled, whole or layer by layer, under gate="module".

Where `without_guard` is used the gate is looked at alone, as in `test_offload_gate`: the guard
would make up for what it does not wait for.
"""

import copy
import gc
import pickle
import sys
import types

import pytest
import stepwell
import torch
from offload_cases import WIDTH, Net, batch, reversed_params, train_step
from offload_landing import Landing
from optim_cases import bits
from stepwell.access.compiled_calls import CompiledCall
from stepwell.access.gate import Gate
from stepwell.offload.forwards import Forwards
from torch import nn

STEPS = 6

# torch.compile looks at `.grad` of what a layer is called with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def without_guard(monkeypatch):
    monkeypatch.setattr("stepwell.access.under_way.UnderWay", nn.Parameter)


def nothing_is_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def compiler():
    nothing_is_compiled()
    yield
    nothing_is_compiled()


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("utils", "is_open"),
    [
        # Compiled code that was traced before there were hooks would not call them.
        (types.SimpleNamespace(counters={"stats": {"unique_graphs": 1}}), False),
        # What is imported is not used.
        (types.SimpleNamespace(counters={"stats": {}}), True),
        (None, True),
    ],
    ids=["used", "imported", "not imported"],
)
def test_what_torch_compile_has_traced_closes_the_gate(utils, is_open, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    net = Net(1 << 16)
    assert Gate(net.parameters(), Landing()).is_open == is_open


# ---- which code is compiled, and when ----


def compiled_run(gate, backend, how):
    torch.manual_seed(0)
    net = call = Net(1 << 20)
    if how == "before":
        call = torch.compile(net, backend=backend)
    elif how.startswith("in place"):
        net.compile(backend=backend)
    elif how.startswith("submodule before"):
        net.first.compile(backend=backend)
    elif how == "submodule wrapped":
        net.first = torch.compile(net.first, backend=backend)
    optimizer = stepwell.OffloadAdamW(reversed_params(net), lr=1e-2, threads=1, gate=gate)
    losses = []
    for step in range(STEPS):
        if how == "used before":
            torch.compile(net, backend=backend)(batch(step, width=WIDTH))
        if step == 3:
            if how == "after":
                call = torch.compile(net, backend=backend)
            elif how in ("after, in place", "in place, twice", "submodule before, whole after"):
                net.compile(backend=backend)
            elif how == "submodule after":
                net.first.compile(backend=backend)
            elif how == "function":
                call = torch.compile(lambda x: net(x) * 2, backend=backend)
        losses.append(train_step(call, optimizer, step))
    optimizer.synchronize()
    return optimizer, losses, [bits(param) for param in net.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("how", "is_open"),
    [
        ("before", True),
        ("in place", True),
        ("submodule before", True),
        ("submodule wrapped", True),
        # What is gone may not be collected yet.
        ("used before", None),
        ("after", False),
        ("after, in place", False),
        ("in place, twice", None),
        ("submodule after", False),
        ("submodule before, whole after", False),
        ("function", False),
    ],
)
def test_compiled_code_never_sees_stale_weights(compiler, request, how, is_open, backend):
    if how != "in place, twice":
        request.getfixturevalue("without_guard")
    optimizer, losses, params = compiled_run("module", backend, how)
    assert is_open is None or optimizer._gate.is_open == is_open
    if is_open:
        # The forward waits for all, and nothing is compiled again.
        assert optimizer._gate.uncovered == []
        # torch 2.11 leaves a linear layer as it is.
        assert num_graphs() <= 1
    torch._dynamo.reset()
    _, expected_losses, expected = compiled_run("step", backend, how)
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


# ---- layers that are compiled ----


def is_before(module):
    """Whether something is called before the compiled call of a module."""
    return any(
        isinstance(module.__dict__.get(name), CompiledCall)
        for name in ("_compiled_call_impl", "forward")
    )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers(how, backend="aot_eager", count=3):
    """A model whose layers, but not the last linear one, are compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(count)), nn.Linear(WIDTH, 3))
    for index in range(count):
        if how == "in place":
            model[index].compile(backend=backend)
        elif how == "wrapped":
            model[index] = torch.compile(model[index], backend=backend)
    return model


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_layer_waits_for_what_is_within_it(compiler, how):
    model = layers(how, "eager")
    uploads = Landing()
    gate = Gate(model.parameters(), uploads)
    model(batch(0, width=WIDTH))
    compiled = num_graphs()
    for _ in range(2):
        gate.open(model.parameters())
        assert gate.uncovered == []
        gate.wait_for_uncovered()
        uploads.waits.clear()
        model(batch(0, width=WIDTH))
        assert [count for count in uploads.waits if count] == [4, 4, 4, 2]
    assert gate.is_open and num_graphs() == compiled
    # Evaluation waits for everything at once.
    gate.open(model.parameters())
    uploads.waits.clear()
    model.eval()(batch(0, width=WIDTH))
    assert next(count for count in uploads.waits if count) == 14
    # So does a state dict of a part of compiled code.
    gate.open(model.parameters())
    uploads.waits.clear()
    inner = model[0]._orig_mod if how == "wrapped" else model[0]
    inner.norm.state_dict()
    assert [count for count in uploads.waits if count] == [2]


def trained(how, deferred):
    nothing_is_compiled()
    model = layers(how)
    optimizer = stepwell.OffloadAdamW(model.parameters(), lr=1e-2, threads=1, deferred=deferred)
    losses, pending = [], 0
    for step in range(14):
        losses.append(train_step(model, optimizer, step))
        pending += optimizer._engine.has_pending()
    names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
    params = dict(zip(names, map(bits, model.parameters()), strict=True))
    return losses, params, pending, optimizer


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_updates_are_deferred_where_layers_are_compiled(compiler, how, fraction):
    deferred = stepwell.Deferred(interval=3, fraction=fraction)
    losses, params, pending, optimizer = trained(how, deferred)
    assert pending > 5 and optimizer._gate.is_open
    expected_losses, expected, expected_pending, _ = trained("not", deferred)
    assert (losses, pending) == (expected_losses, expected_pending)
    assert params.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in params.items())


def trained_with_a_part(how):
    """What is called, a part of it that is not compiled, and its optimizer with updates pending."""
    model = call = layers(how)
    if how == "whole":
        call = torch.compile(model, backend="aot_eager")
    part = {"in place": model[0].linear, "whole": model}.get(how) or model[0]._orig_mod
    optimizer = stepwell.OffloadAdamW(
        model.parameters(), lr=1e-2, threads=1, deferred=stepwell.Deferred(interval=3)
    )
    for step in range(7):
        train_step(call, optimizer, step)
    assert optimizer._engine.has_pending()
    return call, part, optimizer


@pytest.mark.parametrize("when", ["before the step", "after a forward"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "whole"])
def test_an_evaluation_of_a_part_has_all_updates(compiler, how, when):
    """The part is called by itself, and not compiled."""
    call, part, optimizer = trained_with_a_part(how)
    loss = call(batch(7, width=WIDTH)).sum()
    if when == "before the step":
        loss.backward()
    with torch.no_grad():
        found = part.eval()(batch(8, width=WIDTH))
        optimizer.drain()
        assert torch.equal(part(batch(8, width=WIDTH)), found)


@pytest.mark.parametrize("how", ["in place", "wrapped", "whole"])
@pytest.mark.parametrize("called", ["all of it", "a part"])
def test_an_evaluation_in_training_mode_has_all_updates(compiler, how, called):
    call, part, optimizer = trained_with_a_part(how)
    evaluated = call if called == "all of it" else part
    with torch.no_grad():
        found = evaluated(batch(8, width=WIDTH))
        optimizer.drain()
        assert torch.equal(evaluated(batch(8, width=WIDTH)), found)
    assert optimizer._gate.is_open


def test_code_of_others_that_has_a_compiled_layer_closes_the_gate(compiler):
    model = layers("in place")
    optimizer = stepwell.OffloadAdamW(
        model.parameters(), lr=1e-2, threads=1, deferred=stepwell.Deferred(interval=3)
    )
    for step in range(7):
        train_step(model, optimizer, step)
    model(batch(7, width=WIDTH)).sum().backward()
    model.eval()
    evaluate = torch.compile(lambda x: model[0].linear(x), backend="aot_eager")
    with torch.no_grad():
        found = evaluate(batch(8, width=WIDTH))
        assert not optimizer._gate.is_open
        optimizer.drain()
        assert torch.equal(model[0].linear(batch(8, width=WIDTH)), found)


@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)", "layers"])
@pytest.mark.parametrize("when", ["before the state is loaded", "behind that"])
def test_a_resumed_run_sees_the_looks_of_the_run_that_went_on(compiler, how, when):
    """Also a look behind its first step."""

    def compiled(model):
        if how == "layers":
            for layer in model[:3]:
                layer.compile(backend="aot_eager")
        elif how == "model.compile()":
            model.compile(backend="aot_eager")
        else:
            return torch.compile(model, backend="aot_eager")
        return model

    def made(model):
        deferred = stepwell.Deferred(interval=3)
        return stepwell.OffloadAdamW(model.parameters(), lr=1e-2, threads=1, deferred=deferred)

    def go_on(call, model, optimizer, first, last):
        losses = []
        for step in range(first, last):
            losses.append(train_step(call, optimizer, step))
            if step == 6:
                losses.append(sum(param.sum().item() for param in model.parameters()))
        return losses

    model = layers("not")
    call, optimizer = compiled(model), made(model)
    go_on(call, model, optimizer, 0, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = go_on(call, model, optimizer, 6, 12)
    nothing_is_compiled()
    del call, optimizer
    model = call = layers("not")
    if when == "before the state is loaded":
        call = compiled(model)
    optimizer = made(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if when == "behind that":
        call = compiled(model)
    # Whose memory others hold would be stepped exactly.
    del saved
    assert go_on(call, model, optimizer, 6, 12) == expected


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_forwards_of_compiled_layers_are_noted_before_the_gate(compiler, how):
    model = layers(how)
    forwards = Forwards(model.parameters())
    model(batch(0, width=WIDTH))
    called = forwards.end()
    assert set(called) == {*model, model}
    assert not any(map(is_before, model))
    gate = Gate(model.parameters(), Landing(), called=called)
    gate.open(model.parameters())
    assert gate.is_open and gate.uncovered == []


class Borrowing(nn.Module):
    """A compiled layer that uses a weight of a later one, which is no part of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        first, lent = self.first, [self.second]
        compiled = nn.Module()
        compiled.first = first
        compiled.forward = lambda x: first(x) @ lent[0].weight
        self.compiled = compiled

    def forward(self, x):
        return self.second(self.compiled(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_layer_that_borrows_a_weight_waits_for_it(compiler, how, backend):
    """Where its guards do not see that, since it waits where it unpacks the weight."""

    def run(gate):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Borrowing()
        if how == "in place":
            net.compiled.compile(backend=backend)
        else:
            net.compiled = torch.compile(net.compiled, backend=backend)
        optimizer = stepwell.OffloadAdamW(reversed_params(net), lr=1e-2, threads=1, gate=gate)
        losses = [train_step(net, optimizer, step) for step in range(STEPS)]
        optimizer.synchronize()
        return losses, [bits(param) for param in net.parameters()]

    losses, params = run("module")
    expected_losses, expected = run("step")
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_parts_of_a_compiled_layer_may_be_called_by_themselves(compiler, how):
    def run(gate):
        torch._dynamo.reset()
        model = layers(how)
        optimizer = stepwell.OffloadAdamW(reversed_params(model), lr=1e-2, threads=1, gate=gate)
        found = []
        for step in range(STEPS):
            found.append(train_step(model, optimizer, step))
            inner = model[0]._orig_mod if how == "wrapped" else model[0]
            found.append(inner.linear(batch(step, width=WIDTH)).sum().item())
        return found

    assert run("module") == run("step")


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_copies_of_a_compiled_layer_do_not_wait(compiler, how):
    model = layers(how, "eager")
    model(batch(0, width=WIDTH))
    compiled = num_graphs()
    gate = Gate(model.parameters(), uploads := Landing())
    assert is_before(model[0])
    model(batch(0, width=WIDTH))
    gate.open(model.parameters())
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    if how == "in place":
        # What torch.compile has returned cannot be pickled.
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        uploads.waits.clear()
        other(batch(0, width=WIDTH))
        assert uploads.waits == []
    # What comes before the call goes with the gate.
    gate.finish()
    model(batch(0, width=WIDTH))
    del gate, copies, other
    gc.collect()
    assert not any(map(is_before, model))
    assert all(not each._forward_pre_hooks for each in model.modules())
    model(batch(0, width=WIDTH))
    assert how == "wrapped" or num_graphs() == compiled


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_gates_over_one_model_end_in_any_order(compiler, how, order):
    model = layers(how, "eager")
    model(batch(0, width=WIDTH))
    uploads = [Landing() for _ in order]
    gates = {number: Gate(model.parameters(), one) for number, one in enumerate(uploads)}
    for ended in order:
        model(batch(0, width=WIDTH))
        for number, gate in gates.items():
            gate.open(model.parameters())
            uploads[number].waits.clear()
            model(batch(0, width=WIDTH))
            assert [count for count in uploads[number].waits if count] == [4, 4, 4, 2]
            gate.finish()
        del gates[ended], gate
        gc.collect()
    assert not any(map(is_before, model))


def test_a_layer_that_is_compiled_again_is_left_as_it_is(compiler):
    model = layers("in place", "eager")
    gate = Gate(model.parameters(), Landing())
    model[0].compile(backend="aot_eager")
    again = model[0]._compiled_call_impl
    del gate
    gc.collect()
    assert model[0]._compiled_call_impl is again
