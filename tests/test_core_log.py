"""Records of the core in Python's `logging`: what a handler raises is what the call raises.

Ctrl-C lands in handlers too. A step runs none.
"""

import gc
import logging

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
