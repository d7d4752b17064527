"""Which parameters OffloadAdamW steps: frozen, added, thawed, odd ones, and memory for them."""

import copy
import re
import weakref

import pytest
import stepwell
import torch
from insides import engine_of, has_host_side
from offload_cases import MODE_IDS, MODES, assert_equal, batch, loss_of, pair, small, train
from optim_cases import bits
from stepwell import _state
from stepwell.store.host_side import HostSide

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


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
        with caplog.at_level("INFO", logger="stepwell._budget"):
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
        engine = engine_of(optimizer) if net is ours[0] else None
        caplog.clear()
        with caplog.at_level("INFO", logger="stepwell._budget"):
            optimizer.add_param_group({"params": [("extra", net[4].weight)]})
        # Nothing was begun anew.
        assert engine is None or engine_of(optimizer) is engine
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
    ours = net, stepwell.OffloadAdamW(net, lr=1e-2, accumulation_steps=1)
    theirs = twin, stepwell.AdamW(twin.parameters(), lr=1e-2)
    for model, optimizer in (ours, theirs):
        train(model, optimizer, 2)
    assert_equal(ours, theirs)
    assert not ours[1].state.get(net[0].weight)


def test_gradient_of_a_frozen_parameter_is_refused():
    net = small()
    net[0].weight.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), model=net)
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


def test_parameters_that_cannot_be_stepped_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        stepwell.OffloadAdamW([torch.nn.Parameter(torch.zeros(4, 3).t())])
    with pytest.raises(ValueError, match="meta"):
        stepwell.OffloadAdamW(torch.nn.Linear(3, 3, device="meta").parameters())
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match="shares memory"):
        stepwell.OffloadAdamW([torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:])])


# ---- engines and memory ----


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
    before, admit, seen = weakref.ref(engine_of(optimizer)), HostSide.admit, []

    def noted_admit(*args):
        seen.append(before())
        admit(*args)

    monkeypatch.setattr(HostSide, "admit", noted_admit)
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
    assert not has_host_side(ours[1], extra)
    for net, optimizer in (ours, theirs):
        optimizer.add_param_group({"params": [("extra", torch.nn.Parameter(torch.ones(3)))]})
        train(net, optimizer, 2, first=1)
    assert_equal(ours, theirs)


def test_memory_is_announced_and_bounded(caplog):
    net = small(torch.bfloat16)
    numel = sum(param.numel() for param in net.parameters())
    with caplog.at_level("INFO", logger="stepwell"):
        stepwell.OffloadAdamW(net, moments="q8")
    assert f"of host memory for {numel} parameters" in caplog.text
    with pytest.raises(ValueError, match=r"`1000` are left of `host_bytes_max`(.|\n)*hint"):
        stepwell.OffloadAdamW(small().parameters(), host_bytes_max=1000)
    # Of all groups together: each takes 16 bytes per element.
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1000))]} for _ in range(2)]
    stepwell.OffloadAdamW(groups, host_bytes_max=33_000)
    with pytest.raises(ValueError, match="are left"):
        stepwell.OffloadAdamW(groups, host_bytes_max=31_000)
