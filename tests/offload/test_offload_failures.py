"""What goes wrong around OffloadAdamW: interrupted, moved, freed, forked.

No hang, no crash, a clear error, and nothing half done.
"""

import gc
import signal
import textwrap
import threading
import weakref

import fork_server
import pytest
import stepwell
import torch
from insides import background_of, engine_of, make_late
from offload_cases import (
    WIDTH,
    Net,
    assert_equal,
    batch,
    loss_of,
    pair,
    reversed_params,
    small,
    train,
)
from optim_cases import bits
from stepwell.access.under_way import without_waiting
from stepwell.store import gradients
from torch.multiprocessing.reductions import StorageWeakRef

SECONDS_MAX = 60


def run_program(program, *arguments):
    """The output of a program, which has to end in time and without a signal."""
    process = fork_server.python("-c", textwrap.dedent(program), *arguments, timeout=SECONDS_MAX)
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout


def interrupt_behind_the_submit(patched, optimizer):
    """Ctrl-C lands when the next step has begun."""
    submit = engine_of(optimizer).submit

    def interrupted(*args, **options):
        submit(*args, **options)
        raise KeyboardInterrupt

    patched.setattr(engine_of(optimizer), "submit", interrupted)


def test_forward_that_raises_between_steps():
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.zeros(3, 11))
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_backward_that_raises_between_steps():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("half of the gradients are there")

    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="half of the gradients"):
            net[3](net[2](Fails.apply(net[:2](batch(0))))).sum().backward()
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


@pytest.fixture
def heard_interrupts():
    """Ctrl-C raises, also where the tests run in a shell's background, which has it ignored."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("where", ["step", "synchronize", "forward", "state_dict"])
def test_keyboard_interrupt_while_waiting(where):
    """Ctrl-C arrives while a large step runs.

    The call is left, the step goes on, and so does the training after it.
    """

    def net_and_optimizer():
        torch.manual_seed(0)
        net = Net()
        return net, stepwell.OffloadAdamW(reversed_params(net), model=net, lr=1e-2, threads=1)

    def step(net, optimizer, number):
        optimizer.zero_grad()
        net(batch(number, width=WIDTH)).square().sum().backward()
        optimizer.step()

    net, optimizer = net_and_optimizer()
    twin, reference = net_and_optimizer()
    for number in range(3):
        step(net, optimizer, number)
        step(twin, reference, number)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    calls = {
        "step": optimizer.step,
        "synchronize": optimizer.synchronize,
        "forward": lambda: net(batch(0, width=WIDTH)),
        "state_dict": optimizer.state_dict,
    }
    interrupt = threading.Timer(
        0.002, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        calls[where]()
        # Where the call was the quicker one.
        threading.Event().wait(SECONDS_MAX)
    interrupt.join(SECONDS_MAX)
    optimizer.synchronize()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert len(steps) == 1, "some parameters were stepped and some not"
    if steps == {4.0}:
        for param in twin.parameters():
            param.grad = torch.ones_like(param)
        reference.step()
    step(net, optimizer, 5)
    step(twin, reference, 5)
    assert_equal((net, optimizer), (twin, reference))


def test_keyboard_interrupt_from_a_timer():
    # Wherever in the loop they land, each step is whole: parameters follow the number of steps
    # counted.
    out = run_program(
        """
        import signal, sys
        import torch, stepwell
        param = torch.nn.Parameter(torch.zeros(1 << 20))
        layer = torch.nn.Module()
        layer.weight = param
        optimizer = stepwell.OffloadAdamW([param], lr=1.0, weight_decay=0.0, eps=0.0, threads=1)
        grad = torch.ones_like(param)
        is_training = False
        for _ in range(2):
            param.grad = grad
            optimizer.step()

        def interrupt(*_):
            global is_training
            if is_training:
                is_training = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.004)
        for _ in range(40):
            try:
                is_training = True
                while True:
                    param.grad = grad
                    optimizer.step()
            except KeyboardInterrupt:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        optimizer.synchronize()
        count = float(optimizer.state[param]["step"])
        assert count >= 2
        expected = torch.full_like(param, -count)
        assert torch.allclose(param.detach(), expected, rtol=1e-4), (param[0], param[-1], count)
        print("whole")
        """
    )
    assert out == "whole\n"


def test_an_interrupt_behind_the_submit_releases_the_gradients(monkeypatch):
    """The step is under way when Ctrl-C lands.

    Afterwards gradients may be written, as after any step.
    """
    (net, optimizer), (twin, reference) = pair()
    for each in ((net, optimizer), (twin, reference)):
        train(*each, 1)
        loss_of(each[0], 1).backward()
    released = []
    release = engine_of(optimizer).release

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_of(optimizer), "release", lambda: (released.append(None), release()))
    with monkeypatch.context() as patched:
        interrupt_behind_the_submit(patched, optimizer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert released
    optimizer.zero_grad(set_to_none=False)
    reference.step()
    reference.zero_grad(set_to_none=False)
    train(net, optimizer, 2, first=2)
    train(twin, reference, 2, first=2)
    assert_equal((net, optimizer), (twin, reference))


@pytest.mark.parametrize("gives_model", [True, False])
def test_interrupts_in_the_release_do_not_end_it(gives_model, monkeypatch):
    """Ctrl-C again and again: the step is left when its gradients may be written."""
    ours, theirs = pair(gives_model=gives_model)
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 1)
        loss_of(net, 1).backward()
    optimizer = ours[1]
    calls, waited = [], []
    release = engine_of(optimizer).release
    wait = background_of(optimizer).wait_for_weights

    def interrupted_release():
        if engine_of(optimizer).is_released:
            return
        calls.append(None)
        if len(calls) < 4:
            raise KeyboardInterrupt
        release()

    def interrupted_wait():
        waited.append(None)
        if len(waited) < 3:
            raise KeyboardInterrupt
        wait()

    with monkeypatch.context() as patched:
        patched.setattr(engine_of(optimizer), "release", interrupted_release)
        patched.setattr(background_of(optimizer), "wait_for_weights", interrupted_wait)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert (len(calls), len(waited)) == (4, 3)
    assert background_of(optimizer).is_released
    theirs[1].step()
    for net, optimizer in (ours, theirs):
        optimizer.zero_grad(set_to_none=False)
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_releases_what_an_interrupt_has_left(set_to_none, monkeypatch):
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 1)
        loss_of(net, 1).backward()
    optimizer = ours[1]
    released = []
    release = engine_of(optimizer).release

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(background_of(optimizer), "release", lambda: None)
        patched.setattr(optimizer, "_leave_step", interrupt)
        patched.setattr(background_of(optimizer), "wait_for_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    monkeypatch.setattr(engine_of(optimizer), "release", lambda: (released.append(None), release()))
    assert not background_of(optimizer).is_released
    theirs[1].step()
    for _, optimizer in (ours, theirs):
        optimizer.zero_grad(set_to_none=set_to_none)
    assert released
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)


def test_an_interrupted_step_waits_for_weights_that_no_forward_waits_for(monkeypatch):
    """Those that can be reached past the parameter."""
    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        loss_of(net, 2).backward()
    net, optimizer = ours
    optimizer.synchronize()
    make_late(optimizer)
    alias = net[0].weight.data

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        interrupt_behind_the_submit(patched, optimizer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    theirs[1].step()
    assert torch.equal(bits(alias), bits(theirs[0][0].weight))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_failure_to_discard_does_not_hide_why_the_step_failed(error, monkeypatch):
    net, optimizer = pair()[0]
    train(net, optimizer, 1)
    net[0].weight.grad = torch.zeros_like(net[0].weight).to_sparse()

    def fail():
        raise error("the device is gone")

    monkeypatch.setattr(engine_of(optimizer), "discard", fail)
    with pytest.raises(ValueError, match="expected a dense tensor"):
        optimizer.step()


def test_weights_are_those_of_the_last_step_after_one_that_was_not_submitted(monkeypatch):
    net, optimizer = pair()[0]
    train(net, optimizer, 2)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_of(optimizer), "submit", interrupted)
    loss_of(net, 2).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert engine_of(optimizer).wait(net.parameters())


def test_an_interrupt_behind_a_failure_is_raised(monkeypatch):
    """In the wait for what was copied, which is not left out."""
    net, optimizer = pair()[0]
    train(net, optimizer, 1)
    net[0].weight.grad = torch.zeros_like(net[0].weight).to_sparse()
    discard, calls = engine_of(optimizer).discard, []

    def interrupted():
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        discard()

    monkeypatch.setattr(engine_of(optimizer), "discard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(calls) == 2


def test_gradients_that_were_copied_may_be_freed_after_a_refused_step(monkeypatch):
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 1)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    copied = [StorageWeakRef(param.grad.untyped_storage()) for param in net.parameters()]
    net[0].weight.grad = torch.zeros_like(net[0].weight).to_sparse()
    with pytest.raises(ValueError, match="expected a dense tensor"):
        optimizer.step()
    net.zero_grad()
    assert all(storage.expired() for storage in copied)


# ---- models that move ----


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (
            lambda net: net.to(torch.float16),
            r"is `torch.float16`.*expected `torch.float32`",
        ),
        (lambda net: setattr(net[0].weight, "data", torch.zeros(3, 3)), r"of `\(3, 3\)`"),
        (
            lambda net: setattr(net[0].weight, "data", net[0].weight.data.t().contiguous().t()),
            "contiguous",
        ),
    ],
    ids=["dtype", "shape", "strides"],
)
@pytest.mark.parametrize("told", [{}, {"accumulation_steps": 1}], ids=["untold", "told"])
def test_moved_model_is_refused(move, message, told):
    net, optimizer = pair(**told)[0]
    train(net, optimizer, 2)
    optimizer.synchronize()
    before = {
        param: {key: bits(value) for key, value in state.items()}
        for param, state in optimizer.state.items()
    }
    move(net)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=message + r"(.|\n)*hint"):
        optimizer.step()
    for param, state in before.items():
        assert all(
            torch.equal(bits(optimizer.state[param][key]), value) for key, value in state.items()
        )


def test_memory_may_be_swapped_while_weights_are_on_their_way():
    # Not synchronized: what the model has afterwards is of no step, but nothing is written to
    # memory that was freed.
    for _ in range(2):
        net = Net()
        optimizer = stepwell.OffloadAdamW(net, threads=1)
        for step in range(2):
            loss_of(net, step, WIDTH).backward()
            optimizer.step()
        for param in net.parameters():
            param.data = torch.zeros(1)
            param.grad = None
        gc.collect()
        optimizer.synchronize()
        assert all(param.item() == 0 for param in net.parameters())


@pytest.mark.parametrize("freed", ["parameter", "gradient"])
@pytest.mark.parametrize("kind", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_memory_that_a_program_has_freed_is_refused(kind, freed):
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = kind([param])
    param.grad = torch.ones(1000)
    optimizer.step()
    storage = (param if freed == "parameter" else param.grad).untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(ValueError, match=r"memory of its own|storage has `0`"):
        optimizer.step()
    storage.resize_(nbytes)
    optimizer.zero_grad()
    optimizer.step()


def test_gradients_may_be_freed_after_a_skipped_step():
    net = Net()
    optimizer = stepwell.OffloadAdamW(net, threads=1, accumulation_steps=1)
    for step in range(4):
        loss_of(net, step, WIDTH).backward()
        if step % 2:
            net.first.weight.grad[0, 0] = torch.nan
        optimizer.step()
        net.zero_grad()
        gc.collect()
    assert optimizer.skipped_steps == 2


def test_memory_of_weights_is_held_until_they_are_there():
    net, optimizer = pair()[0]
    train(net, optimizer, 2)
    loss_of(net, 2).backward()
    make_late(optimizer)
    optimizer.step()
    weight = net[0].weight
    with without_waiting():
        storage = StorageWeakRef(weight.untyped_storage())
        weight.data = torch.zeros_like(weight)
    assert not storage.expired()
    optimizer.synchronize()
    assert storage.expired()


@pytest.mark.parametrize("first", ["model", "optimizer", "cycle"])
def test_all_may_be_freed_while_a_step_runs(first):
    out = run_program(
        """
        import gc, sys
        sys.path.insert(0, sys.argv[2])
        import stepwell
        from offload_cases import WIDTH, Net, loss_of
        for _ in range(2):
            net = Net()
            optimizer = stepwell.OffloadAdamW(net, threads=1)
            for step in range(2):
                loss_of(net, step, WIDTH).backward()
                optimizer.step()
            if sys.argv[1] == "model":
                del net, optimizer
            elif sys.argv[1] == "optimizer":
                del optimizer, net
            else:
                # The collector clears what refers to each other in any order.
                optimizer.itself, net.optimizer = [optimizer, net], optimizer
                del optimizer, net
            gc.collect()
        print("freed")
        """,
        first,
        str(__file__.rpartition("/")[0]),
    )
    assert out == "freed\n"


def test_optimizer_is_freed_with_its_last_reference():
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 2)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    # Its hooks are quiet.
    loss_of(net, 3).backward()


def test_exit_while_a_step_runs():
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import stepwell
        from offload_cases import WIDTH, Net, loss_of
        net = Net()
        optimizer = stepwell.OffloadAdamW(net, threads=1)
        for step in range(2):
            loss_of(net, step, WIDTH).backward()
            optimizer.step()
        print("exits")
        """
    assert run_program(program, str(__file__.rpartition("/")[0])) == "exits\n"


# ---- fork ----


def test_forked_child_is_told_and_the_parent_goes_on():
    out = run_program(
        """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import torch
        torch.set_num_threads(1)
        import stepwell
        from offload_cases import train, small
        net = small()
        optimizer = stepwell.OffloadAdamW(net)
        train(net, optimizer, 2)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
                try:
                    call()
                except ValueError as error:
                    refused += "make the optimizer after forking" in str(error)
            # One of its own works.
            other = small()
            train(other, stepwell.OffloadAdamW(other), 2)
            del optimizer
            os._exit(0 if refused == 3 else 3)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        train(net, optimizer, 2)
        optimizer.synchronize()
        print("forked")
        """,
        str(__file__.rpartition("/")[0]),
    )
    assert out == "forked\n"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_data_loader_workers_do_not_disturb_it():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((7,), 0.1 * index)

    ours, theirs = pair()
    for net, optimizer in (ours, theirs):
        for epoch in range(2):
            # Workers are forked while a step runs.
            for x in torch.utils.data.DataLoader(
                Data(), batch_size=4, num_workers=1, multiprocessing_context="fork"
            ):
                optimizer.zero_grad()
                net(x + epoch).square().sum().backward()
                optimizer.step()
    assert_equal(ours, theirs)


def test_unknown_device_is_named():
    net = small().to("meta")
    with pytest.raises(ValueError, match="meta"):
        stepwell.OffloadAdamW(net)
