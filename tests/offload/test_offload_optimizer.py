"""stepwell.OffloadAdamW over the host as an asynchronous device.

The same bits as stepwell.AdamW, however it is used.
"""

import contextlib
import copy
import math
import pickle
import time
from functools import partial

import pytest
import stepwell
import torch
from offload_cases import MODE_IDS, MODES, assert_equal, loss_of, pair, small, train
from optim_cases import DTYPES, LAYOUT_IDS, LAYOUTS, SPECIALS
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_trains_as_adamw_bit_for_bit(dtype, moments, mode):
    ours, theirs = pair(dtype=dtype, moments=moments, seed=3, **mode)
    assert train(*ours, 5) == train(*theirs, 5)
    assert_equal(ours, theirs)


def test_models_may_mix_dtypes():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7).to(dtype) for dtype in DTYPES)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x

    ours, theirs = pair(Mixed())
    assert train(*ours, 4) == train(*theirs, 4)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_clipping_is_that_of_torch_without_a_pass(mode):
    (net, optimizer), (twin, reference) = pair(clip_norm=0.5, **mode)
    for step in range(4):
        for each, each_optimizer in ((net, optimizer), (twin, reference)):
            each_optimizer.zero_grad()
            loss_of(each, step).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        assert expected > 0.5
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-6)
        # Not scaled in place: what was accumulated is what stays.
        assert torch.nn.utils.get_total_norm(
            [p.grad for p in net.parameters()]
        ).item() == pytest.approx(optimizer.grad_norm)
    optimizer.synchronize()
    for param, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    optimizer.clip_norm = None
    train(net, optimizer, 1)


def test_gradients_within_the_norm_are_not_clipped():
    ours, theirs = pair(clip_norm=1e6)
    assert train(*ours, 2) == train(*theirs, 2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_clipping_by_others_is_seen(mode):
    ours, theirs = pair(**mode)
    for step in range(4):
        for net, optimizer in (ours, theirs):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
    assert_equal(ours, theirs)
    assert ours[1].grad_norm == pytest.approx(0.1, rel=1e-4)


# ---- accumulation ----


def _accumulate(net, optimizer, how, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(3):
            if how == "no_sync" and micro < 2:
                with optimizer.no_sync():
                    loss_of(net, 3 * step + micro).backward()
            else:
                loss_of(net, 3 * step + micro).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["untold", "accumulation_steps", "no_sync", "wrongly told"])
def test_accumulated_gradients_are_whole(how, dtype, caplog):
    told = {"accumulation_steps": 3, "wrongly told": 2}
    ours, theirs = pair(dtype=dtype, **({"accumulation_steps": told[how]} if how in told else {}))
    _accumulate(*ours, how)
    _accumulate(*theirs, None)
    assert_equal(ours, theirs)
    nbytes = sum(param.nbytes for param in ours[0].parameters())
    # Some of what was told wrongly crosses twice.
    crossed = ours[1].timing["bytes_downloaded"]
    assert nbytes < crossed <= 2 * nbytes if how == "wrongly told" else crossed == nbytes
    assert caplog.text.count("cross the bus again") == (how == "wrongly told")


def test_no_sync_is_left_by_an_exception():
    net, optimizer = pair()[0]
    with pytest.raises(KeyError), optimizer.no_sync():
        raise KeyError
    # Either backward is taken for the last, so that gradients cross twice.
    for _ in range(2):
        loss_of(net, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.timing["bytes_downloaded"] > sum(param.nbytes for param in net.parameters())


def test_no_sync_while_a_parameter_is_frozen():
    ours, theirs = pair()
    for is_frozen in (True, False):
        for net, optimizer in (ours, theirs):
            net[2].weight.requires_grad_(not is_frozen)
            optimizer.zero_grad()
            with optimizer.no_sync() if net is ours[0] else contextlib.nullcontext():
                loss_of(net, 0).backward()
            loss_of(net, 1).backward()
            optimizer.step()
    assert_equal(ours, theirs)
    assert ours[1].state[ours[0][2].weight]["step"] == 1


def test_gradient_of_a_backward_that_was_dropped_is_not_stepped():
    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        loss_of(net, 7).backward()
        optimizer.zero_grad()
        loss_of(net, 8).backward()
        optimizer.zero_grad(set_to_none=False)
        train(net, optimizer, 2)
    assert_equal(ours, theirs)


# ---- what it is used with ----


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: epoch / 5),
    ],
    ids=["one-cycle", "warm-up-from-0"],
)
def test_schedulers(schedule):
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 6, scheduler=schedule(optimizer))
    assert_equal(ours, theirs)


def test_closure():
    ours, theirs = pair()

    def closure(net, optimizer):
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    for _ in range(3):
        one, other = (
            optimizer.step(partial(closure, net, optimizer)) for net, optimizer in (ours, theirs)
        )
        assert one == other
    assert_equal(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", [{}, {"accumulation_steps": 2}], ids=["untold", "told"])
def test_activation_checkpointing(use_reentrant, mode):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = torch.nn.Linear(7, 7)
            self.last = torch.nn.Linear(7, 3)

        def forward(self, x):
            x = x.requires_grad_()
            for _ in range(3):
                x = torch.tanh(checkpoint(self.shared, x, use_reentrant=use_reentrant))
            return self.last(x)

    ours, theirs = pair(Checkpointed(), **mode)
    for step in range(3):
        for net, optimizer in (ours, theirs):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            loss_of(net, step + 1).backward()
            optimizer.step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_right_after_the_step(mode, set_to_none):
    ours, theirs = pair(dtype=torch.bfloat16, **mode)
    for step in range(4):
        for net, optimizer in (ours, theirs):
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("poison_at", [None, 0, 3])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_grad_scaler(poison_at, unscale, mode):
    ours, theirs = pair(**mode)
    scales = []
    for net, optimizer in (ours, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
            if step == poison_at:
                net[0].weight.grad[0, 0] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert ours[1].skipped_steps == theirs[1].skipped_steps == (poison_at is not None)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_the_norm_under_a_grad_scaler_is_of_gradients_without_its_scale(mode):
    (net, optimizer), (twin, reference) = pair(clip_norm=0.5, **mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(2):
        for each in (net, twin):
            each.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_of(twin, step).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        reference.step()
        assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-6)
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        ours, theirs = optimizer.state[param], reference.state[other]
        torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"])


def test_autocast_with_float32_parameters():
    ours, theirs = pair(accumulation_steps=1)
    for step in range(3):
        for net, optimizer in (ours, theirs):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
    assert_equal(ours, theirs)


# ---- gradients that are not finite ----


@pytest.mark.parametrize("special", SPECIALS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_gradient_is_skipped_and_counted(dtype, mode, special):
    ours, theirs = pair(dtype=dtype, moments="q8", **mode)
    for step in range(4):
        for net, optimizer in (ours, theirs):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            if step == 2:
                net[3].bias.grad[1] = special
            optimizer.step()
        assert math.isfinite(ours[1].grad_norm) == (step != 2)
    assert ours[1].skipped_steps == 1
    assert_equal(ours, theirs)


def test_nonfinite_gradient_raises_where_asked_for():
    ours, theirs = pair(nonfinite="raise")
    train(*ours, 2)
    train(*theirs, 2)
    loss_of(ours[0], 2).backward()
    ours[0][0].weight.grad[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"norm of the gradients is `nan`; nothing was changed(.|\n)*hint"
    ):
        ours[1].step()
    assert_equal(ours, theirs)
    train(*ours, 1, first=2)
    train(*theirs, 1, first=2)
    assert_equal(ours, theirs)


# ---- what it tells, and what it refuses ----


def test_timing_and_bytes():
    (net, optimizer), _ = pair()
    assert optimizer.timing == {}
    assert optimizer.grad_norm is None
    assert optimizer.committed_steps is None
    began = time.perf_counter()
    train(net, optimizer, 1)
    optimizer.synchronize()
    elapsed = time.perf_counter() - began
    timing = optimizer.timing
    assert timing.keys() == {
        *("background", "norm", "prepare", "release", "gate", "step", "gradients"),
        *("bytes_downloaded", "bytes_uploaded", "oldest_age"),
    }
    assert all(value >= 0 for value in timing.values())
    assert all(timing[name] < elapsed for name in ("background", "norm", "prepare", "release"))
    assert (
        timing["bytes_downloaded"]
        == timing["bytes_uploaded"]
        == sum(p.nbytes for p in net.parameters())
    )


def test_the_time_that_forwards_wait_is_of_one_step():
    net, optimizer = pair()[0]
    train(net, optimizer, 2)
    assert optimizer.timing["gate"] == 0.0
    began = time.perf_counter()
    loss_of(net, 2).backward()
    assert 0.0 < optimizer.timing["gate"] <= time.perf_counter() - began
    optimizer.step()
    assert optimizer.timing["gate"] == 0.0


def test_state_may_be_read_between_the_first_backward_and_its_step():
    net, optimizer = pair(accumulation_steps=1)[0]
    loss_of(net, 0).backward()
    assert optimizer.timing["gate"] == 0.0
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": "disk"}, "`accumulate` is `disk`"),
        ({"accumulation_steps": 0}, "`accumulation_steps` is `0`"),
        ({"moments": "int4"}, "`moments` is `int4`"),
        ({"clip_norm": 0.0}, "`clip_norm` is `0.0`"),
        ({"clip_norm": math.nan}, "`clip_norm` is `nan`"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stepwell.OffloadAdamW(small(), **options)


def test_a_model_is_given_once():
    with pytest.raises(ValueError, match=r"`params` is a `Sequential` and `model` is given"):
        stepwell.OffloadAdamW(small(), model=small())


def test_an_option_of_earlier_releases_warns():
    with pytest.warns(FutureWarning, match="`gate` is `step`, and has no effect"):
        stepwell.OffloadAdamW(small(), gate="step")


def test_an_optimizer_without_a_model_says_once_that_steps_wait(caplog):
    net = small()
    train(net, stepwell.OffloadAdamW(net.parameters()), 3)
    (record,) = caplog.records
    assert "hint: OffloadAdamW(model, ...)" in record.getMessage()


def test_optimizer_is_not_copied():
    (net, optimizer), _ = pair()
    train(net, optimizer, 1)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled(.|\n)*hint"):
            duplicate(optimizer)
