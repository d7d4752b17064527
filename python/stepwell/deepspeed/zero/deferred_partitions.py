"""Flat partitions whose updates are deferred: the data of ZeRO-1 and -2. Imports no DeepSpeed.

As `partitions`, but what the engine steps is a *run*: what lies of one parameter in this rank's
partition, so that its channels can be selected. Where the partition cuts a row, that part of it is
a run of its own. Masters and moments stay flat partitions: a run is a view of them.

- What is pending is applied by `finish`, before anything reads or writes masters or moments.
- The weights that ranks hold on the device are equal at any time. So `finish` leaves them as they
  are where there are several ranks: they follow with the next step, or with `upload`.

Bytes of host memory per parameter, for 16-bit weights and fp32 moments with `interval=4`: 4 + 2 +
8, 7 for gradients that wait, and .5 for weights that run ahead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _core
from stepwell._budget import GIB, announce, note_pinned
from stepwell._streams import current_stream, device_name, stream_of
from stepwell._tensors import name_of, view
from stepwell.access.under_way import without_waiting
from stepwell.deepspeed.zero.deferred_gradients import DeferredGradients, runs_of
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import host_memory
from stepwell.store.deferred import Extents, deferred_core, memory_of
from stepwell.store.selection import Selector

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from stepwell.deepspeed.zero.deferred_gradients import Run, Source
    from stepwell.deepspeed.zero.fragment import Fragment
    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.store.deferred import Deferred

__all__ = ["DeferredPartitions"]

_LOGGER = logging.getLogger(__name__)


class DeferredPartitions:
    """Gradients, norms, steps and waits of a list of partitions, whose updates are deferred.

    It has what `DeferredZeroOptimizer` and a `PartitionWork` call of `Partitions`.

    Attributes:
        gradients: the gradients that the coming step takes.
        twins: the host side of each partition's weights; None where that is the master itself.
        is_settled: whether nothing was submitted since `finish`: the next step is exact then, so
            that a run that is resumed from there has the same bits.
        lock: a thread that steps or settles has it.
        claim: host memory that is announced, until it is taken.

    Args:
        partitions: of all groups.
        sources: all fragments, in the order of the forward.
        params: the parameters whose weights they are.
        deferred: which updates are deferred.
        device: where the weights are.
        is_alone: whether no other rank has these weights.
        threads: how many workers of this process may step; None: all but one.
        host_bytes_max: the most host memory that may be taken; None: what is free.

    Raises:
        OSError: the device or the memory cannot be had.
        ValueError: there is not as much memory.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        sources: Mapping[Fragment, Source],
        params: Sequence[torch.Tensor],
        deferred: Deferred,
        *,
        device: torch.device,
        is_alone: bool,
        threads: int | None = None,
        host_bytes_max: int | None = None,
    ) -> None:
        self.device = device
        self._params = list(params)
        self._deferred = deferred
        self._is_alone = is_alone
        self._weights = [partition.weight for partition in partitions]
        self._runs = {fragment: runs_of(fragment, source) for fragment, source in sources.items()}
        runs = [run for each in self._runs.values() for run in each]
        self._indices = {run: index for index, run in enumerate(runs)}
        extents = Extents(
            [run.numel for run in runs],
            [name_of(self._weights[run.group].dtype) for run in runs],
            [run.row_len for run in runs],
        )
        # Moments are taken later.
        self.claim = _announce(partitions, extents, deferred, host_bytes_max)
        self._core, self._selected_bytes = deferred_core(
            device, device_name(device), extents, deferred, threads
        )
        self._finalizer = weakref.finalize(self, _drain, self._core)
        self.twins: list[torch.Tensor | None] = []
        for partition in partitions:
            self.twins.append(self._twin_of(partition))
        note_pinned(self, self._core.pinned_nbytes)
        self.gradients = DeferredGradients(
            self._core, self._runs, [weight.dtype for weight in self._weights], device
        )
        self._selector: Selector[Run] | None = None
        if self._selected_bytes:
            self._selector = Selector(self._core.selectable(), runs, deferred.reselect, device)
        # Tensors of the core, by where their memory is.
        self._tensors: dict[Run, tuple[tuple[int, ...], _core.AdamTensor]] = {}
        self.lock = threading.RLock()
        self._is_stepping = False
        self.is_settled = True
        self._has_pending = False
        # Of several ranks: whether masters have updates that no weight on the device has.
        self._is_ahead_of_device = False
        self._submit_stream = 0
        # None while a step is being submitted: weights that are waited for then are old ones.
        self._step_stream: int | None = 0
        self._seconds = {"gate": 0.0, "background": 0.0}

    def _twin_of(self, partition: Partition) -> torch.Tensor | None:
        """The host side of a partition's weights; None: its master is. Moves the master."""
        master, weight = partition.master, partition.weight
        is_same = master.dtype == weight.dtype
        moved = host_memory(self._core, weight.numel(), master.dtype, is_pinned=is_same)
        twin = (
            None
            if is_same
            else host_memory(self._core, weight.numel(), weight.dtype, is_pinned=True)
        )
        if master.numel() == weight.numel():
            moved.copy_(master.detach())
        elif twin is None:
            moved.copy_(weight)
        else:
            # By way of pinned memory.
            moved.copy_(twin.copy_(weight))
        master.data = moved
        return twin

    # ---- gradients ----

    def let_go(self) -> None:
        """As `Partitions.let_go`: gradients stay until their step."""

    def arrive(self) -> None:
        """As `Partitions.arrive`: nothing reads gradients in host memory but their step."""

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self.gradients.drop()

    # ---- the step ----

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """A step is decided and submitted on this thread: what it reads applies nothing."""
        with self.lock:
            self._is_stepping = True
            try:
                yield
            finally:
                self._is_stepping = False

    def score(self, *, is_deferred: bool, is_selected: bool) -> None:
        """Scores channels of which some may be selected; the norm that comes next is waited for.

        Args:
            is_deferred: whether the coming step is.
            is_selected: whether an exact step is to select.
        """
        if self._selector is None:
            return
        if not is_deferred and not is_selected:
            self._selector.score([], [], None)
            return
        grads = dict(self.gradients.by_run())
        group = self._core.next_group() if is_deferred else None
        self._selector.score(list(grads), list(grads.values()), group)

    def prepare(
        self,
        operands: Mapping[int, Operand],
        *,
        grad_scale: float,
        at_once: Collection[Fragment] | None,
    ) -> list[partial[Any]]:
        """Makes everything ready for a step, and returns the calls that start it in the background.

        They are made one directly after the other. The first raises ValueError where the step
        cannot be taken, with nothing changed, and OSError where the device has failed. After them
        comes `forget`, or `drop` if it raised.

        Args:
            operands: of all groups that have elements, in the order in which they are stepped.
            grad_scale: the factor of all gradients.
            at_once: the step is deferred, but for these; None: it is exact.
        """
        begin = time.perf_counter()
        self.claim.end()
        self._finish_job()
        self._seconds = {"gate": 0.0, "background": time.perf_counter() - begin}
        self.gradients.take_zeros()
        order = {group: place for place, group in enumerate(operands)}
        fragments = sorted(self._runs, key=lambda each: order[each.group])
        runs = [(each, run) for each in fragments for run in self._runs[each]]
        hypers = {group: one.hyper.core(grad_scale) for group, one in operands.items()}
        now: set[Run] = set()
        deferral: dict[str, Any] = {}
        if at_once is not None:
            now = {run for fragment, run in runs if fragment in at_once}
            deferral = {
                "deferred": self._deferred.predicted_updates,
                "at_once": [run in now for _, run in runs],
            }
        if self._selector is not None:
            deferral["selected"] = self._selector.choose(None if at_once is None else now)
            self._selector.drop(now)
            deferral["grads"] = [self.gradients.address(fragment, run) for fragment, run in runs]
        self._submit_stream, self._step_stream = self.stream(), None
        submit = partial(
            self._core.submit,
            [self._indices[run] for _, run in runs],
            [self._tensor(run, operands[run.group]) for _, run in runs],
            weights=[self._address(run) for _, run in runs],
            steps=[operands[run.group].step for _, run in runs],
            hypers=[hypers[run.group] for _, run in runs],
            owners=[
                self._weights,
                list(self.twins),
                [(one.master, one.state) for one in operands.values()],
            ],
            stream=self._submit_stream,
            **deferral,
        )
        return [
            submit,
            partial(setattr, self, "_step_stream", self._submit_stream),
            partial(setattr, self, "is_settled", False),
            partial(setattr, self, "_has_pending", at_once is not None),
            partial(setattr, self, "_is_ahead_of_device", False),
        ]

    def _address(self, run: Run) -> int:
        weight = self._weights[run.group]
        return weight.data_ptr() + run.begin * weight.element_size()

    def _tensor(self, run: Run, operand: Operand) -> _core.AdamTensor:
        """A run as the core takes it. The state of a partition seldom moves."""
        state, twin = operand.state, self.twins[run.group]
        held = {"param": operand.master.detach()}
        held |= {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        if twin is not None:
            held["weight_out"] = twin
        key = tuple(each.data_ptr() for each in held.values())
        known = self._tensors.get(run)
        if known is None or known[0] != key:
            views: dict[str, Any] = {
                name: view(each.narrow(0, run.begin, run.numel)) for name, each in held.items()
            }
            known = self._tensors[run] = key, _core.AdamTensor(**views)
        return known[1]

    def forget(self) -> None:
        """The gradients since the last step have been used.

        From now on their device memory may be written or freed.
        """
        self.gradients.release(self._submit_stream)

    # ---- waiting ----

    def settle(self) -> None:
        """As `Partitions.settle`: when it returns, the step is complete, or there was none."""
        with contextlib.suppress(OSError):
            self._finish_job()

    def wait(self, fragments: Iterable[Fragment]) -> bool:
        """The current stream and the step's stream wait for the weights of `fragments` that land.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        # Read before the wait: a step may be submitted on another thread meanwhile.
        started, step_stream = time.perf_counter(), self._step_stream
        streams = self._streams(step_stream)
        for fragment in fragments:
            for run in self._runs[fragment]:
                for stream in streams:
                    self._core.wait(self._indices[run], 0, run.numel, stream=stream)
        self._seconds["gate"] += time.perf_counter() - started
        return step_stream is not None

    def wait_for_landing(self) -> None:
        """The current stream and the step's stream wait for all weights that land."""
        self.wait(self._runs)

    def finish_job(self) -> None:
        """The job that runs is over, and both streams wait for its weights. Applies nothing."""
        if self._finalizer.alive:
            self._finish_job()

    def _finish_job(self) -> None:
        for stream in self._streams(self._step_stream):
            self._core.finish(stream=stream)

    def _streams(self, step_stream: int | None) -> set[int]:
        """The current stream, and that of the last step."""
        return {self.stream(), *([] if step_stream is None else [step_stream])}

    def finish(self) -> None:
        """Applies all that is deferred; masters and moments are those of the last step.

        One rank's weights on the device are, too. In a step it waits for the one before.

        Raises:
            OSError: the step or the device has failed.
        """
        if not self._finalizer.alive:
            return
        with self.lock:
            if self._is_stepping:
                self._finish_job()
                return
            self.is_settled = True
            if self._selector is not None:
                self._selector.reset()
            self._finish_job()
            if self._has_pending:
                self._apply_all()

    def _apply_all(self) -> None:
        kept = [] if self._is_alone else [weight.clone() for weight in self._weights]
        with without_waiting(), torch.no_grad():
            if self._is_alone:
                torch.autograd.graph.increment_version(self._params)
            if self.device.type == "cuda" and self._submit_stream != self.stream():
                # What the last step's stream holds may read weights.
                other = stream_of(self._submit_stream, self.device)
                torch.cuda.current_stream(self.device).wait_stream(other)
            self._core.settle(stream=self.stream())
            self._has_pending = False
            self._finish_job()
            for weight, before in zip(self._weights, kept, strict=False):
                weight.copy_(before)
        self._is_ahead_of_device = not self._is_alone

    def upload(self, masters: Sequence[torch.Tensor]) -> None:
        """Of several ranks: this rank's weights on the device are those of the last step."""
        self.finish()
        if not self._is_ahead_of_device:
            return
        with torch.no_grad():
            for weight, twin, master in zip(self._weights, self.twins, masters, strict=True):
                weight.copy_(master.detach() if twin is None else twin)
        self._is_ahead_of_device = False

    def has_pending(self) -> bool:
        """Whether updates are deferred that no exact step has followed."""
        return self._has_pending

    @property
    def is_landed(self) -> bool:
        """Whether the weights on the device lack no update."""
        return not self._has_pending and not self._is_ahead_of_device

    def synchronize(self) -> None:
        """Waits until the last step is complete, and all copies have ended."""
        self._core.synchronize(stream=self.stream())

    def stream(self) -> int:
        """The current stream of the device, as the engine knows it."""
        return current_stream(self.device)

    def timing(self) -> dict[str, float]:
        """What the last step took, with the keys of `OffloadAdamW.timing`."""
        timing = {**self._core.timing(), **self._seconds}
        if self._selector is not None:
            timing |= {
                "selected_share": self._selector.share,
                "selected_bytes": self._selected_bytes,
            }
        return timing


def _announce(
    partitions: Sequence[Partition],
    extents: Extents,
    deferred: Deferred,
    host_bytes_max: int | None,
) -> _core.MemoryClaim:
    memory = memory_of(extents, deferred)
    state, crossing, held = 0, memory.pinned, 0
    for master, weight, _, moments_bytes, _ in partitions:
        is_same = weight.dtype == master.dtype
        state += moments_bytes + (0 if is_same else weight.numel() * master.dtype.itemsize)
        crossing += weight.nbytes
        held += master.nbytes
    if memory.selected:
        _LOGGER.info("%.2f GiB of device memory for selected channels", memory.selected / GIB)
    return announce(
        sum(partition.weight.numel() for partition in partitions),
        state=state,
        crossing=crossing,
        limit=host_bytes_max,
        held=held,
        waiting=memory.pinned,
    )


def _drain(core: _core.OffloadEngine) -> None:
    """What is deferred is applied, to memory that the engine's job holds."""
    # Broken, or another process's: then nothing runs that could be waited for.
    with contextlib.suppress(ValueError, OSError):
        core.synchronize(stream=0)
        if core.settle(stream=0):
            core.synchronize(stream=0)
