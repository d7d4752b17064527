"""Records of the core in Python's `logging`: what a handler raises is what the call raises.

Ctrl-C lands in handlers too. A step runs none.
"""

import gc
import logging
import os

import fork_server
import pytest
import stepwell
import torch

LOGGER = logging.getLogger("stepwell")
NUMEL = 200_000


class Interrupted(logging.Handler):
    """Raises at the first record that has this text."""

    def __init__(self, text, raised=KeyboardInterrupt):
        super().__init__()
        self.text, self.raised, self.seen = text, raised, []

    def __enter__(self):
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_):
        LOGGER.removeHandler(self)

    def emit(self, record):
        is_first = self.text in record.getMessage() and not self.seen
        self.seen.append(record.getMessage())
        if is_first:
            raise self.raised


def made(folder, numel=NUMEL, **options):
    param = torch.nn.Parameter(torch.zeros(numel))
    tier = stepwell.Volume([folder], name="v", **options)
    optimizer = stepwell.OffloadAdamW([param], tier=tier, host_bytes_max=5 << 20, threads=1)
    return param, optimizer


def a_volume_with_a_damaged_header(folder):
    param, optimizer = made(folder)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    weights = param.detach().clone()
    del optimizer
    gc.collect()
    with (folder / "v.0.stepwell").open("r+b") as file:
        file.write(b"x")  # One copy of the header, of which the core warns.
    return weights


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_what_a_handler_raises_is_what_the_call_raises(tmp_path, raised):
    weights = a_volume_with_a_damaged_header(tmp_path)
    with Interrupted("header", raised) as handler, pytest.raises(raised):
        made(tmp_path, resume=True)
    assert len(handler.seen) == 1
    # The volume is there as before, and nobody has it.
    param, optimizer = made(tmp_path, resume=True)
    assert torch.equal(param, weights)
    assert optimizer.state[param]["step"] == 1


def test_an_error_of_the_call_is_the_context_of_what_a_handler_raises(tmp_path):
    a_volume_with_a_damaged_header(tmp_path)
    with Interrupted("header"), pytest.raises(KeyboardInterrupt) as raised:
        made(tmp_path, numel=NUMEL + 1, resume=True)
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(ValueError, match="volume"):
        made(tmp_path, numel=NUMEL + 1, resume=True)


def test_records_have_their_level_and_the_place_of_the_call(tmp_path, caplog):
    for level in ("ERROR", "WARNING"):
        folder = tmp_path / level
        folder.mkdir()
        a_volume_with_a_damaged_header(folder)
        with caplog.at_level(level, logger="stepwell"):
            made(folder, resume=True)
    (record,) = [each for each in caplog.records if "header" in each.getMessage()]
    assert (record.name, record.levelno) == ("stepwell", logging.WARNING)
    assert record.pathname.endswith(".py")


STEP_PROGRAM = """
import logging, sys
import torch, stepwell

class Handler(logging.Handler):
    raises = {raises}

    def emit(self, record):
        # Not of what other processes do.
        if "workers share the" not in record.getMessage():
            return
        print("seen", flush=True)
        if self.raises:
            Handler.raises = False
            raise KeyboardInterrupt

logging.getLogger("stepwell").addHandler(Handler())
param = torch.nn.Parameter(torch.zeros(8))
optimizer = stepwell.{make}
param.grad = torch.ones(8)
for _ in range(2):
    try:
        optimizer.step()
    except KeyboardInterrupt:
        print("interrupted")
print("stepped", int(optimizer.state[param]["step"]))
"""


def stepped(make, *, raises):
    """What a program prints whose pool warns when it is made, which the first step does."""
    program = STEP_PROGRAM.format(make=make, raises=raises)
    environment = {"STEPWELL_THREADS": str(len(os.sched_getaffinity(0)) + 1)}
    process = fork_server.python("-c", program, environment=environment, timeout=100)
    assert process.returncode == 0, process.stderr
    return process.stdout.split("\n")[:-1]


def test_an_interrupted_step_has_changed_nothing():
    make = "AdamW([param])"
    assert stepped(make, raises=False) == ["seen", "stepped 2"]
    # In the look at the gradients.
    assert stepped(make, raises=True) == ["seen", "interrupted", "stepped 1"]


def test_a_step_runs_no_handler_and_its_records_are_seen_at_exit():
    # Without a look the step makes the pool.
    make = "AdamW([param], nonfinite='propagate')"
    assert stepped(make, raises=False) == ["stepped 2", "seen"]
