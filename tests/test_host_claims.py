"""Processes of a host that claim the same memory, or step on the same cores."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from stepwell import _core
from stepwell._budget import announce, share_of_free_bytes

# Does something with the core, says so, and goes on until its input ends.
PROGRAM = """
import sys
from stepwell import _core
held = {}
print("ready", flush=True)
sys.stdin.read()
"""
CLAIM = "_core.MemoryClaim(4 * _core.system_info()['free_memory_bytes'], is_checked=False)"
STEPS = "_core.OffloadEngine('cpu', [8])"


@contextlib.contextmanager
def another(held, **environment):
    """Another process, which has done `held`."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(held)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def warnings_of(process):
    """What it has logged by its end."""
    return process.communicate(timeout=30)[1]


@pytest.mark.timeout(90)
def test_what_another_process_has_claimed_is_refused_with_its_name_until_it_is_killed():
    assert _core.free_memory_bytes() > 0
    with another(CLAIM) as process:
        assert _core.free_memory_bytes() == 0
        with pytest.raises(ValueError, match=rf"processes `\[{process.pid}\]` .* have claimed"):
            announce(1000, state=10_000, crossing=2_000, limit=None)
        # What is held already is no more, and a limit asks for no free memory.
        announce(1000, state=10_000, crossing=2_000, limit=None, held=12_000)
        announce(1000, state=10_000, crossing=2_000, limit=12_000)
        info = _core.system_info()
        assert info["claimants"] == [process.pid]
        assert info["claimed_memory_bytes"] > info["free_memory_bytes"] > 0
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        announce(1000, state=10_000, crossing=2_000, limit=None)
    assert _core.free_memory_bytes() > 0


@pytest.mark.timeout(90)
def test_ranks_on_the_same_cores_warn_once_and_those_of_a_launcher_do_not():
    with another(STEPS) as first:
        with another(f"{STEPS}, {STEPS}") as second:
            text = warnings_of(second)
        assert text.count("run too") == 1
        assert f"`[{first.pid}]`" in text
        assert "LOCAL_WORLD_SIZE" in text
        assert first.pid in _core.system_info()["others_on_cpus"]
        assert warnings_of(first) == ""
    if len({cpu["core"] for cpu in _core.system_info()["cpus"]}) < 2:
        pytest.skip("two ranks share the only core")
    with (
        another(STEPS, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
        another(STEPS, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") as second,
    ):
        assert warnings_of(second) == ""


@pytest.mark.timeout(60)
def test_a_folder_that_cannot_be_used_is_said_to_ranks_and_stops_nothing(tmp_path):
    (tmp_path / "file").touch()
    environment = {"STEPWELL_CLAIMS_FOLDER": str(tmp_path / "file")}
    with another(f"{STEPS}, _core.MemoryClaim(5).is_refused", **environment) as process:
        text = warnings_of(process)
    assert str(tmp_path / "file") in text
    assert "hint: STEPWELL_CLAIMS_FOLDER" in text
    assert text.count("claimed") == 1


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
)
def test_ranks_of_each_launcher_share_the_free_memory_of_their_host(monkeypatch, rank, size):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(rank, "1")
    monkeypatch.setenv(size, "4")
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: 4_000)
    assert share_of_free_bytes() == 750
