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
from offload_cases import (
    WIDTH,
    Net,
    assert_equal,
    batch,
    loss_of,
    pair,
    reversed_params,
    train,
)
from optim_cases import bits

SECONDS_MAX = 60


def run_program(program, *arguments):
    """The output of a program, which has to end in time and without a signal."""
    process = fork_server.python("-c", textwrap.dedent(program), *arguments, timeout=SECONDS_MAX)
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout


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
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (stepwell.AdamW, {}),
        (stepwell.OffloadAdamW, {}),
        (stepwell.OffloadAdamW, {"accumulation_steps": 1}),
    ],
)
def test_memory_that_a_program_has_freed_is_refused(kind, options, freed):
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = kind([param], **options)
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


@pytest.mark.parametrize("first", ["model", "optimizer", "cycle", "neither"])
def test_all_may_be_freed_while_a_step_runs(first):
    """At exit at the latest."""
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
            elif sys.argv[1] == "cycle":
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
