"""Shards of two ranks have the bits of whole parameters."""

import contextlib
import subprocess
import sys

import pytest
import torch
from net_cases import TIMEOUT, assert_same_bits, environments
from net_runs import FOLDER


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = []
    for rank, environment in enumerate(environments(2)):
        command = [sys.executable, str(FOLDER / "net_ranks.py"), str(folder)]
        with (folder / f"{rank}.txt").open("w") as printed:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)
            )
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(TIMEOUT)
        processes[1].wait(5)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    printed = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
    assert codes == [0, 0], printed[-8000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("place", ["in memory", "on drives"])
def test_shards_have_the_bits_of_whole_parameters(ranks, place):
    for rank in ranks:
        assert_same_bits(rank[place], rank["whole"])
