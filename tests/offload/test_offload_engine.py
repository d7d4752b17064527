"""The core's engine as Python has it: what it holds, what it forgets; OffloadAdamW on it."""

import gc
import weakref
from pathlib import Path

import fork_server
import pytest
import stepwell
import torch
from offload_cases import WIDTH, Net, assert_equal, loss_of
from stepwell import _core
from stepwell._tensors import view

NUMEL = 1 << 16
HYPER = _core.Hyper(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)


class Owner:
    """Something that may be lent, and is seen to be freed."""


class Case:
    """A float32 parameter with its state and gradient, and an engine for it."""

    def __init__(self, generations=1):
        self.param, self.exp_avg, self.exp_avg_sq, self.weight = (
            torch.zeros(NUMEL) for _ in range(4)
        )
        self.hosts = [torch.zeros(NUMEL) for _ in range(generations)]
        self.core = _core.OffloadEngine("cpu", [NUMEL], threads=1, generations=generations)

    def take(self, grad, owners=((), ()), host=0):
        self.core.take(
            [0],
            [grad.data_ptr()],
            [view(self.hosts[host])],
            source_owners=[grad, *owners[0]],
            target_owners=[self.hosts[host], *owners[1]],
        )

    def submit(self, step=1, owners=(), host=0):
        tensor = _core.AdamTensor(
            param=view(self.param),
            grad=view(self.hosts[host]),
            exp_avg=view(self.exp_avg),
            exp_avg_sq=view(self.exp_avg_sq),
        )
        self.core.submit(
            [0],
            [tensor],
            weights=[self.weight.data_ptr()],
            steps=[step],
            hypers=[HYPER],
            owners=[self, *owners],
        )


def test_what_a_step_borrows_is_freed_when_it_has_ended():
    case, objects = Case(), [Owner(), Owner(), Owner()]
    refs = [weakref.ref(one) for one in objects]
    case.take(torch.ones(NUMEL), ([objects[0]], [objects[1]]))
    case.submit(owners=[objects[2]])
    del objects
    gc.collect()
    assert all(ref() is not None for ref in refs)
    case.core.synchronize()
    assert all(ref() is None for ref in refs)
    assert torch.equal(case.weight, case.param)


# A thread of Python's runs while the engine is dropped in the middle of a step. Threads switch only
# where one of them lets go of the interpreter.
DROPPED = """
import logging, sys, threading, time
import torch
from test_offload_engine import Case, NUMEL
from stepwell._tensors import view

logging.basicConfig(level=logging.DEBUG)
case = Case()
# It lies before the gradient, so the step is running while it is copied.
big, place = (torch.ones(1 << 29, dtype=torch.uint8) for _ in range(2))
case.core.take_part([big.data_ptr()], [view(place)], source_owners=[big], target_owners=[place])
case.take(torch.ones(NUMEL))
case.submit()
core, case.core = case.core, None
turns, started, stopped = [], threading.Event(), threading.Event()

def take_turns():
    started.set()
    while not stopped.is_set():
        turns.append(None)
        time.sleep(0.001)

thread = threading.Thread(target=take_turns, daemon=True)
thread.start()
assert started.wait(60)
sys.setswitchinterval(60)
assert core.busy
before = len(turns)
del core
after = len(turns)
sys.setswitchinterval(0.005)
stopped.set()
thread.join(60)
assert torch.equal(case.weight, case.param) and case.param.any(), "it waits for the step"
print("turns", after - before)
"""


def test_an_engine_that_is_dropped_waits_for_its_step_without_the_interpreter():
    """A thread of the engine that logs takes the interpreter, and would wait for ever."""
    result = fork_server.python("-c", DROPPED, cwd=Path(__file__).parent, timeout=110)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 0, "the interpreter is held while the engine waits"


def test_what_is_refused_is_not_held():
    case, owner = Case(), Owner()
    ref = weakref.ref(owner)
    with pytest.raises(ValueError, match="tensor `1`"):
        case.core.take(
            [1],
            [case.weight.data_ptr()],
            [view(case.hosts[0])],
            source_owners=[owner],
            target_owners=[],
        )
    with pytest.raises(ValueError, match="steps"):
        case.submit(step=0, owners=[owner])
    del owner
    gc.collect()
    case.core.synchronize()
    assert ref() is None


@pytest.mark.parametrize("discards", [True, False], ids=["discarded", "forgotten"])
def test_a_gradient_of_a_skipped_step_is_not_stepped_in_the_next(discards):
    """A long copy lies before the part, so a step that did not wait would be over."""
    case = Case()
    case.take(torch.ones(NUMEL))
    case.core.synchronize()
    if discards:
        case.core.discard()
    big, place = (torch.ones(1 << 28, dtype=torch.uint8) for _ in range(2))
    grad = -torch.ones(NUMEL)
    case.core.take_part(
        [big.data_ptr(), grad.data_ptr()],
        [view(place), view(case.hosts[0])],
        source_owners=[big, grad],
        target_owners=[place, case.hosts[0]],
    )
    case.submit()
    case.core.synchronize()
    assert torch.allclose(case.param, torch.full((NUMEL,), 0.1))


def test_discarded_gradients_may_be_written_and_are_not_held():
    case, grad, owner = Case(), torch.ones(NUMEL), Owner()
    ref = weakref.ref(owner)
    case.take(grad, ([owner], []))
    del owner
    case.core.discard()
    assert ref() is None
    assert torch.equal(case.hosts[0], grad), "the copy has ended"
    case.hosts[0].zero_()
    case.submit()
    case.core.synchronize()
    assert not case.exp_avg.any(), "a step with a gradient that was discarded"


def test_one_generation_is_not_taken_while_it_is_stepped_and_two_are():
    one, two = Case(), Case(generations=2)
    big, place = (torch.ones(1 << 28, dtype=torch.uint8) for _ in range(2))
    for case in (one, two):
        case.core.take_part(
            [big.data_ptr()], [view(place)], source_owners=[big], target_owners=[place]
        )
        case.submit()
        if case is one:
            with pytest.raises(ValueError, match=r"one generation(.|\n)*hint"):
                case.take(torch.ones(NUMEL))
        else:
            case.take(torch.ones(NUMEL), host=1)
            case.core.finish()
            case.submit(step=2, host=1)
        case.core.synchronize()
    assert not one.exp_avg.any()
    assert torch.allclose(two.exp_avg, torch.full((NUMEL,), 0.1))


def test_state_may_lose_its_memory_while_a_step_runs():
    """The step goes on in the memory that it began with."""
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    optimizer, reference = (stepwell.OffloadAdamW(each, threads=1) for each in (net, twin))
    for step in range(2):
        for each, stepper in ((net, optimizer), (twin, reference)):
            loss_of(each, step, WIDTH).backward()
            stepper.step()
            stepper.zero_grad()
    states = [optimizer.state[param] for param in net.parameters()]
    loss_of(net, 2, WIDTH).backward()
    loss_of(twin, 2, WIDTH).backward()
    optimizer.step()
    for state in states:
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].data = torch.zeros_like(state[name])
    gc.collect()
    reference.step()
    optimizer.synchronize()
    reference.synchronize()
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_a_skipped_step_leaves_nothing_for_the_next():
    """What was copied during the backward of a skipped step is not in the next."""
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    optimizer, reference = (
        stepwell.OffloadAdamW(each, threads=1, accumulation_steps=1) for each in (net, twin)
    )
    for step in range(3):
        for each, stepper in ((net, optimizer), (twin, reference)):
            loss_of(each, step, WIDTH).backward()
            if step == 1:
                if each is twin:
                    stepper.zero_grad()
                    continue
                each.first.weight.grad[0, 0] = torch.nan
            stepper.step()
            stepper.zero_grad()
    optimizer.synchronize()
    assert optimizer.skipped_steps == 1
    assert_equal((net, optimizer), (twin, reference))
