"""Flat partitions of a model on the offload engine: the data of ZeRO. Imports no DeepSpeed.

A partition is the part of a parameter group that this rank steps. Its weights are contiguous on the
device. In host memory it has a master, a gradient and, where the master has another dtype, a twin
of the weights. Bytes per parameter for a 16-bit model with fp32 master and moments: 4 + 2 + 2, and
8 for the moments, which the caller holds. All of it is announced before any is taken.

- A partition is one span of the engine, or several where updates are deferred (`zero.spans`). The
  gradients are in the engine's memory then: 7 bytes per parameter with `interval=4`, and .5 for
  weights that run ahead.
- The weights may also be in host memory, whence the caller uploads them by itself. Then they are
  their own twin: a step writes them in place, and the engine uploads nothing. Where the master has
  their dtype they are copied from it at the end of the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell import _core
from stepwell._streams import current_stream
from stepwell.access.guard import Uploads, exposed
from stepwell.access.writes import ThreadWait, Writes
from stepwell.deepspeed.zero.gradients import Gradients
from stepwell.deepspeed.zero.host_memory import HostMemory, announced, bytes_beside_state
from stepwell.deepspeed.zero.lanes import CudaLane, EngineLane
from stepwell.deepspeed.zero.partition import Fragment
from stepwell.deepspeed.zero.pending import Deferral, Pending
from stepwell.deepspeed.zero.run_gradients import RunGradients
from stepwell.deepspeed.zero.spans import Spans
from stepwell.ranks.gathering import Gatherer
from stepwell.store.engine import Engine, Submitted, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from stepwell.access.writes import Protection
    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.deepspeed.zero.swapped import SwappedPartitions
    from stepwell.ranks.peers import Peers
    from stepwell.store.selection import Selected

__all__ = ["Partitions", "Prepared"]

_LOGGER = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A step that is ready to begin."""

    operands: Mapping[int, Operand]
    owners: list[object]
    """What keeps its memory alive."""
    coming: Submitted
    """What is known of it once it has begun."""


class Partitions(Uploads):
    """Memory, steps and waits of a list of partitions, one per group.

    Attributes:
        engine: what steps.
        gradients: of all partitions.
        twins: the host side of each partition's weights; None where that is the master itself.
        claim: host memory that is announced, until it is taken.

    Args:
        partitions: of all groups.
        device: where gradients are made, and weights that are not offloaded are.
        fragments: of parameters that forwards wait for what is stepped of them: all.
        order: of the partitions, in which they are stepped; None: as they are given.
        threads: workers that step; None: as `OffloadEngine` has it.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        is_pinned: whether the host side of gradients is pinned, and that of weights where no state
            is on a volume. What waits for a drive waits little longer for other copies.
        adds_on_host: whether gradients of several backwards are summed in host memory.
        swapped: makes a volume for state that does not fit into host memory; None: all is there.
        deferral: which updates are deferred; None: none is.

    Raises:
        OSError: the device, the memory or the volume cannot be had.
        ValueError: there is not as much memory.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        *,
        device: torch.device,
        fragments: Mapping[torch.Tensor, Fragment] | None = None,
        order: Sequence[int] | None = None,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        is_pinned: bool = True,
        adds_on_host: bool = False,
        swapped: SwappedPartitions | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        self.device = device
        if swapped is not None:
            beside = sum(map(bytes_beside_state, partitions))
            limit = None if host_bytes_max is None else max(host_bytes_max - beside, 0)
            swapped.open(partitions, limit, beside=beside, finish=self.finish)
            swapped = None if swapped.volume.core is None else swapped
        self._swapped = swapped
        self.order = list(range(len(partitions))) if order is None else list(order)
        """The partitions, as they are stepped."""
        sources = None if deferral is None else deferral.sources
        self._spans = Spans(partitions, sources, self.order)
        extents = self._spans.extents
        # Moments are taken later.
        deferred = None if deferral is None else deferral.options
        self.claim, host_bytes_left = announced(
            partitions, host_bytes_max, swapped, deferred, extents
        )
        waiting = {} if fragments is None else fragments
        self.engine = Engine(
            device,
            self._spans.tensors,
            extents,
            windows={param: self._spans.windows([each]) for param, each in waiting.items()},
            threads=threads,
            deferred=deferred,
            tier=None if swapped is None else swapped.volume.tier(range(len(partitions))),
        )
        memory = HostMemory(self.engine, swapped)
        # What is deferred is pinned in any case.
        pins_weights = deferral is not None or (is_pinned and swapped is None)
        self.gradients: Gradients | RunGradients
        self.pending: Pending | None = None
        """What is deferred; None: nothing ever is."""
        if deferral is not None:
            dtypes = [partition.weight.dtype for partition in partitions]
            of_fragment = self._spans.of_fragment
            gradients = RunGradients(self.engine.core, of_fragment, dtypes, device)
            self.pending = Pending(self.engine, self._spans, gradients, deferral.weights)
            self.gradients = gradients
        else:
            core = self.engine.core
            self.gradients = Gradients(
                [
                    memory.take(each.weight.numel(), each.grad_dtype, is_pinned=is_pinned)
                    for each in partitions
                ],
                [partition.master.dtype for partition in partitions],
                device=device,
                lane=CudaLane(device, core) if device.type == "cuda" else EngineLane(core),
                is_summed_on_host=adds_on_host,
                host_bytes_left=host_bytes_left,
                end_last_step=self._end_last_step,
            )
        # The engine unpins what is added to.
        self._finalizer = weakref.finalize(self, _drain, self.gradients)
        self.twins: list[torch.Tensor | None] = [
            memory.move(group, partition, is_pinned=pins_weights)
            for group, partition in enumerate(partitions)
        ]
        self.engine.pin([])
        self.resumed = memory.resumed
        """Of partitions that a resumed volume has: how many updates they have seen."""
        # Offloaded weights with the masters that they are copies of, and the step that was copied.
        self._copies = memory.copies
        self._copied: Submitted | None = None
        self._bytes_downloaded = 0
        self._seconds_behind_last = 0.0
        self._writes: Writes[Sequence[Fragment]] = Writes(
            self._wait_for_parts, partial(self.engine.core.synchronize, stream=0)
        )
        # What the step that comes begins with.
        self._protections: list[Protection] = []
        self._has_said_why = False
        self._thread_wait = ThreadWait(device)
        # The last step of which all copies have ended.
        self._drained: Submitted | None = None
        self.are_weights_read_elsewhere = False
        """Whether weights on the device are read on streams that come after no other."""
        # Of several ranks.
        self._gatherer: Gatherer | None = None

    def pin(self, buffer: _core.Buffer) -> None:
        """Pins the memory of weights that are offloaded, as long as this object can step."""
        self.engine.pin([(buffer, 0, buffer.nbytes)])

    def arrive(self) -> None:
        """Waits until all gradients that were sent or added on the host are there."""
        if self._finalizer.alive:
            self.gradients.arrive()

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self.gradients.drop()
        # An engine that has failed says so in the next step.
        with contextlib.suppress(OSError):
            self.engine.discard()

    def let_go(self) -> None:
        """A forward or backward begins: what was copied in the last one is freed on the device."""
        self.gradients.let_go()

    # ---- what a home of DeepSpeed's state (`deepspeed.state.home`) reads of one partition ----

    def gradient(self, group: int, begin: int, numel: int) -> torch.Tensor:
        """As `Gradients.gradient`."""
        return self.gradients.gradient(Fragment(group, begin, numel))

    def set_gradient(self, group: int, begin: int, value: torch.Tensor) -> None:
        """As `Gradients.set_gradient`. As DeepSpeed has it, the norm remains what it was."""
        fragment = Fragment(group, begin, value.numel())
        self.gradients.set_gradient(fragment, value, is_norm_kept=True)

    def is_swapped(self, group: int) -> bool:
        """Whether the state of a partition is on a volume."""
        return self._swapped is not None and group in self._swapped.leases

    def pieces(self, group: int, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor] | None:
        """Pieces of a master that are good after every step; None: any view of it is.

        Those that were given out before are used no more.

        Args:
            group: the number of its partition.
            runs: first element and number of elements of each.
        """
        if self._swapped is None or not self._swapped.has_master(group):
            return None
        return self._swapped.leases[group].pieces(runs)

    # ---- the step ----

    @property
    def are_copied_late(self) -> bool:
        """Whether offloaded weights are copies of their masters, made at the end of a step."""
        return bool(self._copies)

    @property
    def is_busy(self) -> bool:
        """Whether a step is running in host memory."""
        if not self._finalizer.alive:
            return False
        return self.engine.busy or (self._gatherer is not None and self._gatherer.is_busy)

    def has_ended(self) -> bool:
        """Whether no step is running. If so, no use of what the last one has written waits.

        It has not where it has failed: what waits for it then gets its error.
        """
        if self.is_busy:
            return False
        if self._writes:
            self.finish()
        return True

    def end_last_step(self) -> None:
        """A step comes: waits until the last one is complete. `prepare` comes next.

        Raises:
            OSError: it has failed, or a drive has.
        """
        self.claim.end()
        begin = time.perf_counter()
        self.finish()
        self._seconds_behind_last = time.perf_counter() - begin
        if self._swapped is not None:
            self._swapped.volume.check()

    def prepare(self, operands: Mapping[int, Operand], weights: Sequence[torch.Tensor]) -> Prepared:
        """Makes everything ready for a step, behind `end_last_step`.

        Args:
            operands: of the partitions that are stepped, by their number.
            weights: of all partitions.

        Returns:
            what `submit` takes.

        Raises:
            ValueError: a partition cannot be stepped.
            OSError: the device or a copy of a gradient has failed.
        """
        self.gradients.complete(self.engine.core)
        self._spans.bind(self.engine.store, operands, self.gradients, weights, self.twins)
        memory = [each.memory for each in operands.values()]
        owners = [memory, list(weights), list(self.twins), *self.gradients.owners]
        coming = Submitted(current_stream(self.device), verified=self._spans.tensors)
        # Of a step that was left.
        self._protections.clear()
        return Prepared(operands, owners, coming)

    def submit(
        self,
        prepared: Prepared,
        *,
        grad_scale: float,
        at_once: Collection[Fragment] | None = None,
        begun: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Has a step begin in the background: all of it, or nothing. `forget` comes next.

        Args:
            prepared: what is stepped.
            grad_scale: the factor of all gradients.
            at_once: the step is deferred, but for these; None: it is exact.
            begun: what is called when it has begun: functions of C, without arguments.

        Raises:
            ValueError: the step cannot be taken; nothing was changed.
            OSError: the device has failed.
        """
        operands, owners, coming = prepared
        selected: list[Selected] = []
        now: set[torch.Tensor] | None = None
        if at_once is not None:
            now = {self._spans.tensors[each.span] for each in self._spans.windows(at_once)}
        selector = self.engine.selector
        if selector is not None:
            selected = selector.choose(now)
            selector.drop(now or ())
        self._bytes_downloaded, self.gradients.bytes_sent = self.gradients.bytes_sent, 0
        protections, self._protections = self._protections, []
        swapped, hypers = self._swapped, [each.hyper.core(grad_scale) for each in operands.values()]
        with contextlib.ExitStack() as stack:
            leaving = [] if swapped is None else stack.enter_context(swapped.stepping())
            self.engine.submit(
                coming,
                hypers,
                at_once=now,
                selected=selected,
                num_settled=self.engine.store.num_settled,
                owners=owners,
                order=self._spans.places,
                protections=protections,
                begun=[*begun, *leaving],
            )
        self.gradients.note_step(grad_scale)

    def forget(self) -> None:
        """The gradients since the last step have been used.

        From now on their device memory may be written or freed.
        """
        self.engine.release()
        self.gradients.let_go()

    def protect(
        self, parts: Mapping[torch.Tensor, Sequence[Fragment]], holders: Iterable[torch.Tensor]
    ) -> bool:
        """Has uses of tensors wait for the step that comes, each for its own part.

        Call it between `prepare` and `submit`.

        Args:
            parts: plain tensors that the step writes, with what they hold.
            holders: other tensors on the same memory, which are used after a wait only.

        Returns:
            Whether that is all. If not, nothing was done, and the caller calls `finish` after the
            step.
        """
        # A view refers to the tensor that it was made of, which nothing else does.
        bases = [tensor._base for tensor in parts if tensor._base is not None]
        if self._copies:
            return False
        if found := exposed(parts, [*parts, *bases, *holders], torch.Tensor):
            if not self._has_said_why:
                self._has_said_why = True
                _LOGGER.info(
                    "step() waits for all weights: a program holds memory of %d tensors that it "
                    "writes, of `%s` and more elements. hint: keep no views of partitions, nor "
                    "arrays of numpy",
                    len(found),
                    found[0].numel(),
                )
            return False
        self.begin_with(self._writes.protection([], parts))
        return True

    def begin_with(self, protection: Protection | None) -> None:
        """Has the step that comes begin with this. Call it as `protect`."""
        if protection is not None:
            self._protections.append(protection)

    def _wait_for_parts(self, parts: Iterable[Sequence[Fragment]]) -> None:
        with self._thread_wait.waiting():
            self.wait_for(fragment for part in parts for fragment in part)

    # ---- waits ----

    def end_left_step(self) -> None:
        """Called after an exception that may have come after the submit.

        When it returns, the step is complete, or there was none.
        """
        # A gradient that has not come down stops a step before the submit.
        with contextlib.suppress(OSError, RuntimeError):
            self.arrive()
        with contextlib.suppress(OSError):
            self.finish()

    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """The current stream and the step's stream wait for the weights of `params`."""
        self.gradients.let_go()
        self.engine.wait(params)

    def wait_for(self, fragments: Iterable[Fragment]) -> None:
        """As `wait`, of fragments."""
        self.gradients.let_go()
        self.engine.wait_for(self._spans.windows(fragments))

    def wait_for_all(self) -> None:
        """The current stream and the step's stream wait for all weights that come with the step.

        What of it goes on in host memory is not waited for.
        """
        self.engine.wait_for(
            [Window(span, 0, run.numel) for span, run in enumerate(self._spans.runs)]
        )

    def _end_last_step(self) -> None:
        if self.engine.busy:
            self.finish()

    def finish(self) -> None:
        """Waits until the last step is complete in host memory, and gathered where ranks gather.

        The current stream and the stream that the step began on wait for the weights. What is
        deferred stays so.

        Raises:
            OSError: the step has failed, here or on another rank that gathers.
        """
        if not self._finalizer.alive:
            return
        # Read before the wait: a step may be submitted on another thread meanwhile.
        step = self._writes.num_steps
        last = self.engine.submitted
        self.engine.finish()
        if self._gatherer is not None:
            self._gatherer.finish(self.engine.streams)
            self._gatherer.synchronize()
        if self.are_weights_read_elsewhere and self._drained is not last:
            # Of a step once: gradients that are on their way would be waited for, too.
            self.engine.synchronize()
            self._drained = last
        self._writes.clear(step)
        if self._copies and self._copied is not last:
            with torch.no_grad():
                for weight, master in self._copies:
                    weight.copy_(master)
            self._copied = last

    def settle(self) -> None:
        """Applies all that is deferred, as `Pending.settle`."""
        if self.pending is not None and self._finalizer.alive:
            self.pending.settle()

    def complete(self) -> None:
        """Waits as `finish`, with all updates: masters and moments are those of the last step."""
        self.settle()
        self.finish()

    def has_pending(self) -> bool:
        """Whether updates are deferred that no exact step has followed."""
        return self.pending is not None and self.engine.has_pending()

    def gather(self, peers: Peers) -> Gatherer:
        """Makes what brings the new weights of this rank to the others, and theirs here.

        From now on a step is complete when these have come.
        """
        self._gatherer = Gatherer(self.engine.core, peers, self.device)
        return self._gatherer

    def synchronize(self) -> None:
        """Waits until the last step is complete, and all copies have ended."""
        self.arrive()
        self.engine.synchronize()

    def end(self) -> None:
        """Waits as `synchronize`, and frees gradients and `twins`.

        Masters stay where they are in memory, and waiting for them is possible; nothing else is
        from now on. Whether gradients have come makes no difference: no step takes them.
        """
        if not self._finalizer.alive:
            return
        self.finish()
        self.drop()
        self.engine.synchronize()
        # Without a step it lasts until now.
        self.claim.end()
        self._finalizer.detach()
        self._gatherer = None
        self._writes.close()
        self.gradients.end()
        self.engine.close()
        # With it the volume's files are unlocked.
        del self.engine
        self.pending = None
        if self._swapped is not None:
            self._swapped.close()
        self.twins.clear()
        self._copies.clear()

    def timing(self) -> dict[str, float]:
        """What the last step took, with the keys of `OffloadAdamW.timing`.

        Left out is what the optimizer does before the step. With a volume also how many bytes were
        read and written since it was made.
        """
        engine = self.engine
        timing: dict[str, float] = {**engine.timing(), "gate": engine.seconds_waited}
        if self.pending is None:
            timing["bytes_downloaded"] = self._bytes_downloaded
        else:
            timing["background"] = self._seconds_behind_last
        if self._gatherer is not None:
            timing["bytes_gathered"] = self._gatherer.bytes_received
        if engine.selector is not None:
            timing["selected_share"] = engine.selector.share
            timing["selected_bytes"] = engine.selected_bytes
        if self._swapped is not None:
            timing.update(self._swapped.volume.bytes_moved())
        return timing


def _drain(gradients: Gradients | RunGradients) -> None:
    """Before the engine, which this refers to, lets go of what is pinned."""
    # In a forked child there is nothing to wait for, and what a device that has failed says was
    # said before.
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        gradients.drain()
