"""What deferred updates take of a program: no other process, and host memory as announced."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from fork_server import PATIENCE
from insides import core_of
from stepwell import Deferred, OffloadAdamW, _state
from stepwell._budget import GIB
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

# As a user may write it: nothing guards it against being imported by a process that it has started.
PROGRAM = """
with open("runs", "a") as runs:
    runs.write("run\\n")

import contextlib, multiprocessing, os, pathlib, resource, sys
# The second too, which a first step imports: torch looks for libraries with programs.
import torch, torch._dynamo

STARTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
          "subprocess.Popen")
started = []

def note(event, arguments):
    if event in STARTS:
        started.append((event, arguments))

def children():
    found = [each.pid for each in multiprocessing.active_children()]
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has ended.
            found += path.read_text().split()
    return found

def shared():
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # That of the folder itself.
            found.add(os.readlink(path))
    return {name for name in found if name.startswith("/dev/shm/")}

def check():
    assert not children(), children()
    assert shared() == before, shared()

def ended():  # Page faults of children that have ended: of those of torch, and of others.
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt

sys.addaudithook(note)
before, ended_before = shared(), ended()

from stepwell import Deferred, OffloadAdamW

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
optimizer = OffloadAdamW(
    model, lr=1e-3, clip_norm=1.0, deferred=Deferred(interval=4, fraction=0.25)
)
for step in range(12):
    loss = model(torch.randn(8, 64)).square().mean()
    check()
    loss.backward()
    optimizer.step()
    check()
    optimizer.zero_grad()
metrics = optimizer.deferral
assert metrics.interval == 4 and metrics.oldest_age > 0 and metrics.selected_bytes > 0
optimizer.state_dict()
check()
assert not started, started
assert ended() == ended_before
print("trained")
"""


def test_a_program_without_a_main_guard_runs_once_and_starts_no_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    assert (tmp_path / "runs").read_text() == "run\n"


# ---- host memory ----


def model_of() -> nn.Module:
    """Matrices of one size, of which each turn has as many: what gradients take depends on it."""
    model = nn.Sequential()
    for _ in range(8):
        model.extend([nn.Linear(640, 640), nn.LayerNorm(640)])
    return model.to(torch.bfloat16)


@pytest.mark.parametrize(("moments", "most"), [("fp32", 20), ("q8", 14)])
def test_host_memory_is_announced_as_documented_and_no_more_is_taken(
    moments: str, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    numel = sum(param.numel() for param in model.parameters())

    def optimizer_with(host_bytes_max: int) -> OffloadAdamW:
        return OffloadAdamW(
            model,
            lr=1e-3,
            moments=moments,  # type: ignore[arg-type]
            host_bytes_max=host_bytes_max,
            deferred=Deferred(interval=4),
        )

    with pytest.raises(ValueError, match="bytes of host memory, `0` are left") as refused:
        optimizer_with(0)
    (announced,) = map(int, re.findall(r"take `(\d+)` bytes", str(refused.value)))
    assert announced <= most * numel
    with pytest.raises(ValueError, match=f"`{announced - 1}` are left of `host_bytes_max`"):
        optimizer_with(announced - 1)
    with caplog.at_level(logging.INFO, "stepwell"):
        optimizer = optimizer_with(announced)
    (said,) = [each for each in caplog.records if "GiB of host memory for" in each.getMessage()]
    assert said.args is not None
    assert said.args[:2] == (announced / GIB, numel)  # type: ignore[index]
    for _ in range(6):
        model(torch.randn(2, 640, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.deferral is not None and optimizer.deferral.oldest_age > 0
    pinned = core_of(optimizer).pinned_nbytes
    state = sum(map(_state.nbytes_of, optimizer.state.values()))
    assert 0.9 * announced < pinned + state <= announced
