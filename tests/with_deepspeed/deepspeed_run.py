"""Programs that the tests of DeepSpeed run in processes of their own.

A program is a function `program_NAME(result, **options)` in one of `MODULES`. It makes many runs
and puts what the tests look at into `result`.

The processes are forked from a server (`fork_server`), which has imported of torch what DeepSpeed
imports, and nothing of DeepSpeed or Stepwell.
"""

import importlib
import json
import os
import socket
import sys
from pathlib import Path

import fork_server
import torch

MODULES = (
    "deepspeed_training_programs",
    "deepspeed_checkpoint_programs",
    "deepspeed_register_programs",
    "deepspeed_offload_programs",
    "deepspeed_offload_access_programs",
    "deepspeed_options_programs",
    "deepspeed_offload_param_programs",
    "deepspeed_gradient_programs",
    "deepspeed_client_programs",
    "deepspeed_corpus_programs",
    "deepspeed_gpu_programs",
    "deepspeed_torch_adam_programs",
    "deepspeed_access_programs",
    "deepspeed_late_programs",
    "deepspeed_fetch_programs",
    "deepspeed_fetch_ranks_programs",
    "deepspeed_world_programs",
    "deepspeed_zenflow_programs",
    "deepspeed_nvme_programs",
    "deepspeed_nvme_export_programs",
    "deepspeed_async_io_programs",
)


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
    processes, results = [], []
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
        printed = tmp_path / f"{program}.{rank}.txt"
        printed.unlink(missing_ok=True)
        results.append(tmp_path / f"{program}.{rank}.pt")
        processes.append(
            {
                "arguments": [__file__, program, str(results[-1]), json.dumps(options)],
                "cwd": str(Path.cwd()),
                "environment": variables,
                "output": str(printed),
                "errors": str(printed),
            }
        )
    on_cpu = variables["DS_ACCELERATOR"] == "cpu"
    imports = fork_server.IMPORTED_BY_DEEPSPEED if on_cpu else None
    codes = fork_server.run(processes, imports=imports, timeout=timeout)
    printed = "\n".join(Path(process["output"]).read_text() for process in processes)
    assert codes == [0] * ranks, f"exit codes {codes}: {printed[-8000:]}"
    assert list(extensions.iterdir()) == [], f"something was compiled: {list(extensions.iterdir())}"
    found = [torch.load(result, weights_only=False) for result in results]
    return found[0] if ranks == 1 else found


# ---- in the process ----


def main(program, path, options):
    modules = [importlib.import_module(module) for module in MODULES]
    (function,) = (
        getattr(module, f"program_{program}")
        for module in modules
        if hasattr(module, f"program_{program}")
    )
    result = {}
    function(result, **json.loads(options))
    torch.save(result, path)


# Spawned processes import this file again.
if __name__ == "__main__":
    main(*sys.argv[1:])
