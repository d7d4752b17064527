"""Sums in host memory to which a device adds, gradients of neighbours at a time."""

import gc
import random
import weakref
from collections import deque
from functools import partial

import numpy
import pytest
import torch
from optim_cases import bits
from stepwell.store import adder as module
from stepwell.store.adder import Adder, add, add_to_zero, assign
from torch.utils._python_dispatch import TorchDispatchMode


class LateEvent:
    """As torch's, on a `LateStream`."""

    def __init__(self, stream):
        self.stream, self.has_ended = stream, False

    def end(self):
        self.has_ended = True

    def query(self):
        return self.has_ended

    def synchronize(self):
        while not self.has_ended:
            self.stream.work.popleft()()


class LateStream:
    """As torch's, of a device that does nothing before it is waited for."""

    def __init__(self):
        self.work = deque()

    def record_event(self):
        event = LateEvent(self)
        self.work.append(event.end)
        return event

    def wait_event(self, event):
        self.work.append(event.synchronize)

    def synchronize(self):
        self.record_event().synchronize()

    @property
    def cuda_stream(self):
        return self


class Late(TorchDispatchMode):
    """In this context a stream writes, when it comes to it."""

    def __init__(self, stream, gradients):
        super().__init__()
        self.stream, self.gradients = stream, gradients

    def same_memory(self, tensor):
        """The same without the memory of a gradient, which it would keep."""
        if isinstance(tensor, (list, tuple)):
            return [self.same_memory(each) for each in tensor]
        if not isinstance(tensor, torch.Tensor):
            return tensor
        memory = self.gradients.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor
        memory = memory.view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not function._schema.is_mutable and "norm" not in function.name():
            return function(*args, **kwargs)
        taken = [self.same_memory(each) for each in args]
        if function._schema.is_mutable:
            self.stream.work.append(partial(function, *taken, **kwargs))
            return args[0] if function._schema.returns else None
        found = [torch.full((), torch.nan) for _ in args[0]]
        self.stream.work.append(lambda: torch._foreach_copy_(found, function(*taken, **kwargs)))
        return found


class LateDevice:
    """A GPU whose work is done when it is waited for; `made_on` is torch's current stream."""

    def __init__(self, monkeypatch):
        self.gradients = {}
        self.made_on = LateStream()
        empty = torch.empty
        monkeypatch.setattr(module, "_SLOT_BYTES", 1 << 10)
        monkeypatch.setattr(
            torch, "empty", lambda *sizes, dtype, device: empty(*sizes, dtype=dtype)
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: LateStream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.made_on)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: Late(stream, self.gradients))
        self.adder = Adder(torch.device("cuda"))
        monkeypatch.setattr(torch, "empty", empty)

    def gradient(self, values):
        """With these values, once it is made. Once it is freed its stream has a use for it."""
        memory = numpy.full(values.nbytes, 255, numpy.uint8)
        lent = memory[:]
        weakref.finalize(lent, self.made_on.work.append, partial(memory.fill, 255))
        grad = torch.from_numpy(lent).view(values.dtype)
        made = torch.from_numpy(memory)
        self.gradients[grad.untyped_storage().data_ptr()] = made
        self.made_on.work.append(partial(made.view(values.dtype).copy_, values))
        return grad


class LateEngine:
    """Takes what a stream has done."""

    def take_part(self, *_, stream, **__):
        stream.synchronize()


@pytest.mark.parametrize("ended_by", ["finish", "let_go", "order", "end"])
@pytest.mark.parametrize("seed", range(2))
def test_a_device_may_be_late(seed, ended_by, monkeypatch):
    """Streams wait for what they read and write over; what they read is held."""
    device, chance = LateDevice(monkeypatch), random.Random(seed)
    streams = [LateStream() for _ in range(3)]
    memory, expected = torch.zeros(600), torch.zeros(600)
    norms = []
    for _ in range(60):
        begin = chance.randrange(0, 600, 20)
        end = min(600, begin + chance.choice([20, 40, 400]))
        device.made_on = chance.choice(streams)
        values = torch.tensor([chance.uniform(-1, 1) for _ in range(end - begin)])
        values[0] = -0.0
        operation = chance.choice([assign, add, add_to_zero])
        operation(expected[begin:end], values)
        found = []
        norms.append((expected[begin:end].norm(), found))
        device.adder.run(operation, memory[begin:end], device.gradient(values), found)
        if chance.random() < 0.3:
            # It is not late: it makes further gradients in memory that was freed.
            chance.choice(streams).synchronize()
    user = LateStream()
    device.adder.norms_to(user)
    user.synchronize()
    for exact, found in norms:
        assert torch.stack(found).norm().item() == pytest.approx(exact.item(), rel=1e-5)
    operation(expected[:20], torch.ones(20))
    device.adder.run(operation, memory[:20], device.gradient(torch.ones(20)))
    if ended_by == "finish":
        device.adder.finish()
    elif ended_by == "let_go":
        device.adder.let_go()
        assert not device.adder._reads._held
    elif ended_by == "order":
        device.adder.order(LateEngine())
    else:
        # As when its optimizer is dropped. What waits for its neighbours is no use to anybody.
        device.adder._launch_all()
        del device.adder
        gc.collect()
    assert torch.equal(bits(memory), bits(expected))


def test_gradients_of_copies_under_way_are_bounded(monkeypatch):
    device = LateDevice(monkeypatch)
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES_MAX", 4 << 10)
    memory = torch.zeros(256)
    for _ in range(20):
        device.adder.run(add, memory, device.gradient(torch.ones(256)))
        assert device.adder._reads._nbytes <= 5 << 10
    device.adder.finish()
    assert memory.tolist() == [20.0] * 256
