"""Programs that the tests of DeepSpeed run in processes of their own.

They are started as `python deepspeed_run.py PROGRAM RESULT_FILE OPTIONS`.

A program is a function `program_NAME(result, **options)` in one of `MODULES`. Importing DeepSpeed
takes seconds, so it makes many runs and puts what the tests look at into `result`.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
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
    "deepspeed_torch_adam_programs",
)


def run(program, tmp_path, *, timeout, ranks=1, environment=None, **options):
    """Runs a program in `ranks` processes.

    Returns what it saved; with several ranks, what each did.

    An exception in the program is an AssertionError here, with what the program printed; so is
    anything that it compiled.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
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
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        result, output = tmp_path / f"{program}.{rank}.pt", tmp_path / f"{program}.{rank}.txt"
        # A file, not a pipe: a process that a program leaves behind would keep a pipe open.
        with output.open("w") as stdout:
            command = [sys.executable, __file__, program, str(result), json.dumps(options)]
            processes.append(
                (
                    subprocess.Popen(
                        command,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stdout,
                    ),
                    result,
                    output,
                )
            )
    try:
        codes = [process.wait(timeout) for process, *_ in processes]
    finally:
        for process, *_ in processes:
            process.kill()
            process.wait()
    printed = "\n".join(output.read_text() for *_, output in processes)
    assert codes == [0] * ranks, printed[-8000:]
    assert list(extensions.iterdir()) == [], f"something was compiled: {list(extensions.iterdir())}"
    results = [torch.load(result, weights_only=False) for _, result, _ in processes]
    return results[0] if ranks == 1 else results


def main():
    program, path, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    modules = [importlib.import_module(module) for module in MODULES]
    (function,) = (
        getattr(module, f"program_{program}")
        for module in modules
        if hasattr(module, f"program_{program}")
    )
    result = {}
    function(result, **options)
    torch.save(result, path)


# Spawned processes import this file again.
if __name__ == "__main__":
    main()
