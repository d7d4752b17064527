"""Which parameters OffloadAdamW steps: frozen, added, thawed, odd ones, and memory for them."""

import re

import pytest
import stepwell
import torch
from offload_cases import assert_equal, pair, small, train
from stepwell import _state

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")


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


def test_gradient_of_a_frozen_parameter_is_refused():
    net = small()
    net[0].weight.requires_grad_(False)
    optimizer = stepwell.OffloadAdamW(net.named_parameters(), model=net)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(ValueError, match=r"`0.weight`.*has a gradient, but is frozen"):
        optimizer.step()


def test_parameters_that_cannot_be_stepped_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        stepwell.OffloadAdamW([torch.nn.Parameter(torch.zeros(4, 3).t())])
    with pytest.raises(ValueError, match="meta"):
        stepwell.OffloadAdamW(torch.nn.Linear(3, 3, device="meta").parameters())
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match="shares memory"):
        stepwell.OffloadAdamW([torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:])])


def test_groups_that_are_added_to_a_model_need_no_names():
    net = small()
    optimizer = stepwell.OffloadAdamW(net)
    net.added = torch.nn.Linear(3, 2)
    loose = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": net.added.parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": loose})
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names[1:] == [["added.weight", "added.bias"], ["group 2, 0"]]


# ---- memory ----


def test_memory_is_of_the_parameters_that_there_are():
    """Of 16 bytes per element: what was set aside for a first step is state from then on."""

    def param():
        param = torch.nn.Parameter(torch.ones(1000))
        param.grad = torch.ones(1000)
        return param

    optimizer = stepwell.OffloadAdamW([param()], host_bytes_max=33_000)
    for _ in range(3):
        optimizer.step()
        optimizer.add_param_group({"params": [param()]})
        optimizer.step()
        with pytest.raises(ValueError, match="are left"):
            optimizer.add_param_group({"params": [param()]})
        # What leaves takes none, nor does its state.
        (gone,) = optimizer.param_groups.pop()["params"]
        del optimizer.state[gone]


def test_a_group_for_whose_state_there_is_no_memory_is_not_added(monkeypatch):
    first, second = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
    first.grad = torch.ones(1000)
    optimizer = stepwell.OffloadAdamW([first], host_bytes_max=33_000)
    optimizer.step()
    with monkeypatch.context() as full:
        full.setattr(_state, "new", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
        with pytest.raises(OSError, match="no memory"):
            optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    # There is room for one more, of another name.
    third = torch.nn.Parameter(torch.ones(1000))
    optimizer.add_param_group({"params": [third]})
    third.grad = torch.ones(1000)
    optimizer.step()
    assert [optimizer.state[param]["step"] for param in (first, third)] == [3, 1]
    assert torch.equal(second, torch.ones(1000))


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


def test_state_that_was_deleted_begins_anew_also_after_a_first_step_at_lr_0():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = stepwell.OffloadAdamW([param], lr=0.0)
    for lr, grad in ((0.0, 0.0), (0.1, 1.0), (0.1, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.full((3,), grad)
        if grad and optimizer.state[param]["step"]:
            del optimizer.state[param]
        optimizer.step()
    assert float(optimizer.state[param]["step"]) == 1
