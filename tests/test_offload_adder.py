"""Sums in host memory to which a device adds, gradients of neighbours at a time."""

import contextlib
import random

import pytest
import torch
from stepwell.offload import adder as module
from stepwell.offload.adder import Adder, add, add_to_zero, assign

NUMEL = 5000


class Event:
    def query(self):
        return True

    def synchronize(self):
        pass


class Stream:
    """As torch's, of a device that does everything at once."""

    def record_event(self):
        return Event()

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


def made(monkeypatch):
    """An adder with slots of 1 KiB: on a GPU if there is one."""
    monkeypatch.setattr(module, "_SLOT_BYTES", 1 << 10)
    if torch.cuda.is_available():
        return Adder(torch.device("cuda"))
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    adder = Adder(torch.device("cpu"))
    adder._slots = [(Stream(), torch.empty(1 << 10, dtype=torch.uint8)) for _ in range(3)]
    return adder


def places(chance):
    """Parts of a tensor of sums, all of it, of any size."""
    cuts = sorted(chance.sample(range(1, NUMEL), 40))
    return list(zip([0, *cuts], [*cuts, NUMEL], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_sums_and_norms_are_those_of_one_addition_after_the_other(seed, dtype, monkeypatch):
    adder, chance = made(monkeypatch), random.Random(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    memories = [torch.zeros(NUMEL, dtype=dtype) for _ in range(4)]
    if torch.cuda.is_available():
        memories = [memory.pin_memory() for memory in memories]
    expected = [memory.clone() for memory in memories]
    is_there = set()
    for backward in range(4):
        norms = {}
        parts = [(which, *place) for which in range(4) for place in places(chance)]
        if backward % 2 == 0:
            # As a backward: the last first, of all tensors in turns.
            parts.sort(key=lambda part: -part[2])
        elif backward == 3:
            chance.shuffle(parts)
        for which, begin, end in parts:
            grad = torch.randn(end - begin, generator=generator).to(dtype)
            operation = add if which in is_there else assign
            if backward == 2 and which == 1:
                operation = add_to_zero
            norms[which, begin, end] = []
            target = memories[which][begin:end]
            adder.run(operation, target, grad.to(device), norms[which, begin, end])
            operation(expected[which][begin:end], grad)
        is_there.update(range(4))
        if torch.cuda.is_available():
            adder.norms_to(torch.cuda.current_stream())
        else:
            adder.norms_to(Stream())
        for (which, begin, end), found in norms.items():
            squares = sum(float(norm) ** 2 for norm in found)
            exact = expected[which][begin:end].double().norm().item() ** 2
            # Norms are rounded to float32.
            assert squares == pytest.approx(exact, rel=1e-5)
    adder.finish()
    for memory, sums in zip(memories, expected, strict=True):
        assert torch.equal(memory, sums)


def test_what_waits_is_bounded(monkeypatch):
    adder = made(monkeypatch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memories = [torch.zeros(8) for _ in range(50)]
    for memory in memories:
        adder.run(assign, memory, torch.ones(8, device=device))
        assert len(adder._batches) <= 3
    adder.finish()
    assert all(memory.tolist() == [1.0] * 8 for memory in memories)
