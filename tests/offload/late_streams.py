"""Streams beside the one that computes, which do each copy as late as they may.

On the CPU: the thread is the stream that computes. Another stream begins a copy when something
waits for it. If memory was freed by then, or has other contents, the order was not kept.
"""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LateStream:
    """A queue of what a stream was given."""

    def __init__(self, device=None):
        self.given, self.num_done = [], 0

    def do_until(self, position):
        while self.num_done < position:
            given = self.given[self.num_done]
            self.num_done += 1
            given()

    def record_event(self):
        return LateEvent(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        self.given.append(event.wait)

    def synchronize(self):
        self.do_until(len(self.given))


class Computing(LateStream):
    """What it is given is done at once."""

    def wait_event(self, event):
        event.wait()


class LateEvent:
    def __init__(self, stream):
        self.stream, self.position = stream, len(stream.given)

    def wait(self):
        self.stream.do_until(self.position)


def have_late_streams(monkeypatch, watched):
    """Has `Activations` on the CPU copy as on a device. Returns its streams."""
    computing = Computing()
    current = [computing]
    copy = torch.Tensor.copy_

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    def copied(target, source, non_blocking=False):
        if current[-1] is computing:
            return copy(target, source)
        sides = [
            (StorageWeakRef(side.untyped_storage()), side.storage_offset(), side.numel())
            for side in (target, source)
        ]

        def late():
            views = []
            for storage, offset, numel in sides:
                assert not storage.expired(), "memory was freed before its copy"
                found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
                empty = torch.empty(0, dtype=torch.uint8)
                views.append(empty.set_(found, offset, (numel,)))
            copy(*views)

        current[-1].given.append(late)
        return target

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    watched._down, watched._up = LateStream(), LateStream()
    return watched._down, watched._up
