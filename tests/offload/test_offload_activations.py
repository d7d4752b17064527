"""What autograd saves in forwards goes to host memory: every program trains as if it stayed.

To the bit. On the CPU the host is the device, and all is copied as on a GPU. Nothing is too small
to leave here, and little is on its way at once.
"""

import contextlib
import copy
import gc
import logging

import pytest
import stepwell
import torch
from host_weight_cases import Block, Net, assert_same, loss_of, made, trained, words_of
from late_streams import have_late_streams
from stepwell import _core
from stepwell.weights import activations
from stepwell.weights.arenas import Arenas
from test_host_weights import DEVICES, LOSSES, MODELS, deterministic, saves_the_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

__all__ = ["deterministic"]

CROSSING_BYTES = 1 << 12


@pytest.fixture(autouse=True)
def all_leaves(monkeypatch):
    monkeypatch.setattr(activations, "_BYTES_MIN", 1)
    monkeypatch.setattr(activations, "_CROSSING_BYTES", CROSSING_BYTES)


@pytest.fixture
def taken(monkeypatch):
    """The bytes of each piece of host memory that was taken."""
    found, take = [], Arenas.take

    def noting(arenas, nbytes):
        found.append(nbytes)
        return take(arenas, nbytes)

    monkeypatch.setattr(Arenas, "take", noting)
    return found


def has_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def assert_trains_as_without(weights, device, **program):
    with_them = trained(weights, device, activations="host", **program)
    assert_same(with_them, trained("device", device, **program))
    assert not has_hooks()


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_with_activations_on_the_device(weights, device, name, taken):
    assert_trains_as_without(weights, device, make=MODELS[name])
    assert taken


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_activations_on_the_device(device, loss):
    assert_trains_as_without("host", device, loss=loss, dtype=torch.float32)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_of_several_backwards_are_summed(reentrant):
    assert_trains_as_without("host", "cpu", make=lambda: Net(reentrant=reentrant), backwards=3)


def test_a_copy_of_the_model_is_a_plain_one(taken):
    assert_trains_as_without("host", "cpu", then=saves_the_model)
    net, _optimizer = made("device", "cpu", activations="host")
    copied = copy.deepcopy(net)
    taken.clear()
    loss_of(copied, 0).backward()
    assert not taken


# ---- what leaves, and what stays ----


def made_with(**options):
    return made("device", "cpu", dtype=torch.float32, activations="host", **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_is_saved_leaves_the_device_in_the_forward(monkeypatch, device, reentrant):
    monkeypatch.setattr(activations, "_CROSSING_BYTES", 1)
    options = {"make": lambda: Net([Block() for _ in range(6)], reentrant)}
    net, _optimizer = made("device", device, activations="host", **options)
    outputs = []
    for layer in net.layers:
        layer.register_forward_hook(
            lambda _m, _i, out: outputs.append(StorageWeakRef(out.untyped_storage()))
        )
    loss = loss_of(net, 0)
    # One of those that are saved is on its way, and the last one stays.
    assert [each.expired() for each in outputs[:4]] == [True] * 4
    assert not outputs[5].expired()
    loss.backward()


def test_a_tensor_that_is_saved_often_is_copied_once(taken):
    class Often(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            views = x, x.t(), x[2:].view(5, 6, 32)
            return sum(part(view).sum() for part, view in zip(self.parts, views, strict=True))

    net, _optimizer = made_with(make=Often)
    # Two: the last one stays.
    found = sum(net(torch.randn(32, 32, requires_grad=True).exp()) for _ in range(2))
    found.backward()
    assert taken == [32 * 32 * 4]


def test_of_a_large_storage_only_the_part_that_is_saved_leaves(taken):
    net, _optimizer = made_with(make=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32)))
    data = torch.randn(1000, 32)
    for begin in (4, 8, 12):
        net(data[begin : begin + 4]).sum().backward()
    sum(net(data[begin : begin + 4]) for begin in (4, 8, 12)).sum().backward()
    assert taken == [4 * 32 * 4] * 2


class Saved(torch.autograd.Function):
    """Compares what it gets with what it has saved."""

    @staticmethod
    def forward(ctx, x):
        views = x.t(), x[:, 1::2], x.expand(2, -1, -1), x.t()[3:].view(dtype=x.dtype)
        ctx.save_for_backward(*views)
        ctx.expected = [(each.stride(), each.detach().clone()) for each in views]
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        for (stride, value), each in zip(ctx.expected, ctx.saved_tensors, strict=True):
            assert each.stride() == stride
            assert_same(each, value)
        return grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_views_keep_their_strides_and_values(dtype, taken):
    class Viewing(torch.nn.Linear):
        def forward(self, x):
            for _ in range(4):
                x = Saved.apply(super().forward(x))
            return x

    net = Viewing(32, 32).to(dtype)
    watched = activations.Activations(net, torch.device("cpu"))
    net(torch.randn(4, 32, dtype=dtype)).sum().backward()
    assert len(taken) > 3
    watched.end()


def test_what_parameters_and_buffers_have_stays(taken):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 32))
            self.late = torch.nn.Parameter(torch.randn(32, 32))
            self.register_buffer("scale", torch.ones(16, 32))

        def forward(self, x):
            found = x @ self.weight.t() @ self.late.t() + x.sum() * self.weight.detach()[:16]
            return (found * self.scale).sum() + (found * self.scale[:1]).sum()

    net, _optimizer = made_with(make=Own)
    # One that comes later, too.
    net.late = torch.nn.Parameter(torch.randn(32, 32))
    net(torch.randn(16, 32, requires_grad=True)).backward()
    # Of two inputs of products the last one stays.
    assert taken == [16 * 32 * 4]


def test_what_is_small_stays(monkeypatch, taken):
    monkeypatch.setattr(activations, "_BYTES_MIN", 1 << 20)
    assert_trains_as_without("host", "cpu")
    assert not taken


# ---- graphs ----


def test_a_graph_that_is_kept_has_all_its_backwards():
    net, _optimizer = made_with()
    loss = loss_of(net, 0)
    grads = []
    for retains in (True, True, False):
        loss.backward(retain_graph=retains)
        grads.append([param.grad for param in net.parameters()])
        net.zero_grad()
    plain, _ = made("device", "cpu", dtype=torch.float32)
    loss_of(plain, 0).backward()
    for found in grads:
        assert_same(found, [param.grad for param in plain.parameters()])


class Seen(torch.autograd.Function):
    """Notes the memory of what it has saved, as its backward gets it."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.seen.append(StorageWeakRef(x.untyped_storage()))
        return grad, None


def test_a_graph_that_is_kept_leaves_the_device_again(monkeypatch):
    monkeypatch.setattr(activations, "_CROSSING_BYTES", 1)
    seen = []
    hook = lambda _m, args: Seen.apply(args[0], seen)
    net, _optimizer = made_with()
    for layer in net.layers:
        layer.up.register_forward_pre_hook(hook)
    loss = loss_of(net, 0)
    loss.backward(retain_graph=True)
    assert [each.expired() for each in seen] == [True] * 3


def test_a_part_of_a_graph_goes_back_alone():
    """What was copied ahead is not what comes next."""
    found = []
    for where in ("host", "device"):
        net, _optimizer = made("device", "cpu", dtype=torch.float32, activations=where)
        losses = [loss_of(net, step) for step in range(3)]
        for nth in (1, 0, 2):
            losses[nth].backward()
        found.append([param.grad for param in net.parameters()])
    assert_same(*found)


def test_host_memory_is_said_when_it_is_taken_and_used_again(caplog):
    caplog.set_level(logging.INFO, "stepwell.weights.arenas")
    net, optimizer = made_with()
    for step in range(6):
        loss_of(net, step)
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            assert "GiB of host memory for activations" in caplog.text
            caplog.clear()
    assert not caplog.records


def test_host_memory_that_is_not_there_is_refused(monkeypatch):
    class Refused(contextlib.nullcontext):
        is_refused, room_nbytes = True, 7

        def __enter__(self):
            return self

    net, _optimizer = made_with()
    with monkeypatch.context() as patched:
        patched.setattr(_core, "MemoryClaim", Refused)
        with pytest.raises(ValueError, match=r"activations take .* `7` are free\. hint: fewer"):
            loss_of(net, 0)
    assert not has_hooks()
    loss_of(net, 0).backward()


def test_a_graph_outlives_the_optimizer(taken):
    net, optimizer = made_with()
    loss = loss_of(net, 0)
    del optimizer
    gc.collect()
    taken.clear()
    plain, _ = made("device", "cpu", dtype=torch.float32)
    loss_of(net, 0)
    assert not taken
    loss.backward()
    loss_of(plain, 0).backward()
    assert_same(*([param.grad for param in each.parameters()] for each in (net, plain)))


def test_two_optimizers_of_one_model():
    net, first = made_with()
    second = stepwell.OffloadAdamW(net.head.parameters(), model=net, activations="host")
    plain, third = made("device", "cpu", dtype=torch.float32)
    fourth = stepwell.OffloadAdamW(plain.head.parameters(), model=plain)
    for step in range(3):
        for each, optimizers in ((net, (first, second)), (plain, (third, fourth))):
            loss_of(each, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not has_hooks()
    assert_same(net.state_dict(), plain.state_dict())


# ---- writes ----


class Writing(torch.nn.Module):
    """Writes what autograd has saved, behind so many further layers."""

    def __init__(self, behind):
        super().__init__()
        self.behind = behind
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))

    def forward(self, x):
        x = saved = self.layers[0](x).mul_(0.5).exp()
        for nth, layer in enumerate(self.layers[1:]):
            if nth == self.behind:
                with torch.no_grad():
                    saved.zero_()
            x = layer(x).tanh()
        return x.sum()


def grads_of_writing(behind):
    net, _optimizer = made_with(make=lambda: Writing(behind))
    net(torch.ones(2, 32)).backward()
    return [param.grad for param in net.parameters()]


@pytest.mark.parametrize("behind", [1, 2, 6])
def test_a_write_before_it_has_left_is_an_error(behind):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads_of_writing(behind)


def test_a_write_while_it_leaves_is_an_error(monkeypatch):
    monkeypatch.setattr(activations, "_CROSSING_BYTES", 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads_of_writing(1)


def test_a_write_of_what_has_left_does_not_change_it(monkeypatch):
    monkeypatch.setattr(activations, "_CROSSING_BYTES", 1)
    assert_same(grads_of_writing(6), grads_of_writing(None))


class Unread(torch.autograd.Function):
    """Saves what its backward does not read."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(4, 32)


def test_what_is_written_and_saved_again_is_another_one():
    class Again(torch.nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            first = Unread.apply(x)
            return first + x.add_(1).square().sum() + x.cos().sum()

    found = []
    for where in ("host", "device"):
        options = {"dtype": torch.float32, "activations": where, "make": lambda: Again(32, 32)}
        net, _optimizer = made("device", "cpu", **options)
        net(torch.ones(4, 32)).backward()
        found.append(net.weight.grad)
    assert_same(*found)


def test_a_write_of_what_stays_is_an_error():
    net, _optimizer = made_with()
    loss = loss_of(net, 0)
    with torch.no_grad():
        net.layers[1].down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- hooks ----


class Interrupted(Block):
    ends = False

    def forward(self, x):
        assert has_hooks() == torch._C._autograd._saved_tensors_hooks_is_enabled()
        if self.ends:
            raise KeyboardInterrupt
        return super().forward(x)


def test_ctrl_c_in_a_forward_leaves_no_hooks_for_long():
    net, _optimizer = made_with(make=lambda: Net([Interrupted() for _ in range(2)]))
    net.layers[1].ends = True
    with pytest.raises(KeyboardInterrupt):
        loss_of(net, 0)
    net.layers[1].ends = False
    loss_of(net, 0).backward()
    assert not has_hooks()


def in_checkpoints(reentrant):
    def loss(net, step):
        words = words_of(net, step)

        def last(x):
            return cross_entropy(net.head(net.layers[2](x)).float().flatten(0, 1), words.flatten())

        x = net.layers[0](net.embed(words))
        x = checkpoint(net.layers[1], x, use_reentrant=reentrant)
        return checkpoint(last, x, use_reentrant=reentrant)

    return loss


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_modules(weights, reentrant):
    assert_trains_as_without(weights, "cpu", loss=in_checkpoints(reentrant))


def test_hooks_of_the_program_are_those_that_count(taken):
    def loss(net, step):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return loss_of(net, step)

    assert_trains_as_without("device", "cpu", loss=loss, dtype=torch.float32)
    assert not taken


def test_evaluations_save_nothing(taken):
    net, _optimizer = made_with()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            net(words_of(net, 0))
    assert not taken


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
def test_a_compiled_model(weights, in_place, taken):
    def run(where):
        torch.manual_seed(0)
        net = Net()
        if in_place:
            net.compile(backend="aot_eager")
        model = net if in_place else torch.compile(net, backend="aot_eager")
        options = {"lr": 1e-2, "weights": weights, "activations": where, "nonfinite": "raise"}
        optimizer = stepwell.OffloadAdamW(model, **options)
        losses = []
        for step in range(3):
            loss = loss_of(net, step, lambda words: model(words))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, net.state_dict()

    assert_same(run("host"), run("device"))
    assert taken


def test_it_takes_a_model():
    params = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="`activations` is `host` and no model is given"):
        stepwell.OffloadAdamW(params, activations="host")


# ---- streams ----


@pytest.mark.parametrize("crossing", [1, CROSSING_BYTES])
@pytest.mark.parametrize("name", ["plain", "checkpoints", "reentrant checkpoints", "tied"])
def test_streams_wait_for_late_copies(monkeypatch, name, crossing):
    monkeypatch.setattr(activations, "_CROSSING_BYTES", crossing)

    def grads(*, are_late):
        torch.manual_seed(0)
        net, found = MODELS[name](), []
        with monkeypatch.context() as patched:
            if are_late:
                watched = activations.Activations(net, torch.device("cpu"))
                down, up = have_late_streams(patched, watched)
            for step in range(4):
                losses = [loss_of(net, 10 * step + nth) for nth in range(3)]
                (losses[0] + losses[2]).backward(retain_graph=True)
                for loss in losses:
                    loss.backward()
                found.append([param.grad.clone() for param in net.parameters()])
            if are_late:
                assert down.given and (up.given or crossing > 1)
        return found

    assert_same(grads(are_late=True), grads(are_late=False))


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_device_has_room_for_more(monkeypatch, reentrant):
    monkeypatch.undo()
    monkeypatch.setattr(activations, "_CROSSING_BYTES", 32 << 20)
    layers, width, tokens = 24, 512, 16384
    region = tokens * width * 2

    def peak(where):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

        class Deep(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = model

            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                return x

        net = Deep().to("cuda", torch.bfloat16)
        optimizer = stepwell.OffloadAdamW(net, activations=where, nonfinite="raise")
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            net(x).square().mean().backward()
            used = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
        return used, net.state_dict(), x.grad

    ours, theirs = peak("host"), peak("device")
    assert_same(ours[1:], theirs[1:])
    # Of the layers' inputs the last, those of 32 MiB each way, and what a layer works with, stay.
    assert theirs[0] > layers * region
    assert ours[0] < theirs[0] - (layers - 10) * region
