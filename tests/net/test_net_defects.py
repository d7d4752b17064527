"""Defects of 7c4e5c5, which are mended."""

import gc
import logging
from collections import defaultdict

import pytest
import stepwell
import torch
from net_cases import NEAR, TAKES_MODEL, Face, assert_same_bits, result, train, weights
from net_models import Slopes
from torch import nn

pytestmark = pytest.mark.filterwarnings("default")
OURS = [stepwell.AdamW, stepwell.OffloadAdamW]


@pytest.mark.parametrize("cls", OURS)
def test_setstate_without_groups_begins_anew(cls):
    """torch takes it, and its next step is the first."""
    found = []
    for each in (cls, torch.optim.AdamW):
        param = nn.Parameter(torch.ones(4))
        optimizer = each([param], lr=0.1)
        for value in (1.0, -3.0):
            param.grad = torch.full((4,), value)
            optimizer.step()
            optimizer.__setstate__({"state": defaultdict(dict)})
        param.grad = torch.ones(4)
        optimizer.step()
        assert optimizer.state[param]["step"] == 1
        found.append(param.detach().clone())
    torch.testing.assert_close(*found, **NEAR)


def test_state_is_replaced_while_updates_are_deferred():
    found = []
    for options in ({}, {"deferred": stepwell.Deferred(interval=3)}):
        make = Face(options=options, net_class=Slopes)
        net = make.net(torch.device("cpu"))
        optimizer = make(net.parameters(), model=net)
        train(net, optimizer, 4)
        optimizer.state = defaultdict(dict)
        train(net, optimizer, 2, first=4)
        found.append(result(net, optimizer))
    assert_same_bits(*found)


def written_behind_steps(cls, loose, write, moment="behind the step"):
    """What a layer is trained to, with a parameter that is in no module, or two."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    alphas = [torch.zeros(1, requires_grad=True) for _ in range(loose)]
    options = {"threads": 1} if cls is stepwell.OffloadAdamW else {}
    if TAKES_MODEL and options:
        options["model"] = net
    optimizer = cls([*net.parameters(), *alphas], lr=0.05, **options)
    kept = net.weight.data if write is by_what_was_kept else None
    for step in range(12):
        optimizer.zero_grad()
        loss = (-1 if step < 6 else 1) * net.weight.sum()
        loss = loss + net(torch.ones(2, 4)).square().mean()
        (loss + sum(alpha.square().sum() for alpha in alphas)).backward()
        if moment == "before the step":
            write(net.weight, kept)
        optimizer.step()
        if moment == "behind the step":
            write(net.weight, kept)
        elif moment == "once it is complete" and cls is stepwell.OffloadAdamW:
            optimizer.synchronize()
        if moment == "once it is complete":
            write(net.weight, kept)
    return weights(net)[0]


def check_writes(loose, write, moment):
    expected = written_behind_steps(torch.optim.AdamW, loose, write, moment)
    for cls in OURS:
        found = written_behind_steps(cls, loose, write, moment)
        torch.testing.assert_close(found, expected, **NEAR)


def by_data(weight, kept):
    weight.data.clamp_(-0.3, 0.3)


def by_numpy(weight, kept):
    array = weight.detach().numpy()
    array.clip(-0.3, 0.3, out=array)


def by_what_was_kept(weight, kept):
    kept.clamp_(-0.3, 0.3)


MOMENTS = ["behind the step", "once it is complete", "before the step"]
WRITES = [
    *((by_data, moment) for moment in MOMENTS[1:]),
    *((write, moment) for write in (by_numpy, by_what_was_kept) for moment in MOMENTS),
]


def test_what_was_written_by_data_behind_a_step_counts():
    check_writes(0, by_data, "behind the step")


@pytest.mark.parametrize("loose", [1, 2])
def test_it_counts_beside_loose_parameters(loose):
    check_writes(loose, by_data, "behind the step")


@pytest.mark.parametrize(("write", "moment"), WRITES)
def test_what_was_written_between_two_steps_counts_however_it_was(write, moment):
    check_writes(0, write, moment)


class Interrupted(logging.Handler):
    def emit(self, record):
        raise KeyboardInterrupt


def test_what_a_handler_of_the_log_raises_is_what_the_call_raises(tmp_path):
    """Ctrl-C is handled there."""
    param = nn.Parameter(torch.zeros(200_000))

    def made(**options):
        tier = stepwell.Volume([tmp_path], name="v", **options)
        options = {"model": nn.ParameterList([param])} if TAKES_MODEL else {}
        return stepwell.OffloadAdamW(
            [("p", param)], tier=tier, host_bytes_max=5 << 20, threads=1, **options
        )

    optimizer = made()
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    del optimizer
    gc.collect()
    with (tmp_path / "v.0.stepwell").open("r+b") as file:
        file.write(b"x")  # One copy of the header, of which the core warns.
    handler, logger = Interrupted(), logging.getLogger("stepwell")
    logger.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            made(resume=True)
    finally:
        logger.removeHandler(handler)
