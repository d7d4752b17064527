"""Volumes on file systems that become read-only or full: what is refused, and what goes on.

Each test runs this file in a process with mounts of its own, which end with it.
"""

import ctypes
import errno
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import torch
from fork_server import PATIENCE
from offload_cases import assert_equal, train
from volume_models import folders, net_of, on_volume, pair

pytestmark = pytest.mark.root

CLONE_NEWNS = 0x20000
SKIPPED = "skipped: "


# Of the second drive. Containers have no loop device for an ext4.
on_both = pytest.mark.parametrize("second", ["tmpfs", "ext4"])


def in_a_process(tmp_path, program, second):
    """Runs a function of this file where mounts are its own."""
    done = fork_server.python(__file__, program, tmp_path, second, timeout=60)
    if SKIPPED in done.stdout:
        pytest.skip(done.stdout.partition(SKIPPED)[2].strip())
    assert done.returncode == 0, done.stderr


@on_both
def test_a_volume_on_a_read_only_file_system_is_refused_as_it_is(tmp_path, second):
    in_a_process(tmp_path, "read_only", second)


@on_both
def test_steps_and_commits_need_no_space_once_the_volume_is_made(tmp_path, second):
    in_a_process(tmp_path, "full", second)


# ---- in the process ----


def read_only(at, second):
    """A volume that is kept is resumed while one of its members cannot be written to."""
    drives = mounted(at, second)
    (net, optimizer), theirs = pair(at, name="run")
    train(net, optimizer, 3)
    train(*theirs, 3)
    optimizer.synchronize()
    del optimizer
    gc.collect()
    there = contents(at)
    assert len(there) == 2

    net = net_of(seed=9)
    weights = [param.detach().clone() for param in net.parameters()]
    for number, drive in enumerate(drives):
        remount(drive, "ro")
        for options in ({}, {"keep": False}):
            with pytest.raises(OSError, match="Read-only file system") as error:
                on_volume(net, at, name="run", resume=True, **options)
            assert error.value.errno == errno.EROFS
            member = f"volume `run`: member `{number}` ({drive / f'run.{number}.stepwell'})"
            expected = f"{member}; hint: its file system is mounted read-only"
            assert expected in str(error.value), error.value
        assert contents(at) == there
        assert all(torch.equal(*both) for both in zip(net.parameters(), weights, strict=True))
        remount(drive, "rw")

    optimizer = on_volume(net, at, name="run", resume=True)
    assert optimizer.committed_steps == 3
    assert train(net, optimizer, 3, first=3) == train(*theirs, 3, first=3)
    assert_equal((net, optimizer), theirs)


def full(at, second):
    """A file system is full from when a volume is made until it was resumed and has gone on."""
    drives = mounted(at, second)
    (net, optimizer), theirs = pair(at, name="run")
    for drive in drives:
        fill(drive)
    assert train(net, optimizer, 3) == train(*theirs, 3)
    optimizer.synchronize()
    assert optimizer.committed_steps == 3
    del optimizer
    gc.collect()

    net = net_of(seed=9)
    optimizer = on_volume(net, at, name="run", resume=True)
    assert optimizer.committed_steps == 3
    assert train(net, optimizer, 3, first=3) == train(*theirs, 3, first=3)
    optimizer.synchronize()
    assert optimizer.committed_steps == 6
    assert [free_bytes(drive) for drive in drives] == [0, 0]
    assert_equal((net, optimizer), theirs)


def contents(at):
    """What the files of members have."""
    return {path: path.read_bytes() for path in at.glob("drive*/*.stepwell")}


def mounts_of_its_own():
    """What this process mounts from here on ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        skip(f"no process gets mounts of its own here ({os.strerror(ctypes.get_errno())})")
    assert works("mount", "--make-rprivate", "/")


def mounted(at, second):
    """Folders with an empty file system of 64 MiB on each: a tmpfs, and a `second`."""
    drives = folders(at)
    for drive, kind in zip(drives, ("tmpfs", second), strict=True):
        is_mounted = {"tmpfs": is_mounted_as_tmpfs, "ext4": is_mounted_as_ext4}[kind](drive)
        if not is_mounted:
            skip(f"no {kind} can be mounted here")
    return drives


def is_mounted_as_tmpfs(folder):
    return works("mount", "-t", "tmpfs", "-o", "size=64m", "stepwell", folder)


def is_mounted_as_ext4(folder):
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    # The loop device ends with the mount.
    return works("mkfs.ext4", "-q", "-m", "0", image) and works(
        "mount", "-t", "ext4", "-o", "loop", image, folder
    )


def remount(folder, option):
    """Once the kernel has let go of the files of an io_uring that has ended: it does that later."""
    end = time.monotonic() + 20 * PATIENCE
    while not works("mount", "-o", f"remount,{option}", folder):
        assert time.monotonic() < end
        time.sleep(0.01)


def works(*command):
    """Whether a command is there, and ends well."""
    try:
        done = subprocess.run(list(map(str, command)), timeout=30, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def fill(folder):
    """Takes all space that is free."""
    with (folder / "filler").open("wb") as file:
        for nbytes in (1 << 20, 1 << 12):
            while has_taken(file, nbytes):
                pass
    assert free_bytes(folder) == 0


def has_taken(file, nbytes):
    """Whether a file has got so much longer."""
    try:
        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), nbytes)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        return False
    return True


def free_bytes(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def skip(reason):
    print(SKIPPED + reason)
    sys.exit()


if __name__ == "__main__":
    mounts_of_its_own()
    programs = {"read_only": read_only, "full": full}
    programs[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
