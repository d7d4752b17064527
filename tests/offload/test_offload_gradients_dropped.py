"""Gradients that no step takes: cleared, of a step that is not made, of a backward that fails."""

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, small, train
from stepwell.store import gradients
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


def clear_by_optimizer(net, optimizer):
    optimizer.zero_grad()


def clear_by_model(net, optimizer):
    net.zero_grad()


def set_to_zero(net, optimizer):
    optimizer.zero_grad(set_to_none=False)
    for param in net.parameters():
        # The next backward makes another.
        param.grad = None


@pytest.mark.parametrize("batch_bytes", [0, 64 << 20], ids=["copied", "waiting"])
@pytest.mark.parametrize("clear", [clear_by_optimizer, clear_by_model, set_to_zero])
def test_gradients_that_are_cleared_are_let_go(clear, batch_bytes, monkeypatch):
    """A program that skips batches holds no more than one set of gradients."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", batch_bytes)
    ours, theirs = pair(accumulation_steps=1)
    net, optimizer = ours
    held = []
    for step in range(20):
        loss_of(net, step).backward()
        held += [StorageWeakRef(param.grad.untyped_storage()) for param in net.parameters()]
        clear(net, optimizer)
        held = [storage for storage in held if not storage.expired()]
        assert len(held) <= len(list(net.parameters())), step
        if clear is not clear_by_model:
            assert not held
    for each in (ours, theirs):
        train(*each, 2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_cleared_backward_does_not_count(set_to_none, caplog):
    """Of three backwards the first is cleared: the last is the third, which crosses once."""
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        loss_of(net, 0).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, 1).backward()
        loss_of(net, 2).backward()
        optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text
    nbytes = sum(param.nbytes for param in ours[0].parameters())
    assert ours[1].timing["bytes_downloaded"] == nbytes


def test_backwards_are_counted_from_the_last_step(caplog):
    """Also where gradients are not cleared, so that those of all steps are summed."""
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        for step in range(6):
            loss_of(net, step).backward()
            if step % 2:
                optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text


def test_a_backward_counts_once_for_a_parameter_that_went_and_came_back():
    net, optimizer = pair(accumulation_steps=2)[0]
    first, params = net[0].weight, optimizer.param_groups[0]["params"]
    for members in (list(net.parameters())[1:], [*params[1:], first]):
        train(net, optimizer, 1)
        params[:] = members
    train(net, optimizer, 1)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    assert not optimizer._collector.is_any_taken
    loss_of(net, 2).backward()
    assert optimizer._collector.is_any_taken


@pytest.mark.parametrize("batch_bytes", [0, 64 << 20], ids=["copied", "waiting"])
def test_backwards_that_the_model_has_cleared_do_not_count(batch_bytes, monkeypatch, caplog):
    """Of four backwards two are cleared: the last is the fourth, which crosses once, and early."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", batch_bytes)
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        for step in range(4):
            loss_of(net, step).backward()
            if step == 1:
                net.zero_grad()
        if net is ours[0]:
            assert optimizer._collector.is_any_taken
        optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text


def test_zero_grad_after_a_step_discards_nothing(monkeypatch):
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 1)
    discarded = []
    monkeypatch.setattr(optimizer._background.engine, "discard", lambda: discarded.append(None))
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, 1).backward()
        optimizer.step()
    optimizer.zero_grad()
    assert not discarded


# ---- steps that are not made, backwards that fail ----


class Broken(torch.autograd.Function):
    """Passes on what it gets, and fails in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this backward fails")


def fail_half_way(net, step):
    """A backward that reaches the last layer, and no other."""
    *front, last = net
    x = torch.linspace(-1, 1, 28).view(4, 7) + step
    for layer in front:
        x = layer(x)
    with pytest.raises(RuntimeError, match="this backward fails"):
        last(Broken.apply(x)).square().sum().backward()


OPTIONS = [{}, {"accumulation_steps": 1}, {"accumulation_steps": 2}, {"accumulate": "host"}]
OPTION_IDS = ["untold", "told", "two", "host"]


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "not cleared"])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_a_backward_that_fails_leaves_what_it_leaves_in_torch(options, clears):
    """Nothing but what is in `param.grad`, and that only until it is cleared."""
    ours = small()
    theirs = small()
    optimizer = stepwell.OffloadAdamW(ours, lr=1e-2, **options)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for net, each in ((ours, optimizer), (theirs, reference)):
        for step in range(4):
            each.zero_grad()
            if step % 2:
                fail_half_way(net, step)
                if clears:
                    each.zero_grad()
            loss_of(net, step).backward()
            loss_of(net, step + 1).backward()
            each.step()
    optimizer.synchronize()
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[param][name], reference.state[expected][name]
            )


def skip_by_nan(net, optimizer):
    loss_of(net, 7).backward()
    net[0].weight.grad[0, 0] = float("nan")
    optimizer.step()


def skip_by_found_inf(net, optimizer):
    loss_of(net, 7).backward()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf


def refuse(net, optimizer):
    loss_of(net, 7).backward()
    whole = net[0].weight.grad
    net[0].weight.grad = None
    net[0].bias.grad = torch.zeros_like(net[0].bias).to_sparse()
    with pytest.raises(ValueError, match="expected a dense tensor"):
        optimizer.step()
    net[0].weight.grad = whole


def fail_in_a_closure(net, optimizer):
    def closure():
        loss_of(net, 7).backward()
        raise RuntimeError("this closure fails")

    with pytest.raises(RuntimeError, match="this closure fails"):
        optimizer.step(closure)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=OPTION_IDS[:3])
@pytest.mark.parametrize("abandon", [skip_by_nan, skip_by_found_inf, refuse, fail_in_a_closure])
def test_gradients_of_a_step_that_was_not_made_are_not_stepped(abandon, options):
    ours, theirs = pair(**options)
    for net, optimizer in (ours, theirs):
        for step in range(4):
            optimizer.zero_grad()
            if step % 2:
                abandon(net, optimizer)
                optimizer.zero_grad()
            loss_of(net, step).backward()
            if step == 3:
                # A parameter of the abandoned step that has no part in this one.
                net[3].weight.grad = None
            optimizer.step()
    assert_equal(ours, theirs)
