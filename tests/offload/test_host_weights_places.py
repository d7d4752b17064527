"""Where weights in host memory are, whose they are, and what Ctrl-C leaves of them."""

import contextlib
import copy
import gc
import linecache
import logging
import re
import sys
import weakref

import pytest
import stepwell
import torch
from host_weight_cases import (
    WIDTH,
    WORDS,
    Net,
    assert_same,
    assert_trains_alike,
    is_away,
    is_same,
    loss_of,
    made,
    partly_frozen,
    resident_bytes,
    words_of,
)
from stepwell.store.engine import Engine

# ---- Ctrl-C ----


class CtrlC:
    """Comes at the nth line of the code that has weights come and go."""

    FILES = re.compile(r"stepwell/(weights/|store/(host_weight|staying)|access/writes)")

    def __init__(self, nth):
        self.num_left = nth

    def __call__(self, frame, event, arg):
        return self.trace if self.FILES.search(frame.f_code.co_filename) else None

    def trace(self, frame, event, arg):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # At the end of a `with` Python looks for signals behind the exit alone.
        if event == "line" and not line.startswith("with "):
            self.num_left -= 1
            if self.num_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def reads(net, optimizer):
    return [param.norm().item() for param in net.parameters()]


def goes_forward_and_back(net, optimizer):
    loss_of(net, 7).backward()


def looks_at_state(net, optimizer):
    net.state_dict()


def steps(net, optimizer):
    optimizer.step()


def run_with_ctrl_c(weights, act, nth, stays=None):
    """What there is after some steps, and whether Ctrl-C came. `act`: None: it is left out."""
    net, optimizer = made(weights, "cpu", stays=stays)
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    view = net.head.weight.data
    loss_of(net, 1).backward()
    view.mul_(0.9)
    interrupt = CtrlC(nth)
    sys.settrace(interrupt if nth else None)
    with contextlib.suppress(KeyboardInterrupt):
        if act is not None:
            act(net, optimizer)
    sys.settrace(None)
    optimizer.zero_grad()
    for step in range(2, 4):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [[param.detach().clone() for param in net.parameters()], net.state_dict(), view.clone()]
    del view
    loss_of(net, 4).backward()
    optimizer.step()
    assert weights == "device" or stays or resident_bytes(net) == 0
    return seen, interrupt.num_left == 0


@pytest.mark.parametrize("stays", [None, "ends"])
@pytest.mark.parametrize("act", [reads, goes_forward_and_back, looks_at_state, steps])
def test_ctrl_c_leaves_weights_as_they_were_or_stepped(act, stays):
    expected = [run_with_ctrl_c("device", each, 0)[0] for each in (act, None)]
    nth, was_interrupted = 1, True
    while was_interrupted:
        seen, was_interrupted = run_with_ctrl_c("host", act, nth, stays)
        assert any(is_same(seen, each) for each in expected), nth
        nth += 41 if nth < 1000 else 101
    assert nth > 500


def test_what_comes_behind_a_forward_that_ctrl_c_has_ended_is_no_use_of_its_module():
    net, optimizer = made("host", "cpu")

    def interrupts(*_):
        raise KeyboardInterrupt

    handle = net.layers[1].up.register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        loss_of(net, 0)
    handle.remove()
    net.head.weight.norm()
    loss_of(net, 0).backward()
    optimizer.step()
    seen = []
    net.layers[1].up.register_forward_hook(lambda *_: seen.append(is_away(net.head.weight)))
    with torch.no_grad():
        # The first pass of its kind, which fetches nothing ahead.
        net(words_of(net, 1))
    assert seen == [True]


# ---- where weights are ----


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_weights_are_on_the_device_only_while_modules_use_them(reentrant):
    net, optimizer = made("host", "cpu", lambda: Net(reentrant=reentrant))
    total = sum(param.nbytes for param in net.parameters())
    assert resident_bytes(net) == 0
    most = []
    for layer in net.layers:
        layer.up.register_forward_hook(lambda *_: most.append(resident_bytes(net)))
    for step in range(3):
        loss_of(net, step).backward()
        assert all(param.grad is not None for param in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert resident_bytes(net) == 0
    # The first pass fetches nothing ahead.
    assert max(most[:3]) < total / 2


def test_what_is_used_first_and_last_stays_with_room_on_the_device():
    net, optimizer = made("host", "cpu", stays="ends")
    staying = {net.embed.weight, net.head.weight}
    seen = []
    net.layers[1].up.register_forward_hook(
        lambda *_: seen.append([not is_away(param) for param in staying])
    )
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(map(is_away, staying))
        assert all(map(is_away, net.layers[1].parameters()))
    assert seen == [[True, True]] * 3


def test_groups_are_placed_one_after_the_other_and_nothing_is_fetched():
    net = Net().bfloat16()
    groups = [{"params": list(net.embed.parameters())}, {"params": list(net.layers.parameters())}]
    optimizer = stepwell.OffloadAdamW(groups, model=net, weights="host", lr=1e-2)
    assert resident_bytes(net) == 0
    optimizer.add_param_group({"params": list(net.head.parameters())})
    assert resident_bytes(net) == 0
    before = copy.deepcopy(net.state_dict())
    loss_of(net, 0).backward()
    optimizer.step()
    assert not any(is_same(value, before[n]) for n, value in net.named_parameters())


def test_state_stays_with_room_for_all_weights():
    net, optimizer = made("host", "cpu", stays="state")
    loss_of(net, 0).backward()
    optimizer.step()
    assert not any(map(is_away, net.parameters()))
    numel = sum(param.numel() for param in net.parameters())
    assert 3 * numel < optimizer.timing["resident_bytes"] <= 6 * numel


def test_no_more_is_fetched_ahead_than_there_is_room_for():
    def most_there(**options):
        net, optimizer = made("host", "cpu", **options)
        most = 0

        def look(*_):
            nonlocal most
            most = max(most, resident_bytes(net))

        for step in range(3):
            if step == 2:
                for module in net.modules():
                    module.register_forward_hook(look)
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return most

    assert most_there(device_bytes_max=20_000) <= 20_000 < most_there()


def test_what_steps_upload_of_large_weights_is_no_write_of_the_program(caplog):
    net = torch.nn.Linear(1 << 12, 1 << 11).bfloat16()
    options = {"device": "cpu", "device_bytes_max": 1 << 25}
    optimizer = stepwell.OffloadAdamW(net, weights="host", **options)
    for step in range(4):
        net(torch.ones(1, 1 << 12, dtype=torch.bfloat16)).sum().backward()
        if step == 1:
            # The first step copies all to the host.
            caplog.set_level(logging.DEBUG, "stepwell")
        if step == 3:
            assert "were written" not in caplog.text
            net.weight.data[-1, -1] += 1
        optimizer.step()
        optimizer.zero_grad()
    assert "1 parameters were written" in caplog.text


def fails(patch, of, name, is_meant):
    """The device has no memory for what is meant."""
    function = getattr(of, name)

    def call(*args, **kwargs):
        if is_meant(*args):
            raise torch.OutOfMemoryError
        return function(*args, **kwargs)

    patch.setattr(of, name, call)


def assert_trains_as_on_the_device(net, optimizer):
    reference = made("device", "cpu")
    for step in range(3):
        for model, each in ((net, optimizer), reference):
            loss_of(model, step).backward()
            each.step()
            each.zero_grad()
    assert_same(net.state_dict(), reference[0].state_dict())


@pytest.mark.parametrize("stays", ["ends", "state"])
def test_fewer_weights_stay_where_the_device_has_no_memory(monkeypatch, stays):
    moved = []

    def is_second(tensor, *args):
        is_meant = tuple(tensor.shape) == (WORDS, WIDTH) and args == (torch.device("cpu"),)
        moved.extend([tensor] if is_meant else [])
        return is_meant and len(moved) == 2

    with monkeypatch.context() as patch:
        fails(patch, torch.Tensor, "to", is_second)
        net, optimizer = made("host", "cpu", stays=stays)
    assert is_away(net.head.weight) and not is_away(net.embed.weight)
    assert_trains_as_on_the_device(net, optimizer)


def test_weights_that_stay_give_way_to_what_others_need(monkeypatch):
    held, num_failed = [], 0

    def holding():
        net = Net().bfloat16()
        held.append(net.layers[1].up.weight.data)
        return net

    def is_early(*_):
        nonlocal num_failed
        num_failed += 1
        return num_failed <= 3

    with monkeypatch.context() as patch:
        fails(patch, torch, "empty_like", is_early)
        net, optimizer = made("host", "cpu", make=holding, stays="ends")
    assert num_failed == 4 and resident_bytes(net) == 0
    assert_trains_as_on_the_device(net, optimizer)


def test_what_a_backward_used_last_stays_for_the_next_forward():
    net, optimizer = made("host", "cpu")
    for step in range(3):
        loss_of(net, step).backward()
    assert not is_away(net.embed.weight)
    assert all(map(is_away, net.layers[1].parameters()))
    optimizer.step()
    assert is_away(net.embed.weight)


def test_uses_outside_of_modules_leave_with_the_next_step():
    net, optimizer = made("host", "cpu")
    assert all(bool(param.isfinite().all()) for param in net.parameters())
    assert resident_bytes(net) > 0
    loss_of(net, 0).backward()
    optimizer.step()
    assert resident_bytes(net) == 0


def test_what_is_used_outside_of_modules_is_bounded(monkeypatch):
    from stepwell.store import host_weights

    monkeypatch.setattr(host_weights, "BORROWED_BYTES_MAX", 10_000)
    net, _ = made("host", "cpu", dtype=torch.float32)
    plain = dict(made("device", "cpu", dtype=torch.float32)[0].named_parameters())
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.add_(1)
            plain[name].add_(1)
            assert resident_bytes(net) < 10_000 + 2 * max(p.nbytes for p in net.parameters())
    state = net.state_dict()
    for name, param in net.named_parameters():
        assert_same(param.detach(), plain[name])
        assert_same(state[name], plain[name])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_is_moved_to_its_own_device_without_a_fetch(device):
    net, optimizer = made("host", device)
    for step in range(2):
        for move in (lambda: net.to(device), lambda: net.to(torch.bfloat16), net.bfloat16):
            move()
            assert all(map(is_away, net.parameters()))
            assert {param.device.type for param in net.parameters()} == {device}
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert net.head.weight.to(torch.float32).norm() > 0


@pytest.mark.gpu
def test_a_model_on_another_device_is_refused():
    net, optimizer = made("host", "cuda")
    net.to("cpu")
    for call in (lambda: net(words_of(net, 0).cpu()), optimizer.step):
        with pytest.raises(ValueError, match="a parameter is on `cpu`"):
            call()
    net.to("cuda")
    optimizer.step()


def test_a_state_dict_has_host_memory_and_waits_for_the_step():
    net, optimizer = made("host", "cpu")
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = net.state_dict()
        assert resident_bytes(net) == 0
        assert {value.device.type for value in state.values()} == {"cpu"}
        for name, param in net.named_parameters():
            assert_same(state[name].clone(), param.detach().clone())
    assert net.state_dict(keep_vars=True)["head.weight"] is net.head.weight


def test_each_tensor_of_a_state_dict_has_a_storage_of_its_own():
    # Else what saves them takes them for one that is shared.
    for make in (Net, partly_frozen):
        net, _ = made("host", "cpu", make)
        storages = {
            v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
            for v in net.state_dict().values()
        }
        assert sum(storages.values()) == sum(v.nbytes for v in net.state_dict().values())


def test_arrays_of_parameters_and_shared_memory_do_not_stop_a_step():
    def arrays(net, optimizer, step, kept):
        net.head.share_memory()
        return [param.detach().numpy().tolist() for param in net.embed.parameters()]

    assert_trains_alike("cpu", then=arrays, dtype=torch.float32)


PLACES = [("device", None), ("host", None), ("host", "ends"), ("host", "state")]


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("second", PLACES)
def test_a_run_goes_on_with_weights_elsewhere(first, second):
    net, optimizer = made(first[0], "cpu", stays=first[1])
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    seen = []
    for weights, stays in (first, second):
        net, optimizer = made(weights, "cpu", stays=stays)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(2, 4):
            loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        seen.append(net.state_dict())
    assert_same(seen[:3], seen[3:])


@pytest.mark.parametrize("stays", [None, "ends", "state"])
def test_a_model_is_used_when_its_optimizer_is_gone(stays):
    net, optimizer = made("host", "cpu", stays=stays)
    loss_of(net, 0).backward()
    optimizer.step()
    expected = net(words_of(net, 1)).detach()
    del optimizer
    gc.collect()
    assert_same(net(words_of(net, 1)).detach(), expected)
    assert net.head.weight.norm() > 0


def test_a_parameter_without_its_model_says_so():
    net, optimizer = made("host", "cpu")
    weight = net.head.weight
    del net, optimizer
    gc.collect()
    with pytest.raises(ValueError, match="its model, which is gone"):
        weight.norm()


@pytest.mark.parametrize("stays", [None, "ends", "state"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_an_optimizer_takes_over_from_the_one_before(is_gone, stays):
    seen = []
    for weights in ("host", "device"):
        net, optimizer = made(weights, "cpu", stays=stays if weights == "host" else None)
        for run in range(2):
            if run:
                if is_gone:
                    del optimizer
                    gc.collect()
                optimizer = stepwell.OffloadAdamW(net, weights=weights)
                assert weights == "device" or resident_bytes(net) == 0
            for step in range(2):
                loss_of(net, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                net.head.weight.mul_(0.9)
            seen.append([param.detach().clone() for param in net.parameters()])
    assert_same(seen[:2], seen[2:])


@pytest.mark.parametrize("stays", [None, "ends", "state"])
def test_the_optimizer_before_steps_no_more(stays):
    net, optimizer = made("host", "cpu", stays=stays)
    other = stepwell.OffloadAdamW(net, weights="host")
    with pytest.raises(ValueError, match="has another one"):
        optimizer.step()
    del optimizer
    loss_of(net, 0).backward()
    other.step()


@pytest.mark.parametrize("stays", [None, "ends", "state"])
def test_another_optimizer_of_the_same_weights_is_refused(stays):
    net, optimizer = made("host", "cpu", stays=stays)
    state = copy.deepcopy(net.state_dict())
    other = Net()
    other.embed = net.embed
    for model, options in ((net, {}), (other, {}), (other, {"weights": "host"})):
        with pytest.raises(ValueError, match="in host memory for another optimizer"):
            stepwell.OffloadAdamW(model, **options)
    with pytest.raises(ValueError, match="in host memory for another optimizer"):
        stepwell.OffloadAdamW(other.head.parameters(), model=other, weights="host")
    # What was refused has let go of what it had.
    assert all(type(param) is torch.nn.Parameter for param in other.layers.parameters())
    assert bool(other.head.weight.norm() > 0)
    assert_same(net.state_dict(), state)
    loss_of(net, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("stays", [None, "ends", "state"])
def test_a_model_and_its_optimizer_go_when_the_program_lets_go_of_them(stays):
    net, optimizer = made("host", "cpu", stays=stays)
    loss_of(net, 0).backward()
    optimizer.step()
    held = [*map(weakref.ref, net.parameters()), weakref.ref(optimizer._background)]
    del net, optimizer
    gc.collect()
    assert not any(each() for each in held)


# ---- what is refused ----


def test_a_pin_that_fails_leaves_nothing_pinned(monkeypatch):
    pin, engines = Engine.pin, []

    def fails_at_second(self, memory):
        engines.append(self)
        if len(engines) == 2:
            raise OSError("cannot pin")
        pin(self, memory)

    net = Net().bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "pin", fails_at_second)
        with pytest.raises(OSError, match="cannot pin"):
            stepwell.OffloadAdamW(net, weights="host")
    assert engines[0].core.pinned_nbytes == 0
    assert all(type(param) is torch.nn.Parameter for param in net.parameters())
    optimizer = stepwell.OffloadAdamW(net, weights="host")
    loss_of(net, 0).backward()
    optimizer.step()


def test_other_shapes_and_dtypes_are_refused():
    for change in (
        lambda net: net.bfloat16(),
        lambda net: setattr(net.head.weight, "data", torch.zeros(7, WIDTH)),
    ):
        net, optimizer = made("host", "cpu", dtype=torch.float32)
        change(net)
        with pytest.raises(ValueError, match="as it was"):
            optimizer.step()


def test_what_does_not_go_with_weights_in_host_memory_is_refused():
    params = list(Net().parameters())
    with pytest.raises(ValueError, match="no model is given"):
        stepwell.OffloadAdamW(params, weights="host")
    for options, why in [
        ({"weights": "nowhere"}, "`weights` is `nowhere`"),
        ({"weights": "host", "accumulate": "device"}, "`accumulate` is `device`"),
        (
            {"weights": "host", "deferred": stepwell.Deferred()},
            "`deferred` is `Deferred.*expected it to be left out",
        ),
        ({"weights": "host", "device": "nowhere"}, "`device` is `nowhere`.*device string: nowhere"),
        ({"device": "cpu"}, "`device` is `cpu` and `weights` is `device`"),
    ]:
        with pytest.raises(ValueError, match=why):
            stepwell.OffloadAdamW(Net(), **options)
