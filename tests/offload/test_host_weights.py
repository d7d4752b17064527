"""Weights in host memory, which modules fetch: every program trains as with weights on the device.

To the bit: losses, weights whichever way they are read, and state. On the CPU the host is the
device, and what a program reads too early or too late has no memory.
"""

import contextlib
import copy
import gc
import io
import linecache
import os
import re
import sys
import weakref

import pytest
import stepwell
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

# cuBLAS is told before it is used first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, WORDS, STEPS = 32, 50, 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """`reentrant`: of the checkpoints of its layers; None: there are none."""

    def __init__(self, layers=None, reentrant=None):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(layers or (Block() for _ in range(3)))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.reentrant = reentrant

    def called(self, layer, x):
        if self.reentrant is None or not self.training:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.reentrant)

    def forward(self, words):
        x = self.embed(words) * self.scale
        for layer in self.layers:
            x = self.called(layer, x)
        return self.head(x)


def words_of(net, step):
    drawn = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
    return drawn.to(net.scale.device)


def loss_of(net, step, call=None):
    words = words_of(net, step)
    return cross_entropy((call or net)(words).float().flatten(0, 1), words.flatten())


def is_same(ours, theirs):
    with contextlib.suppress(AssertionError):
        assert_same(ours, theirs)
        return True
    return False


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(bits(ours), bits(theirs))
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def made(weights, device, make=Net, dtype=torch.bfloat16, **options):
    """A model with its optimizer; weights in host memory begin on the CPU."""
    torch.manual_seed(0)
    net = make().to(dtype)
    if weights == "host":
        options["device"] = device
    else:
        net.to(device)
    options = {"lr": 1e-2, "clip_norm": 1.0, **options}
    return net, stepwell.OffloadAdamW(net, weights=weights, **options)


def trained(weights, device, loss=loss_of, then=None, backwards=1, **made_with):
    """What a program sees in some steps, and what there is at the end."""
    net, optimizer = made(weights, device, **made_with)
    seen, kept = [], {}
    for step in range(STEPS):
        for nth in range(backwards):
            value = loss(net, step + 100 * nth)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
        # Only the step behind a write tells what has become of the state.
        if then is not None and step < STEPS - 1:
            seen.append(then(net, optimizer, step, kept))
    net.eval()
    with torch.no_grad():
        seen.append(net(words_of(net, 0)))
    return seen, net.state_dict(), optimizer.state_dict()["state"]


def assert_trains_alike(device, **program):
    assert_same(trained("host", device, **program), trained("device", device, **program))


# ---- models ----


class Adapted(torch.nn.Module):
    """A frozen layer with a trained part of low rank."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(4, layer.in_features))
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.t() @ self.b.t()


class Output:
    """What no one sees a tensor in."""

    def __init__(self, x):
        self.x = x


class Unseen(torch.nn.Module):
    """Uses a weight of a module that is not called, and returns what is not looked into."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.uncalled = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Output(torch.nn.functional.linear(x @ self.own, self.uncalled.weight))


class Unseeing(Net):
    def __init__(self):
        super().__init__([Unseen(), Unseen()])

    def called(self, layer, x):
        return layer(x).x


class Skipping(Net):
    """Leaves a layer out now and then."""

    def forward(self, words):
        x = self.embed(words)
        for nth, layer in enumerate(self.layers):
            if nth != 1 or int(words.sum()) % 2:
                x = layer(x)
        return self.head(x)


class Twice(torch.nn.Module):
    """Uses its input twice, and returns a view of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        return {
            "x": x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
            "weight": self.weight.t(),
        }


class Returning(torch.nn.Module):
    """Uses its input a third time, and the weight that its module returns."""

    def __init__(self):
        super().__init__()
        self.inner, self.up = Twice(), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found = self.inner(x)
        return x + self.up(found["x"] @ found["weight"])


def returning(reentrant):
    return Net([Returning(), Returning()], reentrant=reentrant)


def renormed():
    net = Net()
    net.embed.max_norm = 1.0
    return net


class Routed(torch.nn.Module):
    """Leaves a loss that is made last, and so goes back first."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x @ self.own
        self.loss = 1e-3 * (y.sin() * self.gain).sum()
        return y


class Writing(Net):
    """Writes weights in its forward."""

    def forward(self, words):
        # What is written behind the last step is in no state yet.
        self.embed.max_norm = 0.5 if self.training else None
        if self.training:
            with torch.no_grad():
                self.head.weight.clamp_(-0.05, 0.05)
        return super().forward(words)


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x, times=3):
        return (self(x, times - 1) if times else x) + torch.tanh(x @ self.own)


def tied():
    net = Net()
    net.head.weight = net.embed.weight
    return net


def partly_frozen():
    net = Net()
    net.embed.requires_grad_(False)
    net.layers[1].requires_grad_(False)
    return net


def adapted(reentrant):
    net = Net(reentrant=reentrant).requires_grad_(False)
    for layer in net.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return net


def attending():
    encoder = torch.nn.TransformerEncoderLayer
    return Net([encoder(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(2)])


def compiled_layers():
    net = Net()
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    return net


MODELS = {
    "plain": Net,
    "checkpoints": lambda: Net(reentrant=False),
    "reentrant checkpoints": lambda: Net(reentrant=True),
    "tied": tied,
    "partly frozen": partly_frozen,
    "LoRA": lambda: adapted(None),
    "LoRA with checkpoints": lambda: adapted(False),
    "attention, whose weights are read past its modules": attending,
    "outputs that are not looked into": Unseeing,
    "layers left out": Skipping,
    "weights that modules return": lambda: returning(None),
    "inputs of checkpoints that are used often": lambda: returning(True),
    "weights written in forwards": Writing,
    "layers that call themselves": lambda: Net([Recursive(), Recursive()]),
    "compiled layers": compiled_layers,
}


# torch.compile looks at `grad` of inputs, and hides the warning but from pytest.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_with_weights_on_the_device(device, name):
    assert_trains_alike(device, make=MODELS[name])


def test_what_a_forward_writes_counts():
    # In fp32: the forward at the end is followed by no step.
    assert_trains_alike("cpu", make=renormed, dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("backwards", [1, 3])
def test_options_train_as_with_weights_on_the_device(device, dtype, moments, backwards):
    # Sums that the device has have been added in the same order.
    assert_trains_alike(device, dtype=dtype, moments=moments, backwards=backwards)


def test_state_on_a_volume_and_weights_in_host_memory(tmp_path):
    runs = []
    for weights in ("host", "device"):
        (tmp_path / weights).mkdir()
        tier = stepwell.Volume([tmp_path / weights], durability="none")
        runs.append(trained(weights, "cpu", tier=tier, host_bytes_max=1 << 20))
    assert_same(*runs)


# ---- backwards that people have ----


def two_forwards(net, step):
    return loss_of(net, step) + loss_of(net, step + 10)


def of_gradients(net, step):
    loss = loss_of(net, step)
    params = list(net.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return loss + 1e-3 * sum(each.float().square().sum() for each in grads)


def of_activations(net, step):
    x = net.embed(words_of(net, step)).detach().requires_grad_()
    found = net.head(net.layers[1](net.layers[0](x)))
    (grad,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    return found.square().mean() + (grad.norm(dim=-1) - 1).square().mean()


def transformed(net, step):
    params, words = dict(net.named_parameters()), words_of(net, step)
    grads = grad(lambda each: functional_call(net, each, (words,)).square().mean())(params)
    mapped = vmap(lambda each: net(each[None]))(words)
    found = loss_of(net, step) + mapped.square().mean()
    return found + sum(each.detach().square().sum() for each in grads.values())


def with_penalty(net, step):
    return loss_of(net, step) + 1e-3 * sum(p.float().square().sum() for p in net.parameters())


def functional(net, step):
    scaled = {name: param * 1.5 for name, param in net.named_parameters()}
    return loss_of(net, step, lambda words: functional_call(net, scaled, (words,)))


def in_parts(net, step):
    """Modules of the model are called one after the other, and not the model."""
    words = words_of(net, step)
    x = net.embed(words)
    for layer in net.layers:
        x = layer(x)
    return sum(
        cross_entropy(net.head(part).float().flatten(0, 1), target.flatten())
        for part, target in zip(x.split(2), words.split(2), strict=True)
    )


def with_losses_of_layers(net, step):
    return loss_of(net, step) + sum(layer.loss for layer in net.layers)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_a_layer_leaves_as_an_attribute_goes_back(device):
    options = {"loss": with_losses_of_layers, "dtype": torch.float32}
    assert_trains_alike(device, make=lambda: Net([Routed(), Routed()]), **options)


def test_a_graph_keeps_what_is_used_outside_of_modules(monkeypatch):
    from stepwell.store import host_weights

    monkeypatch.setattr(host_weights, "BORROWED_BYTES_MAX", 10_000)

    def penalty_first(net, step):
        penalty = 1e-3 * sum(p.square().sum() for p in net.parameters())
        net.state_dict()
        return penalty + loss_of(net, step)

    def logs(net, optimizer, step, kept):
        for param in net.parameters():
            param.norm().item()
        assert optimizer._host.weights is None or resident_bytes(net) < 20_000

    assert_trains_alike("cpu", loss=penalty_first, then=logs, dtype=torch.float32)


def test_what_is_known_of_a_pass_without_end_is_bounded(monkeypatch):
    from stepwell.weights import order

    monkeypatch.setattr(order, "_USES_MAX", 8)
    assert_trains_alike("cpu", loss=in_parts)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def failed_forward(net, step):
    """An exception is caught, and the program goes on."""
    if step in (1, 2):
        handle = net.layers[1].up.register_forward_hook(_raise)
        with pytest.raises(MemoryError):
            loss_of(net, step)
        handle.remove()
    return loss_of(net, step)


def _raise(*_):
    raise MemoryError


def failed_backward(net, step):
    if step in (1, 2):
        handle = net.layers[1].register_forward_hook(lambda _m, _i, out: _Failing.apply(out))
        with pytest.raises(MemoryError):
            loss_of(net, step).backward()
        handle.remove()
        for param in net.parameters():
            param.grad = None
    return loss_of(net, step)


LOSSES = [
    two_forwards,
    of_gradients,
    of_activations,
    transformed,
    with_penalty,
    functional,
    in_parts,
]
LOSSES += [failed_forward, failed_backward]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_weights_on_the_device(device, loss):
    assert_trains_alike(device, loss=loss, dtype=torch.float32)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss", [failed_forward, failed_backward])
def test_a_caught_error_within_checkpoints_leaves_nothing(reentrant, loss):
    assert_trains_alike("cpu", loss=loss, make=lambda: Net(reentrant=reentrant))


# ---- what people do between steps ----


def clamps(net, optimizer, step, kept):
    for param in net.parameters():
        param.data.clamp_(-0.05, 0.05)


def scales(net, optimizer, step, kept):
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.99)


def averages(net, optimizer, step, kept):
    if step == 0:
        kept["average"] = copy.deepcopy(net)
    else:
        with torch.no_grad():
            pairs = zip(kept["average"].parameters(), net.parameters(), strict=True)
            for average, param in pairs:
                average.lerp_(param, 0.1)
    return [param.detach() for param in kept["average"].parameters()]


def evaluates(net, optimizer, step, kept):
    net.eval()
    with torch.inference_mode():
        found = net(words_of(net, 7)).clone()
    net.train()
    return found


def holds_views(net, optimizer, step, kept):
    """Memory that is kept is read without asking."""
    if step == 0:
        kept["views"] = [param.data for param in net.parameters()]
    if step == 2:
        for view in kept["views"]:
            view.mul_(0.9)
    return [view.clone() for view in kept["views"]]


def replaces_data(net, optimizer, step, kept):
    if step == 1:
        for param in net.parameters():
            param.data = param.data * 0.9
    if step == 2:
        net.head.weight.data = torch.full_like(net.head.weight, 0.01)


def freezes(net, optimizer, step, kept):
    net.layers[0].requires_grad_(step % 2 == 1)


def thaws(net, optimizer, step, kept):
    """Of what thaws memory is kept as well."""
    kept.setdefault("views", [param.data for param in net.parameters()])
    net.requires_grad_(True)
    return [view.clone() for view in kept["views"]]


def goes_back(net, optimizer, step, kept):
    if step == 1:
        stream = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        kept["saved"] = stream.getvalue()
    if step == 2:
        saved = torch.load(io.BytesIO(kept["saved"]))
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])


def saves_the_model(net, optimizer, step, kept):
    stream = io.BytesIO()
    torch.save(net, stream)
    found = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    return found(words_of(net, 3)).detach()


THEN = [clamps, scales, averages, evaluates, holds_views, replaces_data, freezes, goes_back]
THEN += [saves_the_model]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("then", THEN)
def test_what_is_done_between_steps_counts(device, then):
    assert_trains_alike(device, then=then)


@pytest.mark.parametrize("device", DEVICES)
def test_what_thaws_counts(device):
    assert_trains_alike(device, make=partly_frozen, then=thaws)


# ---- Ctrl-C ----


class CtrlC:
    """Comes at the nth line of the code that has weights come and go."""

    FILES = re.compile(r"stepwell/(weights/|store/host_weights|access/writes)")

    def __init__(self, nth):
        self.num_left = nth

    def __call__(self, frame, event, arg):
        return self.trace if self.FILES.search(frame.f_code.co_filename) else None

    def trace(self, frame, event, arg):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # At the end of a `with` Python looks for signals behind the exit alone.
        if event == "line" and not line.startswith("with "):
            self.num_left -= 1
            if self.num_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def reads(net, optimizer):
    return [param.norm().item() for param in net.parameters()]


def goes_forward_and_back(net, optimizer):
    loss_of(net, 7).backward()


def looks_at_state(net, optimizer):
    net.state_dict()


def steps(net, optimizer):
    optimizer.step()


def run_with_ctrl_c(weights, act, nth):
    """What there is after some steps, and whether Ctrl-C came. `act`: None: it is left out."""
    net, optimizer = made(weights, "cpu", lambda: Net([Block()]))
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    view = net.head.weight.data
    loss_of(net, 1).backward()
    view.mul_(0.9)
    interrupt = CtrlC(nth)
    sys.settrace(interrupt if nth else None)
    with contextlib.suppress(KeyboardInterrupt):
        if act is not None:
            act(net, optimizer)
    sys.settrace(None)
    optimizer.zero_grad()
    for step in range(2, 4):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [[param.detach().clone() for param in net.parameters()], net.state_dict(), view.clone()]
    del view
    loss_of(net, 4).backward()
    optimizer.step()
    assert weights == "device" or resident_bytes(net) == 0
    return seen, interrupt.num_left == 0


@pytest.mark.parametrize("act", [reads, goes_forward_and_back, looks_at_state, steps])
def test_ctrl_c_leaves_weights_as_they_were_or_stepped(act):
    expected = [run_with_ctrl_c("device", each, 0)[0] for each in (act, None)]
    nth, was_interrupted = 1, True
    while was_interrupted:
        seen, was_interrupted = run_with_ctrl_c("host", act, nth)
        assert any(is_same(seen, each) for each in expected), nth
        nth += 41
    assert nth > 500


# ---- where weights are ----


def resident_bytes(net):
    """Bytes of weights that are on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {id(param): param.untyped_storage().nbytes() for param in net.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_weights_are_on_the_device_only_while_modules_use_them(reentrant):
    net, optimizer = made("host", "cpu", lambda: Net(reentrant=reentrant))
    total = sum(param.nbytes for param in net.parameters())
    assert resident_bytes(net) == 0
    most = []
    for layer in net.layers:
        layer.up.register_forward_hook(lambda *_: most.append(resident_bytes(net)))
    for step in range(3):
        loss_of(net, step).backward()
        assert all(param.grad is not None for param in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert resident_bytes(net) == 0
    # The first pass fetches nothing ahead.
    assert max(most[:3]) < total / 2


def test_uses_outside_of_modules_leave_with_the_next_step():
    net, optimizer = made("host", "cpu")
    assert all(bool(param.isfinite().all()) for param in net.parameters())
    assert resident_bytes(net) > 0
    loss_of(net, 0).backward()
    optimizer.step()
    assert resident_bytes(net) == 0


def test_what_is_used_outside_of_modules_is_bounded(monkeypatch):
    from stepwell.store import host_weights

    monkeypatch.setattr(host_weights, "BORROWED_BYTES_MAX", 10_000)
    net, _ = made("host", "cpu", dtype=torch.float32)
    plain = dict(made("device", "cpu", dtype=torch.float32)[0].named_parameters())
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.add_(1)
            plain[name].add_(1)
            assert resident_bytes(net) < 10_000 + 2 * max(p.nbytes for p in net.parameters())
    state = net.state_dict()
    for name, param in net.named_parameters():
        assert_same(param.detach(), plain[name])
        assert_same(state[name], plain[name])


def test_a_state_dict_has_host_memory_and_waits_for_the_step():
    net, optimizer = made("host", "cpu")
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = net.state_dict()
        assert resident_bytes(net) == 0
        assert {value.device.type for value in state.values()} == {"cpu"}
        for name, param in net.named_parameters():
            assert_same(state[name].clone(), param.detach().clone())
    assert net.state_dict(keep_vars=True)["head.weight"] is net.head.weight


def test_each_tensor_of_a_state_dict_has_a_storage_of_its_own():
    # Else what saves them takes them for one that is shared.
    for make in (Net, partly_frozen):
        net, _ = made("host", "cpu", make)
        storages = {
            v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
            for v in net.state_dict().values()
        }
        assert sum(storages.values()) == sum(v.nbytes for v in net.state_dict().values())


def test_arrays_of_parameters_and_shared_memory_do_not_stop_a_step():
    def arrays(net, optimizer, step, kept):
        net.head.share_memory()
        return [param.detach().numpy().tolist() for param in net.embed.parameters()]

    assert_trains_alike("cpu", then=arrays, dtype=torch.float32)


@pytest.mark.parametrize("order", [("device", "host"), ("host", "device")])
def test_a_run_goes_on_with_weights_elsewhere(order):
    first, second = order
    net, optimizer = made(first, "cpu")
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    seen = []
    for weights in (first, second):
        net, optimizer = made(weights, "cpu")
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(2, 4):
            loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        seen.append(net.state_dict())
    assert_same(seen[:3], seen[3:])


def test_a_model_is_used_when_its_optimizer_is_gone():
    net, optimizer = made("host", "cpu")
    loss_of(net, 0).backward()
    optimizer.step()
    expected = net(words_of(net, 1)).detach()
    del optimizer
    gc.collect()
    assert_same(net(words_of(net, 1)).detach(), expected)
    assert net.head.weight.norm() > 0


def test_a_parameter_without_its_model_says_so():
    net, optimizer = made("host", "cpu")
    weight = net.head.weight
    del net, optimizer
    gc.collect()
    with pytest.raises(ValueError, match="its model, which is gone"):
        weight.norm()


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_optimizer_takes_over_from_the_one_before(is_gone):
    seen = []
    for weights in ("host", "device"):
        net, optimizer = made(weights, "cpu")
        for run in range(2):
            if run:
                if is_gone:
                    del optimizer
                    gc.collect()
                optimizer = stepwell.OffloadAdamW(net, weights=weights)
                assert weights == "device" or resident_bytes(net) == 0
            for step in range(2):
                loss_of(net, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                net.head.weight.mul_(0.9)
            seen.append([param.detach().clone() for param in net.parameters()])
    assert_same(seen[:2], seen[2:])


def test_the_optimizer_before_steps_no_more():
    net, optimizer = made("host", "cpu")
    other = stepwell.OffloadAdamW(net, weights="host")
    with pytest.raises(ValueError, match="has another one"):
        optimizer.step()
    del optimizer
    loss_of(net, 0).backward()
    other.step()


def test_another_optimizer_of_the_same_weights_is_refused():
    net, optimizer = made("host", "cpu")
    state = copy.deepcopy(net.state_dict())
    other = Net()
    other.embed = net.embed
    for model, options in ((net, {}), (other, {}), (other, {"weights": "host"})):
        with pytest.raises(ValueError, match="in host memory for another optimizer"):
            stepwell.OffloadAdamW(model, **options)
    with pytest.raises(ValueError, match="in host memory for another optimizer"):
        stepwell.OffloadAdamW(other.head.parameters(), model=other, weights="host")
    # What was refused has let go of what it had.
    assert all(type(param) is torch.nn.Parameter for param in other.layers.parameters())
    assert bool(other.head.weight.norm() > 0)
    assert_same(net.state_dict(), state)
    loss_of(net, 0).backward()
    optimizer.step()


def test_a_model_and_its_optimizer_go_when_the_program_lets_go_of_them():
    net, optimizer = made("host", "cpu")
    loss_of(net, 0).backward()
    optimizer.step()
    held = [*map(weakref.ref, net.parameters()), weakref.ref(optimizer._background)]
    del net, optimizer
    gc.collect()
    assert not any(each() for each in held)


# ---- what is refused ----


def test_other_shapes_and_dtypes_are_refused():
    for change in (
        lambda net: net.bfloat16(),
        lambda net: setattr(net.head.weight, "data", torch.zeros(7, WIDTH)),
    ):
        net, optimizer = made("host", "cpu", dtype=torch.float32)
        change(net)
        with pytest.raises(ValueError, match="as it was"):
            optimizer.step()


def test_what_does_not_go_with_weights_in_host_memory_is_refused():
    params = list(Net().parameters())
    with pytest.raises(ValueError, match="no model is given"):
        stepwell.OffloadAdamW(params, weights="host")
    for options, why in [
        ({"weights": "nowhere"}, "`weights` is `nowhere`"),
        ({"weights": "host", "accumulate": "device"}, "`accumulate` is `device`"),
        (
            {"weights": "host", "deferred": stepwell.Deferred()},
            "`deferred` is `Deferred.*expected it to be left out",
        ),
        (
            {"weights": "host", "device_bytes_max": 1 << 20},
            "`device_bytes_max` is `1048576`, expected it to be left out",
        ),
        ({"weights": "host", "device": "nowhere"}, "`device` is `nowhere`"),
        ({"device": "cpu"}, "`device` is `cpu` and `weights` is `device`"),
    ]:
        with pytest.raises(ValueError, match=why):
            stepwell.OffloadAdamW(Net(), **options)
