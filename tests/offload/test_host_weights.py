"""Weights in host memory, which modules fetch: every program trains as with weights on the device.

To the bit: losses, weights whichever way they are read, and state. On the CPU the host is the
device, and what a program reads too early or too late has no memory.
"""

import copy
import io
import os

import pytest
import torch
from host_weight_cases import (
    Listing,
    Net,
    Recursive,
    Routed,
    Skipping,
    Unseeing,
    WithNothing,
    Writing,
    adapted,
    assert_same,
    assert_trains_alike,
    attending,
    compiled_layers,
    loss_of,
    partly_frozen,
    renormed,
    resident_bytes,
    returning,
    tied,
    words_of,
)
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

# cuBLAS is told before it is used first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


MODELS = {
    "plain": Net,
    "checkpoints": lambda: Net(reentrant=False),
    "reentrant checkpoints": lambda: Net(reentrant=True),
    "tied": tied,
    "a weight without elements": WithNothing,
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
    # Sums that the device has have been added in the same order. State that stays there is fp32.
    stays = (None, "ends", "state") if moments == "fp32" else (None, "ends")
    options = {"dtype": dtype, "moments": moments, "backwards": backwards}
    assert_trains_alike(device, stays=stays, **options)


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


def with_lists_of_losses(net, step):
    loss = loss_of(net, step)
    for layer in net.layers:
        loss = loss + layer.losses.pop()
    return loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("layer", "loss"), [(Routed, with_losses_of_layers), (Listing, with_lists_of_losses)]
)
def test_a_loss_that_a_layer_leaves_as_an_attribute_goes_back(device, layer, loss):
    options = {"loss": loss, "dtype": torch.float32}
    assert_trains_alike(device, make=lambda: Net([layer(), layer()]), **options)


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

    program = {"loss": penalty_first, "then": logs, "dtype": torch.float32}
    assert_trains_alike("cpu", stays=(None,), **program)


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


def clamped_behind_a_forward(net, step):
    """Weights that the backward uses first are on the device."""
    loss_of(net, step)
    for param in net.parameters():
        param.data.clamp_(-0.05, 0.05)
    return loss_of(net, step)


def replaced_behind_a_backward(net, step):
    """Weights that the next pass uses first are on the device."""
    loss_of(net, step).backward()
    for param in net.parameters():
        param.data = param.data * 0.9
    saved = {name: each.clone() for name, each in net.state_dict().items()}
    for name, param in net.named_parameters():
        assert_same(saved[name], param.detach())
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
LOSSES += [clamped_behind_a_forward, replaced_behind_a_backward]


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


def puts_data_back(net, optimizer, step, kept):
    """Saves other weights, and goes on with the memory from before."""
    before = [param.data for param in net.parameters()]
    for param in net.parameters():
        param.data = param.data * 0.5
    saved = {name: each.clone() for name, each in net.state_dict().items()}
    found = evaluates(net, optimizer, step, kept)
    for param, data in zip(net.parameters(), before, strict=True):
        param.data = data
    return saved, found, [param.detach().clone() for param in net.parameters()]


def replaces_data_in_a_graph(net, optimizer, step, kept):
    """A weight with new memory is saved, and stays."""
    weight = net.head.weight
    kept["graph"] = weight.sum()
    weight.data = weight.data * 0.9
    saved = net.state_dict()["head.weight"].clone()
    return saved, weight.detach().clone()


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
THEN += [saves_the_model, replaces_data_in_a_graph]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("then", THEN)
def test_what_is_done_between_steps_counts(device, then):
    assert_trains_alike(device, then=then)


@pytest.mark.parametrize("device", DEVICES)
def test_data_that_is_put_back_is_as_it_was(device):
    # In fp32: what a save has written loses its trailing bits.
    assert_trains_alike(device, then=puts_data_back, dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_what_thaws_counts(device):
    assert_trains_alike(device, make=partly_frozen, then=thaws)
