"""Forwards wait: a model under gate="module" computes what it computes under gate="step".

The gate is looked at without the guard, which would make up for what it does not wait for. Weights
are large and stepped in the reverse order of the forward by one worker, so that a forward that does
not wait reads what was there before, by a margin of milliseconds; `test_the_tests_would_notice`
breaks the gate and sees them fail.
"""

import pickle
import sys
import threading
import weakref

import pytest
import stepwell
import torch
from offload_cases import WIDTH, Net, batch, reversed_params, train_step
from offload_landing import Landing
from optim_cases import bits
from stepwell.access.gate import Gate
from stepwell.offload import gate as gate_module
from stepwell.offload import module_tree


@pytest.fixture(autouse=True)
def _without_guard(monkeypatch):
    monkeypatch.setattr("stepwell.access.under_way.UnderWay", torch.nn.Parameter)


class Tied(Net):
    """The first weight is that of the last layer as well, whose module is called in no forward."""

    def __init__(self):
        super().__init__()
        self.again = torch.nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight

    def forward(self, x):
        return super().forward(x).sum() + torch.nn.functional.linear(x, self.again.weight).sum()


class Attention(torch.nn.Module):
    """`out_proj` is a module whose weight is used without calling it."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.net = Net()

    def forward(self, x):
        return self.net(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])


class InTurns(Net):
    """A layer that every third forward calls, from the fourth on."""

    def __init__(self):
        super().__init__()
        self.rare = torch.nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards > 3 and self.forwards % 3 == 0:
            x = self.rare(x)
        return super().forward(x)


class Branches(torch.nn.Module):
    """A weight that two modules use without calling its own, in turns which of them comes first."""

    class User(torch.nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.box = torch.nn.ModuleList([shared])

        def forward(self, x):
            return x @ self.box[0].weight

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.one, self.two = self.User(self.net.first), self.User(self.net.first)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        one, two = (self.one, self.two) if self.forwards % 2 else (self.two, self.one)
        return (
            two(torch.tanh(one(x))).sum()
            + self.net.last.weight[:4].sum()
            + self.net.last.bias.sum()
        )


def run(make, gate, after_step, steps=5):
    """Losses and what `after_step` read of the model right after each step."""
    torch.manual_seed(0)
    net = make()
    options = {"lr": 1e-2, "threads": 1, "gate": gate}
    optimizer = stepwell.OffloadAdamW(reversed_params(net), **options)
    seen = []
    for step in range(steps):
        seen.append(train_step(net, optimizer, step))
        if step >= 2:
            seen += after_step(net, optimizer)
    return optimizer, seen


def nothing(net, optimizer):
    return []


def second_call(net, optimizer):
    with torch.no_grad():
        return [net(batch(7, width=WIDTH)).sum().item()]


def evaluation(net, optimizer):
    net.eval()
    found = second_call(net, optimizer)
    net.train()
    return found


def evaluation_of_a_submodule(net, optimizer):
    first = next(module for module in net.modules() if isinstance(module, torch.nn.Linear)).eval()
    with torch.no_grad():
        found = first(batch(7, width=WIDTH)).sum().item()
    first.train()
    return [found]


def state_dict(net, optimizer):
    return [value.double().sum().item() for value in net.state_dict().values()]


def state_dict_of_a_submodule(net, optimizer):
    return [
        value.double().sum().item()
        for module in net.children()
        for value in module.state_dict().values()
    ]


def synchronize(net, optimizer):
    optimizer.synchronize()
    return [param.double().norm().item() for param in net.parameters()]


def own_state_dict(net, optimizer):
    optimizer.state_dict()
    return [param.double().norm().item() for param in net.parameters()]


def halved(net, optimizer):
    values = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict({name: value / 2 for name, value in values.items()})
    return second_call(net, optimizer)


READS = [
    nothing,
    second_call,
    evaluation,
    evaluation_of_a_submodule,
    state_dict,
    state_dict_of_a_submodule,
    synchronize,
    own_state_dict,
    halved,
]
MODELS = [Net, Tied, Attention, InTurns, Branches]


@pytest.mark.parametrize("read", READS)
def test_reads_wait(read):
    optimizer, seen = run(Net, "module", read)
    assert optimizer._gate.is_open
    assert seen == run(Net, "step", read)[1]


@pytest.mark.parametrize("model", MODELS)
def test_models_wait(model):
    optimizer, seen = run(model, "module", second_call)
    assert optimizer._gate.is_open
    assert seen == run(model, "step", second_call)[1]


@pytest.mark.parametrize(
    ("model", "read"),
    [(model, nothing) for model in MODELS] + [(Net, second_call), (Net, evaluation)],
)
def test_the_tests_would_notice(monkeypatch, model, read):
    monkeypatch.setattr(Gate, "enter", lambda self, module: self._called.add(id(module)))
    expected = run(model, "step", read)[1]
    # A step that ends early is not noticed: on a busy machine some do.
    assert any(run(model, "module", read)[1] != expected for _ in range(5))


@pytest.mark.parametrize("read", [state_dict, halved])
def test_the_tests_of_state_dicts_would_notice(monkeypatch, read):
    monkeypatch.setattr(Gate, "enter_all", lambda self, module: None)
    expected = run(Net, "step", read)[1]
    assert any(run(Net, "module", read)[1] != expected for _ in range(5))


def test_forwards_wait_for_their_own_weights_only():
    torch.manual_seed(0)
    net = Net()
    # In the order of the forward: the first layer's weights are there long before the last one's.
    optimizer = stepwell.OffloadAdamW(net.parameters(), lr=1e-2, threads=1)
    for step in range(3):
        train_step(net, optimizer, step)
    assert under_way(net, optimizer) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    net.first(batch(0, width=WIDTH))
    assert under_way(net, optimizer) == {"last.weight", "last.bias"}
    net.last(batch(0, width=WIDTH))
    assert not under_way(net, optimizer)


def test_modules_are_reached_in_the_order_of_a_walk():
    steps = {1: [4, 5], 4: [6], 5: [6, 1]}
    assert module_tree.reached([1, 2, 3], steps) == [1, 4, 6, 5, 2, 3]
    assert module_tree.reached([5, 1], steps) == [5, 6, 1, 4]


def test_every_owner_of_weights_is_gated():
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    gate = Gate(net.parameters(), Landing())
    assert all(len(layer._forward_pre_hooks) == 1 for layer in net)
    del gate
    assert not any(layer._forward_pre_hooks for layer in net)


def test_a_copy_of_a_model_belongs_to_no_gate(monkeypatch):
    """Nor to the first that there was, in another process."""
    net = Net(1 << 16)
    first = Gate(net.parameters(), Landing())
    monkeypatch.setattr(gate_module, "_GATES", weakref.WeakValueDictionary({1: first}))
    copied = pickle.loads(pickle.dumps(net))
    copied(batch(0, width=WIDTH))
    copied.state_dict()
    assert not first._called
    assert [hook.key for hook in copied.first._forward_pre_hooks.values()] == [""]


class ShortCut(torch.nn.Module):
    """Calls its layers in training; in evaluation it computes with their weights itself."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Net(1 << 16), torch.nn.Linear(4, 4)])
        self.seen = None

    def forward(self, x):
        if self.training:
            return self.layers[1](self.layers[0](x))
        self.seen = self.look()
        return x


@pytest.mark.parametrize("first", ["the model", "a part of it"])
def test_a_forward_in_evaluation_waits_for_everything_beneath(first):
    net = ShortCut()
    optimizer = stepwell.OffloadAdamW(net.parameters(), lr=1e-2, threads=1)
    for step in range(3):
        train_step(net, optimizer, step)
    assert len(under_way(net, optimizer)) == 6
    net.eval()
    net.look = lambda: under_way(net, optimizer)
    if first == "a part of it":
        net.layers[0].first(batch(0, width=WIDTH))
        assert len(under_way(net, optimizer)) == 4
    net(batch(0, width=WIDTH))
    assert net.seen == set()


def under_way(net, optimizer):
    """The names of the parameters whose new weights nobody has waited for."""
    is_under_way = optimizer._gate.guard.is_under_way
    return {name for name, param in net.named_parameters() if is_under_way(param)}


def test_parameters_outside_of_modules_are_waited_for_by_the_step(caplog):
    param = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = stepwell.OffloadAdamW([param], lr=0.1, weight_decay=0.0, threads=1)
    with caplog.at_level("INFO", logger="stepwell"):
        for step in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
            torch.testing.assert_close(param.detach(), torch.full_like(param, 1 - 0.1 * (step + 1)))
    assert "1 parameters are in no module" in caplog.text
    # The tests run behind a gc.freeze().
    assert "gc.freeze() hides modules" in caplog.text


def test_two_models_and_two_optimizers():
    def alternate(gate):
        torch.manual_seed(0)
        nets = [Net(1 << 20), Net(1 << 20)]
        optimizers = [
            stepwell.OffloadAdamW(reversed_params(net), lr=1e-2, threads=1, gate=gate)
            for net in nets
        ]
        losses = []
        for step in range(6):
            losses.append(train_step(nets[step % 2], optimizers[step % 2], step))
            losses.append(nets[1 - step % 2](batch(step, width=WIDTH)).sum().item())
        return losses

    assert alternate("module") == alternate("step")


def test_hooks_go_with_the_optimizer():
    net = Net(1 << 16)
    optimizer = stepwell.OffloadAdamW(net.parameters())
    train_step(net, optimizer, 0)
    assert net.first._forward_pre_hooks
    del optimizer
    assert not net.first._forward_pre_hooks
    assert not net.first._state_dict_pre_hooks
    assert not net._load_state_dict_pre_hooks


# ---- CUDA graphs ----


def test_a_captured_forward_has_every_step_wait(monkeypatch):
    """Replays call no hooks."""
    torch.manual_seed(0)
    net = Net()
    optimizer = stepwell.OffloadAdamW(reversed_params(net), lr=1e-2, threads=1)
    for step in range(3):
        train_step(net, optimizer, step)
    monkeypatch.setattr(optimizer._gate, "is_on_cuda", True)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match=r"hint: optimizer.synchronize\(\) before the capture"):
            net(batch(0, width=WIDTH))
        optimizer.synchronize()
        net(batch(0, width=WIDTH))
    monkeypatch.setattr(optimizer._gate, "is_on_cuda", False)
    for step in range(3):
        train_step(net, optimizer, step)
        seen = [bits(param).clone() for param in net.parameters()]
        optimizer.synchronize()
        assert all(
            torch.equal(one, bits(param)) for one, param in zip(seen, net.parameters(), strict=True)
        )


def test_a_module_waits_at_once_for_what_is_beneath_it():
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4)
    )
    uploads = Landing()
    inner = 2 * (4 * 4 + 4) * 4
    gate = Gate(model.parameters(), uploads, wait_bytes_max=inner)
    model(torch.ones(1, 4))
    gate.open(model.parameters())
    gate.wait_for_uncovered()
    uploads.waits.clear()
    model(torch.ones(1, 4))
    assert uploads.waits == [4, 2]


def test_looking_for_modules_disturbs_no_other_thread():
    """Python cannot end a tuple that is being made where something else holds it."""
    is_over, failures = threading.Event(), []
    # Longer than the space that Python takes for them at first.
    lengths = range(11, 200)

    def make_tuples():
        try:
            while not is_over.is_set():
                for length in lengths:
                    tuple(each for each in range(length))
        except SystemError as error:
            failures.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    net = Net()
    interval = sys.getswitchinterval()
    # The objects of before the tests are not looked at here, and the others are few.
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            found = {id(module) for module in module_tree.modules_alive()}
            assert found >= {id(module) for module in net.modules()}
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join(30)
    assert not failures
