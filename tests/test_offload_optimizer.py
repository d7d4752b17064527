"""stepwell.OffloadAdamW over the host as an asynchronous device.

The same bits as stepwell.AdamW, however it is used.
"""

import contextlib
import copy
import io
import math
import pickle
import re
import time
import weakref
from functools import partial

import pytest
import stepwell
import torch
from offload_cases import assert_equal, batch, loss_of, pair, small, train
from optim_cases import DTYPES, LAYOUT_IDS, LAYOUTS, SPECIALS, bits
from stepwell import _core, _state
from stepwell.offload import gradients
from stepwell.offload.twins import Twins
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _every_gradient_is_a_batch(monkeypatch):
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)


MODES = [{"gate": "module"}, {"gate": "step"}, {"accumulation_steps": 1}]
MODE_IDS = ["module", "step", "told"]


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
    loss_of(net, 0).backward()
    # The first of the backward; the last is left to the step.
    assert optimizer._collector.copies.is_copied(net[3].weight, net[3].weight.grad)


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


# ---- which parameters ----


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_frozen_parameters_and_such_without_gradient(mode):
    net = small()
    net[2].weight.requires_grad_(False)
    ours, theirs = pair(net, **mode)
    for step in range(3):
        for each, optimizer in (ours, theirs):
            optimizer.zero_grad()
            # In turns: the last layer has no part in every other loss.
            x = batch(step)
            (each(x) if step % 2 else each[:3](x)).square().sum().backward()
            optimizer.step()
    assert_equal(ours, theirs)
    assert ours[1].state[net[3].weight]["step"] == 1
    assert net[2].weight not in ours[1].state


def test_parameter_thawed_later_is_stepped_from_then_on(caplog):
    net = small()
    for param in (net[0].weight, net[2].weight):
        param.requires_grad_(False)
    ours, theirs = pair(net)
    for model, optimizer in (ours, theirs):
        train(model, optimizer, 1)
        model[0].weight.requires_grad_(True)
        with caplog.at_level("INFO", logger="stepwell.offload.budget"):
            train(model, optimizer, 2, first=1)
    assert_equal(ours, theirs)
    # It alone takes memory, and only now: not those that have theirs, nor one that is frozen.
    assert re.findall(r"host memory for (\d+) param", caplog.text) == [str(net[0].weight.numel())]


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_group_of_frozen_parameters_takes_nothing(mode, caplog):
    ours, theirs = pair(**mode)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        net.append(torch.nn.Linear(3, 2, bias=False).requires_grad_(False))
        torch.nn.init.ones_(net[4].weight)
        engine = getattr(optimizer, "_engine", None)
        with caplog.at_level("INFO", logger="stepwell.offload.budget"):
            optimizer.add_param_group({"params": [("extra", net[4].weight)]})
        # Nothing was begun anew.
        assert getattr(optimizer, "_engine", None) is engine
        train(net, optimizer, 2, first=2)
    assert not caplog.messages
    assert_equal(ours, theirs)
    for net, optimizer in (ours, theirs):
        net[4].weight.requires_grad_(True)
        train(net, optimizer, 1, first=4)
    assert_equal(ours, theirs)
    assert ours[1].state[ours[0][4].weight]["step"] == 1


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_an_optimizer_of_frozen_parameters(accumulate):
    net = small().requires_grad_(False)
    ours, theirs = pair(net, accumulate=accumulate)
    for model, optimizer in (ours, theirs):
        optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not optimizer.state
        model.requires_grad_(True)
        extra = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [("extra", extra)]})
        train(model, optimizer, 3)
    assert_equal(ours, theirs)


def test_a_gradient_that_a_hook_takes_away_is_not_stepped():
    net = small()
    twin = copy.deepcopy(net)
    for model in (net, twin):
        # Before the optimizer's own hook.
        model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ours = net, stepwell.OffloadAdamW(net.parameters(), lr=1e-2, accumulation_steps=1)
    theirs = twin, stepwell.AdamW(twin.parameters(), lr=1e-2)
    for model, optimizer in (ours, theirs):
        train(model, optimizer, 2)
    assert_equal(ours, theirs)
    assert not ours[1].state.get(net[0].weight)


def test_a_write_voids_the_trailing_bits_of_its_chunk_only():
    ours, theirs = pair(dtype=torch.bfloat16)
    for net, optimizer in (ours, theirs):
        weight = net[2].weight
        assert weight.numel() > _core.CHUNK_LEN
        train(net, optimizer, 2)
        with torch.no_grad():
            weight.view(-1)[:1] = 1.0
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_gradient_of_a_frozen_parameter_is_refused():
    net = small()
    net[0].weight.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(net.named_parameters())
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(ValueError, match=r"`0.weight`.*has a gradient, but is frozen"):
        optimizer.step()


def test_step_without_any_gradient_does_nothing():
    net, optimizer = pair()[0]
    before = [bits(param) for param in net.parameters()]
    optimizer.step()
    assert all(
        torch.equal(bits(param), old) for param, old in zip(net.parameters(), before, strict=True)
    )
    assert not optimizer.state


def test_groups_may_differ_and_be_added_while_training():
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        extra = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(extra.weight)
        torch.nn.init.ones_(extra.bias)
        train(net, optimizer, 2)
        group = {
            "lr": 1e-3,
            "betas": (0.5, 0.9),
            "eps": 1e-4,
            "weight_decay": 0.3,
            "maximize": True,
        }
        optimizer.add_param_group({"params": list(extra.named_parameters()), **group})
        net.append(extra)
        train(net, optimizer, 3)
    assert_equal(ours, theirs)
    assert ours[1].state[ours[0][4].weight]["step"] == 3
    assert ours[1].state[ours[0][0].weight]["step"] == 5


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_empty_and_scalar_parameters(mode):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = torch.nn.Parameter(torch.empty(0, 3))
            self.scalar = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scalar + self.empty.sum()

    ours, theirs = pair(Odd(), **mode)
    assert train(*ours, 3) == train(*theirs, 3)
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


# ---- who else touches parameters ----


def _load(net, values):
    net.load_state_dict(values)


def _copy(net, values):
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(values[name])


def _swap(net, values):
    for name, param in net.named_parameters():
        param.data = values[name].clone()


def _data(net, values):
    for name, param in net.named_parameters():
        param.data.copy_(values[name])


@pytest.mark.parametrize(
    "write", [_load, _copy, _swap, _data], ids=["load_state_dict", "copy_", "data=", "data.copy_"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_between_steps_is_stepped(dtype, write):
    ours, theirs = pair(dtype=dtype)
    values = {
        name: torch.randn(param.shape).to(dtype) for name, param in ours[0].named_parameters()
    }
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        if net is ours[0] and write is not _load:
            # Not by a way that waits.
            optimizer.synchronize()
        write(net, values)
        if net is ours[0] and write is _data:
            optimizer.reread_parameters()
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_other_memory_at_the_same_address_is_read_again():
    """As after `model.half().float()`: freed memory is given out again."""
    ours, theirs = pair(torch.nn.Linear(7, 3, bias=False), gate="step")
    for net, optimizer in (theirs, ours):
        memory = torch.zeros(3, 7).numpy()
        for step in range(3):
            memory[...] = 0.1 * step
            # A storage of its own each time.
            net.weight.data = torch.from_numpy(memory)
            train(net, optimizer, 1, first=step)
    assert_equal(ours, theirs)


def test_other_memory_after_a_skipped_step_is_read():
    """A skipped step reads the weight, whose memory is freed and given out again."""
    ours, theirs = pair(torch.nn.Linear(7, 300, bias=False))
    for net, optimizer in (theirs, ours):
        for value in range(3):
            net.weight.grad = torch.full_like(net.weight, torch.nan)
            optimizer.step()
            net.weight.data = torch.empty(0)
            net.weight.data = torch.full((300, 7), float(value))
        train(net, optimizer, 1)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_that_is_written_after_a_step_that_was_not_taken_is_stepped(dtype, nonfinite):
    ours, theirs = pair(dtype=dtype)
    ours[1]._nonfinite = nonfinite
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        if net is ours[0]:
            loss_of(net, 2).backward()
            net[3].bias.grad[1] = torch.nan
            with contextlib.suppress(ValueError):
                optimizer.step()
        # A parameter is written, and the others keep their trailing bits.
        net[0].weight.data.mul_(0.5)
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_a_weight_that_was_read_holds_the_identity_of_its_storage():
    """Until another is read: no other storage can have it meanwhile."""
    twins = Twins()
    param = torch.nn.Parameter(torch.ones(3))
    twins.add([param])
    for _ in range(3):
        param.data = torch.zeros(3)
        identity = param.untyped_storage()._cdata
        assert twins.stale([param])
        twins.refresh([param])
        assert not twins.stale([param])
        assert twins[param].storage.cdata == identity
        param.data = torch.empty(0)
        assert twins[param].storage.expired()


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_the_model_are_on_their_own(duplicate):
    (net, optimizer), _ = pair(accumulation_steps=1)
    train(net, optimizer, 2)
    optimizer.synchronize()
    twin = duplicate(net)
    train(net, optimizer, 1)
    optimizer.synchronize()
    before = [bits(param) for param in net.parameters()]
    reference = stepwell.OffloadAdamW(twin.parameters(), lr=1e-2)
    train(twin, reference, 2)
    assert all(
        torch.equal(bits(param), old) for param, old in zip(net.parameters(), before, strict=True)
    )


def test_saved_model_is_the_stepped_one():
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
    stream = io.BytesIO()
    torch.save(ours[0].state_dict(), stream)
    stream.seek(0)
    for name, value in torch.load(stream).items():
        assert torch.equal(bits(value), bits(theirs[0].get_parameter(name)))


# ---- what it tells ----


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


def test_gradients_that_an_engine_took_which_is_gone_are_copied_again():
    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 1)
        optimizer.zero_grad()
        loss_of(net, 1).backward()
        optimizer.add_param_group({"params": [("extra", torch.nn.Parameter(torch.ones(3)))]})
        optimizer.step()
    assert_equal(ours, theirs)


def test_an_engine_is_gone_before_another_takes_memory(monkeypatch):
    net, optimizer = pair()[0]
    train(net, optimizer, 1)
    before, admit, seen = weakref.ref(optimizer._engine), optimizer._host.admit, []

    def noted_admit(*args):
        seen.append(before())
        admit(*args)

    monkeypatch.setattr(optimizer._host, "admit", noted_admit)
    optimizer.add_param_group({"params": [("extra", torch.nn.Parameter(torch.ones(3)))]})
    assert seen == [None]


def test_a_group_for_whose_state_there_is_no_memory_is_not_added(monkeypatch):
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 1)
    extra = torch.nn.Parameter(torch.ones(3))
    with monkeypatch.context() as full:
        full.setattr(_state, "new", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
        with pytest.raises(OSError, match="no memory"):
            ours[1].add_param_group({"params": [("extra", extra)]})
    assert len(ours[1].param_groups) == 1
    assert extra not in ours[1]._twins
    for net, optimizer in (ours, theirs):
        optimizer.add_param_group({"params": [("extra", torch.nn.Parameter(torch.ones(3)))]})
        train(net, optimizer, 2, first=1)
    assert_equal(ours, theirs)


def test_memory_is_announced_and_bounded(caplog):
    net = small(torch.bfloat16)
    numel = sum(param.numel() for param in net.parameters())
    with caplog.at_level("INFO", logger="stepwell"):
        stepwell.OffloadAdamW(net.parameters(), moments="q8")
    assert f"of host memory for {numel} parameters" in caplog.text
    with pytest.raises(ValueError, match=r"`1000` are left of `host_bytes_max`(.|\n)*hint"):
        stepwell.OffloadAdamW(small().parameters(), host_bytes_max=1000)
    # Of all groups together: each takes 16 bytes per element.
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1000))]} for _ in range(2)]
    stepwell.OffloadAdamW(groups, host_bytes_max=33_000)
    with pytest.raises(ValueError, match="are left"):
        stepwell.OffloadAdamW(groups, host_bytes_max=31_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "layer"}, "`gate` is `layer`"),
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
        stepwell.OffloadAdamW(small().parameters(), **options)


def test_parameters_that_cannot_be_stepped_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        stepwell.OffloadAdamW([torch.nn.Parameter(torch.zeros(4, 3).t())])
    with pytest.raises(ValueError, match="meta"):
        stepwell.OffloadAdamW(torch.nn.Linear(3, 3, device="meta").parameters())
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match="shares memory"):
        stepwell.OffloadAdamW([torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:])])


def test_optimizer_is_not_copied():
    (net, optimizer), _ = pair()
    train(net, optimizer, 1)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled(.|\n)*hint"):
            duplicate(optimizer)
