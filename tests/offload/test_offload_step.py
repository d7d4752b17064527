"""One step beside a device: how it clips, which state it goes on with, and what it lets go of."""

import math
import time

import pytest
import stepwell
import torch
from insides import (
    engine_of,
    forwards_wait,
    gate_of,
    has_host_side,
    is_any_under_way,
    make_late,
    num_pending,
)
from offload_cases import loss_of, small, train
from optim_cases import bits


def parameters_with(*grads):
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


# ---- clipping ----


@pytest.mark.parametrize("norm", [1e-6, 1e-3, 1.0, 1e3])
def test_clipping_has_the_coefficient_of_torch(norm):
    grad = torch.full((4,), norm / 2)
    (ours,), (theirs,) = parameters_with(grad), parameters_with(grad)
    optimizer = stepwell.OffloadAdamW([ours], clip_norm=norm)
    reference = torch.optim.AdamW([theirs])
    optimizer.step()
    torch.nn.utils.clip_grad_norm_([theirs], norm)
    reference.step()
    found, expected = optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_an_infinite_norm_that_propagates_clips_as_in_torch():
    grads = torch.tensor([1.0, math.inf]), torch.full((2,), 100.0)
    ours, theirs = parameters_with(*grads), parameters_with(*grads)
    optimizer = stepwell.OffloadAdamW(ours, clip_norm=1.0, nonfinite="propagate")
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.optim.AdamW(theirs).step()
    optimizer.synchronize()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert not optimizer.state[ours[1]]["exp_avg"].any()


def test_a_norm_of_nan_that_propagates_clips_nothing():
    ours = parameters_with(torch.tensor([1.0, math.nan]), torch.full((2,), 100.0))
    optimizer = stepwell.OffloadAdamW(ours, clip_norm=1.0, nonfinite="propagate")
    optimizer.step()
    assert ours[0].isnan().tolist() == [False, True]
    assert optimizer.state[ours[1]]["exp_avg"] == pytest.approx(10.0)


# ---- state ----


@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_first_step_at_lr_0_makes_state_where_all_gradients_are_zero(norm):
    """As torch.distributed.checkpoint asks for it."""
    (param,) = parameters_with(torch.tensor([norm]))
    optimizer = stepwell.OffloadAdamW([param], lr=0.0)
    optimizer.step()
    assert optimizer.state[param]["step"] == norm
    assert param == 1


def test_state_that_was_deleted_begins_anew():
    (ours,), (theirs,) = (parameters_with(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer, reference = stepwell.OffloadAdamW([ours]), torch.optim.AdamW([theirs])
    for each, param in ((optimizer, ours), (reference, theirs)):
        each.step()
        del each.state[param]
        each.step()
    assert optimizer.state[ours]["step"] == 1
    for name, value in reference.state[theirs].items():
        torch.testing.assert_close(optimizer.state[ours][name], value)
    torch.testing.assert_close(ours, theirs)


def test_moments_that_are_strided_are_stepped():
    grad = torch.randn(3, 5)
    (ours,), (theirs,) = parameters_with(grad), parameters_with(grad)
    optimizer, reference = (stepwell.OffloadAdamW([param]) for param in (ours, theirs))
    for _ in range(3):
        optimizer.step()
        reference.step()
        state = optimizer.state[ours]
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    assert torch.equal(bits(ours), bits(theirs))
    found, expected = (
        each.state[param] for each, param in ((optimizer, ours), (reference, theirs))
    )
    assert torch.equal(bits(found["exp_avg"]), bits(expected["exp_avg"]))


def test_memory_of_state_is_counted_once():
    """Of 16 bytes per element: what was set aside for a first step is state from then on."""
    params = parameters_with(torch.ones(1000))
    optimizer = stepwell.OffloadAdamW(params, host_bytes_max=33_000)
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1000))]})


# ---- what follows a step ----


def test_nothing_is_under_way_after_synchronize():
    net = small()
    optimizer = stepwell.OffloadAdamW(net)
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
    assert is_any_under_way(optimizer)
    optimizer.synchronize()
    assert not is_any_under_way(optimizer)


def test_a_weight_whose_memory_others_hold_is_there_after_the_step():
    net = small()
    weight = net[0].weight
    optimizer = stepwell.OffloadAdamW(net, lr=1e-2)
    train(net, optimizer, 2)
    optimizer.synchronize()
    make_late(optimizer)
    kept = weight.detach()
    before = kept.clone()
    loss_of(net, 2).backward()
    optimizer.step()
    assert not torch.equal(kept, before)


@pytest.mark.parametrize("seen", ["forwards", "no model"])
def test_a_step_waits_for_weights_where_no_forward_does(seen):
    net = small()
    optimizer = stepwell.OffloadAdamW(net.parameters(), model=None if seen == "no model" else net)
    train(net, optimizer, 2)
    optimizer.synchronize()
    late = make_late(optimizer)
    loss_of(net, 2).backward()
    optimizer.step()
    assert late.is_late == (seen == "forwards")


@pytest.mark.parametrize("accumulate", ["device", "host"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_as_in_torch(accumulate, set_to_none):
    net = small()
    optimizer = stepwell.OffloadAdamW(net, accumulate=accumulate)
    loss_of(net, 0).backward()
    optimizer.zero_grad(set_to_none)
    for param in net.parameters():
        assert (param.grad is None) == set_to_none
        assert set_to_none or not param.grad.any()


def test_a_step_that_has_failed_is_told_where_a_group_is_added(monkeypatch):
    net = small()
    optimizer = stepwell.OffloadAdamW(net.parameters(), model=net)
    train(net, optimizer, 1)
    error = OSError("the device has failed")
    monkeypatch.setattr(engine_of(optimizer), "synchronize", lambda: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match="the device has failed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_the_parts_of_a_step_take_no_longer_than_it():
    net = small()
    optimizer = stepwell.OffloadAdamW(net)
    for step in range(2):
        loss_of(net, step).backward()
        began = time.perf_counter()
        optimizer.step()
        elapsed = time.perf_counter() - began
        parts = ("background", "norm", "prepare", "release")
        assert sum(optimizer.timing[part] for part in parts) <= elapsed


def test_a_parameter_that_has_left_its_group_takes_no_memory():
    params = parameters_with(torch.ones(3), torch.ones(3))
    optimizer = stepwell.OffloadAdamW(params)
    optimizer.step()
    gone = optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert not has_host_side(optimizer, gone)
    assert has_host_side(optimizer, params[0])


def test_steps_are_exact_once_an_access_was_compiled():
    """No wait is seen from then on, so nothing may be pending."""
    model = small()
    optimizer = stepwell.OffloadAdamW(model, deferred=stepwell.Deferred(interval=2))
    train(model, optimizer, 4)
    assert num_pending(optimizer)
    gate_of(optimizer).guard.was_compiled = True
    train(model, optimizer, 1)
    assert not forwards_wait(optimizer)
    assert not num_pending(optimizer)


@pytest.mark.parametrize("options", [{}, {"device_bytes_max": 200}], ids=str)
def test_parameters_may_share_a_count_of_writes(caplog, options):
    # Slices of one buffer: a write to one is counted for all.
    flat = torch.linspace(-1.0, 1.0, 48).view(12, 4)
    runs = []
    for parts in (flat.clone().split(3), [part.clone() for part in flat.split(3)]):
        params = [torch.nn.Parameter(part) for part in parts]
        model = torch.nn.ParameterList(params)
        optimizer = stepwell.OffloadAdamW(params, lr=0.1, model=model, **options)
        for step in range(4):
            for index, param in enumerate(params):
                param.grad = torch.full_like(param, float(step - index))
            optimizer.step()
        optimizer.synchronize()
        assert params[0]._version >= 4
        runs.append(torch.cat([param.detach() for param in params]))
    assert torch.equal(*map(bits, runs))
    assert not caplog.records
