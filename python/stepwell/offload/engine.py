"""The core's offload engine over torch tensors: streams, addresses, and the memory behind them.

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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from stepwell import _core
from stepwell._sharding import is_dtensor, local
from stepwell.offload.budget import note_pinned
from stepwell.offload.checksums import checksum, sums_of
from stepwell.offload.deferred import Extents, deferred_core
from stepwell.offload.selection import Selector
from stepwell.offload.under_way import as_plain
from stepwell.offload.wait_order import WaitOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell._hyper import Hyper
    from stepwell._operand import BoundUpdate
    from stepwell.offload.deferred import Deferred
    from stepwell.offload.selection import Selected
    from stepwell.offload.swapped import Swapped
    from stepwell.offload.twins import Twins

_LOGGER = logging.getLogger(__name__)

_Item = TypeVar("_Item")

__all__ = ["Engine", "EngineStep", "current_stream", "device_name", "stream_of"]


def device_name(device: torch.device) -> str:
    """What the core calls `device`."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def current_stream(device: torch.device) -> int:
    """The current stream of `device`, as the core knows it."""
    if device.type != "cuda":
        return 0
    # Hooks ask for every gradient, and torch.cuda.current_stream makes an object each time.
    stream: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return stream


def stream_of(stream: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of torch's that the core knows as `stream`."""
    if stream == 0:
        # torch takes the address 0 for none, and makes a new stream.
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]


def _close(core: _core.OffloadEngine, held: list[dict[int, torch.UntypedStorage]]) -> None:
    """The optimizer is gone: what it has deferred is applied, to memory that is `held`."""
    # Broken, or another process's: then nothing runs that could be waited for.
    with contextlib.suppress(OSError, ValueError):
        core.synchronize()
        if core.settle():
            core.synchronize()
    held[0] = {}


class _Owners(list[object]):
    """What a step holds. Of a storage torch prints each byte, also where nothing is (`Place`)."""

    def __repr__(self) -> str:
        return f"<{len(self)} owners of memory>"


class _Storages(dict[int, torch.UntypedStorage]):
    """Storages by the id of a parameter, which print likewise."""

    def __repr__(self) -> str:
        return f"<{len(self)} storages>"


class EngineStep(NamedTuple):
    """The updates of a step that waits for the norm of its gradients, as the core takes them.

    It holds no memory of weights: a step that comes to nothing leaves none of it shared.
    """

    params: list[torch.Tensor]
    """The parameters of the step, also those of which this rank has nothing."""
    stepped: list[torch.Tensor]
    """Those of which it has something. Of each of them what follows."""
    tensors: list[_core.AdamTensor]
    steps: list[int]
    hypers: list[Hyper]
    owners: list[object]
    """The memory of their state, and copies of what is not dense."""


class Engine:
    """Steps `params`, whose host sides are `twins`, beside `device`.

    Args:
        device: where the parameters are.
        params: the parameters, in the order in which the forward uses them. Where some are
            DTensors, steps learn the order from waits (`wait_order`).
        twins: their host sides, which are pinned, but for those whose state is on a volume.
        threads: workers that step; None: as `OffloadEngine` has it.
        threads_share: which share of these step where updates are deferred. A part of a model takes
            as long with that part of them as the whole with all, and leaves cores.
        lock: what a thread has that submits a step or settles; None: one of its own.
        deferred: which updates are deferred; None: none is.
        swapped: the state that is on a volume; None: none is.
        sums_on_host: whether gradients of several backwards are summed in host memory. Then the
            host sides of all gradients are pinned.

    Raises:
        OSError: the device cannot be had, or refuses to pin.
    """

    def __init__(
        self,
        device: torch.device,
        params: Iterable[torch.Tensor],
        twins: Twins,
        threads: int | None,
        deferred: Deferred | None = None,
        swapped: Swapped | None = None,
        *,
        sums_on_host: bool = False,
        threads_share: float = 1.0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._device = device
        self._twins = twins
        self._params = list(params)
        # By the parameter's id (`twins`), as `_held` and `_pending`.
        self._indices = {id(param): index for index, param in enumerate(self._params)}
        self._order = WaitOrder(len(self._params))
        self._is_sharded = any(map(is_dtensor, self._params))
        # They own the memory of all twins.
        self._buffers = twins.buffers
        self._numels = [twins.weight_numel(param) for param in self._params]
        self._deferred = deferred
        self.selector: Selector[torch.Tensor] | None = None
        """Chooses the channels that are stepped on the device; None: none is."""
        self.selected_bytes = 0
        """Device memory for their state."""
        tier: dict[str, Any] = {}
        if swapped is not None and swapped.core is not None:
            tier = {"swap": swapped.core, "swapped": swapped.indices(self._params)}
        if deferred is None:
            self._core = _core.OffloadEngine(
                device_name(device), self._numels, threads=threads, **tier
            )
        else:
            self._core, self.selected_bytes = deferred_core(
                device,
                device_name(device),
                Extents.of(self._params),
                deferred,
                threads,
                tier,
                threads_share,
            )
            if self.selected_bytes:
                segments = self._core.selectable()
                self.selector = Selector(segments, self._params, deferred.reselect, device)
        self._is_settling = False
        self.num_settled = 0
        """How often that has ended what deferred steps go on with: pending updates, selections."""
        self._has_checksums = True
        # The storages of weights between deferred steps, in a list for the finalizer's sake.
        self._held: list[dict[int, torch.UntypedStorage]] = [{}]
        self.lock = threading.RLock() if lock is None else lock
        """A thread that submits or settles has it: a look on another thread may settle."""
        self.is_settled = True
        """Whether nothing was submitted since `settle`, which may have found nothing to do."""
        # Those of which deferred steps have left updates pending, or weights to land; and for how
        # many deferred steps more, if no gradient comes.
        self._pending: dict[int, int] = {}
        if swapped is None:
            for buffer in self._buffers:
                self._core.pin(buffer)
        else:
            # What waits for a drive waits little longer for a copy. Sums come up and go down again
            # in each backward.
            pinned = [param for param in self._params if param not in swapped]
            for span in twins.spans(pinned, "weight"):
                self._core.pin(*span)
            for span in twins.spans(self._params if sums_on_host else pinned, "grad"):
                self._core.pin(*span)
        note_pinned(self, self._core.pinned_nbytes)
        self._submit_stream = self._stream()
        # None while a step is being submitted: weights that are waited for then are old ones.
        self._step_stream: int | None = self._submit_stream
        self.seconds_waited = 0.0
        """How long forwards have waited for weights since the last step."""
        weakref.finalize(self, _close, self._core, self._held)

    def _stream(self) -> int:
        return current_stream(self._device)

    def _streams(self, step_stream: int | None) -> set[int]:
        """The current stream, and that of the last step."""
        return {self._stream(), *([] if step_stream is None else [step_stream])}

    @property
    def held(self) -> Collection[int]:
        """The ids of the parameters whose storage it keeps alive between deferred steps.

        By one reference each.
        """
        return self._held[0]

    @property
    def pending_params(self) -> list[torch.Tensor]:
        """The parameters of which the device may lack an update, or have a predicted weight.

        Deferred steps have stepped them, and no exact step has followed. Those that get no gradient
        any more have their own weight after `2 * interval + 1` deferred steps.
        """
        return self._of(self._pending)

    def pending_besides(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `pending_params` that are not among `params`."""
        known = set(map(id, params))
        return self._of(key for key in self._pending if key not in known)

    def _of(self, keys: Iterable[int]) -> list[torch.Tensor]:
        return [self._params[self._indices[key]] for key in keys]

    def is_pending(self, param: torch.Tensor) -> bool:
        """Whether `param` is among `pending_params`."""
        return id(param) in self._pending

    def has_pending(self) -> bool:
        """Whether there is any in `pending_params`."""
        return bool(self._pending)

    @property
    def busy(self) -> bool:
        """Whether a step is running on the host."""
        return self._core.busy

    def take(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Copies contiguous gradients to the host, in the background.

        After what the current stream holds now. Not while a step is running, unless updates are
        deferred.
        """
        piece = self._twins.piece
        pairs = [(param, piece(param, grad)) for param, grad in zip(params, grads, strict=True)]
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
        """The checksums of contiguous tensors on the device (see `checksums`), in their order.

        In the order of the current stream. Those of tensors with equal sizes, and memory that
        begins at equal places of a word, can be compared.
        """
        if self._has_checksums and tensors:
            try:
                return sums_of(self._core, tensors, self._stream())
            except OSError as error:
                # The driver has no compiler, say. A device that has failed says so again.
                self._has_checksums = False
                _LOGGER.warning("checksums of gradients take longer than they might: %s", error)
        return [checksum(tensor) for tensor in tensors]

    def in_order(
        self, items: Iterable[_Item], param_of: Callable[[_Item], torch.Tensor]
    ) -> list[_Item]:
        """`items` in the order in which the next step goes over their parameters."""
        return self._order.sorted(items, lambda item: self._indices[id(param_of(item))])

    def discard(self) -> None:
        """Forgets the gradients taken since the last step: of a step that is skipped or refused.

        Waits until their copies have ended; then they may be written or freed. Does nothing where
        none were taken.
        """
        self._core.discard()

    def prepare(self, updates: Sequence[BoundUpdate]) -> EngineStep:
        """The bound updates of a step, as `submission` takes them.

        It changes nothing, and reads nothing that a program may change before the step is
        submitted.
        """
        updates = self.in_order(updates, lambda each: each.update.param)
        stepped = [(each.update, each.bound) for each in updates if each.bound.tensor is not None]
        parts = [part for _, bound in stepped for part in bound.parts]
        return EngineStep(
            params=[each.update.param for each in updates],
            stepped=[update.param for update, _ in stepped],
            tensors=[bound.tensor for _, bound in stepped if bound.tensor is not None],
            steps=[update.step for update, _ in stepped],
            hypers=[update.hyper for update, _ in stepped],
            owners=[
                *[part.piece.untyped_storage() for part in parts],
                *[bound.write_backs for _, bound in stepped if bound.write_backs],
            ],
        )

    def submission(
        self,
        prepared: EngineStep,
        grad_scale: float,
        *,
        at_once: Collection[torch.Tensor] | None,
        grads: Mapping[int, torch.Tensor],
        selected: Sequence[Selected],
    ) -> list[partial[Any]]:
        """The calls that start a step, to be made one directly after the other.

        No Python in them can be interrupted. `release` comes after them, before a gradient is
        written.

        Args:
            prepared: the step.
            grad_scale: what all gradients are multiplied by.
            at_once: the step is deferred, but for these parameters: with their updates all that
                is pending of them is applied. None: it is not deferred, and applies all that is
                pending.
            grads: by the id of each parameter its gradient on the device, contiguous: of channels
                that are stepped there; empty without a selector.
            selected: the selections that begin with it; empty without a selector.
        """
        keys = list(map(id, prepared.stepped))
        weights = list(map(self._twins.piece, prepared.stepped))
        storages = {
            key: weight.untyped_storage() for key, weight in zip(keys, weights, strict=True)
        }
        # Deferred steps hold them here, not with each job: the guard counts what refers to one.
        before = self._held[0]
        pending = self._pending_after(keys, at_once)
        still = {key: old for key, old in before.items() if key in pending}
        held = _Storages() if at_once is None else _Storages({**still, **storages})
        owners_of_weights = [old for key, old in before.items() if old is not held.get(key)]
        options: dict[str, Any] = {}
        if at_once is None:
            owners_of_weights += storages.values()
        else:
            assert self._deferred is not None
            keys_at_once = set(map(id, at_once))
            options = {
                "deferred": self._deferred.predicted_updates,
                "at_once": [key in keys_at_once for key in keys],
            }
        if self.selector is not None:
            options["grads"] = [local(grads[key]).data_ptr() for key in keys]
            options["selected"] = selected
        self._order.begin()
        self._submit_stream, self._step_stream = self._stream(), None
        self.seconds_waited = 0.0
        # Parameters of one group have one object.
        by_id = {id(hyper): hyper for hyper in prepared.hypers}
        hypers = {key: hyper.core(grad_scale) for key, hyper in by_id.items()}
        submit = partial(
            self._core.submit,
            [self._indices[key] for key in keys],
            prepared.tensors,
            weights=[weight.data_ptr() for weight in weights],
            steps=prepared.steps,
            hypers=[hypers[id(hyper)] for hyper in prepared.hypers],
            # Storages: a tensor may be given other memory.
            owners=_Owners([*self._buffers, *owners_of_weights, *prepared.owners]),
            stream=self._submit_stream,
            **options,
        )
        return [
            submit,
            partial(self._held.__setitem__, 0, held),
            partial(setattr, self, "_pending", pending),
            partial(setattr, self, "is_settled", False),
            partial(setattr, self, "_step_stream", self._submit_stream),
        ]

    def decided(self) -> AbstractContextManager[None]:
        """A context in which a step is submitted that ranks have agreed on, where they share it."""
        return contextlib.nullcontext()

    def withdraw(self) -> None:
        """What `submission` has made ready is not submitted, or was before.

        So waits are for the weights of the last step, and end it.
        """
        if self._step_stream is None:
            self._step_stream = self._submit_stream

    def _pending_after(
        self, stepped: Iterable[int], at_once: Collection[torch.Tensor] | None
    ) -> dict[int, int]:
        """`_pending` once a step of these parameters was submitted; `at_once` as there."""
        if at_once is None:
            return {}
        assert self._deferred is not None
        # The turn of the last gradient, the landing of its predicted weight, and, at the turn after
        # that, of the weight itself (`submit` in `rust/offload/engine.rs`).
        num_steps = 2 * self._deferred.interval + 1
        left = {key: count - 1 for key, count in self._pending.items() if count > 1}
        left.update(dict.fromkeys(stepped, num_steps))
        for param in at_once:
            left.pop(id(param), None)
        return left

    def settle(self) -> None:
        """Applies all updates that are deferred. The weights on the device are all there are then.

        The current stream waits for them, and autograd takes them for written.

        Raises:
            ValueError: a parameter was written while updates of it were pending. All is applied,
                and the write is lost.
            OSError: the step or the device has failed.
        """
        with self.lock:
            if not self._is_settling:
                self._is_settling = True
                try:
                    self._settle()
                finally:
                    self._is_settling = False

    def _settle(self) -> None:
        self.num_settled += self._deferred is not None and not self.is_settled
        self.is_settled = True
        if self.selector is not None:
            self.selector.reset()
        if not self._pending:
            return
        self._wait_for_submit_stream()
        self.finish()
        params = self.pending_params
        with as_plain(params), torch.no_grad():
            written = self._twins.stale(params)
            foreign = set(written)
            ours = [param for param in params if param not in foreign]
            try:
                torch.autograd.graph.increment_version(params)
                self._twins.note(ours)
                self._core.settle(stream=self._stream())
            except BaseException:
                # Ctrl-C. What has another version now was not written by the program.
                self._twins.note(ours)
                raise
            self.finish()
            for param in written:
                # Its memory may be another than the one that the weight went to.
                local(param).copy_(local(self._twins.weight(param)))
            self._twins.note(params)
        self._pending = {}
        self._let_go()
        if written:
            raise ValueError(
                f"{len(written)} parameters were written while updates of them were deferred, and "
                "the writes are lost. hint: optimizer.drain() before parameters are written"
            )

    def _wait_for_submit_stream(self) -> None:
        """What the last step's stream holds may read weights; the current stream waits for it."""
        if self._device.type == "cuda" and self._submit_stream != self._stream():
            other = stream_of(self._submit_stream, self._device)
            torch.cuda.current_stream(self._device).wait_stream(other)

    def _let_go(self) -> None:
        """Nothing is deferred any more: what copies to the device need is held by their job."""
        if self._held[0]:
            self.synchronize()
            self._held[0] = {}

    def next_group(self) -> int:
        """The group of segments whose turn comes with the next deferred step."""
        return self._core.next_group()

    def release(self) -> None:
        """Lets go of the gradients of the step that was submitted.

        The stream that it began on waits for their copies. The thread waits until the device has
        all of these.
        """
        self._core.release(stream=self._submit_stream)

    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        """The current stream and the step's stream wait for the weights of `params`.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        begin = time.perf_counter()
        # Read before the wait: a step may be submitted on another thread meanwhile.
        step_stream = self._step_stream
        streams = self._streams(step_stream)
        indices = [self._indices[id(param)] for param in params]
        if self._is_sharded:
            self._order.note(indices)
        for index in indices:
            for stream in streams:
                self._core.wait(index, 0, self._numels[index], stream=stream)
        self.seconds_waited += time.perf_counter() - begin
        return step_stream is not None

    def finish(self) -> None:
        """The step is complete on the host, and both streams wait for all weights.

        These are the current stream and the stream that the step began on.
        """
        for stream in self._streams(self._step_stream):
            self._core.finish(stream=stream)

    def synchronize(self) -> None:
        """As `finish`, and all copies have ended."""
        self._core.synchronize(stream=self._stream())

    def timing(self) -> dict[str, float]:
        """Of the last step: seconds of `step` and, within it, `gradients`; bytes of the bus."""
        return self._core.timing()
