"""The processes of a training run: one, or the ranks of one host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["launched", "run_processes"]

_SECONDS_MAX = 1800
_POLL_SECONDS = 0.1


def launched(num_ranks: int) -> list[dict[str, str]]:
    """For each rank of this host what a launcher puts into its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(num_ranks)
    ]


def run_processes(
    program: Sequence[str], asked: dict[str, Any], environments: Sequence[Mapping[str, str]]
) -> dict[str, Any] | str:
    """Runs `python PROGRAM ASKED`, where ASKED is JSON, once in each of the environments.

    All end when one fails.

    Args:
        program: a path, or `-m` and a module. It prints a JSON object in its last line.
        asked: plain values.
        environments: what each process has beside the environment of this one.

    Returns:
        what the first process has printed; or why there is nothing.
    """
    command = [sys.executable, *program, json.dumps(asked)]
    # ninja, without which DeepSpeed's op is not built, is installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        # Not pipes: a process that DeepSpeed's ZenFlow leaves behind would hold them open.
        errors = [Path(folder, f"{number}.err") for number in range(len(environments))]
        output = Path(folder, "out")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, environment in enumerate(environments):
                with (
                    errors[number].open("wb") as stderr,
                    (Path(os.devnull) if number else output).open("wb") as stdout,
                ):
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdout=stdout,
                            stderr=stderr,
                            env={**os.environ, **environment, "PATH": path},
                            start_new_session=True,
                        )
                    )
            failed = _wait(processes)
        finally:
            for process in processes:
                _end_session(process)
        if isinstance(failed, str):
            return failed
        lines = output.read_text().strip().splitlines()
        if failed is None and lines:
            result: dict[str, Any] = json.loads(lines[-1])
            return result
        said = errors[failed or 0].read_text().strip().splitlines()[-1:]
        why = said[0] if said else f"it ended with the code {processes[failed or 0].returncode}"
        return f"rank {failed or 0}: {why}" if len(processes) > 1 else why


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | str | None:
    """Waits for all; which one has failed, or why, if they have not all ended well."""
    end = time.monotonic() + _SECONDS_MAX
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if failed := [number for number, code in enumerate(codes) if code]:
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_SECONDS)
    return f"it took more than {_SECONDS_MAX} seconds"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started, and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
