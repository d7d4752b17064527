"""New weights of one of several ranks go to all others, and theirs come here, behind the step.

A thread gathers the weights of a step, piece by piece, in an order that is a plan: the same on all
ranks. So all ranks make the same collectives in the same order, whatever their other threads do
meanwhile: a forward, a look at a weight or an evaluation waits for what the thread has gathered,
and calls no collective. The collectives are those of process groups that nothing else uses.

- A piece is gathered when this rank's part of it is on the device. It is written in place on the
  others, after all that the stream of the step held when it was submitted.
- On CUDA collectives are on a stream of their own; what waits is the current stream.
- Before the first piece and behind the last all ranks tell whether their own step is good. One that
  has left the step by an error (`leave`) says so at once, and no piece is gathered. One whose step
  fails later goes on with the collectives, with old weights. The errors of the others name it.
- A forward waits for its pieces alone: meanwhile another rank may have failed. The wait for the
  last weight is one for what is told behind it, so no forward of the whole model ends with old
  weights. What a program may keep (a look at a weight, an evaluation) waits for that at once
  (`confirm`), but for a look at a weight that a forward in training has used since: it is a plain
  one then. `step()` begins with a wait for all.
- A rank that is gone fails the collectives of the others: at once by gloo, after the timeout of the
  process group by NCCL, whose watchdog ends the process.

Cost: each rank receives what it does not step, once per step; one launch per piece. On CPUs it is
one per rank where its parts are not even, or do not lie together. What is told is 32 bytes, twice.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from stepwell._streams import stream_of
from stepwell.access.finalizers import finalize, postponed
from stepwell.ranks.collective import why_lost
from stepwell.ranks.peers import wait_for_work

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepwell import _core
    from stepwell.ranks.peers import Peers

__all__ = ["Gatherer", "Piece", "bytes_of"]

# How long copies that have been enqueued are not looked at.
_POLL_SECONDS = 5e-4

# For a thread that has nothing left to do but to let go of what it has.
_JOIN_SECONDS_MAX = 10.0


class Piece(NamedTuple):
    """What is gathered at once, of tensors without their class, which guards them."""

    place: int
    """Of the engine's tensor of which this rank steps a part."""
    begin: int
    """The first element of this part."""
    end: int
    """Behind its last element."""
    parts: Sequence[torch.Tensor]
    """What each rank steps, as bytes, where it belongs on this device."""
    whole: torch.Tensor | None = None
    """All parts, one behind the other; None: they are not even, or do not lie together."""
    source: torch.Tensor | None = None
    """This rank's part in host memory, whence the thread copies it; None: the engine uploads it."""


class _GatheredStep:
    """What is gathered of one step.

    The thread marks one piece after the other; others wait for them.
    """

    def __init__(
        self,
        pieces: list[Piece],
        after: torch.cuda.Event | None,
        last: Mapping[Any, int],
        why_left: str | None = None,
    ) -> None:
        self.why_left = why_left
        """The error by which this rank has left the step; None: it has submitted it."""
        self.pieces = pieces
        self.after = after
        """What the memory of the pieces is written after."""
        self.last = last
        """Of each weight, its last piece."""
        self._last_place = max(last.values(), default=-1)
        self.bytes_received = 0
        """Of parts of other ranks."""
        self.error: OSError | None = None
        """Why this rank's step has failed; or, at the end, that another rank's has."""
        self.is_over = False
        """Whether it has ended, on this rank."""
        self._events: list[torch.cuda.Event | None] = []
        self._changed = threading.Condition()

    def mark(self, event: torch.cuda.Event | None) -> None:
        """The next piece is gathered, or is when `event` has passed."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def fail(self, error: OSError) -> None:
        """This rank's step has failed. The others are told at the end."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def end(self, error: OSError | None) -> None:
        """Nothing more comes."""
        with self._changed:
            # The memory is the parameters' again: a count of its references has theirs alone.
            self.pieces = []
            self.error = error
            self.is_over = True
            self._changed.notify_all()

    def wait(self, weights: Iterable[Any], streams: Iterable[int], device: torch.device) -> None:
        """`streams` wait for `weights`; the thread until they are enqueued.

        For the last of all weights until all ranks have told that they have stepped: what waits for
        all of them, part by part, has new ones only.

        Raises:
            OSError: they do not come; or this rank or another has failed, as far as that is known.
        """
        place = max((self.last[key] for key in weights if key in self.last), default=-1)
        if place < 0:
            return
        count = place + 1 if place < self._last_place else math.inf
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_over or self.error is not None or len(self._events) >= count
            )
            if self.error is not None:
                self._raise()
            last = self._events[place]
        if last is not None:
            # All are on one stream: the last is behind the others.
            for stream in streams:
                stream_of(stream, device).wait_event(last)

    def wait_for_end(self) -> None:
        """Waits until nothing more comes.

        Raises:
            OSError: this rank or another has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_over)
        if self.error is not None:
            self._raise()

    def wait_for_copies(self) -> None:
        """Waits until what was enqueued has ended."""
        last = self._events[-1] if self._events else None
        while last is not None and not last.query():  # type: ignore[no-untyped-call]
            time.sleep(_POLL_SECONDS)

    def _raise(self) -> None:
        assert self.error is not None
        # Each wait raises an error of its own, with its own traceback.
        raise OSError(str(self.error)) from self.error


class _GatherThread:
    """What the thread has: it gathers the pieces of one step after the other."""

    def __init__(
        self,
        core: _core.OffloadEngine,
        peers: Peers,
        device: torch.device,
    ) -> None:
        self._core = core
        self._peers = peers
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.steps: queue.SimpleQueue[_GatheredStep | None] = queue.SimpleQueue()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # What is collected on this thread may wait for it.
        with postponed() as call_finalizers:
            while (step := self.steps.get()) is not None:
                self._take(step)
                del step
                call_finalizers()

    def _take(self, step: _GatheredStep) -> None:
        error: OSError | None = None
        try:
            error = self._gather(step)
        except OSError as caught:
            error = caught
        except BaseException as caught:  # noqa: BLE001 - a thread has no caller
            error = OSError(f"new weights did not come from all ranks: {why_lost(caught)}")
        step.end(error)

    @torch.no_grad()
    def _gather(self, step: _GatheredStep) -> OSError | None:
        """Gathers all pieces; returns why this rank or another has failed, if one has."""
        told = self._peers.tell(step.why_left, is_taken=step.why_left is None)
        if step.why_left is not None:
            return told.error()
        error: OSError | None = None
        is_begun = False
        stream = self._stream
        if stream is not None and step.after is not None:
            stream.wait_event(step.after)
        for piece in step.pieces:
            if error is None:
                try:
                    self._core.wait(
                        piece.place,
                        piece.begin,
                        piece.end,
                        stream=0 if stream is None else stream.cuda_stream,
                    )
                except (OSError, ValueError) as caught:
                    # The others wait for this rank's part of each collective.
                    error = OSError(str(caught))
                    step.fail(error)
            if not is_begun:
                # Behind the wait for the first chunks, which takes longer.
                if left := told.error():
                    return error or left
                is_begun = True
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                if piece.source is not None:
                    piece.parts[self._peers.rank].copy_(piece.source, non_blocking=True)
                event = self._finish(self._collectives(piece))
            step.mark(event)
        if not is_begun and (left := told.error()):
            return left
        why = None if error is None else str(error)
        failure = self._peers.tell(why, is_taken=True).error()
        return error or failure

    def _finish(self, works: list[Any]) -> torch.cuda.Event | None:
        """Waits for collectives: the thread in host memory; on CUDA the current stream does."""
        if self._stream is None:
            for work in works:
                wait_for_work(work)
            return None
        for work in works:
            work.wait()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _collectives(self, piece: Piece) -> list[Any]:
        peers = self._peers
        if peers.world_size == 1 or not any(part.numel() for part in piece.parts):
            return []
        if piece.whole is not None:
            mine = piece.parts[peers.rank]
            return [dist.all_gather_into_tensor(piece.whole, mine, group=peers.data, async_op=True)]
        if self._stream is None:
            return self._broadcasts(piece)
        # One launch: each takes its turn with those of the thread that launches the forward.
        peers.data._start_coalescing(self._device)
        try:
            self._broadcasts(piece)
        finally:
            # Or what comes next would wait for an end of this one.
            launched = peers.data._end_coalescing(self._device)
        return [launched]

    def _broadcasts(self, piece: Piece) -> list[Any]:
        peers = self._peers
        return [
            dist.broadcast(part, peers.ranks[rank], group=peers.data, async_op=True)
            for rank, part in enumerate(piece.parts)
            if part.numel()
        ]


def _close(
    thread: threading.Thread,
    steps: queue.SimpleQueue[_GatheredStep | None],
    last: list[_GatheredStep | None],
    pid: int,
) -> None:
    """The optimizer is gone: its last step is waited for, and the thread ends."""
    if os.getpid() != pid:
        # A forked child has no such thread: nothing would ever end.
        return
    steps.put(None)
    if last[0] is not None:
        # Its error has no caller any more.
        with contextlib.suppress(OSError):
            last[0].wait_for_end()
            last[0].wait_for_copies()
    if thread is not threading.current_thread():
        # With the thread its process groups may go. Where the interpreter ends before that, torch
        # ends the process by SIGABRT.
        thread.join(_JOIN_SECONDS_MAX)


class Gatherer:
    """Gathers the weights of each step behind it, on a thread of its own.

    Args:
        core: what steps this rank's parts.
        peers: the ranks, with a group for weights.
        device: where the weights are.
    """

    def __init__(
        self,
        core: _core.OffloadEngine,
        peers: Peers,
        device: torch.device,
    ) -> None:
        self._device = device
        self._peers = peers
        # In a list for the finalizer's sake.
        self._last: list[_GatheredStep | None] = [None]
        thread = _GatherThread(core, peers, device)
        self._steps = thread.steps
        runner = threading.Thread(target=thread.run, name="stepwell-gather", daemon=True)
        runner.start()
        finalize(self, _close, runner, self._steps, self._last, os.getpid())

    @property
    def bytes_received(self) -> int:
        """In the last step, of parts of other ranks."""
        last = self._last[0]
        return 0 if last is None else last.bytes_received

    @property
    def is_busy(self) -> bool:
        """Whether the last step's weights are on their way."""
        last = self._last[0]
        return last is not None and not last.is_over

    def submission(self, pieces: list[Piece], last: Mapping[Any, int]) -> list[partial[Any]]:
        """The calls that begin to gather, to be made directly after the step is submitted.

        Args:
            pieces: in their order, which is the same on all ranks.
            last: of each weight, the number of its last piece.
        """
        after = None
        if self._device.type == "cuda":
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]
            after.record(torch.cuda.current_stream(self._device))
        step = _GatheredStep(pieces, after, last)
        step.bytes_received = sum(
            part.numel()
            for piece in pieces
            for rank, part in enumerate(piece.parts)
            if rank != self._peers.rank
        )
        return [
            partial(self._last.__setitem__, 0, step),
            partial(self._steps.put, step),
        ]

    def leave(self, why: str) -> None:
        """This rank has left a step, before its submit: the others, which gather it, are told.

        Args:
            why: the error by which it has.
        """
        left = _GatheredStep([], None, {}, why)
        # First: a step that nothing gathers would be waited for.
        self._steps.put(left)
        self._last[0] = left

    def wait(self, weights: Iterable[Any], streams: Iterable[int]) -> None:
        """`streams` wait for `weights` of the last step; the thread until they are enqueued.

        Raises:
            OSError: they do not come.
            ValueError: this is a forked child.
        """
        if (last := self._last_step()) is not None:
            last.wait(weights, streams, self._device)

    def confirm(self) -> None:
        """Waits until all ranks have told that their parts of the last step are good.

        Raises:
            OSError: one is not.
            ValueError: this is a forked child.
        """
        if (last := self._last_step()) is not None:
            last.wait_for_end()

    def finish(self, streams: Iterable[int]) -> None:
        """As `wait`, for all weights, and until all ranks have told that they have stepped.

        Raises:
            OSError: this rank or another has failed.
            ValueError: this is a forked child.
        """
        if (last := self._last_step()) is not None:
            last.wait_for_end()
            last.wait(last.last, streams, self._device)

    def synchronize(self) -> None:
        """Waits until what was enqueued has ended."""
        if (last := self._last_step()) is not None:
            last.wait_for_copies()

    def _last_step(self) -> _GatheredStep | None:
        # Before a look at the step: its lock may be held by the thread that a child does not have.
        self._peers.check_process()
        return self._last[0]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, with a version of its own, and no class that guards it."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = tensor.storage_offset() * tensor.itemsize
    memory.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))
    return memory
