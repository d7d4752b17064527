"""Programs with deferred updates that are killed amid turns, and go on from what they saved."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fork_server
import pytest
import torch
from deferred_kill_program import SAVE_STEPS
from fork_server import PATIENCE
from optim_cases import bits

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = Path(__file__).with_name("deferred_kill_program.py")
SECONDS = 60
# Amid turns, beyond whatever was saved by programs that were killed.
LAST = 5 * SAVE_STEPS - 1

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"deferred": {"interval": 4}},
    "fp32, selected": {"deferred": {"interval": 4, "fraction": 0.25, "reselect": 4}},
    "q8": {"deferred": {"interval": 4}, "moments": "q8"},
    "fp32, interval 2": {"deferred": {"interval": 2}},
    "fp32, interval 2, selected": {"deferred": {"interval": 2, "fraction": 0.25, "reselect": 2}},
    "q8, interval 2": {"deferred": {"interval": 2}, "moments": "q8"},
}


def kill(folder: Path, options: Mapping[str, Any], num_saved: int, more: int) -> None:
    """A program is killed `more` steps behind what it saves at the `num_saved`th time.

    It may be some steps further by then, but not beyond what it saves next.
    """
    expected = step_of(folder) + num_saved * SAVE_STEPS + more
    last = expected - more + SAVE_STEPS
    told = folder / "told"
    program = PROGRAM, folder, last, told, json.dumps(options)
    with fork_server.telling(told, *program, timeout=SECONDS) as (job, lines):
        pid = lines.readline()
        assert pid, f"ended with {job.result().returncode}: {job.result().stderr}"
        steps = []
        while line := lines.readline():
            steps.append([int(number) for number in line.split()])
            if steps[-1][0] == expected:
                os.kill(int(pid), signal.SIGKILL)
        killed = job.result(SECONDS * PATIENCE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps[-1][0] >= expected
    # The first step behind what was loaded, or saved, is exact. Others leave updates pending.
    for step, has_pending in steps:
        assert has_pending == ((step - 1) % SAVE_STEPS > 0), step
    assert step_of(folder) in {expected - more, last}


def step_of(folder: Path) -> int:
    """That of the last checkpoint; 0: there is none."""
    path = folder / "saved"
    return int(torch.load(path)["step"]) if path.exists() else 0


def trained(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a program of its own has in the end, which goes on from the last checkpoint."""
    program = PROGRAM, folder, LAST, os.devnull, json.dumps(options)
    done = fork_server.python(*program, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(folder / "end")
    return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """All values in two dicts are the same, and those of tensors to the bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where} {key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other)), where
    else:
        assert one == other, where


# Four programs at most.
@pytest.mark.timeout(4 * SECONDS + 20)
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("fp32", [(1, 5), (1, 2)]),
        ("fp32, selected", [(2, 4)]),
        ("q8", [(1, 3)]),
        ("fp32, interval 2", [(2, 3)]),
        ("fp32, interval 2, selected", [(1, 4)]),
        ("q8, interval 2", [(1, 5)]),
    ],
)
def test_a_program_that_is_killed_amid_turns_goes_on_with_the_bits_of_one_that_was_not(
    tmp_path: Path, case: str, kills: list[tuple[int, int]]
) -> None:
    """Both drain where they save, at the same steps."""
    options = CASES[case]
    went_on, resumed = tmp_path / "went_on", tmp_path / "resumed"
    for folder in (went_on, resumed):
        folder.mkdir()
    for num_saved, more in kills:
        kill(resumed, options, num_saved, more)
    assert 0 < step_of(resumed) < LAST
    found, expected = trained(resumed, options), trained(went_on, options)
    assert found["step"] == LAST and len(expected["losses"]) == LAST
    assert_same(found, expected)
