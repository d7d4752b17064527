"""What people do with torch's AdamW, each a function of what makes the optimizer, and a device.

A program gives a list of tensors. `make(params, model=net, **options)` gives an optimizer,
`make.net(device)` a model whose forward gives its loss. `training` is for those that begin and end
as most do. None knows which optimizer it is; `ours=` is for options of `OffloadAdamW` alone.
"""

import contextlib
import copy
import io
from collections import defaultdict

import torch
from net_cases import batch, loss_of, result, train, weights
from net_models import Checkpointed, First, Words
from torch import nn

PROGRAMS = {}
# Faces that a program cannot have, by its name.
WITHOUT = {}
# Of what comes later all state is in host memory.
ROOM = {"host_bytes_max": 1 << 27}


def program(*without):
    def add(function):
        PROGRAMS[function.__name__] = function
        WITHOUT[function.__name__] = set(without)
        return function

    return add


def training(*without, **options):
    """A program that trains a model, and gives what it returns, weights, moments and counts."""

    def add(function):
        def run(make, device):
            net = make.net(device)
            optimizer = make(net.parameters(), model=net, **options)
            found = function(net, optimizer) or []
            return found + result(net, optimizer)

        run.__name__ = function.__name__
        return program(*without)(run)

    return add


def by_file(value):
    """As it is behind torch.save and torch.load."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


# ---- loops ----


@training()
def plain_loop(net, optimizer):
    train(net, optimizer, 8)


OPTIONS = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2, "maximize": True}


@program()
def named_parameters_and_options(make, device):
    net = make.net(device)
    optimizer = make(net.named_parameters(), model=net, lr=torch.tensor(3e-3), **OPTIONS)
    train(net, optimizer, 5)
    return result(net, optimizer)


@training()
def zero_grad_both_ways(net, optimizer):
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step != 3:  # Then all gradients are 0, and momentum goes on.
            loss_of(net, step).backward()
        optimizer.step()


@training("linear")
def evaluation_between_steps(net, optimizer):
    losses = []
    for step in range(5):
        train(net, optimizer, 1, first=step)
        net.eval()
        with torch.no_grad():
            losses.append(loss_of(net, 99))
        net.train()
    return losses


@training()
def closures(net, optimizer):
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, len(losses))
        loss.backward()
        return loss

    while len(losses) < 4:
        losses.append(optimizer.step(closure))
    assert None not in losses


def accumulate(net, optimizer, has_no_sync=False):
    for step in range(3):
        for micro in range(4):
            skips = has_no_sync and micro < 3 and hasattr(optimizer, "no_sync")
            with optimizer.no_sync() if skips else contextlib.nullcontext():
                (loss_of(net, 4 * step + micro) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


@training()
def accumulation(net, optimizer):
    accumulate(net, optimizer)


@training(ours={"accumulation_steps": 4})
def accumulation_that_is_told(net, optimizer):
    accumulate(net, optimizer)


@training()
def accumulation_with_no_sync(net, optimizer):
    accumulate(net, optimizer, has_no_sync=True)


@training("linear", "drained", "resident", "part resident", ours={"accumulate": "host"})
def accumulation_on_the_host(net, optimizer):
    accumulate(net, optimizer)


# ---- gradients ----


@training()
def clip_grad_norm(net, optimizer):
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


@training("host", clip_norm=0.05)
def clip_norm(net, optimizer):
    train(net, optimizer, 5)


@training()
def grad_scaler(net, optimizer):
    scaler = torch.amp.GradScaler(
        net.first.weight.device.type, init_scale=2.0**10, growth_interval=2
    )
    for step in range(7):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        if step == 3:
            net.middle.weight.grad[0, 0] = torch.inf
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**11


@training(nonfinite="skip")
def steps_that_are_skipped(net, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        if step in (0, 3):
            net.last.bias.grad[1] = (torch.nan, torch.inf)[step % 2]
        optimizer.step()
    assert optimizer.skipped_steps == 2


@training()
def gradients_by_hand(net, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        net.first.weight.grad.mul_(0.5)
        net.middle.bias.grad.data.add_(0.01)
        net.last.weight.grad = torch.full_like(net.last.weight, 0.1 * step)
        if step % 3 == 1:
            net.last.bias.grad = None
        optimizer.step()


def halve(tensor):
    tensor.mul_(0.5)


@training()
def hooks_of_tensors_and_of_the_optimizer(net, optimizer):
    net.first.weight.register_hook(lambda grad: grad * 2)
    net.last.weight.register_post_accumulate_grad_hook(lambda param: halve(param.grad))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    train(net, optimizer, 4)
    assert calls == ["before", "behind"] * 4


@training("linear")
def regulariser_past_the_modules(net, optimizer):
    for step in range(5):
        optimizer.zero_grad()
        decay = sum(param.abs().sum() for param in net.parameters())
        (loss_of(net, step) + 1e-3 * decay).backward()
        optimizer.step()


@training()
def functional_call(net, optimizer):
    for step in range(5):
        optimizer.zero_grad()
        halved = {name: 0.5 * param for name, param in net.named_parameters()}
        torch.func.functional_call(net, halved, (batch(step, net.first.weight.device),)).backward()
        optimizer.step()


# ---- groups and schedules ----


@training()
def schedulers(net, optimizer):
    # It moves the betas too.
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=6)
    for step in range(5):
        train(net, optimizer, 1, first=step)
        cycle.step()
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    for step in range(4):
        train(net, optimizer, 1, first=step)
        chain.step()


@program()
def edits_of_groups(make, device):
    net = make.net(device)
    decaying = [param for param in net.parameters() if param.ndim > 1]
    others = [param for param in net.parameters() if param.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": 0.3}, {"params": others, "lr": 5e-3}]
    optimizer = make(groups, model=net)
    for step in range(6):
        train(net, optimizer, 1, first=step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["betas"] = (0.9 - 0.1 * step, 0.99)
            group["eps"] = 1e-8 * 10**step
            group["weight_decay"] = 0.01 * step
    return result(net, optimizer)


@program()
def groups_that_are_added_later(make, device):
    net = make.net(device)
    optimizer = make(net.last.parameters(), model=net, ours=ROOM)
    train(net, optimizer, 2)
    optimizer.add_param_group({"params": list(net.middle.parameters()), "lr": 1e-3})
    train(net, optimizer, 2, first=2)
    optimizer.add_param_group({"params": list(net.first.parameters()), "weight_decay": 0.0})
    train(net, optimizer, 3, first=4)
    return result(net, optimizer)


@program()
def frozen_and_thawed(make, device):
    net = make.net(device)
    net.middle.requires_grad_(False)
    optimizer = make(net.parameters(), model=net, ours=ROOM)
    train(net, optimizer, 2)
    net.middle.requires_grad_(True)
    net.first.requires_grad_(False)
    train(net, optimizer, 3, first=2)
    net.first.requires_grad_(True)
    train(net, optimizer, 3, first=5)
    return result(net, optimizer)


@program()
def two_optimizers(make, device):
    net = make.net(device)
    one = make(net.first.parameters(), model=net)
    other = make([*net.middle.parameters(), *net.last.parameters()], model=net, lr=3e-3)
    for step in range(7):
        one.zero_grad()
        other.zero_grad()
        loss_of(net, step).backward()
        other.step()
        if step % 2 == 0:
            one.step()
    return result(net, one, other)


@program()
def beside_an_optimizer_of_torch(make, device):
    net = make.net(device)
    ours = make([*net.first.parameters(), *net.middle.parameters()], model=net)
    sgd = torch.optim.SGD(net.last.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        sgd.zero_grad()
        train(net, ours, 1, first=step)
        sgd.step()
    return result(net, ours)


# ---- looks and writes between steps ----


@training()
def average_by_deepcopy(net, optimizer):
    average = copy.deepcopy(net)
    swa = torch.optim.swa_utils.AveragedModel(net)
    for step in range(5):
        train(net, optimizer, 1, first=step)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(param, 0.3)
        swa.update_parameters(net)
    return weights(average) + weights(swa) + weights(copy.deepcopy(net))


@training()
def average_by_data(net, optimizer):
    means = [param.data.clone() for param in net.parameters()]
    for step in range(5):
        train(net, optimizer, 1, first=step)
        for mean, param in zip(means, net.parameters(), strict=True):
            mean.mul_(0.9).add_(param.data, alpha=0.1)
    return means


@training()
def clamped_by_data(net, optimizer):
    """Before the first step, and between a step and the next forward."""
    net.first.weight.data.mul_(0.5)
    for step in range(6):
        train(net, optimizer, 1, first=step)
        for param in net.parameters():
            param.data.clamp_(-0.1, 0.1)


@training()
def written_without_data(net, optimizer):
    for step in range(6):
        train(net, optimizer, 1, first=step)
        with torch.no_grad():
            net.first.weight.clamp_(-0.1, 0.1)
            net.middle.bias.copy_(torch.full_like(net.middle.bias, 0.01 * step))
            net.last.weight[:1] *= 0.5
        if step == 2:
            nn.init.zeros_(net.last.bias)
            net.middle.weight.data = net.middle.weight.detach() * 0.9
        if step == 4:
            vector = nn.utils.parameters_to_vector(net.parameters())
            nn.utils.vector_to_parameters(vector * 0.9, net.parameters())


@training()
def edits_of_state(net, optimizer):
    train(net, optimizer, 3)
    optimizer.state[net.first.weight]["exp_avg"].zero_()
    optimizer.state[net.middle.weight]["exp_avg_sq"].mul_(2.0)
    train(net, optimizer, 2, first=3)
    moments = optimizer.state[net.last.weight]
    moments["exp_avg"] = torch.ones_like(moments["exp_avg"]) * 1e-2
    del optimizer.state[net.first.bias]
    train(net, optimizer, 2, first=5)
    optimizer.state.clear()
    train(net, optimizer, 2, first=7)


@training("linear")
def state_that_is_replaced(net, optimizer):
    train(net, optimizer, 3)
    optimizer.state = defaultdict(dict)
    train(net, optimizer, 3, first=3)


# ---- saved and loaded ----


@training()
def back_to_an_earlier_state(net, optimizer):
    train(net, optimizer, 2)
    saved = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, 3, first=2)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, 3, first=9)
    net.load_state_dict(saved[0])  # The weights alone.
    train(net, optimizer, 2, first=12)


@program()
def saved_and_resumed(make, device):
    net = make.net(device)
    optimizer = make(net.parameters(), model=net)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(3):
        train(net, optimizer, 1, first=step)
        schedule.step()
    saved = by_file([each.state_dict() for each in (net, optimizer, schedule)])
    del optimizer, schedule
    net = make.net(device)
    optimizer = make(net.parameters(), model=net)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for each, state in zip((net, optimizer, schedule), saved, strict=True):
        each.load_state_dict(state)
    del saved
    for step in range(3, 6):
        train(net, optimizer, 1, first=step)
        schedule.step()
    return result(net, optimizer)


@program()
def state_dicts_go_to_torch_and_back(make, device):
    net = make.net(device)
    ours = make(net.parameters(), model=net)
    train(net, ours, 2)
    theirs = torch.optim.AdamW(net.parameters())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(net, theirs, 2, first=2)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(net, ours, 2, first=4)
    return result(net, ours)


# ---- models ----


def of_words(make, device, between):
    torch.manual_seed(5)
    net = Words(between()).to(device)
    # The bias of an attention's keys has a gradient of nothing but rounding.
    optimizer = make(net.parameters(), model=net, eps=1e-3)
    train(net, optimizer, 5)
    return result(net, optimizer)


@program("linear")
def tied_embeddings(make, device):
    return of_words(make, device, nn.Identity)


@program("linear")
def lstm(make, device):
    return of_words(make, device, lambda: First(nn.LSTM(16, 16, batch_first=True), 1))


@program("linear")
def attention(make, device):
    heads = {"num_heads": 2, "batch_first": True}
    return of_words(make, device, lambda: First(nn.MultiheadAttention(16, **heads), 3))


@program("linear")
def gradient_checkpointing(make, device):
    return of_words(
        make, device, lambda: Checkpointed(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    )


@program("linear")
def parametrized(make, device):
    net = make.net(device)
    nn.utils.parametrizations.weight_norm(net.middle)
    optimizer = make(net.parameters(), model=net)
    train(net, optimizer, 4)
    nn.utils.parametrize.remove_parametrizations(net.middle, "weight")
    optimizer.zero_grad()
    return weights(net)
