"""The engine of one of several ranks: its weights go to all others, and theirs come here.

A thread gathers the weights of a step, parameter by parameter, in the engine's order. So all ranks
make the same collectives in the same order, whatever their other threads do meanwhile: a forward, a
look at a weight or an evaluation waits for what the thread has gathered, and calls no collective.
The collectives are those of process groups that nothing else uses.

- A parameter is gathered when this rank's rows of it are on the device. Its rows are written in
  place on the others, after all that the stream of the step held when it was submitted.
- On CUDA collectives are on a stream of their own; what waits is the current stream.
- A rank whose own step fails goes on with the collectives, with old weights, and says so behind the
  last. Then the next wait for all weights is an error on every rank: `step()` begins with one.
- A rank that is gone fails the collectives of the others: at once by gloo, after the timeout of the
  process group by NCCL, whose watchdog ends the process.

Cost: each rank receives what it does not step, once per step; one call per parameter, and one per
rank where its rows are not dealt out evenly.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override

from stepwell._sharding import local
from stepwell.offload.engine import Engine, stream_of
from stepwell.offload.peers import wait_for_work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from stepwell import _core
    from stepwell._operand import BoundUpdate
    from stepwell.offload.peers import Peers
    from stepwell.offload.selection import Selected
    from stepwell.offload.sharding import Sharding
    from stepwell.offload.twins import Twins

__all__ = ["RankEngine"]

# How long copies that have been enqueued are not looked at.
_POLL_SECONDS = 5e-4


class _Weight(NamedTuple):
    """A parameter of a step, without its class, which guards it."""

    place: int
    """Among the engine's parameters."""
    memory: torch.Tensor
    """All of it, as bytes."""
    cuts: list[int]
    """In bytes, where the rows of each rank begin, and the end."""
    own_numel: int
    """Elements that this rank steps."""
    own_nbytes: int
    """Bytes of these."""

    @property
    def is_even(self) -> bool:
        """Whether every rank has as much."""
        sizes = [end - begin for begin, end in zip(self.cuts, self.cuts[1:], strict=False)]
        return len(set(sizes)) == 1

    def part(self, rank: int) -> torch.Tensor:
        """The rows of `rank`."""
        return self.memory[self.cuts[rank] : self.cuts[rank + 1]]


class _Gathering:
    """What is gathered of one step.

    The thread marks one weight after the other; others wait for them.
    """

    def __init__(self, weights: list[_Weight], after: torch.cuda.Event | None) -> None:
        self.weights = weights
        self.after = after
        """What the memory of the weights is written after."""
        self.places = {weight.place: nth for nth, weight in enumerate(weights)}
        self.error: OSError | None = None
        """Why it has ended early, or that another rank has failed."""
        self.is_over = False
        """Whether it has ended, on this rank."""
        self.bytes_received = sum(weight.memory.numel() - weight.own_nbytes for weight in weights)
        """Bytes of the rows of other ranks."""
        self._events: list[torch.cuda.Event | None] = []
        self._changed = threading.Condition()

    def mark(self, event: torch.cuda.Event | None) -> None:
        """The next weight is gathered, or is when `event` has passed."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self, error: OSError | None) -> None:
        """Nothing more comes."""
        with self._changed:
            # The memory is the parameters' again: a count of its references has theirs alone.
            self.weights = []
            self.error = error
            self.is_over = True
            self._changed.notify_all()

    def wait(self, indices: Iterable[int], streams: Iterable[int], device: torch.device) -> None:
        """`streams` wait for the weights of `indices`; the thread until they are enqueued.

        Raises:
            OSError: they do not come.
        """
        places = [self.places[index] for index in indices if index in self.places]
        if not places:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or len(self._events) > max(places))
            if len(self._events) <= max(places):
                self._raise()
            last = self._events[max(places)]
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


class _Gatherer:
    """The thread's side: gathers the weights of one step after the other."""

    def __init__(self, core: _core.OffloadEngine, peers: Peers, device: torch.device) -> None:
        self._core = core
        self._peers = peers
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.steps: queue.SimpleQueue[_Gathering | None] = queue.SimpleQueue()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while (step := self.steps.get()) is not None:
            error: OSError | None = None
            try:
                error = self._gather(step)
            except OSError as caught:
                error = caught
            except BaseException as caught:  # noqa: BLE001 - a thread has no caller
                error = OSError(
                    f"new weights could not be brought to the other ranks: {caught}. hint: another "
                    "rank may be gone, its own error says why; resume all ranks from a checkpoint"
                )
            step.end(error)
            del step

    @torch.no_grad()
    def _gather(self, step: _Gathering) -> OSError | None:
        """Gathers all weights; returns why this rank or another has failed, if one has."""
        error: OSError | None = None
        stream = self._stream
        if stream is not None and step.after is not None:
            stream.wait_event(step.after)
        for weight in step.weights:
            if error is None:
                try:
                    self._core.wait(
                        weight.place,
                        0,
                        weight.own_numel,
                        stream=0 if stream is None else stream.cuda_stream,
                    )
                except (OSError, ValueError) as caught:
                    # The others wait for this rank's part of each collective.
                    error = OSError(str(caught))
            if stream is None:
                for work in self._collectives(weight):
                    wait_for_work(work)
                step.mark(None)
                continue
            with torch.cuda.stream(stream):
                for work in self._collectives(weight):
                    work.wait()
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            step.mark(event)
        failed = torch.tensor([error is not None], dtype=torch.int32, device="cpu")
        wait_for_work(
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._peers.status, async_op=True)
        )
        if error is None and int(failed):
            error = OSError(
                "the step has failed on another rank, and its weights are not new. hint: its own "
                "error says why; resume all ranks from a checkpoint"
            )
        return error

    def _collectives(self, weight: _Weight) -> list[Any]:
        peers = self._peers
        if peers.world_size == 1 or not weight.memory.numel():
            return []
        if weight.is_even:
            mine = weight.part(peers.rank)
            return [
                dist.all_gather_into_tensor(weight.memory, mine, group=peers.data, async_op=True)
            ]
        return [
            dist.broadcast(part, peers.ranks[rank], group=peers.data, async_op=True)
            for rank in range(peers.world_size)
            if (part := weight.part(rank)).numel()
        ]


def _close(
    steps: queue.SimpleQueue[_Gathering | None], last: list[_Gathering | None], pid: int
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


class RankEngine(Engine):
    """Steps the rows of this rank, and brings all new weights to all ranks.

    Args:
        sharding: the ranks, and the rows of each.
        device: as `Engine` has it.
        params: likewise, the same in the same order on all ranks.
        twins: likewise.
        threads: likewise.
    """

    def __init__(
        self,
        sharding: Sharding,
        device: torch.device,
        params: Iterable[torch.Tensor],
        twins: Twins,
        threads: int | None,
    ) -> None:
        super().__init__(device, params, twins, threads)
        self._shares = sharding.shares
        # In a list for the finalizer's sake.
        self._last: list[_Gathering | None] = [None]
        gatherer = _Gatherer(self._core, sharding.peers, device)
        self._steps = gatherer.steps
        threading.Thread(target=gatherer.run, name="stepwell-gather", daemon=True).start()
        weakref.finalize(self, _close, self._steps, self._last, os.getpid())

    @property
    @override
    def busy(self) -> bool:
        last = self._last[0]
        return super().busy or (last is not None and not last.is_over)

    @override
    def submission(
        self,
        updates: Sequence[BoundUpdate],
        grad_scale: float,
        at_once: Collection[torch.Tensor] | None = None,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
        selected: Sequence[Selected] = (),
    ) -> list[partial[Any]]:
        submit, *others = super().submission(updates, grad_scale, at_once, grads, selected)
        stepped = {each.update.param for each in updates}
        weights = [self._weight(param) for param in self._indices if param in stepped]
        after = None
        if self._device.type == "cuda":
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]
            after.record(torch.cuda.current_stream(self._device))
        gathering = _Gathering(weights, after)
        return [
            submit,
            partial(self._last.__setitem__, 0, gathering),
            partial(self._steps.put, gathering),
            *others,
        ]

    def _weight(self, param: torch.Tensor) -> _Weight:
        piece = local(param)
        begin, itemsize = piece.storage_offset() * piece.itemsize, piece.itemsize
        memory = torch.empty(0, dtype=torch.uint8, device=piece.device)
        # A version of its own, and no class that guards it.
        memory.set_(piece.untyped_storage(), begin, (piece.nbytes,), (1,))
        cuts = [self._shares.elements(param, rank)[0] for rank in range(self._shares.world_size)]
        own_begin, own_end = self._shares.elements(param)
        return _Weight(
            self._indices[param],
            memory,
            [cut * itemsize for cut in [*cuts, piece.numel()]],
            own_end - own_begin,
            (own_end - own_begin) * itemsize,
        )

    @override
    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        begin = time.perf_counter()
        # Read before the wait: a step may be submitted on another thread meanwhile.
        step_stream, last = self._step_stream, self._last[0]
        if last is not None:
            streams = {self._stream(), *([] if step_stream is None else [step_stream])}
            last.wait((self._indices[param] for param in params), streams, self._device)
        self.seconds_waited += time.perf_counter() - begin
        return step_stream is not None

    @override
    def finish(self) -> None:
        super().finish()
        last = self._last[0]
        if last is not None:
            last.wait_for_end()
            step_stream = self._step_stream
            streams = {self._stream(), *([] if step_stream is None else [step_stream])}
            last.wait(self._indices.values(), streams, self._device)

    @override
    def synchronize(self) -> None:
        super().synchronize()
        if self._last[0] is not None:
            self.finish()
            self._last[0].wait_for_copies()

    @override
    def timing(self) -> dict[str, float]:
        """As `Engine.timing`, with `bytes_gathered`: of weights that came from other ranks."""
        last = self._last[0]
        return {**super().timing(), "bytes_gathered": 0 if last is None else last.bytes_received}
