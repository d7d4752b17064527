"""Flat partitions of a model on the offload engine: the data of ZeRO. Imports no DeepSpeed.

A partition is the part of a parameter group that this rank steps. Its weights are contiguous on the
device. In host memory it has a master, a gradient and, where the master has another dtype, a twin
of the weights. Bytes per parameter for a 16-bit model with fp32 master and moments: 4 + 2 + 2, and
8 for the moments, which the caller holds. All of it is announced before any is taken.

The weights may also be in host memory, whence the caller uploads them by itself. Then they are
their own twin: a step writes them in place, and the engine uploads nothing. Where the master has
their dtype they are copied from it at the end of the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._budget import announce, note_pinned
from stepwell._streams import current_stream, device_name
from stepwell._tensors import tensor_on
from stepwell.access.guard import Uploads, exposed
from stepwell.access.writes import ThreadWait, Writes
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.gradients import Gradients
from stepwell.deepspeed.zero.lanes import CudaLane, EngineLane, Lane, ThreadLane
from stepwell.ranks.gathering import Gatherer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stepwell.deepspeed.zero.partition import Partition
    from stepwell.deepspeed.zero.swapped import SwappedPartitions
    from stepwell.ranks.peers import Peers

__all__ = [
    "FragmentUploads",
    "PartitionWork",
    "Partitions",
    "Update",
    "host_memory",
]


_LOGGER = logging.getLogger(__name__)


def host_memory(
    engine: _core.OffloadEngine, numel: int, dtype: torch.dtype, *, is_pinned: bool
) -> torch.Tensor:
    """Host memory of its own for so many elements, pinned by `engine` if `is_pinned`; zeros."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    buffer = _core.Buffer(numel * dtype.itemsize)
    if is_pinned:
        engine.pin(buffer)
    return tensor_on(buffer).view(dtype)


class Update(NamedTuple):
    """One partition of a step."""

    group: int
    tensor: _core.AdamTensor
    step: int
    hyper: _core.Hyper


class Partitions:
    """Memory, steps and waits of a list of partitions, one per group.

    Attributes:
        gradients: of all partitions.
        twins: the host side of each partition's weights; None where that is the master itself.
        claim: host memory that is announced, until it is taken.

    Args:
        partitions: of all groups.
        device: where gradients are made, and weights that are not offloaded are.
        threads: workers that step; None: as `OffloadEngine` has it.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        is_pinned: whether the host side of gradients and weights is pinned where no state is on a
            volume. What waits for a drive waits little longer for other copies.
        adds_on_host: whether gradients of several backwards are summed in host memory.
        accumulation_steps: the backwards of a step, at first. Sums of several, which come up and go
            down again in each, are pinned beside a volume too. A program may change it: results do
            not depend on it, and sums that are not pinned take longer.
        swapped: makes a volume for state that does not fit into host memory; None: all is there.

    Raises:
        OSError: the device, the memory or the volume cannot be had.
        ValueError: there is not as much memory.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        *,
        device: torch.device,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        is_pinned: bool = True,
        adds_on_host: bool = False,
        accumulation_steps: int = 1,
        swapped: SwappedPartitions | None = None,
    ) -> None:
        self.device = device
        numels = [partition.weight.numel() for partition in partitions]
        if swapped is not None:
            beside = sum(map(_bytes_beside_state, partitions))
            limit = None if host_bytes_max is None else max(host_bytes_max - beside, 0)
            swapped.open(partitions, limit, beside=beside, threads=threads, finish=self.finish)
            swapped = None if swapped.core is None else swapped
        # Moments are taken later.
        self.claim, host_bytes_left = _announce(partitions, host_bytes_max, swapped)
        pins_sums = is_pinned and adds_on_host and accumulation_steps > 1
        is_pinned = is_pinned and swapped is None
        pins_grads = is_pinned or pins_sums
        self._swapped = swapped
        self._engine = _core.OffloadEngine(
            device_name(self.device),
            numels,
            threads=threads,
            swap=None if swapped is None else swapped.core,
            swapped=None if swapped is None else swapped.indices(len(numels)),
        )
        self._submit_stream = 0
        # None while a step is being submitted: weights that are waited for then are old ones.
        self._step_stream: int | None = 0
        grads: list[torch.Tensor] = []
        self.gradients = Gradients(
            grads,
            [partition.master.dtype for partition in partitions],
            device=self.device,
            lane=self._lane(is_pinned=pins_grads),
            is_summed_on_host=adds_on_host,
            host_bytes_left=host_bytes_left,
            end_last_step=self._end_last_step,
        )
        # The engine unpins what is added to.
        self._finalizer = weakref.finalize(self, _drain, self._engine, self.gradients)
        self.twins: list[torch.Tensor | None] = []
        # Offloaded weights with the masters that they are copies of, and whether the last step has
        # not been copied.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_uncopied = False
        self.resumed: dict[int, int] = {}
        """Of partitions that a resumed volume has: how many updates they have seen."""
        for group, (master, weight, grad_dtype, _, is_offloaded) in enumerate(partitions):
            numel, is_same = weight.numel(), master.dtype == weight.dtype
            if swapped is not None and swapped.has_master(group):
                host_side = (
                    weight
                    if is_offloaded
                    else host_memory(self._engine, numel, weight.dtype, is_pinned=is_pinned).copy_(
                        weight
                    )
                )
                self._begin(group, host_side, weight)
                self.twins.append(host_side)
                grads.append(host_memory(self._engine, numel, grad_dtype, is_pinned=pins_grads))
                continue
            moved = host_memory(
                self._engine,
                numel,
                master.dtype,
                is_pinned=is_pinned and is_same and not is_offloaded,
            )
            twin: torch.Tensor | None = None
            if is_same:
                self._copies += [(weight, master)] if is_offloaded else []
            elif is_offloaded:
                twin = weight
            else:
                twin = host_memory(self._engine, numel, weight.dtype, is_pinned=is_pinned)
            if master.numel() == numel:
                moved.copy_(master.detach())
            elif twin is None or is_offloaded:
                moved.copy_(weight)
            else:
                # By way of pinned memory, and widened by all cores.
                moved.copy_(twin.copy_(weight))
            master.data = moved
            if swapped is not None and group in swapped:
                self._begin(group, master.detach(), weight)
            self.twins.append(twin)
            grads.append(host_memory(self._engine, numel, grad_dtype, is_pinned=pins_grads))
        note_pinned(self, self._engine.pinned_nbytes)
        self._is_offloaded = [partition.is_offloaded for partition in partitions]
        # Of the step before.
        self._bytes_downloaded = 0
        self.seconds_waited = 0.0
        """Of threads, for weights of the last step."""
        self._writes: Writes[Sequence[Fragment]] = Writes(
            self._wait_for_parts, partial(self._engine.synchronize, stream=0)
        )
        self._has_said_why = False
        self._thread_wait = ThreadWait(device)
        # Of steps: how many were submitted, and of which all copies have ended.
        self._last_step = self._drained_step = 0
        self.are_weights_read_elsewhere = False
        """Whether weights on the device are read on streams that come after no other."""
        # Of several ranks.
        self._gatherer: Gatherer | None = None

    def _lane(self, *, is_pinned: bool) -> Lane:
        """The way down of gradients, to host memory that is pinned or not."""
        if self.device.type != "cuda":
            return EngineLane(self._engine)
        return CudaLane(self.device, self._engine) if is_pinned else ThreadLane(self.device)

    def _begin(self, group: int, host_side: torch.Tensor, weight: torch.Tensor) -> None:
        """The volume is told of the host side of a partition's weights.

        Both are overwritten where it was resumed.
        """
        assert self._swapped is not None
        if count := self._swapped.begin(group, host_side):
            self.resumed[group] = count
            weight.copy_(host_side)

    def pin(self, buffer: _core.Buffer) -> None:
        """Pins the memory of weights that are offloaded, as long as this object can step."""
        self._engine.pin(buffer)
        note_pinned(self, self._engine.pinned_nbytes)

    def arrive(self) -> None:
        """Waits until all gradients that were sent or added on the host are there."""
        if self._finalizer.alive:
            self.gradients.arrive()

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self.gradients.drop()
        self._engine.discard()

    def let_go(self) -> None:
        """A forward or backward begins: what was copied in the last one is freed on the device."""
        self.gradients.let_go()

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
        return self._engine.busy or (self._gatherer is not None and self._gatherer.is_busy)

    def has_ended(self) -> bool:
        """Whether no step is running. If so, no use of what the last one has written waits.

        It has not where it has failed: what waits for it then gets its error.
        """
        if self.is_busy:
            return False
        if self._writes:
            self.finish()
        return True

    def stepped_grads(self) -> list[torch.Tensor]:
        """As `Gradients.stepped`, after the last step is complete."""
        self.finish()
        return self.gradients.stepped()

    def prepare(
        self,
        updates: Sequence[Update],
        weights: Sequence[torch.Tensor],
        in_use: Sequence[object],
        *,
        grad_scale: float,
    ) -> list[partial[Any]]:
        """Makes everything ready for a step, and returns the calls that start it in the background.

        They are made one directly after the other. The first raises ValueError where the step
        cannot be taken, with nothing changed, and OSError where the device has failed. After them
        comes `forget`, or `drop` if it raised.

        Args:
            updates: all partitions, in the order in which they are stepped; their tensors have
                `stepped_grads` and `twins`.
            weights: the partitions' weights.
            in_use: what keeps the memory of the updates alive; held until the step has ended.
            grad_scale: the factor of all gradients.
        """
        self.claim.end()
        self.finish()
        if self._swapped is not None:
            self._swapped.check()
        self.gradients.order(self._engine)
        groups = [update.group for update in updates]
        leaving: list[partial[Any]] = []
        if self._swapped is not None:
            in_use = [*in_use, self._swapped.in_use(groups)]
            leaving = self._swapped.leaving(groups)
        self._bytes_downloaded, self.gradients.bytes_sent = self.gradients.bytes_sent, 0
        self.seconds_waited = 0.0
        self._submit_stream, self._step_stream = self.stream(), None
        submit = partial(
            self._engine.submit,
            groups,
            [update.tensor for update in updates],
            weights=[
                None if self._is_offloaded[update.group] else weights[update.group].data_ptr()
                for update in updates
            ],
            steps=[update.step for update in updates],
            hypers=[update.hyper for update in updates],
            owners=[*in_use, list(weights), list(self.twins), *self.gradients.owners],
            stream=self._submit_stream,
        )
        return [
            submit,
            partial(setattr, self, "_step_stream", self._submit_stream),
            partial(setattr, self, "_is_uncopied", bool(self._copies)),
            partial(setattr, self, "_last_step", self._last_step + 1),
            *self.gradients.use(grad_scale),
            *leaving,
        ]

    def forget(self) -> None:
        """The gradients since the last step have been used.

        From now on their device memory may be written or freed.
        """
        self._engine.release(stream=self._submit_stream)
        self.gradients.let_go()

    def protect(
        self, parts: Mapping[torch.Tensor, Sequence[Fragment]], holders: Iterable[torch.Tensor]
    ) -> bool:
        """Has uses of tensors wait for the step that comes, each for its own part.

        Call it between `prepare` and its calls.

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
        self._writes.protect(parts)
        return True

    def _wait_for_parts(self, parts: Iterable[Sequence[Fragment]]) -> bool:
        with self._thread_wait.waiting():
            return self.wait(fragment for part in parts for fragment in part)

    def settle(self) -> None:
        """Called after an exception that may have come after the submit.

        When it returns, the step is complete, or there was none.
        """
        # A gradient that has not come down stops a step before the submit.
        with contextlib.suppress(OSError, RuntimeError):
            self.arrive()
        with contextlib.suppress(OSError):
            if self._step_stream is None:
                # None was submitted: waits are for the last one again, and end it.
                self._step_stream = self._submit_stream
            self.finish()

    def wait(self, fragments: Iterable[Fragment]) -> bool:
        """The current stream and the step's stream wait for the new weights of `fragments`.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        self.gradients.let_go()
        # Read before the wait: a step may be submitted on another thread meanwhile.
        started, step_stream = time.perf_counter(), self._step_stream
        streams = self.streams(step_stream)
        for group, begin, numel in fragments:
            for stream in streams:
                self._engine.wait(group, begin, begin + numel, stream=stream)
        self.seconds_waited += time.perf_counter() - started
        return step_stream is not None

    def _end_last_step(self) -> None:
        if self._engine.busy:
            self.finish()

    def finish(self) -> None:
        """Waits until the last step is complete in host memory, and gathered where ranks gather.

        The current stream and the stream that the step began on wait for the weights.

        Raises:
            OSError: the step has failed, here or on another rank that gathers.
        """
        if not self._finalizer.alive:
            return
        # Read before the wait: a step may be submitted on another thread meanwhile.
        step, step_stream = self._writes.num_steps, self._step_stream
        last = self._last_step
        for stream in self.streams(step_stream):
            self._engine.finish(stream=stream)
        if self._gatherer is not None:
            self._gatherer.finish(self.streams(step_stream))
            self._gatherer.synchronize()
        if self.are_weights_read_elsewhere and self._drained_step != last:
            # Of a step once: gradients that are on their way would be waited for, too.
            self._engine.synchronize(stream=self.stream())
            self._drained_step = last
        if step_stream is not None:
            self._writes.clear(step)
        if self._is_uncopied:
            with torch.no_grad():
                for weight, master in self._copies:
                    weight.copy_(master)
            self._is_uncopied = False

    @property
    def step_stream(self) -> int | None:
        """The stream that the last step was submitted on; None while one is being submitted."""
        return self._step_stream

    def gather(self, peers: Peers) -> Gatherer:
        """Makes what brings the new weights of this rank to the others, and theirs here.

        From now on a step is complete when these have come.
        """
        self._gatherer = Gatherer(self._engine, peers, self.device)
        return self._gatherer

    def streams(self, step_stream: int | None) -> set[int]:
        """The current stream, and that of the last step."""
        return {self.stream(), *([] if step_stream is None else [step_stream])}

    def synchronize(self) -> None:
        """Waits until the last step is complete, and all copies have ended."""
        self.arrive()
        self._engine.synchronize(stream=self.stream())

    def end(self) -> None:
        """Waits as `synchronize`, and frees gradients and `twins`.

        Masters stay where they are in memory, and waiting for them is possible; nothing else is
        from now on. Whether gradients have come makes no difference: no step takes them.
        """
        if not self._finalizer.alive:
            return
        self.finish()
        self.drop()
        self._engine.synchronize(stream=self.stream())
        # Without a step it lasts until now.
        self.claim.end()
        self._finalizer.detach()
        self._gatherer = None
        self._writes.close()
        del self._engine
        self.gradients.end()
        if self._swapped is not None:
            self._swapped.close()
        self.twins.clear()
        self._copies.clear()

    def stream(self) -> int:
        """The current stream of the device, as the engine knows it."""
        return current_stream(self.device)

    def timing(self) -> dict[str, float]:
        """What the last step took, with the keys of `OffloadAdamW.timing`.

        Left out is what the optimizer does before the step. With a volume also how many bytes were
        read and written since it was made.
        """
        return {
            **self._engine.timing(),
            "gate": self.seconds_waited,
            **({} if self._gatherer is None else {"bytes_gathered": self._gatherer.bytes_received}),
            "bytes_downloaded": self._bytes_downloaded,
            **({} if self._swapped is None else self._swapped.bytes_moved()),
        }


class PartitionWork:
    """The work on one partition that is under way: what its `Home` waits for, and its gradient.

    Also where its state is.

    Args:
        partitions: what steps it.
        group: its number.
        swapped: has the state that is on a volume; None: all is in host memory.
    """

    def __init__(
        self, partitions: Partitions, group: int, swapped: SwappedPartitions | None = None
    ) -> None:
        self._partitions = partitions
        self._group = group
        self._swapped = swapped

    def finish(self) -> None:
        """Waits until the last step is complete."""
        self._partitions.finish()

    def gradient(self, begin: int, numel: int) -> torch.Tensor:
        """As `Gradients.gradient`."""
        return self._partitions.gradients.gradient(Fragment(self._group, begin, numel))

    def set_gradient(self, begin: int, value: torch.Tensor) -> None:
        """As `Gradients.set_gradient`. As DeepSpeed has it, the norm remains what it was."""
        fragment = Fragment(self._group, begin, value.numel())
        self._partitions.gradients.set_gradient(fragment, value, is_norm_kept=True)

    @property
    def is_swapped(self) -> bool:
        """Whether its state is on a volume."""
        return self._swapped is not None and self._group in self._swapped

    def pieces(self, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor] | None:
        """Pieces of the master that are good after every step; None: any view of it is.

        Those that were given out before are used no more.

        Args:
            runs: first element and number of elements of each.
        """
        if self._swapped is None or not self._swapped.has_master(self._group):
            return None
        return self._swapped.pieces(self._group, runs)


class FragmentUploads(Uploads):
    """New weights of parameters: what a `Gate` waits for.

    Args:
        partitions: what steps them.
        fragments: each parameter's fragment, which holds the whole parameter.
    """

    def __init__(self, partitions: Partitions, fragments: Mapping[torch.Tensor, Fragment]) -> None:
        self._partitions = partitions
        self._fragments = fragments

    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        """The current stream and the step's stream wait for the weights of `params`.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        return self._partitions.wait(self._fragments[param] for param in params)

    def finish(self) -> None:
        """The current stream waits for all of them."""
        self._partitions.finish()


def _bytes_beside_state(partition: Partition) -> int:
    """What a partition takes in host memory where all its state is on a volume."""
    master, weight, grad_dtype, _, is_offloaded = partition
    is_same = weight.dtype == master.dtype
    weights = (0 if is_offloaded else weight.nbytes) + (
        weight.nbytes if is_same and is_offloaded else 0
    )
    return weights + weight.numel() * grad_dtype.itemsize


def _announce(
    partitions: Sequence[Partition],
    host_bytes_max: int | None,
    swapped: SwappedPartitions | None,
) -> tuple[_core.MemoryClaim, int | None]:
    """Announces what partitions take.

    Returns the claim of it, which lasts until all is taken, and what is left of `host_bytes_max`.
    """
    state = crossing = held = 0
    for group, (master, weight, grad_dtype, moments_bytes, is_offloaded) in enumerate(partitions):
        numel, is_same = weight.numel(), weight.dtype == master.dtype
        # Then the master itself is what is uploaded.
        is_upload = is_same and not is_offloaded
        crossing += weight.nbytes + numel * grad_dtype.itemsize
        held += weight.nbytes if is_offloaded else 0
        if swapped is None or group not in swapped:
            state += moments_bytes
        if swapped is None or not swapped.has_master(group):
            state += 0 if is_upload else numel * master.dtype.itemsize
            held += master.nbytes
    if swapped is not None:
        state += swapped.memory_bytes
        held += swapped.memory_bytes
    claim = announce(
        sum(partition.weight.numel() for partition in partitions),
        state=state,
        crossing=crossing,
        limit=host_bytes_max,
        held=held,
    )
    return claim, None if host_bytes_max is None else host_bytes_max - state - crossing


def _drain(engine: _core.OffloadEngine, gradients: Gradients) -> None:
    # In a forked child there is nothing to wait for, and what a device that has failed says was
    # said before.
    waits: list[Callable[[], object]] = [
        gradients.drain_copies,
        partial(engine.synchronize, stream=0),
        gradients.wait_for_sums,
    ]
    for wait in waits:
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            wait()
