"""A volume that is kept commits its last step when the optimizer ends, or the program."""

import gc
import logging
import signal
import textwrap
from pathlib import Path

import fork_server
import pytest
import stepwell
import torch
from offload_cases import assert_equal, bits, train
from optim_cases import LAYOUT_IDS, LAYOUTS
from stepwell.store.state_volume import StateVolume
from volume_models import files, folders, net_of, on_volume, pair, pinned_bytes

TIMEOUT_S = 120


def resumed(tmp_path, dtype, **options):
    gc.collect()
    net = net_of(dtype, seed=9)
    return net, on_volume(net, tmp_path, name="run", resume=True, **options)


def test_every_eighth_step_is_committed_and_the_first(tmp_path):
    net = net_of(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(
        net,
        lr=1e-2,
        host_bytes_max=pinned_bytes(net) + (3 << 20),
        tier=stepwell.Volume(folders(tmp_path)),
    )
    found = [optimizer.committed_steps]
    for step in range(17):
        train(net, optimizer, 1, first=step)
        optimizer.synchronize()
        found.append(optimizer.committed_steps)
    assert found == [0, *[1] * 7, *[8] * 8, 16, 16]


# Each dtype and each codec once.
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS[::4], ids=LAYOUT_IDS[::4])
def test_the_end_of_the_optimizer_commits_its_last_step(tmp_path, dtype, moments, caplog):
    options = {"moments": moments, "clip_norm": 1.0, "commit_interval": 8}
    (net, optimizer), theirs = pair(tmp_path, dtype, name="run", **options)
    # The last step may run when the optimizer ends.
    assert train(net, optimizer, 5) == train(*theirs, 5)
    with caplog.at_level(logging.WARNING, logger="stepwell"):
        del net, optimizer
        net, optimizer = resumed(tmp_path, dtype, **options)
    assert not caplog.text
    assert optimizer.committed_steps == 5
    assert_equal((net, optimizer), theirs)
    assert train(net, optimizer, 5, first=5) == train(*theirs, 5, first=5)
    assert_equal((net, optimizer), theirs)


def test_what_the_program_has_written_since_is_not_committed(tmp_path):
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", commit_interval=8)
    train(net, optimizer, 3)
    train(*theirs, 3)
    optimizer.synchronize()
    with torch.no_grad():
        net[0].weight.zero_()
    net[2].weight.data.fill_(3.0)
    del optimizer
    assert_equal(resumed(tmp_path, torch.bfloat16), theirs)


def test_a_parameter_that_has_left_is_as_its_last_step_left_it(tmp_path):
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", commit_interval=8)
    for each, its in ((net, optimizer), theirs):
        train(each, its, 2)
        its.param_groups[0]["params"].remove(each[0].weight)
        each[0].weight.grad = None
        each[0].weight.requires_grad_(False)
        train(each, its, 1, first=2)
    del net, optimizer
    net, optimizer = resumed(tmp_path, torch.bfloat16)
    assert optimizer.committed_steps == 3
    assert all(map(torch.equal, net.parameters(), theirs[0].parameters()))


@pytest.mark.parametrize("options", [{}, {"name": "run", "keep": False}])
def test_a_volume_that_goes_is_not_committed(tmp_path, monkeypatch, options):
    net = net_of()
    optimizer = on_volume(net, tmp_path, commit_interval=8, **options)
    train(net, optimizer, 2)
    written = []
    monkeypatch.setattr(StateVolume, "write_weights", lambda *_: written.append(1))
    del optimizer
    gc.collect()
    assert files(tmp_path) == []
    assert not written


def test_a_commit_that_fails_at_the_end_is_told_of(tmp_path, monkeypatch, caplog):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run", commit_interval=8)
    train(net, optimizer, 3)

    def failed(*_):
        raise OSError("no drive")

    with caplog.at_level(logging.WARNING, logger="stepwell"), monkeypatch.context() as patched:
        patched.setattr(StateVolume, "write_weights", failed)
        del optimizer
        gc.collect()
    assert "the last step may not be committed: OSError no drive" in caplog.text
    assert "ends at step 3 and is kept at step 1, its last commit" in caplog.text
    assert resumed(tmp_path, torch.float32)[1].committed_steps == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handlers_of_signals_are_the_programs(tmp_path, monkeypatch, number):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run", commit_interval=8)
    train(net, optimizer, 3)
    function = StateVolume.write_weights
    called, handlers = [], []

    def handler(*_):
        called.append(1)

    def interrupted(*args):
        signal.raise_signal(number)
        handlers.append(signal.getsignal(number))
        function(*args)

    before = signal.signal(number, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(StateVolume, "write_weights", interrupted)
            del optimizer
            gc.collect()
        handlers.append(signal.getsignal(number))
    finally:
        signal.signal(number, before)
    assert handlers == [handler, handler]
    assert called
    assert resumed(tmp_path, torch.float32)[1].committed_steps == 3


def test_what_a_handler_raises_before_the_last_commit_leaves_the_one_before(
    tmp_path, monkeypatch, caplog
):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run", commit_interval=8)
    train(net, optimizer, 3)

    def interrupted(*_):
        raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING, logger="stepwell"), monkeypatch.context() as patched:
        patched.setattr(StateVolume, "write_weights", interrupted)
        del optimizer
        gc.collect()
    assert "the last step may not be committed: KeyboardInterrupt" in caplog.text
    assert resumed(tmp_path, torch.float32)[1].committed_steps == 1


def test_a_volume_that_has_no_commit_is_removed(tmp_path):
    optimizer = on_volume(net_of(), tmp_path, name="run")
    assert len(files(tmp_path)) == 2
    del optimizer
    gc.collect()
    assert files(tmp_path) == []
    # Its name is free.
    on_volume(net_of(), tmp_path, name="run")


def trained_in_a_cycle(path):
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, path, name="run", commit_interval=8)
    train(net, optimizer, 3)
    # Nothing collects it.
    net.optimizer, net.itself = optimizer, lambda: net


# One that is forked needs a parent in which torch has no threads yet.
PARENT = """
    import multiprocessing, pathlib, sys
    sys.path.insert(0, {tests!r})
    from test_offload_volume_end import trained_in_a_cycle
    if __name__ == "__main__":
        process = multiprocessing.get_context({kind!r}).Process(
            target=trained_in_a_cycle, args=(pathlib.Path({path!r}),)
        )
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_the_end_of_a_process_of_multiprocessing_commits_the_last_step(tmp_path, kind):
    ended = run_program(PARENT, kind=kind, path=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert resumed(tmp_path, torch.bfloat16)[1].committed_steps == 3


def run_program(program, **values):
    program = textwrap.dedent(program).format(tests=str(Path(__file__).parent), **values)
    return fork_server.python("-c", program, timeout=TIMEOUT_S)


PROGRAM = """
    import os, sys, signal
    sys.path.insert(0, {tests!r})
    import pathlib, torch
    from volume_models import net_of, on_volume
    from offload_cases import train
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, pathlib.Path({path!r}), name="run", commit_interval=8)
    train(net, optimizer, 3)
    {end}
"""

FORKED = """
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
    train(net, optimizer, 1, first=3)
"""

# Python ignores it where the shell does, as in a job in the background.
INTERRUPTED = """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
"""

# It comes before, within or behind the last commit.
INTERRUPTED_LATE = """
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, {delay})
"""

ENDS = {
    "the last line": ("", 0, 3),
    "exit": ("sys.exit(3)", 3, 3),
    "an error": ("raise RuntimeError('of the program')", 1, 3),
    "Ctrl-C": (INTERRUPTED, -signal.SIGINT, 3),
    "a kill": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 1),
    "a child that ends": (FORKED, 0, 4),
}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_program_commits_the_last_step(tmp_path, end):
    lines, code, steps = ENDS[end]
    ended = run_program(PROGRAM, path=str(tmp_path), end=textwrap.dedent(lines))
    assert ended.returncode == code, ended.stderr
    assert "may not be committed" not in ended.stderr
    assert "is kept at step" not in ended.stderr
    assert_resumes_whole(tmp_path, [steps])


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("delay", [1e-3, 4e-3, 16e-3, 64e-3])
def test_ctrl_c_while_the_program_ends_leaves_a_whole_step(tmp_path, delay):
    lines = textwrap.dedent(INTERRUPTED_LATE).format(delay=delay)
    run_program(PROGRAM, path=str(tmp_path), end=lines)
    assert_resumes_whole(tmp_path, [1, 3])


def assert_resumes_whole(tmp_path, among):
    """A run goes on from one of these steps, with all of its bits."""
    net, optimizer = resumed(tmp_path, torch.bfloat16)
    steps = optimizer.committed_steps
    assert steps in among
    twin = net_of(torch.bfloat16)
    reference = stepwell.OffloadAdamW(twin, lr=1e-2)
    train(twin, reference, steps)
    assert all(
        torch.equal(bits(mine), bits(its))
        for mine, its in zip(net.parameters(), twin.parameters(), strict=True)
    )
    assert_equal((net, optimizer), (twin, reference))
