"""A refusal for lack of host memory names what would fit, beside what is set already."""

import re

import pytest
import torch
from stepwell import OffloadAdamW

NUMEL = 1 << 20


def refused(host_bytes_max, **options):
    model = torch.nn.Linear(NUMEL // 256, 256, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bytes of host memory") as error:
        OffloadAdamW(model, host_bytes_max=host_bytes_max, **options)
    return model, str(error.value)


def test_q8_is_named_where_it_fits_and_takes_what_is_said():
    model, said = refused(9 * NUMEL)
    (taken,) = map(int, re.findall(r"hint: moments='q8' takes `(\d+)` bytes, which fit", said))
    OffloadAdamW(model, host_bytes_max=taken, moments="q8").step()
    with pytest.raises(ValueError, match="bytes of host memory"):
        OffloadAdamW(model, host_bytes_max=taken - 1, moments="q8")


@pytest.mark.parametrize("moments", ["fp32", "bf16", "q8"])
def test_what_does_not_fit_either_is_not_named(moments):
    _, said = refused(NUMEL, moments=moments)
    assert "q8" not in said
    assert f"hint: `stepwell plan {NUMEL}` says" in said


def test_q8_is_not_named_where_it_is_set():
    _, said = refused(8 * NUMEL, moments="q8")
    assert "q8" not in said


def test_drives_are_named_where_only_they_have_room(monkeypatch):
    from stepwell import _budget

    monkeypatch.setattr(_budget, "VOLUME_BUFFERS_BYTES_MAX", NUMEL)
    for moments in ("fp32", "q8"):
        _, said = refused(6 * NUMEL, moments=moments)
        assert f"hint: state on drives (docs/volume.md) takes `{5 * NUMEL}` bytes" in said
