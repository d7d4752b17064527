"""The core's offload engine over torch tensors: streams, addresses, and the memory behind them.

It steps *spans*: each has one state in host memory, and a weight on the device. A parameter is one
of its own. Of a partition of ZeRO it is all of it; or, where updates are deferred, what lies of one
parameter in it. What waits for a parameter waits for *windows*: the elements of spans that are its.

- The core holds the storage of every tensor that a copy or a step reads or writes until that has
  ended. So a gradient may be dropped, a state replaced, and a parameter given other memory at any
  time. Gradients may be written in place, and their storage freed, by what comes on a stream that
  was ordered after their copies: at the end of a backward (`order_after_copies`), or when `step`
  has `release`d them. Before that no stream can wait for copies which the device does not have yet.
- A step ends before the core is freed, also where the garbage collector takes all of it at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._budget import note_pinned
from stepwell._sharding import is_dtensor, local
from stepwell._streams import current_stream, device_name, stream_of
from stepwell.access.descriptive import without_waiting
from stepwell.access.guard import Uploads
from stepwell.access.writes import LOCK
from stepwell.store.contents import Contents
from stepwell.store.deferred import deferred_core
from stepwell.store.selection import Selector
from stepwell.store.wait_order import WaitOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell._state import State
    from stepwell.access.writes import Protection
    from stepwell.store.deferred import Deferred, Extents
    from stepwell.store.selection import Selected
    from stepwell.store.twins import Twins

_LOGGER = logging.getLogger(__name__)

__all__ = ["Engine", "Submitted", "Window"]


def _close(core: _core.OffloadEngine, store: _core.Store) -> None:
    """The optimizer is gone: what it has deferred is applied, to memory that the store holds."""
    # Broken, or another process's: then nothing runs that could be waited for.
    with contextlib.suppress(OSError, ValueError):
        core.synchronize()
        if core.settle():
            core.synchronize()
    store.note_settled()


class Window(NamedTuple):
    """Elements of a span, which something waits for by themselves."""

    span: int
    """Its number."""
    begin: int
    """The first element, within the span."""
    end: int
    """Behind the last one."""


class Submitted(NamedTuple):
    """What is to be known of a step from the moment on in which it has begun."""

    stream: int
    """The stream that it began on."""
    swapping: Sequence[tuple[torch.Tensor, State, State]] = ()
    """State that it has written to the volume: of each parameter as it was, and as it is then."""
    params: Sequence[torch.Tensor] = ()
    """What it steps."""
    verified: Sequence[torch.Tensor] = ()
    """Of these the ones whose fingerprints it verifies, and takes."""


class Engine(Uploads):
    """Steps spans beside a device, in the background.

    Args:
        device: where the weights are.
        spans: a tensor that stands for each span, in the order of the forward: a parameter, or one
            of its own.
        extents: of the same spans.
        windows: of each parameter those that it waits for; None: the spans are the parameters.
        twins: the host sides of parameters, which programs may write on the device; None: the
            caller has the memory, and what is written there is not looked for.
        uploaded: those of them whose new weights go to the device; None: all. For others none is
            looked for.
        threads: workers that step; None: as `OffloadEngine` has it.
        threads_share: which share of these step where updates are deferred. A part of a model takes
            as long with that part of them as the whole with all, and leaves cores.
        deferred: which updates are deferred; None: none is.
        tier: what has the state of some spans, as the core is told it; None: nothing has.
        label: what errors call a parameter whose updates are deferred.
        lock: what a thread has that submits a step or settles; None: one of its own.

    Raises:
        OSError: the device cannot be had.
    """

    def __init__(
        self,
        device: torch.device,
        spans: Sequence[torch.Tensor],
        extents: Extents,
        *,
        windows: Mapping[torch.Tensor, Sequence[Window]] | None = None,
        twins: Twins | None = None,
        uploaded: Sequence[torch.Tensor] | None = None,
        threads: int | None = None,
        threads_share: float = 1.0,
        deferred: Deferred | None = None,
        tier: Mapping[str, Any] | None = None,
        label: Callable[[torch.Tensor], str] = str,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._device = device
        self._twins = twins
        self._spans = list(spans)
        self._indices = {id(span): index for index, span in enumerate(self._spans)}
        if windows is None:
            windows = {
                span: [Window(index, 0, extents.numels[index])]
                for index, span in enumerate(self._spans)
            }
        self._params = list(windows)
        # By the parameter's id (`twins`): the hash of a tensor is a function in Python.
        self._windows = {id(param): list(parts) for param, parts in windows.items()}
        self._order = WaitOrder(len(self._spans))
        self._is_sharded = any(map(is_dtensor, self._spans))
        self._deferred = deferred
        self._label = label
        self.selector: Selector[torch.Tensor] | None = None
        """Chooses the channels that are stepped on the device; None: none is."""
        self.selected_bytes = 0
        """Device memory for their state."""
        if deferred is None:
            self._core = _core.OffloadEngine(
                device_name(device), extents.numels, threads=threads, **(tier or {})
            )
        else:
            self._core, self.selected_bytes = deferred_core(
                device, device_name(device), extents, deferred, threads, tier, threads_share
            )
            if self.selected_bytes:
                segments = self._core.selectable()
                self.selector = Selector(segments, self._spans, deferred.reselect, device)
        self.store = _core.Store(is_beside=True, engine=self._core)
        """The spans with their states. It has what deferred steps have left pending."""
        self.store.add(self._spans)
        # They own the memory of all twins.
        self._buffers = [] if twins is None else twins.buffers
        self.contents: Contents | None = None
        """Which weights the program has written; None: that is not looked for."""
        if twins is not None and (uploaded is None or uploaded):
            self.contents = Contents(
                self._core,
                self.store,
                self._spans,
                twins,
                device=device,
                stream=partial(current_stream, device),
                uploaded=uploaded,
            )
        self._is_settling = self._is_stepping = False
        self.lock = threading.RLock() if lock is None else lock
        """A thread that submits or settles has it: a look on another thread may settle."""
        # The last step when all was applied.
        self._settled: Submitted | None = None
        # The last step whose gradients may be written.
        self._released: Submitted | None = None
        self.seconds_waited = 0.0
        """How long forwards have waited for weights since the last step."""
        self._finalizer = weakref.finalize(self, _close, self._core, self.store)

    @property
    def core(self) -> _core.OffloadEngine:
        """The core's engine, for what brings gradients to host memory or gathers weights."""
        return self._core

    def pin(self, memory: Iterable[tuple[_core.Buffer, int, int]]) -> None:
        """Pins bytes of buffers, and keeps these, as long as this can step.

        Raises:
            OSError: the device refuses.
        """
        for buffer, begin, end in memory:
            self._core.pin(buffer, begin, end)
        note_pinned(self, self._core.pinned_nbytes)

    def _stream(self) -> int:
        return current_stream(self._device)

    @property
    def submitted(self) -> Submitted | None:
        """The last step that has begun; None: none has."""
        # The store is a step's while it looks, on whichever thread.
        with self.lock:
            found: Submitted | None = self.store.record
            return found

    @property
    def _step_stream(self) -> int:
        submitted = self.submitted
        return self._stream() if submitted is None else submitted.stream

    @property
    def streams(self) -> set[int]:
        """The current stream, and that of the last step."""
        return {self._stream(), self._step_stream}

    @property
    def is_settled(self) -> bool:
        """Whether no step has begun since `settle`, which may have found nothing to do."""
        return self._settled is self.submitted

    def make_exact(self) -> None:
        """The next step is exact, and applies all that is pending."""
        self._settled = self.submitted

    def note_settled(self) -> None:
        """Nothing is pending."""
        self.store.note_settled()
        self.make_exact()

    @property
    def is_released(self) -> bool:
        """Whether the gradients of the last step may be written."""
        return self._released is self.submitted

    @property
    def held(self) -> Collection[int]:
        """The ids of the parameters whose storage it keeps alive between deferred steps.

        By one reference each.
        """
        with self.lock:
            return set(map(id, self.store.held))

    @property
    def pending_params(self) -> list[torch.Tensor]:
        """The parameters of which the device may lack an update, or have a predicted weight.

        Deferred steps have stepped them, and no exact step has followed. Those that get no gradient
        any more have their own weight after `2 * interval + 1` deferred steps.
        """
        with self.lock:
            found: list[torch.Tensor] = self.store.pending
            return found

    def has_pending(self) -> bool:
        """Whether there is any in `pending_params`."""
        return bool(self.pending_params)

    @property
    def busy(self) -> bool:
        """Whether a step is running on the host."""
        return self._core.busy

    def take(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Copies contiguous gradients to the host, in the background.

        After what the current stream holds now. Not while a step is running, unless updates are
        deferred.
        """
        assert self._twins is not None
        pairs = [(param, local(grad)) for param, grad in zip(params, grads, strict=True)]
        pairs = [(param, grad) for param, grad in pairs if grad.numel()]
        indices = [self._indices[id(param)] for param, _ in pairs]
        sources = [grad.data_ptr() for _, grad in pairs]
        owners = [grad.untyped_storage() for _, grad in pairs]
        if self._deferred is not None:
            self._core.take_deferred(indices, sources, source_owners=owners, stream=self._stream())
            return
        self._core.take(
            indices,
            sources,
            [self._twins[param].grad_view for param, _ in pairs],
            source_owners=owners,
            target_owners=self._buffers,
            stream=self._stream(),
        )

    def order_after_copies(self) -> None:
        """What comes on the current stream may write or free the gradients that were taken.

        The thread waits until the device has their copies.

        Raises:
            OSError: the device has failed.
        """
        self._core.order_after_copies(stream=self._stream())

    def checksums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The checksums of contiguous tensors on the device, in their order: each int64, 1-D.

        Each has `_core.CHECKSUM_SUMS` sums (`Device::checksums` has the formula). Those of tensors
        with equal sizes, and memory that begins at equal places of a word, can be compared: bits
        are summed, so there is no rounding, and a NaN equals itself. Only a change that is made for
        it leaves every sum as it was.

        They are taken in the order of the current stream, and the tensors are held until then. Cost
        of each: one read of it, and 2 KiB.

        Raises:
            OSError: the device has no kernel for them, or has failed.
        """
        sums = torch.empty(
            (len(tensors), _core.CHECKSUM_SUMS), dtype=torch.int64, device=self._device
        )
        if tensors:
            addresses = [tensor.data_ptr() for tensor in tensors]
            sizes = [int(tensor.nbytes) for tensor in tensors]
            self._core.checksums(addresses, sizes, sums.data_ptr(), stream=self._stream())
        return list(sums.unbind())

    def discard(self) -> None:
        """Forgets the gradients taken since the last step: of a step that is skipped or refused.

        Waits until their copies have ended; then they may be written or freed. Does nothing where
        none were taken.
        """
        with self.lock:
            self.store.discard()
        self._core.discard()

    def take_looked_at(self, positions: Sequence[int]) -> None:
        """Copies gradients of the store's last look to the host; `positions`: in its lists."""
        self.store.take(
            positions,
            buffers=self._buffers,
            stream=self._stream(),
            is_deferred=self._deferred is not None,
            order=self._order.places,
        )

    def submit(
        self,
        coming: Submitted,
        hypers: Sequence[_core.Hyper],
        *,
        at_once: Collection[torch.Tensor] | None,
        selected: Sequence[Selected],
        num_settled: int,
        owners: Sequence[object] = (),
        order: Sequence[int] | None = None,
        protections: Sequence[Protection] = (),
        begun: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Begins the step of what the store has looked at last, all of it or nothing.

        One call, in which nothing of Python runs. `release` comes after it, before a gradient is
        written.

        Args:
            coming: what is to be known of the step.
            hypers: of each group.
            at_once: the step is deferred, but for these spans: with their updates all that is
                pending of them is applied. None: it is not deferred, and applies all that is
                pending.
            selected: the selections that begin with it; empty without a selector.
            num_settled: the store's when `at_once` was decided on.
            owners: what has the memory of the host sides, beside that of twins.
            order: of each span its place in the step; None: as waits have shown it, or as given.
            protections: what has uses of tensors wait from then on.
            begun: as `Store.submit` has it.

        Raises:
            ValueError: what was looked at has moved, or cannot be stepped; nothing was changed.
            OSError: the device has failed.
        """
        deferred = None
        if at_once is not None:
            assert self._deferred is not None
            deferred = {
                "predicted_updates": self._deferred.predicted_updates,
                # The turn of the last gradient, the landing of its predicted weight, and, at the
                # turn after that, of the weight itself (`submit` in `rust/offload/submit.rs`).
                "steps_pending": 2 * self._deferred.interval + 1,
                "at_once": {self._indices[id(span)] for span in at_once},
                "num_settled": num_settled,
            }
        entries = [each for protection in protections for each in protection.entries]
        classes = [each for protection in protections for each in protection.classes]
        places = self._order.places if order is None else order
        self._order.begin()
        self.seconds_waited = 0.0
        # What `begun` has may let go of the interpreter, and other threads ask what was submitted.
        with self.lock, LOCK:
            is_deferred = self.store.submit(
                hypers,
                buffers=[*self._buffers, *owners],
                stream=coming.stream,
                record=coming,
                order=places,
                verified={self._indices[id(param)] for param in coming.verified},
                deferred=deferred,
                selected=None if self.selector is None else selected,
                protection=(entries, classes),
                begun=begun,
            )
        if at_once is not None and not is_deferred and self.selector is not None:
            # A signal's handler has applied all since.
            self.selector.reset()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which a step is decided on and begins: what reads in it applies nothing."""
        with self.lock:
            self._is_stepping = True
            try:
                yield
            finally:
                self._is_stepping = False

    @property
    def will_settle(self) -> bool:
        """Whether `settle` would apply any update, on this thread, now."""
        return not (self._is_settling or self._is_stepping) and self.has_pending()

    def settle(self) -> None:
        """Applies all updates that are deferred. The weights on the device are all there are then.

        The current stream waits for them, and autograd takes them for written.

        Raises:
            ValueError: a parameter was written while updates of it were pending. All is applied,
                and the write is lost.
            OSError: the step or the device has failed.
        """
        with self.lock:
            if not (self._is_settling or self._is_stepping):
                self._is_settling = True
                try:
                    self._settle()
                finally:
                    self._is_settling = False

    def _settle(self) -> None:
        if self.selector is not None:
            self.selector.reset()
        if not self.has_pending():
            self.note_settled()
            return
        self._wait_for_submit_stream()
        self.finish()
        spans = self.pending_params
        with without_waiting(), torch.no_grad():
            written = self._written_of(spans)
            torch.autograd.graph.increment_version(self._params_on(spans))
            self._core.settle(stream=self._stream())
            self.finish()
            for param in written:
                # Its memory may be another than the one that the weight went to.
                assert self._twins is not None
                local(param).copy_(local(self._twins.weight(param)))
        # What copies to the device need is held by their job.
        self.synchronize()
        self.note_settled()
        if written:
            labels = ", ".join(map(self._label, written[:3]))
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise ValueError(
                "parameters were written between a forward and step() while updates of them were "
                f"deferred, and the writes are lost: {labels}{more}. "
                "hint: optimizer.drain() before parameters are written"
            )

    def _written_of(self, spans: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `spans` whose weights the program has written."""
        if self.contents is None:
            return []
        wanted = set(map(id, spans))
        return [param for param in self.contents.written() if id(param) in wanted]

    def _params_on(self, spans: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have elements in `spans`."""
        numbers = {self._indices[id(span)] for span in spans}
        return [
            param
            for param in self._params
            if any(window.span in numbers for window in self._windows[id(param)])
        ]

    def _wait_for_submit_stream(self) -> None:
        """What the last step's stream holds may read weights; the current stream waits for it."""
        if self._device.type == "cuda" and self._step_stream != self._stream():
            other = stream_of(self._step_stream, self._device)
            torch.cuda.current_stream(self._device).wait_stream(other)

    def next_group(self) -> int:
        """The group of segments whose turn comes with the next deferred step."""
        return self._core.next_group()

    def release(self) -> None:
        """Once a step has begun: waits until its gradients may be written. Once is enough.

        The stream that it began on waits for their copies. The thread waits until the device has
        all of these.
        """
        submitted = self.submitted
        if submitted is not None and submitted is not self._released:
            self._core.release(stream=submitted.stream)
            self._released = submitted

    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """As `wait_for`, of the windows of `params`."""
        windows = [window for param in params for window in self._windows[id(param)]]
        if self._is_sharded:
            self._order.note(window.span for window in windows)
        self.wait_for(windows)

    def wait_for(self, windows: Iterable[Window]) -> None:
        """The current stream and the step's stream wait for the weights of `windows`."""
        begin = time.perf_counter()
        # Read before the wait: a step may begin on another thread meanwhile.
        streams = self.streams
        for span, first, end in windows:
            for stream in streams:
                self._core.wait(span, first, end, stream=stream)
        self.seconds_waited += time.perf_counter() - begin

    def note_waited(self) -> None:
        """The gradients of the step are freed that are read where they are."""
        if self._twins is not None and self._twins.are_params:
            self.finish()

    def finish(self) -> None:
        """The step is complete on the host, and both streams wait for all weights.

        These are the current stream and the stream that the step began on.
        """
        for stream in self.streams:
            self._core.finish(stream=stream)

    def synchronize(self) -> None:
        """As `finish`, and all copies have ended."""
        self._core.synchronize(stream=self._stream())
        self._released = self.submitted

    def close(self) -> None:
        """Ends it, after `synchronize`: its memory is not pinned any more, whoever refers to it."""
        self._finalizer.detach()
        self._core.close()

    def timing(self) -> dict[str, float]:
        """Of the last step: seconds of `step` and, within it, `gradients`; bytes of the bus."""
        return self._core.timing()
