"""ZenFlow's process, without DeepSpeed: steps through shared memory, waits, and how it ends."""

import ctypes
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from deepspeed_tensors import HYPER, OPTIMIZER, assert_unchanged, tensors, update
from interrupts import handler_runs_after
from optim_ranks import IMPORTS
from stepwell.deepspeed import spawn
from stepwell.deepspeed.native import adam, cpu_adam, zenflow


@pytest.fixture(autouse=True)
def optimizer():
    cpu_adam.create_adam(OPTIMIZER, 1e-3, 0.9, 0.999, 1e-8, 0, True, False)
    adam.set_nonfinite("raise")
    yield
    cpu_adam.destroy_adam(OPTIMIZER)


PROCESS_TIMEOUT = 60
# Processes are forked from one that has imported torch.
multiprocessing.set_forkserver_preload(IMPORTS)


def zenflow_process(groups, control, ready, propagates=False):
    cpu_adam.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    handle = zenflow.zenflow_adam_create(0, sorted(os.sched_getaffinity(0))[:1])
    for param, grad0, grad1, stale in groups:
        moments = [torch.zeros_like(param) for _ in range(4)]
        zenflow.zenflow_adam_register_group(handle, param, grad0, grad1, *moments, stale)
    ready.set()
    zenflow.zenflow_adam_run_worker(handle, control.data_ptr())
    zenflow.zenflow_adam_destroy(handle)


def start_zenflow(num_groups=2, submitted=(), method="forkserver"):
    """Starts a worker, after `submitted` steps: keywords of `submit`.

    It finds them all when it comes up.
    """
    context = multiprocessing.get_context(method)
    groups = []
    for seed in range(num_groups):
        param, grad, _, _ = tensors(seed=seed)
        groups.append([t.share_memory_() for t in (param, grad, grad * 2, torch.zeros_like(param))])
    control = torch.zeros(zenflow.zenflow_adam_ctrl_size(), dtype=torch.uint8).share_memory_()
    zenflow.zenflow_adam_ctrl_init(control.data_ptr(), num_groups)
    own = [[t.clone() for t in group] for group in groups]
    for step in submitted:
        submit(control, num_groups=num_groups, **step)
    ready = context.Event()
    process = context.Process(target=zenflow_process, args=(groups, control, ready), daemon=True)
    process.start()
    assert ready.wait(PROCESS_TIMEOUT)
    return process, control, groups, own


def submit(control, now_state, step, num_groups=2, lr=1e-3):
    columns = [[value] * num_groups for value in (HYPER | {"lr": lr}).values()]
    zenflow.zenflow_adam_submit(control.data_ptr(), now_state, step, *columns)


@pytest.fixture
def zenflow_running():
    started = []

    def start(**options):
        started.append(start_zenflow(**options))
        return started[-1]

    yield start
    for process, *_ in started:
        process.kill()
        process.join(PROCESS_TIMEOUT)


@pytest.mark.timeout(3 * PROCESS_TIMEOUT)
def test_zenflow_steps_in_its_process(zenflow_running):
    # Ahead of what is waited for, as ZenFlow runs, each with options of its own.
    steps = [
        {"now_state": state, "step": step, "lr": lr}
        for state, step, lr in ((0, 1, 1e-3), (1, 2, 1e-4), (0, 3, 1e-2))
    ]
    process, control, groups, own = zenflow_running(submitted=steps)
    for group in own:
        moments = [[torch.zeros(1000), torch.zeros(1000)] for _ in range(2)]
        for each in steps:
            update(
                each["step"],
                [group[0], group[1 + each["now_state"]], *moments[each["now_state"]]],
                lr=each["lr"],
            )
    for _ in steps:
        assert zenflow.zenflow_adam_wait(control.data_ptr(), PROCESS_TIMEOUT)
    assert not zenflow.zenflow_adam_wait(control.data_ptr(), 0.0)
    for group, expected in zip(groups, own, strict=True):
        assert_unchanged([group[0], group[3]], [expected[0], expected[0]])
    zenflow.zenflow_adam_ctrl_exit(control.data_ptr())
    process.join(PROCESS_TIMEOUT)
    assert process.exitcode == 0


@pytest.mark.timeout(3 * PROCESS_TIMEOUT)
def test_zenflow_says_why_it_could_not_step(zenflow_running):
    process, control, groups, _ = zenflow_running()
    groups[1][1][3] = math.inf
    before = [group[0].clone() for group in groups]
    submit(control, 0, 1)
    with pytest.raises(ValueError, match=r"could not step.*not finite"):
        zenflow.zenflow_adam_wait(control.data_ptr(), PROCESS_TIMEOUT)
    assert_unchanged([group[0] for group in groups], before)
    process.join(PROCESS_TIMEOUT)
    assert process.exitcode == 1
    with pytest.raises(ValueError, match="could not step"):
        submit(control, 0, 2)


def test_zenflow_says_why_its_process_did_not_come_up():
    control = torch.zeros(zenflow.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    zenflow.zenflow_adam_ctrl_init(control.data_ptr(), 1)
    ready = threading.Event()

    def original(*_):
        raise OSError("no memory")

    kept = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(OSError, match="no memory"):
            spawn.zenflow_worker(lambda: original, [], control, ready, [0], True)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, kept)
    assert ready.is_set()
    with pytest.raises(ValueError, match="could not step, and has ended: OSError: no memory"):
        zenflow.zenflow_adam_wait(control.data_ptr(), PROCESS_TIMEOUT)


@pytest.mark.timeout(3 * PROCESS_TIMEOUT)
def test_zenflow_wait_ends_in_time_and_by_a_signal():
    control = torch.zeros(zenflow.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    zenflow.zenflow_adam_ctrl_init(control.data_ptr(), 1)
    began = time.monotonic()
    assert not zenflow.zenflow_adam_wait(control.data_ptr(), 0.05)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(KeyboardInterrupt), handler_runs_after(0.05):
        zenflow.zenflow_adam_wait(control.data_ptr(), PROCESS_TIMEOUT)


def spawn_zenflow_and_wait(pid):
    # It sees its parent end: this process.
    process, control, *_ = start_zenflow(method="spawn")
    pid.value = process.pid
    submit(control, 0, 1)
    zenflow.zenflow_adam_wait(control.data_ptr(), PROCESS_TIMEOUT)
    time.sleep(PROCESS_TIMEOUT)


@pytest.mark.timeout(4 * PROCESS_TIMEOUT)
def test_zenflow_process_ends_with_a_killed_parent():
    context = multiprocessing.get_context("forkserver")
    pid = context.Value(ctypes.c_int, 0)
    parent = context.Process(target=spawn_zenflow_and_wait, args=(pid,))
    parent.start()
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while not pid.value:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join(PROCESS_TIMEOUT)
    while is_running(pid.value):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def is_running(pid):
    try:
        with Path(f"/proc/{pid}/stat").open() as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_zenflow_refuses_what_does_not_fit():
    control = torch.zeros(zenflow.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    address = control.data_ptr()
    for num_groups in (0, zenflow.GROUPS_MAX + 1):
        with pytest.raises(ValueError, match=f"`{num_groups}` parameter groups"):
            zenflow.zenflow_adam_ctrl_init(address, num_groups)
    zenflow.zenflow_adam_ctrl_init(address, 2)
    with pytest.raises(ValueError, match="hyper-parameters of"):
        submit(control, 0, 1, num_groups=1)
    with pytest.raises(ValueError, match="finite numbers"):
        submit(control, 0, 1, lr=math.nan)
    with pytest.raises(ValueError, match="`now_state, step` is `2, 1`"):
        submit(control, 2, 1)
    with pytest.raises(ValueError, match="there is no ZenFlow worker `999`"):
        zenflow.zenflow_adam_run_worker(999, address)
    with pytest.raises(ValueError, match="there is no optimizer `999`"):
        zenflow.zenflow_adam_create(999, [])
    handle = zenflow.zenflow_adam_create(OPTIMIZER, [])
    param, grad, m, v = tensors()
    with pytest.raises(ValueError, match="is not contiguous"):
        zenflow.zenflow_adam_register_group(
            handle, param, grad, grad, m, torch.zeros(2000)[::2], v, v, None
        )
    with pytest.raises(ValueError, match="`stale` is"):
        zenflow.zenflow_adam_register_group(handle, param, grad, grad, m, m, v, v, param[:5])
    zenflow.zenflow_adam_destroy(handle)
    for _ in range(zenflow.OUTSTANDING_MAX):
        submit(control, 0, 1)
    with pytest.raises(ValueError, match="are not done yet"):
        submit(control, 0, 1)


def test_the_process_does_what_its_optimizer_asks_for():
    class ZeroOptimizer:
        optimizer = torch.optim.SGD([torch.zeros(1)])

    started = zenflow.following(lambda zero: found.append((zero, adam.nonfinite())))
    found, zero = [], ZeroOptimizer()
    started(zero)
    # As the plan does for `"check_grad_overflow": false` in a JSON.
    adam.propagate_in(zero.optimizer)
    started(zero)
    assert found == [(zero, "raise"), (zero, "propagate")]
    assert adam.nonfinite() == "raise"
