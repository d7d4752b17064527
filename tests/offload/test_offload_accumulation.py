"""accumulate="host": gradients are summed in host memory, with the sums of the device.

A program that reads one on the device meets NaN or an error.
"""

import copy
import os
import pickle
import re

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, small, train
from optim_cases import DTYPES, LAYOUT_IDS, LAYOUTS, SPECIALS, bits
from stepwell.store import host_collector
from stepwell.store.host_collector import HostCollector
from stepwell.store.twins import Twins


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipped_as_on_the_device(dtype):
    # One norm, of the same sums by the same code.
    on_host = pair(dtype=dtype, clip_norm=0.1, accumulate="host")[0]
    on_device = pair(dtype=dtype, clip_norm=0.1)[0]
    assert run(*on_host) == run(*on_device)
    assert on_host[1].grad_norm == on_device[1].grad_norm > 0.1
    assert_equal(on_host, on_device)


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
    with pytest.raises(ValueError, match=r"mul_`(.|\n)*clip_norm"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(
    "clear", [lambda net, optimizer: optimizer.zero_grad(), lambda net, optimizer: net.zero_grad()]
)
def test_cleared_gradients_are_cleared(clear):
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        run(net, optimizer, 1)
        clear(net, optimizer)
        loss_of(net, 8).backward()
        # A backward in vain.
        clear(net, optimizer)
        optimizer.step()
        run(net, optimizer, 1)
    assert_equal(ours, theirs)


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


@pytest.mark.parametrize(
    "clear",
    [
        lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda net, optimizer: net.zero_grad(set_to_none=False),
    ],
    ids=["optimizer", "model"],
)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, stepwell.AdamW])
def test_zero_grad_that_leaves_zeros(clear, cls):
    ours, theirs = pair(accumulate="host")
    if cls is torch.optim.AdamW:
        theirs = theirs[0], torch.optim.AdamW(theirs[0].parameters(), lr=1e-2)
    for net, optimizer in (ours, theirs):
        for step in range(4):
            loss_of(net, step).backward()
            loss_of(net, step + 1).backward()
            optimizer.step()
            clear(net, optimizer)
        optimizer.step()
    if cls is torch.optim.AdamW:
        ours[1].synchronize()
        for param, expected in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            torch.testing.assert_close(param, expected)
    else:
        assert_equal(ours, theirs)


EDITS = {
    "mul_": lambda grad: grad.mul_(2),
    "data.mul_": lambda grad: grad.data.mul_(2),
    "*=": lambda grad: grad.__imul__(2),
    "copy_": lambda grad: grad.copy_(torch.zeros(grad.shape)),
    "fill_": lambda grad: grad.fill_(1),
    "a part": lambda grad: grad.__setitem__(0, 0),
    "a view": lambda grad: grad.view(-1)[0].zero_(),
    "a keyword": lambda grad: torch.clamp_(input=grad, min=0),
    "a view of a keyword": lambda grad: torch.transpose(input=grad, dim0=0, dim1=1).zero_(),
    "data =": lambda grad: setattr(grad, "data", torch.zeros(grad.shape)),
    "foreach": lambda grad: torch._foreach_mul_([grad], 2),
    "clamp": lambda grad: torch.nn.utils.clip_grad_value_([_holder(grad)], 1.0),
    "out": lambda grad: torch.mul(torch.zeros(grad.shape), 2, out=grad),
    "nan_to_num_": lambda grad: torch.nan_to_num_(grad, 0),
    "masked_fill_": lambda grad: grad.masked_fill_(torch.ones(grad.shape, dtype=torch.bool), 0),
}


def _holder(grad):
    param = torch.nn.Parameter(torch.zeros(grad.shape))
    param.grad = grad
    return param


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


def test_a_gradient_that_was_moved_takes_no_memory_and_stands_for_its_own_alone():
    net, optimizer = pair(accumulate="host")[0]
    loss_of(net, 1).backward()
    first, last = (net[index].weight.grad for index in (0, 3))
    moved = first.to("cpu", copy=True)
    assert moved.isnan().all()
    assert moved.untyped_storage().nbytes() == moved.itemsize
    for edit in (lambda: moved.zero_(), lambda: setattr(last, "data", last.to(torch.float64))):
        with pytest.raises(ValueError, match=r"in host memory(.|\n)*hint: clear it by zero_grad"):
            edit()
    with pytest.raises(ValueError, match=r"in host memory(.|\n)*hint: clear it by zero_grad"):
        last.data = moved
    optimizer.step()
    assert optimizer.skipped_steps == 0


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


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_backward_that_failed_for_a_parameter_that_goes_is_forgotten(is_followed):
    net, optimizer = pair(accumulate="host")[0]
    loss_of(net, 1).backward()
    first, params = net[0].weight, optimizer.param_groups[0]["params"]

    def fail(_):
        raise RuntimeError("a hook fails")

    broken = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="a hook fails"):
        loss_of(net, 2).backward()
    broken.remove()
    if is_followed:
        loss_of(net, 3).backward()
    params[:] = [param for param in params if param is not first]
    optimizer.step()
    params.append(first)
    first.grad = None
    loss_of(net, 4).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0


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


def test_backwards_go_on_when_the_sums_are_gone():
    param = torch.nn.Parameter(torch.ones(3))
    collector = HostCollector(Twins(), None, str)
    collector.watch(param)
    del collector
    param.sum().backward()
    assert param.grad.tolist() == [1.0] * 3


def test_gradients_that_are_not_cleared_add_up():
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(4):
            loss_of(net, step).backward()
            optimizer.step()
    assert_equal(ours, theirs)


def test_gradients_of_other_origin_count():
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            net[0].bias.grad = torch.full_like(net[0].bias, step + 1.0)
            net[3].weight.grad = None
            optimizer.step()
    assert_equal(ours, theirs)


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


@pytest.mark.parametrize("holds", ["buffer", "parts"])
def test_gradients_written_in_a_buffer_of_the_programs_are_refused(holds):
    """The sum would keep what the program has cleared."""
    net, optimizer = pair(accumulate="host")[0]
    buffer = torch.zeros(sum(param.numel() for param in net.parameters()))
    sizes = [param.numel() for param in net.parameters()]
    parts = []
    for param, part in zip(net.parameters(), buffer.split(sizes), strict=True):
        param.grad = part.view_as(param)
        parts.append(param.grad)
    held = parts if holds == "parts" else [buffer]
    del buffer, part, parts
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    before = bits(net[0].weight)
    for each in held:
        each.zero_()
    loss_of(net, 1).backward()
    with pytest.raises(ValueError, match=r"0.weight`.*a buffer(.|\n)*hint:.*accumulate='device'"):
        optimizer.step()
    assert torch.equal(bits(net[0].weight), before)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    optimizer.step()


def test_gradients_that_a_program_assigns_anew_may_have_one_memory():
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        own = [torch.empty_like(param) for param in net.parameters()]
        for step in range(3):
            for param, grad in zip(net.parameters(), own, strict=True):
                param.grad = grad.fill_(step + 1.0)
            optimizer.step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_a_program_asks_for_leave_the_sums(create_graph):
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, 2 * step).backward()
            loss = loss_of(net, 2 * step + 1)
            grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=create_graph)
            assert all(param.grad is not None for param in net.parameters())
            if create_graph:
                (0.1 * sum(grad.square().sum() for grad in grads)).backward()
            else:
                loss_of(net, 2 * step + 1).backward()
            optimizer.step()
    assert_equal(ours, theirs)


def test_a_hook_that_returns_something_has_the_error_of_torch():
    param = torch.nn.Parameter(torch.ones(3))
    param.register_post_accumulate_grad_hook(lambda param: param.grad)
    optimizer = stepwell.OffloadAdamW([param], accumulate="host")
    with pytest.raises(RuntimeError, match="should return None"):
        param.sum().backward()
    optimizer.zero_grad()


def test_two_optimizers_cannot_share_gradients():
    net, one = pair(accumulate="host")[0]
    other = stepwell.OffloadAdamW(net, accumulate="host")
    with pytest.raises(ValueError, match="used by two optimizers"):
        for _ in range(2):
            loss_of(net, 0).backward()
            one.step()
            other.step()


@pytest.mark.parametrize("special", SPECIALS, ids=str)
def test_nonfinite_sum_is_skipped(special):
    ours, theirs = pair(accumulate="host")
    for net, optimizer in (ours, theirs):
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(net, step)
            (loss * special if step == 2 else loss).backward()
            loss_of(net, step).backward()
            optimizer.step()
        assert optimizer.skipped_steps == 1
    assert_equal(ours, theirs)


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


def test_state_dicts_resume_exactly():
    net, optimizer = pair(dtype=torch.bfloat16, accumulate="host")[0]
    run(net, optimizer, 2)
    twin = small(torch.bfloat16)
    resumed = stepwell.OffloadAdamW(twin, accumulate="host")
    resumed.load_state_dict(optimizer.state_dict())
    twin.load_state_dict(net.state_dict())
    assert run(net, optimizer, 2) == run(twin, resumed, 2)
    assert_equal((net, optimizer), (twin, resumed))


def test_grad_scaler_is_refused():
    net, optimizer = pair(accumulate="host")[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(net, 0)).backward()
    before = [bits(param) for param in net.parameters()]
    with pytest.raises((ValueError, RuntimeError)):
        scaler.step(optimizer)
    assert all(
        torch.equal(bits(param), old) for param, old in zip(net.parameters(), before, strict=True)
    )


def test_what_a_grad_scaler_has_found_is_refused():
    net, optimizer = pair(accumulate="host")[0]
    loss_of(net, 0).backward()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(ValueError, match="GradScaler cannot see gradients"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_is_told():
    net, optimizer = pair(accumulate="host")[0]
    run(net, optimizer, 1)
    loss_of(net, 1).backward()
    optimizer.synchronize()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            net[0].bias.grad = torch.zeros_like(net[0].bias)
            optimizer.step()
        except ValueError as error:
            code = 0 if "after forking" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="`accumulate` is `disk`"):
        stepwell.OffloadAdamW(small().parameters(), accumulate="disk")


def test_sums_are_made_beside_the_device_of_the_parameters(monkeypatch):
    """Parameters that come later may be elsewhere than those that have gone."""
    made = []
    monkeypatch.setattr(host_collector, "Adder", made.append)
    collector = HostCollector(Twins(), None, str)
    for device in ("cpu", "meta", "meta"):
        collector.watch(torch.nn.Parameter(torch.ones(3, device=device)))
    assert made == [torch.device("cpu"), torch.device("meta")]
