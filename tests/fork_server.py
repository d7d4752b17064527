"""Processes of Python that need not import torch first.

They are forked from a server, `python fork_server.py MODULES...`, which has imported these modules:
that takes longer than most programs of tests. What is forked is a process as any other. It has its
own environment and files, runs a program as `python` does, and ends as Python ends.

A module that a test is about is not among those that the server imports.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PATIENCE = float(os.environ.get("STEPWELL_TEST_PATIENCE", "1"))
"""How many times longer than usual tests may take: for machines that have other work, too."""

# An optimizer imports the second one.
_IMPORTED = ("torch", "torch._dynamo")

IMPORTED_BY_DEEPSPEED = (*_IMPORTED, "torch._inductor.compile_fx")
"""It asks what GPUs there are, which initialises CUDA. What has done that cannot be forked."""


@functools.cache
def usual_imports():
    """What most programs import: one server is there for all of them, where there is no GPU."""
    import torch

    return _IMPORTED if torch.cuda.device_count() else IMPORTED_BY_DEEPSPEED


def python(*arguments, cwd=None, environment=None, timeout, imports=None):
    """As `subprocess.run([sys.executable, *arguments], capture_output=True)`, with its result.

    Args:
        arguments: `-c`, `-m` or a file, and what the program gets.
        cwd: where it runs; None: here.
        environment: variables beside those of this process.
        timeout: in seconds, times `PATIENCE`. A process that takes longer is killed.
        imports: modules that are there already; None: `usual_imports`.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **(environment or {})},
            # Files, not pipes: a process that a program leaves behind would keep a pipe open.
            "output": f"{folder}/output",
            "errors": f"{folder}/errors",
        }
        (code,) = run([process], imports=imports, timeout=timeout)
        output, errors = (Path(process[name]).read_text() for name in ("output", "errors"))
    return subprocess.CompletedProcess(arguments, code, output, errors)


@contextlib.contextmanager
def telling(told, *arguments, timeout):
    """A program that runs meanwhile: a future of what `python` returns, and the lines it tells.

    Args:
        told: a path, where a pipe is made for the program, which opens it and writes to it.
        arguments: with `timeout` as `python` has them.
    """
    os.mkfifo(told)
    reader = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
    with ThreadPoolExecutor(1) as executor, open(reader) as lines:  # noqa: PTH123  # it is open
        job = executor.submit(python, *arguments, timeout=timeout)
        # Until the program has opened it, or ended. Then its lines end where the program does.
        while not job.done() and not select.select([lines], [], [], 0.1)[0]:
            pass
        os.set_blocking(reader, True)
        yield job, lines
    Path(told).unlink()


def run(processes, *, imports=None, timeout):
    """Runs processes side by side, and returns their exit codes.

    Each is a dict with `arguments`, `cwd`, `environment` (all variables), and the names of the
    files for `output` and `errors`, which may be one.
    """
    process = server(*(usual_imports() if imports is None else imports))
    try:
        request = {"processes": processes, "timeout": timeout * PATIENCE}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except BaseException:
        # The next request would get this one's answer.
        process.communicate()
        server.cache_clear()
        raise


@functools.cache
def server(*imports):
    """A server of this process, which ends with it."""
    process = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


# ---- the server ----


def serve():
    """Forks processes as asked, until nobody can ask any more.

    Returns in a forked process, with what it is to do.
    """
    while request := sys.stdin.readline():
        request = json.loads(request)
        children = []
        for process in request["processes"]:
            if (child := os.fork()) == 0:
                return process
            children.append(child)
        codes = wait(children, request["timeout"])
        print(json.dumps(codes), flush=True)
    return None


def wait(children, timeout):
    """The exit codes of processes; of those that do not end in time, that of SIGKILL."""
    deadline = time.monotonic() + timeout
    ends = {os.pidfd_open(child): child for child in children}
    poll = select.poll()
    # Of stdin only that it has been closed: who has asked is gone.
    poll.register(sys.stdin, select.POLLHUP)
    for end in ends:
        poll.register(end, select.POLLIN)
    running = set(ends)
    while running:
        ready = {found for found, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if not ready or sys.stdin.fileno() in ready:
            break
        for end in ready:
            poll.unregister(end)
        running -= ready
    for end in running:
        os.kill(ends[end], signal.SIGKILL)
    for end in ends:
        os.close(end)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def become(process):
    """Makes this process what a new one would be: its environment, folder, files, seed."""
    random.seed()
    os.environ.clear()
    os.environ.update(process["environment"])
    os.chdir(process["cwd"])
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    with (
        Path(os.devnull).open() as nothing,
        Path(process["output"]).open("a") as output,
        Path(process["errors"]).open("a") as errors,
    ):
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)


def run_as_python(arguments):
    """Runs the program of a command line of `python`, as the module `__main__`."""
    kind, *rest = arguments
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:1] = ["", *path]
    if kind == "-c":
        program, *rest = rest
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)  # noqa: S102  # as Python does
    elif kind == "-m":
        name, *rest = rest
        sys.argv = [name, *rest]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def main():
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # A gate looks through all objects for modules, and DeepSpeed often collects: what has been
    # imported is left out.
    gc.collect()
    gc.freeze()
    process = serve()
    if process is not None:
        become(process)
        run_as_python(process["arguments"])


# Spawned processes import this file again.
if __name__ == "__main__":
    main()
