"""accumulate="host": gradients are summed in host memory, with the sums of the device.

A program that reads one on the device meets NaN or an error.
"""

import copy
import pickle
import re

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, small, train
from optim_cases import LAYOUT_IDS, LAYOUTS, bits


def run(net, optimizer, steps=4, backwards=3):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(backwards):
            loss = loss_of(net, 3 * step + micro)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("gives_model", [True, False])
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_sums_and_losses_are_those_of_the_device(dtype, moments, gives_model):
    ours, theirs = pair(dtype=dtype, moments=moments, gives_model=gives_model, accumulate="host")
    assert run(*ours) == run(*theirs)
    assert_equal(ours, theirs)


def test_bytes_that_come_down_are_counted():
    net, optimizer = pair(accumulate="host")[0]
    nbytes = sum(param.nbytes for param in net.parameters())
    loss_of(net, 0).backward()
    assert optimizer.timing["bytes_downloaded"] == 0
    optimizer.step()
    assert optimizer.timing["bytes_downloaded"] == nbytes
    run(net, optimizer, steps=1)
    assert optimizer.timing["bytes_downloaded"] == 3 * nbytes


def test_gradients_are_freed_and_whoever_reads_one_is_told():
    net, optimizer = pair(accumulate="host")[0]
    train(net, optimizer, 1)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    assert all(
        param.grad.untyped_storage().nbytes() == param.itemsize for param in net.parameters()
    )
    assert all(param.grad.isnan().all() for param in net.parameters())
    with pytest.raises(ValueError, match=r"mul_`(.|\n)*clip_norm.*weights='device'"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


ZEROINGS = {
    "zero_": lambda grad: grad.zero_(),
    "data.zero_": lambda grad: grad.data.zero_(),
    "detach().zero_": lambda grad: grad.detach().zero_(),
    "torch.zero_": torch.zero_,
    "fill_": lambda grad: grad.fill_(0),
    "foreach": lambda grad: torch._foreach_zero_([grad]),
}


@pytest.mark.parametrize("zero", ZEROINGS.values(), ids=ZEROINGS.keys())
def test_gradients_zeroed_in_place_are_zero(zero):
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(4):
            loss_of(net, step).backward()
            optimizer.step()
            for param in net.parameters():
                zero(param.grad)
        # Zero, and not none: moments and weights decay.
        zero(net[0].bias.grad)
        optimizer.step()
        loss_of(net, 5).backward()
        zero(net[0].weight.grad)
        assert not net[0].weight.grad.any()
        loss_of(net, 6).backward()
        optimizer.step()
    assert_equal(ours, theirs)


EDITS = {
    "mul_": lambda grad: grad.mul_(2),
    "data.mul_": lambda grad: grad.data.mul_(2),
    "fill_": lambda grad: grad.fill_(1),
    "a part": lambda grad: grad.__setitem__(0, 0),
    "a view": lambda grad: grad.view(-1)[0].zero_(),
    "a keyword": lambda grad: torch.clamp_(input=grad, min=0),
    "data =": lambda grad: setattr(grad, "data", torch.zeros(grad.shape)),
    "foreach": lambda grad: torch._foreach_mul_([grad], 2),
    "out": lambda grad: torch.mul(torch.zeros(grad.shape), 2, out=grad),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_other_edits_of_gradients_raise_and_change_nothing(edit):
    ours, theirs = pair(accumulate="host")
    for net, _ in (ours, theirs):
        loss_of(net, 1).backward()
    with pytest.raises(ValueError, match=r"in host memory(.|\n)*hint: clear it by zero_grad"):
        edit(ours[0][0].weight.grad)
    assert ours[0][0].weight.grad.isnan().all()
    for _, optimizer in (ours, theirs):
        optimizer.step()
    assert_equal(ours, theirs)


def test_numpy_of_a_gradient_is_a_copy():
    net, _ = pair(accumulate="host")[0]
    loss_of(net, 1).backward()
    net[0].weight.grad.numpy().fill(0)
    assert net[0].weight.grad.isnan().all()
    stored = pickle.loads(pickle.dumps(net[0].weight.grad))
    assert type(stored) is torch.Tensor and stored.isnan().all()
    copied = copy.deepcopy(net[0].weight.grad)
    assert type(copied) is torch.Tensor
    assert copied.mul_(2).isnan().all()


MOVES = {
    "cpu": lambda net: net.cpu(),
    "to": lambda net: net.to("cpu"),
    # All that a CPU has of a move to another device.
    "away": lambda net: net._apply(lambda tensor: tensor.to("cpu", copy=True)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("clear", [lambda grad: None, torch.Tensor.zero_], ids=["sums", "zeros"])
def test_modules_may_be_moved_while_gradients_are_in_host_memory(move, clear):
    # Lightning moves the model when a fit ends, behind a step whose gradients nobody has cleared.
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(3):
            loss_of(net, step).backward()
            clear(net[0].weight.grad)
            move(net)
            loss_of(net, step + 1).backward()
            optimizer.step()
            move(net)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_backward_that_fails_between_the_marker_and_the_sum(is_followed):
    ours, theirs = pair(accumulate="host")
    for net, _ in (ours, theirs):
        loss_of(net, 1).backward()
    broken = [True]

    def fail(_):
        if broken[0]:
            raise RuntimeError("a hook fails")

    for net, _ in (ours, theirs):
        net[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="a hook fails"):
            loss_of(net, 2).backward()
    broken[0] = False
    if is_followed:
        loss_of(ours[0], 3).backward()
    with pytest.raises(ValueError, match=r"a backward failed(.|\n)*zero_grad"):
        ours[1].step()
    for net, optimizer in (ours, theirs):
        optimizer.zero_grad()
        loss_of(net, 4).backward()
        optimizer.step()
    assert_equal(ours, theirs)


def test_the_sum_of_a_parameter_that_goes_is_forgotten():
    """If it comes back its host side is another, which has no sum."""
    net, optimizer = pair(accumulate="host")[0]
    first, params = net[0].weight, optimizer.param_groups[0]["params"]
    loss_of(net, 1).backward()
    params[:] = [param for param in params if param is not first]
    optimizer.step()
    params.append(first)
    with pytest.raises(ValueError, match="put back or shared"):
        optimizer.step()


def test_a_gradient_put_back_after_another_backward_is_refused():
    net, optimizer = pair(accumulate="host")[0]
    loss_of(net, 0).backward()
    stored = net[0].weight.grad
    net[0].weight.grad = None
    loss_of(net, 1).backward()
    net[0].weight.grad = stored
    before = bits(net[0].weight)
    with pytest.raises(ValueError, match=r"put back or shared.*hint: accumulate='device'"):
        optimizer.step()
    assert torch.equal(bits(net[0].weight), before)
    assert optimizer.skipped_steps == 0
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    optimizer.step()


def test_gradients_written_in_a_buffer_of_the_programs_are_refused():
    """The sum would keep what the program has cleared."""
    net, optimizer = pair(accumulate="host")[0]
    buffer = torch.zeros(sum(param.numel() for param in net.parameters()))
    sizes = [param.numel() for param in net.parameters()]
    for param, part in zip(net.parameters(), buffer.split(sizes), strict=True):
        param.grad = part.view_as(param)
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    before = bits(net[0].weight)
    buffer.zero_()
    loss_of(net, 1).backward()
    with pytest.raises(ValueError, match=r"0.weight`.*a buffer(.|\n)*hint:.*accumulate='device'"):
        optimizer.step()
    assert torch.equal(bits(net[0].weight), before)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    optimizer.step()


def test_gradients_that_a_program_asks_for_leave_the_sums():
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, 2 * step).backward()
            loss = loss_of(net, 2 * step + 1)
            grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            assert all(param.grad is not None for param in net.parameters())
            (0.1 * sum(grad.square().sum() for grad in grads)).backward()
            optimizer.step()
    assert_equal(ours, theirs)


def test_two_optimizers_cannot_share_gradients():
    net, one = pair(accumulate="host")[0]
    other = stepwell.OffloadAdamW(net, accumulate="host")
    with pytest.raises(ValueError, match="used by two optimizers"):
        for _ in range(2):
            loss_of(net, 0).backward()
            one.step()
            other.step()


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_gradient_made_of_a_moved_one_is_named(nonfinite, caplog):
    net, optimizer = pair(accumulate="host", nonfinite=nonfinite)[0]
    loss_of(net, 0).backward()
    net[0].weight.grad = net[0].weight.grad * 2
    message = r"is `nan`, maybe because.*accumulate='host'.*parameter.grad \* 2"
    if nonfinite == "raise":
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert re.search(message, caplog.text)


@pytest.mark.parametrize("poison_at", [None, 0, 2])
def test_grad_scaler_works_as_with_sums_on_the_device(poison_at):
    found = []
    for accumulate in ("host", "device"):
        net = small()
        optimizer = stepwell.OffloadAdamW(net, lr=1e-2, clip_norm=0.5, accumulate=accumulate)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            for nth in range(2):
                factor = torch.inf if (step, nth) == (poison_at, 0) else 1.0
                scaler.scale(factor * loss_of(net, 2 * step + nth)).backward()
            if step == 3:
                # Of one the program has made.
                net[0].weight.grad = torch.ones_like(net[0].weight)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step != 1)
        assert optimizer.skipped_steps == (poison_at is not None)
        found.append((scaler.get_scale(), [bits(param).tolist() for param in net.parameters()]))
    assert found[0] == found[1]


def test_a_scaler_that_would_scale_sums_is_refused():
    net, optimizer = pair(accumulate="host")[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(ValueError, match=r"needs no GradScaler\.unscale_\(\)"):
        scaler.unscale_(optimizer)


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match="`accumulate` is `host`"):
        stepwell.OffloadAdamW(small(), accumulate="host", deferred=stepwell.Deferred())
