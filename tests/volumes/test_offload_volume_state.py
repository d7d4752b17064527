"""State on a volume as programs see it: looks at it, writes to it, and state dicts."""

import contextlib
import copy
import gc
import pickle
import threading
from collections import defaultdict

import pytest
import stepwell
import torch
from insides import swapped_of
from interrupts import handler_runs_after
from offload_cases import assert_equal, train
from optim_cases import bits
from stepwell import _core, _state
from stepwell.store.placeholders import Placeholder
from stepwell.store.state_in_memory import StateInMemory
from torch.distributed.checkpoint.state_dict import get_state_dict
from volume_models import net_of, on_volume, pair


def test_a_state_dict_is_a_snapshot_and_resumes_exactly(tmp_path):
    (net, optimizer), (twin, reference) = pair(tmp_path, torch.bfloat16, moments="q8")
    train(net, optimizer, 3)
    train(twin, reference, 3)
    saved = optimizer.state_dict()
    frozen = copy.deepcopy(saved)
    weights = copy.deepcopy(net.state_dict())
    train(net, optimizer, 2, first=3)
    for index, state in frozen["state"].items():
        for name, value in state.items():
            assert torch.equal(bits(saved["state"][index][name]), bits(value)), name
    # Back to it, here and in memory.
    net.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(twin, reference, 0)
    assert_equal((net, optimizer), (twin, reference))
    assert train(net, optimizer, 3, first=3) == train(twin, reference, 3, first=3)
    assert_equal((net, optimizer), (twin, reference))
    other = net_of(torch.bfloat16, seed=5)
    in_memory = stepwell.OffloadAdamW(other, lr=0.5, moments="q8")
    other.load_state_dict(net.state_dict())
    in_memory.load_state_dict(optimizer.state_dict())
    assert train(other, in_memory, 2, first=6) == train(twin, reference, 2, first=6)


def test_what_is_written_to_the_state_counts(tmp_path):
    ours, theirs = pair(tmp_path, durability="none")
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        for param in net.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
        train(net, optimizer, 1, first=2)
        del optimizer.state[net[2].weight]
        train(net, optimizer, 2, first=3)
    assert_equal(ours, theirs)


def assert_placeholders_print(addresses):
    """Every tensor at these addresses, as the frames above have them, prints without a look."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    begin, end = addresses.address, addresses.address + addresses.nbytes
    found = [each for each in tensors if begin <= each.data_ptr() < end]
    assert found and all(
        type(each) is Placeholder and "on a volume" in repr(each) for each in found
    )


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_what_stands_for_state_on_a_volume_can_be_printed(tmp_path, monkeypatch, moments):
    """A traceback with the arguments of calls, as pytest prints it, would end the process."""
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, tmp_path, host_bytes=4 << 20, moments=moments)
    looks = set()

    def looking(function):
        def call(*args, **options):
            if function not in looks:
                looks.add(function)
                assert_placeholders_print(swapped_of(optimizer).volume._addresses)
                assert repr(args)
            return function(*args, **options)

        return call

    train(net, optimizer, 2)
    volume = swapped_of(optimizer).volume
    monkeypatch.setattr(optimizer, "_submit", looking(optimizer._submit))
    monkeypatch.setattr(volume, "_tensor", looking(volume._tensor))
    train(net, optimizer, 1, first=2)
    optimizer.state_dict()
    assert len(looks) == 2


def test_torch_may_ask_for_state_before_the_first_step(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    # A look, and then a step that only makes state.
    assert not optimizer.state
    state = get_state_dict(net, optimizer)[1]["state"]
    for name in ("0.weight", "2.weight"):
        assert state[name]["exp_avg"].count_nonzero() == 0


def test_ctrl_c_ends_a_look_at_the_state_and_harms_nothing(tmp_path):
    ours, theirs = pair(tmp_path, durability="none", host_bytes=1800 << 10)
    train(*ours, 1)
    train(*theirs, 1)
    optimizer = ours[1]
    optimizer.synchronize()
    interrupted = 0
    for attempt in range(1, 40):
        # All of it is read again each time.
        states = dict(optimizer._states)
        try:
            with handler_runs_after(attempt * 1e-4):
                swapped_of(optimizer).read(states)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    assert_equal(ours, theirs)
    assert train(*ours, 1, first=1) == train(*theirs, 1, first=1)
    assert_equal(ours, theirs)


def test_the_state_may_be_kept_over_steps(tmp_path):
    (net, optimizer), (twin, reference) = pair(tmp_path, durability="none")
    states = optimizer.state
    items = None
    for step in range(3):
        train(net, optimizer, 1, first=step)
        train(twin, reference, 1, first=step)
        if items is not None:
            # Of the step before.
            assert all(torch.isfinite(state["exp_avg"]).all() for _, state in items)
        items = optimizer.state.items()
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(states[param][name], reference.state[other][name])
    assert set(states) == set(net.parameters()) and len(dict(states)) == len(states)
    optimizer.state = optimizer.state
    train(net, optimizer, 1, first=3)
    train(twin, reference, 1, first=3)
    assert_equal((net, optimizer), (twin, reference))


def test_another_thread_may_look_at_the_state(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, durability="none")
    train(net, optimizer, 1, first=0)
    is_over, seen = threading.Event(), []

    def look():
        while not is_over.is_set():
            seen.append(optimizer.state[net[2].weight]["exp_avg"].isfinite().all().item())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for step in range(1, 6):
            train(net, optimizer, 1, first=step)
    finally:
        is_over.set()
        thread.join(timeout=60)
    assert not thread.is_alive() and seen and all(seen)


def test_a_look_after_a_look_scans_nothing(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    train(net, optimizer, 1)
    scanned = []
    swapped = swapped_of(optimizer)
    is_placeholder = swapped.is_placeholder
    monkeypatch.setattr(
        swapped,
        "is_placeholder",
        lambda param, state: scanned.append(param) or is_placeholder(param, state),
    )
    params = list(net.parameters())
    for param in params:
        assert optimizer.state[param]["exp_avg"].abs().sum() > 0
    # Once for all of them.
    assert len(scanned) == len(params)
    train(net, optimizer, 1, first=1)
    scanned.clear()
    assert all(int(optimizer.state[param]["step"]) == 2 for param in params)
    assert len(scanned) == len(params)


def test_a_snapshot_has_its_own_counts_of_parameters_without_elements(tmp_path):
    net = torch.nn.Linear(300, 300)
    net.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
    optimizer = on_volume(net, tmp_path)
    saved = []
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        saved.append(optimizer.state_dict()["state"])
    for count, states in enumerate(saved, 1):
        assert [int(state["step"]) for state in states.values()] == [count] * 3


def test_state_is_read_if_there_is_memory_for_it(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    train(net, optimizer, 1)
    nbytes = sum(_state.nbytes(param, "fp32") for param in net.parameters())
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: nbytes - 1)
    with pytest.raises(ValueError, match=rf"takes `{nbytes}` bytes of host memory as tensors"):
        optimizer.state_dict()
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: nbytes)
    assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
    # Where it is not known how much is free.
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: None)
    train(net, optimizer, 1, first=1)
    assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def test_the_state_is_a_dict_like_any():
    states = defaultdict(dict, {"a": {"step": 1}, "b": {"step": 2}})
    state = StateInMemory(lambda: contextlib.nullcontext(states))
    assert "a" in state and "c" not in state
    assert list(state) == ["a", "b"] and list(reversed(state)) == ["b", "a"]
    assert (state == dict(states), state != dict(states), state == {}) == (True, False, False)
    assert repr(state) == repr(states)
    for other in (copy.copy(state), state.copy(), copy.deepcopy(state)):
        assert type(other) is defaultdict and other == states and other is not states
    assert copy.copy(state)["a"] is states["a"] is not copy.deepcopy(state)["a"]
    assert pickle.loads(pickle.dumps(state)) == states
    assert state | {"a": 3, "c": 4} == {"a": 3, "b": {"step": 2}, "c": 4}
    assert {"a": 3, "c": 4} | state == {"a": {"step": 1}, "b": {"step": 2}, "c": 4}
    kept = state
    kept |= {"c": {"step": 3}}
    assert kept is state and states["c"] == {"step": 3}
    assert state.pop("c") == {"step": 3} and state.pop("c", None) is None
    assert state.setdefault("d", {}) is states["d"]
    assert state.popitem() == ("d", {})
    state.update({"a": {}}, b={"step": 4})
    assert states == {"a": {}, "b": {"step": 4}}
    state.clear()
    assert not states
