"""Programs (`net_programs`) with state on drives, or with updates that are late: the same bits."""

from collections import defaultdict

import pytest
import stepwell
import torch
from net_cases import Face, assert_same_bits, batch, result, train
from net_faces import PLACES, WHOLE, cases, check, face_of
from net_models import Slopes

# What is new and said once is no error here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(("name", "face"), cases(PLACES))
def test_a_program_has_the_bits_of_each_place(name, face, device, tmp_path):
    check(name, face, device, tmp_path)


@pytest.mark.parametrize("face", WHOLE + PLACES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_that_raises_changes_nothing(face, value, tmp_path):
    make, device = face_of(face, tmp_path)[0], torch.device("cpu")
    net = make.net(device)
    optimizer = make(net.parameters(), model=net, nonfinite="raise")
    train(net, optimizer, 3)
    before = result(net, optimizer)
    net(batch(3, device)).backward()
    net.middle.weight.grad.view(-1)[-1] = value
    with pytest.raises(ValueError, match="hint"):
        optimizer.step()
    assert_same_bits(result(net, optimizer), before)
    train(net, optimizer, 1, first=3)
    again = make.net(device)
    unhurt = make(again.parameters(), model=again)
    train(again, unhurt, 4)
    assert_same_bits(result(net, optimizer), result(again, unhurt))


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


def test_updates_are_late_where_they_are_to_be():
    """Forwards read weights that lack some, and looks read them all."""
    outputs = {}
    for name in ("in time", "late"):
        options = (
            {"deferred": stepwell.Deferred(interval=4, predict=False)} if name == "late" else {}
        )
        make = Face(options=options, net_class=Slopes)
        net = make.net(torch.device("cpu"))
        optimizer = make(net.parameters(), model=net)
        outputs[name] = []
        for step in range(8):
            optimizer.zero_grad()
            loss = net(batch(step, "cpu"))
            loss.backward()
            optimizer.step()
            outputs[name].append(loss.item())
        optimizer.drain()
        outputs[name].append(net.eval()(batch(9, "cpu")).item())
    assert outputs["late"][:2] == outputs["in time"][:2]
    assert outputs["late"][3:8] != outputs["in time"][3:8]
    assert outputs["late"][8] == outputs["in time"][8]
