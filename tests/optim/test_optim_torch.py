"""What a torch optimizer is used with: hooks, copies, autograd's version check, GradScaler."""

import copy
import io
import pickle
import weakref

import pytest
import stepwell
import torch
from optim_cases import (
    LAYOUT_IDS,
    LAYOUTS,
    SPECIALS,
    assert_same,
    parameter,
    snapshot,
    stepped,
)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def test_hooks_run_around_the_step():
    seen = []
    optimizer = stepwell.AdamW([parameter(3)])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", len(opt.state))))
    optimizer.register_step_post_hook(
        lambda opt, args, kwargs: seen.append(("post", len(opt.state)))
    )
    optimizer.register_state_dict_post_hook(
        lambda opt, packed: seen.append(("packed", len(packed["state"])))
    )
    optimizer.step()
    loads = stepwell.AdamW([parameter(3)])
    loads.register_load_state_dict_pre_hook(
        lambda opt, packed: seen.append(("load", type(packed["state"][0])))
    )
    loads.register_load_state_dict_post_hook(lambda opt: seen.append(("loaded", len(opt.state))))
    loads.load_state_dict(optimizer.state_dict())
    assert seen == [("pre", 0), ("post", 1), ("packed", 1), ("load", dict), ("loaded", 1)]


def _pickled(value):
    return pickle.loads(pickle.dumps(value))


def _saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"]
)
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_copies_go_on_alike_and_apart(duplicate, dtype, moments):
    param = parameter(1000, dtype=dtype)
    optimizer = stepped(param, moments=moments, nonfinite="skip", seed=3)
    twin_param, twin = duplicate((param, optimizer))
    assert twin.param_groups[0]["params"][0] is twin_param
    grad = torch.randn(1000).to(dtype)
    twin_param.grad = grad.clone()
    before = snapshot(optimizer)
    twin.step()
    assert_same(before, snapshot(optimizer))
    param.grad = grad
    optimizer.step()
    assert_same(snapshot(optimizer), snapshot(twin))
    twin_param.grad = torch.full((1000,), torch.nan, dtype=dtype)
    twin.step()
    assert (optimizer.skipped_steps, twin.skipped_steps) == (0, 1)


def test_gradients_are_not_kept_alive_after_the_step():
    param = parameter(4)
    optimizer = stepwell.AdamW([param])
    optimizer.step()
    grad = weakref.ref(param.grad)
    param.grad = None
    assert grad() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_through_a_tensor_saved_before_the_step_raises(dtype):
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = stepwell.AdamW([param])
    loss = param.square().sum()
    param.grad = torch.ones(3, dtype=dtype)
    version = param._version
    optimizer.step()
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_foreach_and_fused_are_accepted(foreach, fused):
    param = parameter(3)
    stepwell.AdamW([param], foreach=foreach, fused=fused).step()


# ---- torch.amp.GradScaler ----


def _scaled_run(kind, poison_at=None, unscale=False, **options):
    net = model()
    optimizer = kind(net.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(net(torch.full((4, 7), 0.1 * step)).square().sum()).backward()
        if step == poison_at:
            next(net.parameters()).grad[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return net, optimizer, scaler.get_scale()


@pytest.mark.parametrize("poison_at", [None, 0, 3])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "propagate"])
def test_grad_scaler_works_as_with_torchs_fused_adamw(poison_at, unscale, nonfinite):
    ours, optimizer, scale = _scaled_run(stepwell.AdamW, poison_at, unscale, nonfinite=nonfinite)
    theirs, reference, expected_scale = _scaled_run(
        torch.optim.AdamW, poison_at, unscale, fused=True
    )
    assert scale == expected_scale
    assert optimizer.skipped_steps == (poison_at is not None)
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
        state, expected_state = optimizer.state[param], reference.state[expected]
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], expected_state[name])


@pytest.mark.parametrize("scale", [0.0, -1.0, *SPECIALS])
def test_bad_grad_scale_is_refused(scale):
    param = parameter(3)
    optimizer = stepwell.AdamW([param])
    optimizer.grad_scale = torch.tensor(scale)
    with pytest.raises(ValueError, match="grad_scale"):
        optimizer.step()
    assert not optimizer.state


def test_gradient_that_overflows_when_unscaled_is_not_finite():
    param = parameter(3)
    param.grad = torch.full((3,), 1e38)
    optimizer = stepwell.AdamW([param])
    optimizer.grad_scale = torch.tensor(1e-3)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="overflows float32"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))
