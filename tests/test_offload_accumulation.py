"""accumulate="host": gradients are summed in host memory, the same sums as on the device, and whoever reads one there is told."""

import os

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, small, train
from optim_cases import DTYPES, LAYOUT_IDS, LAYOUTS, SPECIALS, bits
from stepwell.offload import accumulation

GATES = ["module", "step"]


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


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_sums_and_losses_are_those_of_the_device(dtype, moments, gate):
    ours, theirs = pair(dtype=dtype, moments=moments, gate=gate, accumulate="host")
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


def test_gradients_in_pieces_through_few_slots(monkeypatch):
    monkeypatch.setattr(accumulation, "_SLOT_BYTES", 256)
    ours, theirs = pair(accumulate="host")
    run(*ours)
    run(*theirs)
    assert_equal(ours, theirs)
    assert ours[1].timing["bytes_downloaded"] == 3 * sum(
        param.nbytes for param in ours[0].parameters()
    )


def test_gradients_are_freed_and_whoever_reads_one_is_told():
    net, optimizer = pair(accumulate="host")[0]
    train(net, optimizer, 1)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    assert all(
        param.grad.untyped_storage().nbytes() == param.itemsize for param in net.parameters()
    )
    assert all(param.grad.isnan().all() for param in net.parameters())
    with pytest.raises(RuntimeError, match="single memory location"):
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


def test_state_dicts_resume_exactly():
    net, optimizer = pair(dtype=torch.bfloat16, accumulate="host")[0]
    run(net, optimizer, 2)
    twin = small(torch.bfloat16)
    resumed = stepwell.OffloadAdamW(twin.named_parameters(), accumulate="host")
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
