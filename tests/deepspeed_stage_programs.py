"""A program (see deepspeed_run) of ZeRO's optimizers on stand-ins."""

from pathlib import Path

import pytest


def program_stages(_result):
    """Runs the tests of `zero_*_stand_ins.py`, which print what fails."""
    files = sorted(map(str, Path(__file__).parent.glob("zero_*_stand_ins.py")))
    assert files
    assert pytest.main([*files, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]) == 0
