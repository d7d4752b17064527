"""Models that torch.compile has compiled: losses are as where steps wait."""

import pytest
import stepwell
import torch
from offload_cases import WIDTH, Net, batch, reversed_params, train_step
from optim_cases import bits
from torch import nn

STEPS = 6

# torch.compile looks at `.grad` of what a layer is called with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def under_way(net):
    """How many parameters nothing has waited for."""
    return sum(type(param) is not nn.Parameter for param in net.parameters())


def compiled_at(net, how, when, backend):
    """What is to be called from now on, and the model that an optimizer is given."""
    if how == "whole" and when == "before":
        call = torch.compile(net, backend=backend)
        return call, call
    if how in ("whole", "whole, and its parameters"):
        return torch.compile(net, backend=backend), net
    if how == "in place":
        net.compile(backend=backend)
    elif how == "layer in place":
        net.first.compile(backend=backend)
    elif how == "layer":
        net.first = torch.compile(net.first, backend=backend)
    elif how == "function":
        return torch.compile(lambda x: net(x) * 2, backend=backend), net
    elif how == "weights":
        use = torch.compile(lambda x: x * net.first.weight.mean(), backend=backend)
        return (lambda x: use(net(x))), net
    elif how == "both":
        net.first.compile(backend=backend)
        return torch.compile(lambda x: net(x) * 2, backend=backend), net
    return net, net


def run(how, when, backend, *, gives_model):
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = call = model = Net(1 << 20)
    if when == "before":
        call, model = compiled_at(net, how, when, backend)
    params = reversed_params(net)
    options = {"lr": 1e-2, "threads": 1, "model": model if gives_model else None}
    optimizer = stepwell.OffloadAdamW(params, **options)
    losses = []
    for step in range(STEPS):
        if step == {"before the first step": 0, "later": 3}.get(when):
            call, _ = compiled_at(net, how, when, backend)
        losses.append(train_step(call, optimizer, step))
    count = under_way(net)
    optimizer.synchronize()
    return losses, [bits(param) for param in params], count, num_graphs()


OVERLAPS = ["in place", "layer in place", "layer"]


@pytest.mark.parametrize(
    ("when", "backend"),
    [("before", "aot_eager"), ("before the first step", "eager"), ("later", "eager")],
)
@pytest.mark.parametrize("how", ["whole", *OVERLAPS, "function", "weights", "both"])
def test_compiled_code_never_sees_stale_weights(how, when, backend):
    losses, params, count, graphs = run(how, when, backend, gives_model=True)
    expected_losses, expected, _, expected_graphs = run(how, when, backend, gives_model=False)
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))
    if how in OVERLAPS or (how, when) == ("whole", "before"):
        assert count > 0
        assert graphs == expected_graphs


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers(how):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, 3))
    for index in range(2):
        if how == "in place":
            model[index].compile(backend="eager")
        elif how == "wrapped":
            model[index] = torch.compile(model[index], backend="eager")
    return model


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_layer_waits_for_what_is_within_it(how):
    model = layers(how)
    optimizer = stepwell.OffloadAdamW(model, lr=1e-2, threads=1)
    train_step(model, optimizer, 0)
    assert under_way(model) == 10
    model[0](batch(0, width=WIDTH))
    assert under_way(model) == 6
    inner = model[1]._orig_mod if how == "wrapped" else model[1]
    inner.norm(batch(0, width=WIDTH))
    assert under_way(model) == 4


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_layers_are_as_they_were_when_the_optimizer_is_gone(how):
    model = layers(how)
    calls = [layer.__dict__.get("_compiled_call_impl") for layer in model]
    optimizers = [stepwell.OffloadAdamW(model, lr=1e-2, threads=1) for _ in range(3)]
    train_step(model, optimizers[0], 0)
    for index in (1, 0, 0):
        del optimizers[index]
        model(batch(0, width=WIDTH))
    assert [layer.__dict__.get("_compiled_call_impl") for layer in model] == calls


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_updates_are_deferred_where_layers_are_compiled(how):
    found = []
    for each in (how, "not"):
        torch._dynamo.reset()
        model = layers(each)
        deferred = stepwell.Deferred(interval=3)
        optimizer = stepwell.OffloadAdamW(model, lr=1e-2, threads=1, deferred=deferred)
        losses = [train_step(model, optimizer, step) for step in range(9)]
        ages = optimizer.timing["oldest_age"]
        part = getattr(model[0], "_orig_mod", model[0]).linear
        with torch.no_grad():
            evaluated = part.eval()(batch(8, width=WIDTH))
            optimizer.drain()
            assert torch.equal(part(batch(8, width=WIDTH)), evaluated)
        found.append((losses, ages))
    assert found[0] == found[1]
    assert found[0][1] > 0
