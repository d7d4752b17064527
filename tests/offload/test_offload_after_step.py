"""Accesses between a step and the next forward: as if the step had waited for all weights."""

import pytest
import stepwell
import torch
from insides import forwards_wait, is_any_under_way
from offload_cases import WIDTH, Net, batch, reversed_params, small
from offload_landing import Later, flat
from optim_cases import bits
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# Of a layer whose step takes longer than what follows it.
WIDE = 2048


class OtherParameter(Parameter):
    pass


def test_parameters_of_another_class_are_waited_for_in_the_step():
    def train(waits):
        torch.manual_seed(0)
        layer = torch.nn.Linear(WIDE, WIDE, bias=False)
        layer.weight = OtherParameter(layer.weight.detach())
        optimizer = stepwell.OffloadAdamW(
            layer.parameters(), model=layer if waits == "forwards" else None, lr=1e-2, threads=1
        )
        outputs = []
        for _ in range(3):
            outputs.append(layer(torch.ones(1, WIDE)).sum())
            outputs[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [output.item() for output in outputs]

    assert train("forwards") == train("step")


def steps(waits, access, count=5, **options):
    """What `access` finds after each step, losses, and the weights at the end."""
    torch.manual_seed(0)
    net = Net(1 << 20)
    options = {"lr": 1e-2, "threads": 1, **options}
    model = net if waits == "forwards" else None
    optimizer = stepwell.OffloadAdamW(reversed_params(net), model=model, **options)
    kept, found = {}, []
    for step in range(count):
        optimizer.zero_grad()
        loss = net(batch(step, width=WIDTH)).square().sum()
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        found += [value.clone() for value in flat(access(net, optimizer, kept))]
    optimizer.synchronize()
    return optimizer, found + [bits(param) for param in net.parameters()]


def averaged(net, _, kept):
    if "average" not in kept:
        kept["average"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    kept["average"].update_parameters(net)
    return list(kept["average"].parameters())


def aliases(net, _, kept):
    if not kept:
        kept["data"] = [param.data for param in net.parameters()]
    return kept["data"]


def state_of(net, optimizer, _):
    return [optimizer.state[param]["exp_avg"] for param in net.parameters()]


def kept_state_of(net, optimizer, kept):
    if not kept:
        kept["state"] = [optimizer.state[param]["exp_avg"] for param in net.parameters()]
    return kept["state"]


def regularised(net, optimizer, _):
    optimizer.zero_grad()
    penalty = sum(param.square().sum() for param in net.parameters())
    loss = net(batch(9, width=WIDTH)).square().sum() + 1e-3 * penalty
    loss.backward()
    optimizer.step()
    return penalty.detach()


def clamped(net, *_):
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.05, 0.05)
    return []


def other_optimizer(net, _, kept):
    kept.setdefault("other", torch.optim.AdamW(net.parameters(), lr=1e-3)).step()
    return []


def second_of_ours(net, optimizer, kept):
    if not kept:
        kept["other"] = stepwell.OffloadAdamW(net, lr=1e-3, threads=1)
    kept["other"].step()
    return []


def tied_later(net, _, kept):
    if not kept:
        kept["later"] = Later(net.first.weight)
    return kept["later"](batch(1, width=WIDTH)).detach()


def forward_method(net, *_):
    return net.forward(batch(1, width=WIDTH)).detach()


def functional_call(net, *_):
    named = dict(net.named_parameters())
    return torch.func.functional_call(net, named, (batch(1, width=WIDTH),)).detach()


ACCESSES = [
    averaged,
    aliases,
    state_of,
    regularised,
    clamped,
    other_optimizer,
    second_of_ours,
    tied_later,
    forward_method,
    functional_call,
]


@pytest.mark.parametrize("access", ACCESSES)
def test_accesses_right_after_a_step(access):
    optimizer, found = steps("forwards", access)
    assert forwards_wait(optimizer)
    _, expected = steps("step", access)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("access", [forward_method, clamped])
def test_compiled_accesses_wait_and_are_compiled_once(access):
    from torch._dynamo import config

    def compiled(net, optimizer, kept):
        if "call" not in kept:
            kept["call"] = torch.compile(access, backend="eager")
            torch._dynamo.utils.counters.clear()
        with torch.no_grad():
            return kept["call"](net)

    try:
        optimizer, found = steps("forwards", compiled)
        # torch 2.11 does not look at parameters again whose modules are as they were: nothing is
        # compiled again, and compiled code waits where it unpacks a parameter.
        has_guard = access is forward_method or not config.use_recursive_dict_tags_for_guards
        assert forwards_wait(optimizer) == (not has_guard)
        # The first step waited by itself: there was no forward yet. The second step did not.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
        torch._dynamo.reset()
        for one, other in zip(found, steps("step", compiled)[1], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    finally:
        torch._dynamo.reset()


def by_data(write):
    def access(net, *_):
        for param in net.parameters():
            write(param)
        return []

    return access


DATA_WRITES = {
    "clamp_": lambda p: p.data.clamp_(-0.01, 0.01),
    "after a read": lambda p: p.data.mul_(0.5 / p.data.norm()),
    "copy_": lambda p: p.data.copy_(-p.data),
    "index": lambda p: p.data.view(-1).__setitem__(0, 7.0 * p.data.view(-1)[0].sign()),
    "foreach": lambda p: torch._foreach_mul_([p.data], 0.5),
    "fill_": lambda p: p.data.fill_(0.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", DATA_WRITES.values(), ids=DATA_WRITES.keys())
def test_writes_through_data_after_a_step_are_stepped_on(write, dtype):
    """As on torch.optim.AdamW's like, stepwell.AdamW, which compares contents.

    Every element is written: of a chunk in which one is, `AdamW` voids the trailing bits of all.
    """

    def write_all(param):
        param.data.mul_(-0.5)
        write(param)

    def train(kind, **options):
        torch.manual_seed(0)
        net = Net(1 << 14).to(dtype)
        params = net.parameters() if kind is stepwell.AdamW else net
        optimizer = kind(params, lr=1e-2, **options)
        # Before the first step as well.
        by_data(write_all)(net)
        for step in range(4):
            optimizer.zero_grad()
            net(batch(step, dtype, WIDTH)).float().square().sum().backward()
            optimizer.step()
            by_data(write_all)(net)
        optimizer.zero_grad()
        return [bits(param) for param in net.parameters()]

    ours = train(stepwell.OffloadAdamW, threads=1)
    for one, other in zip(ours, train(stepwell.AdamW, nonfinite="skip"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"model": None}),
        (torch.float32, {"accumulate": "host"}),
    ],
    ids=["fp32", "bf16", "step", "host"],
)
def test_writes_through_data_to_frozen_parameters_are_stepped_on(dtype, options):
    """Whenever they come: a step leaves the parameter out before the next one takes it."""

    def train(kind, **options):
        net = small(dtype)
        if kind is stepwell.OffloadAdamW:
            options = {"model": net, **options}
        optimizer = kind(net.named_parameters(), lr=1e-2, **options)
        for step in range(7):
            net[0].weight.requires_grad_(step in (0, 2, 6))
            optimizer.zero_grad()
            net(batch(step, dtype)).float().square().sum().backward()
            optimizer.step()
            # A forward has waited, so it is a plain parameter.
            net(batch(step, dtype))
            net[0].weight.data.mul_(0.5)
        optimizer.zero_grad()
        return [bits(param) for param in net.parameters()]

    ours = train(stepwell.OffloadAdamW, threads=1, **options)
    # Compares contents.
    for one, other in zip(ours, train(stepwell.AdamW, nonfinite="skip"), strict=True):
        assert torch.equal(one, other)


def test_what_no_program_has_written_is_not_read_again(caplog):
    net = small()
    frozen = net[0].weight
    optimizer = stepwell.OffloadAdamW(net, threads=1)
    with caplog.at_level("DEBUG", logger="stepwell"):
        for step in range(6):
            frozen.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            net(batch(step)).square().sum().backward()
            optimizer.step()
    # The first step reads all: a program may initialise them unseen.
    found = [record.message for record in caplog.records if "read again" in record.message]
    assert len(found) == 1
    assert found[0].startswith(f"{len(list(net.parameters()))} parameters")


def test_zero_grad_waits_for_nothing():
    torch.manual_seed(0)
    net = Net(1 << 16)
    optimizer = stepwell.OffloadAdamW(net, threads=1)
    for step in range(3):
        net(batch(step, width=WIDTH)).square().sum().backward()
        optimizer.step()
        if step == 0:
            # No forward has shown yet what it waits for.
            continue
        assert is_any_under_way(optimizer)
        optimizer.zero_grad(set_to_none=step == 1)
        net.zero_grad()
        assert is_any_under_way(optimizer)
        assert all(param.grad is None for param in net.parameters())


def test_hooks_go_with_the_optimizers():
    net = torch.nn.Linear(4, 4)
    for _ in range(5):
        optimizer = stepwell.OffloadAdamW(net, accumulate="host")
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
    assert not net._forward_pre_hooks
    assert all(not param._post_accumulate_grad_hooks for param in net.parameters())
    assert all(not param._backward_hooks for param in net.parameters())
    assert all(type(param) is Parameter for param in net.parameters())
