"""Gradients that a program writes or frees behind the backward: they are stepped as they are."""

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair
from stepwell.store import gradients
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


def _replace_data(grad):
    grad.data = grad.data * 0.1


EDITS = {
    "data.mul_": lambda grad: grad.data.mul_(1e-3),
    "data.neg_": lambda grad: grad.data.neg_(),
    "data.clamp_": lambda grad: grad.data.clamp_(-1e-2, 1e-2),
    "data.zero_": lambda grad: grad.data.zero_(),
    "data.add_": lambda grad: grad.data.add_(1e-3),
    "numpy": lambda grad: grad.numpy().fill(0.5),
    "data =": _replace_data,
    "mul_": lambda grad: grad.mul_(1e-3),
    "set_": lambda grad: grad.set_(grad.data * 0.1),
}


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_gradients_changed_after_their_copy_cross_again(edit, which, caplog):
    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            for param in list(net.parameters())[:: 1 if which == "all" else 4]:
                edit(param.grad)
            optimizer.step()
    assert_equal(ours, theirs)
    assert caplog.text.count("cross the bus again") == 1
    assert ours[1].grad_norm == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in theirs[0].parameters()]).item()
    )


def scaled_and_back(grad):
    """As for a log. Bits are the same."""
    grad.data.mul_(2.0**-10)
    grad.data.mul_(2.0**10)


def freed_and_back(grad):
    storage, kept = grad.untyped_storage(), grad.clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    grad.data.copy_(kept)


@pytest.mark.parametrize("edit", [scaled_and_back, freed_and_back])
def test_a_gradient_may_be_written_while_it_would_be_copied(monkeypatch, edit):
    """Its copy has ended when the backward has, or the device is ordered so."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64 << 20)

    def train(**options):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(1 << 24) * 0.01) for _ in range(3)]
        optimizer = stepwell.OffloadAdamW(params, lr=1e-3, **options)
        for _ in range(2):
            (sum(each.square().sum() for each in params) + (params[0] * params[1]).sum()).backward()
            for each in params:
                edit(each.grad)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return params

    for one, other in zip(train(accumulation_steps=1), train(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("edit", [scaled_and_back, freed_and_back])
def test_so_it_may_be_where_all_layers_are_checkpointed(monkeypatch, edit):
    """The last backward that copies any is one within another, which copies none."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64 << 20)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1 << 24) * 0.01)

        def forward(self, hidden):
            return hidden + (self.weight.square() * hidden).sum()

    def train(**options):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(Layer() for _ in range(3))
        optimizer = stepwell.OffloadAdamW(layers, lr=1e-3, **options)
        for _ in range(2):
            hidden = torch.ones(1, requires_grad=True)
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            hidden.sum().backward()
            for each in layers.parameters():
                edit(each.grad)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return list(layers.parameters())

    for one, other in zip(train(accumulation_steps=1), train(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("early", [{}, {"accumulation_steps": 1}])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_gradient_whose_memory_is_freed_is_refused(early, left):
    net, optimizer = pair(**early)[0]
    loss_of(net, 0).backward()
    storage = net[0].weight.grad.untyped_storage()
    storage.resize_(int(storage.nbytes() * left))
    with pytest.raises(ValueError, match=r"but its storage has .* hint: the program has freed it"):
        optimizer.step()


@pytest.mark.parametrize("sizes", [(5, 7), (5, 1 << 15), (1 << 15,)])
def test_gradients_of_any_size_that_change_cross_again(sizes):
    params = [torch.nn.Parameter(torch.zeros(size).bfloat16()) for size in sizes]
    optimizer = stepwell.OffloadAdamW(params, lr=0.1, accumulation_steps=1)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = stepwell.OffloadAdamW(twins, lr=0.1)
    for _ in range(3):
        for tensors in (params, twins):
            sum((each.float() * torch.arange(len(each))).sum() for each in tensors).backward()
            for each in tensors:
                each.grad.data.mul_(-0.5)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    optimizer.synchronize()
    other.synchronize()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
