"""Programs that the tests of DeepSpeed run in processes of their own.

A program is a function `program_NAME(result, **options)` in one of `MODULES`. It makes many runs
and puts what the tests look at into `result`.

The processes are forked from a server, `python deepspeed_run.py`, which has imported of torch what
DeepSpeed imports, and nothing of DeepSpeed or Stepwell: these imports take longer than most
programs. What is forked is a process as any other, and ends as Python ends.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

MODULES = (
    "deepspeed_training_programs",
    "deepspeed_checkpoint_programs",
    "deepspeed_register_programs",
    "deepspeed_offload_programs",
    "deepspeed_offload_param_programs",
    "deepspeed_gradient_programs",
    "deepspeed_weight_programs",
    "deepspeed_client_programs",
    "deepspeed_corpus_programs",
    "deepspeed_gpu_programs",
    "deepspeed_torch_adam_programs",
    "deepspeed_access_programs",
    "deepspeed_twin_flow_programs",
)
IMPORTED_BY_DEEPSPEED = ("torch._dynamo", "torch._inductor.compile_fx")


def run(program, tmp_path, *, timeout, ranks=1, environment=None, **options):
    """Runs a program in `ranks` processes.

    Returns what it saved; with several ranks, what each did.

    An exception in the program is an AssertionError here, with what the program printed; so is
    anything that it compiled.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    extensions = tmp_path / "extensions"
    extensions.mkdir(exist_ok=True)
    processes = []
    for rank in range(ranks):
        # Without a way to a compiler, and with nothing built before.
        variables = {
            **os.environ,
            "PATH": str(tmp_path / "no_programs"),
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            # Of processes that a program starts.
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        processes.append(
            {
                "program": program,
                "result": str(tmp_path / f"{program}.{rank}.pt"),
                # A file, not a pipe: a process that a program leaves behind would keep a pipe open.
                "output": str(tmp_path / f"{program}.{rank}.txt"),
                "environment": variables,
                "options": options,
            }
        )
    # What initialises CUDA cannot be forked, and DeepSpeed's imports ask what GPUs there are.
    imports = variables["DS_ACCELERATOR"] == "cpu"
    codes = ask_server(server(imports=imports), {"processes": processes, "timeout": timeout})
    printed = "\n".join(Path(process["output"]).read_text() for process in processes)
    assert codes == [0] * ranks, f"exit codes {codes}: {printed[-8000:]}"
    assert list(extensions.iterdir()) == [], f"something was compiled: {list(extensions.iterdir())}"
    results = [torch.load(process["result"], weights_only=False) for process in processes]
    return results[0] if ranks == 1 else results


@functools.cache
def server(*, imports):
    """A server of this process, which ends with it; `imports`: with what DeepSpeed imports."""
    process = subprocess.Popen(
        [sys.executable, __file__, "imports" if imports else "nothing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def ask_server(process, request):
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except BaseException:
        # The next request would get this one's answer.
        process.communicate()
        server.cache_clear()
        raise


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
    """Makes this process what a new one would be: its environment, its files, its random seed."""
    os.environ.clear()
    os.environ.update(process["environment"])
    sys.dont_write_bytecode = True
    with Path(os.devnull).open() as nothing, Path(process["output"]).open("w") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def import_modules():
    for module in IMPORTED_BY_DEEPSPEED:
        importlib.import_module(module)
    return [importlib.import_module(module) for module in MODULES]


def main():
    if sys.argv[1] == "imports":
        import_modules()
    # A gate looks through all objects for modules, and DeepSpeed often collects: what has been
    # imported is left out.
    gc.collect()
    gc.freeze()
    process = serve()
    if process is None:
        return
    become(process)
    modules = import_modules()
    (function,) = (
        getattr(module, f"program_{process['program']}")
        for module in modules
        if hasattr(module, f"program_{process['program']}")
    )
    result = {}
    function(result, **process["options"])
    torch.save(result, process["result"])


# Spawned processes import this file again.
if __name__ == "__main__":
    main()
