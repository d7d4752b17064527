"""What autograd saves in forwards of a model lies in host memory until the backward uses it.

The hooks of `torch.autograd.graph.saved_tensors_hooks` are there while a module of the model runs
that is not within another (`outermost`). A checkpoint saves its inputs by way of them, and has
hooks of its own for what is within it. A forward within a backward has none: what it saves is used
at once.

A *region* is what crosses the bus: the storage of what is saved, or a part of one that is much
larger. Views of one storage have one region, so that none is copied twice. It comes back as bytes,
and what was saved is a view of these with its own strides.

- The last region stays on the device until another one is saved: the backward begins with it. Only
  then it begins to leave, and its memory is freed behind the copy.
- No thread waits. Memory is taken and freed in the order of the stream that computes: that stream
  waits for the copies down, before it uses their memory for other things. So what is there at once
  does not depend on how far the thread is ahead of the device.
- The order of use is taken to be that of saving, backwards: what comes next is copied ahead. After
  one that was not there what was copied ahead is dropped.
- Tensors that stay on the device are parameters, buffers, and what is small. As without hooks, an
  error says if they were written in place since. So it does of a region that is written before it
  has left. One that has left is as it was when it was saved.

Cost: on the device the last region, and those that leave and that come, of `_CROSSING_BYTES` each,
but one of each at least; in host memory what was saved at once (`arenas`). What is saved and stays
takes the thread 5 microseconds each way, and a region 50, without launches.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepwell._sharding import local
from stepwell.weights.arenas import Arenas, Piece
from stepwell.weights.fetcher import backward_id
from stepwell.weights.outermost import OutermostCalls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["Activations"]

# Of a storage that is smaller nothing leaves: a copy takes as long as its launch.
_BYTES_MIN = 1 << 20
# Regions on their way down, and those that were copied up ahead of their use.
_CROSSING_BYTES = 256 << 20
# A region is the whole storage where that is at most so many times as large as what is saved.
_WHOLE_MAX = 4
# As the allocator aligns memory: kernels may choose their ways by alignment.
_ALIGN_BYTES = 512
# How many regions are looked through for those that are used next.
_LOOK_BACK = 64

_HINT = "fewer tokens per forward, or activations='device'"


class _Kept(NamedTuple):
    """What is saved and stays on the device."""

    tensor: torch.Tensor
    version: int


class _Part(NamedTuple):
    """What is saved, as a part of a region."""

    region: _Region
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Within the region, in elements."""


class _Region:
    """Bytes of one storage that autograd has saved. Those on the device may be a copy.

    Args:
        tensor: on that storage.
        begin: which bytes of it: the first,
        end: and behind the last.
        serial: its number.
        stream: on which it was made; None: there are none.
    """

    def __init__(
        self, tensor: torch.Tensor, begin: int, end: int, serial: int, stream: Any
    ) -> None:
        storage = tensor.untyped_storage()
        # Its address stays the storage's as long as this is there.
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.end, self.nbytes, self.serial = end, end - begin, serial
        # The graph that holds this must not be held by it.
        self.saved: torch.Tensor | None = tensor.detach()
        """What was saved; None: it has left."""
        self._version = tensor._version
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: torch.Tensor | None = empty.set_(storage, begin, (self.nbytes,))  # type: ignore[call-overload]
        """On the device; None: it is away."""
        self.stream = stream
        """In whose order its memory is freed."""
        self.copied: Any = None
        """When the last copy of it has ended; None: none was begun, or it is there."""
        self.is_lost = False
        """Whether it was written while it could not be."""
        self.piece: Piece | None = None
        """Its place in host memory."""

    @property
    def is_written(self) -> bool:
        """Whether what was saved has been written, or freed, and has not left."""
        saved = self.saved
        return saved is not None and (
            saved._version != self._version or saved.untyped_storage().nbytes() < self.end
        )

    def let_go(self) -> None:
        """Frees its memory on the device, behind its last copy."""
        if self.memory is not None and self.copied is not None:
            self.stream.wait_event(self.copied)
        self.is_lost = self.is_lost or self.is_written
        self.memory = self.saved = None

    def __del__(self) -> None:
        # What a device that has failed says was said before.
        with contextlib.suppress(RuntimeError):
            self.let_go()
        if self.piece is not None:
            self.piece.give_back()


class Activations:
    """Those of a model, in host memory between forward and backward.

    Args:
        model: its modules are on the device from now on, or come to it.
        device: where they compute.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._arenas = Arenas(device, "activations", _HINT)
        # They stay where they are, whatever it is that is saved of them.
        with torch._C.DisableTorchFunctionSubclass():
            own = map(local, (*model.parameters(), *model.buffers()))
            self._own = {each.untyped_storage()._cdata for each in own}
        self._down: Any = None
        self._up: Any = None
        if device.type == "cuda":
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            weakref.finalize(self, _finish, (self._down, self._up))
        # A forward and a backward may be on two threads.
        self._lock = threading.RLock()
        # By their numbers, and by what they are of. The graph has them.
        self._regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
        self._known: weakref.WeakValueDictionary[tuple[int, ...], _Region] = (
            weakref.WeakValueDictionary()
        )
        self._num_regions = 0
        self._last: weakref.ref[_Region] | None = None
        # Also those whose graph is gone; and bytes of all.
        self._leaving: deque[tuple[weakref.ref[_Region], int]] = deque()
        self._leaving_nbytes = 0
        # What was copied up: ahead of its use, and in the backwards that are under way.
        self._ahead: weakref.WeakSet[_Region] = weakref.WeakSet()
        self._back: dict[int, weakref.WeakSet[_Region]] = {}
        self._calls = OutermostCalls(model, self._hooks)

    # ---- forwards ----

    def end(self) -> None:
        """Nothing leaves any more. What has left comes back as long as a graph has it."""
        self._calls.remove()

    def _hooks(self) -> AbstractContextManager[object] | None:
        """Those for a forward. None: there can be none.

        So it is within transforms of torch.func, a CUDA graph, or hooks of others. Those may be a
        checkpoint's, which is around the module.
        """
        is_captured = self._down is not None and torch.cuda.is_current_stream_capturing()
        autograd: Any = torch._C._autograd
        has_others = autograd._top_saved_tensors_default_hooks(True) is not None
        if has_others or is_captured or not autograd._saved_tensors_hooks_is_enabled():
            return None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Part:
        # Parameters may have a class that waits for them to be used.
        with torch._C.DisableTorchFunctionSubclass(), self._lock:
            bounds = self._bounds(tensor)
            if bounds is None:
                return _Kept(tensor.detach(), tensor._version)
            begin, end = bounds
            key = tensor.untyped_storage()._cdata, begin, end, tensor._version
            region = self._known.get(key)
            if region is None:
                region = self._save(tensor, begin, end)
                self._known[key] = region
            offset = int(tensor.storage_offset()) - begin // tensor.itemsize
            return _Part(region, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _bounds(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Which bytes of its storage leave; None: it stays."""
        if (
            type(tensor) is not torch.Tensor
            or tensor.device != self._device
            or tensor.layout is not torch.strided
            or not tensor.is_floating_point()
            or tensor.is_neg()
            or tensor.numel() == 0
            # FSDP2's parameters are others in each forward.
            or isinstance(tensor._base, torch.nn.Parameter)
        ):
            return None
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < _BYTES_MIN or storage._cdata in self._own:
            return None
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * tensor.itemsize
        end = begin + (reach + 1) * tensor.itemsize
        if nbytes <= _WHOLE_MAX * (end - begin):
            return 0, nbytes
        return (begin - begin % _ALIGN_BYTES, end) if end - begin >= _BYTES_MIN else None

    def _save(self, tensor: torch.Tensor, begin: int, end: int) -> _Region:
        """A new region, and the one before it begins to leave."""
        before = None if self._last is None else self._last()
        if before is not None and before.memory is not None and before.piece is None:
            self._copy_down(before)
            self._bound_leaving()
        region = _Region(tensor, begin, end, self._num_regions, self._current())
        self._regions[region.serial] = region
        self._num_regions += 1
        self._last = weakref.ref(region)
        return region

    def _bound_leaving(self) -> None:
        """Memory of what has begun to leave is free for what is computed next."""
        # The last one crosses while the next one is computed.
        while self._leaving_nbytes > _CROSSING_BYTES and len(self._leaving) > 1:
            ref, nbytes = self._leaving.popleft()
            self._leaving_nbytes -= nbytes
            if (region := ref()) is not None:
                region.let_go()

    def _current(self) -> Any:
        return None if self._down is None else torch.cuda.current_stream(self._device)

    @torch.no_grad()
    def _copy_down(self, region: _Region) -> None:
        """It begins to leave."""
        if region.is_written:
            region.let_go()
            return
        assert region.memory is not None
        region.piece = self._arenas.take(region.nbytes)
        with self._on(self._down, region.stream):
            # Of what is up memory may have been given back.
            if self._down is not None:
                self._down.wait_stream(self._up)
            region.piece.memory.copy_(region.memory, non_blocking=True)
            region.copied = self._down and self._down.record_event()
        self._leaving.append((weakref.ref(region), region.nbytes))
        self._leaving_nbytes += region.nbytes

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[None]:
        """A context whose copies are on `stream`, behind what `after` holds now."""
        if stream is None:
            yield
            return
        stream.wait_stream(after)
        with torch.cuda.stream(stream):
            yield

    # ---- backwards ----

    def _unpack(self, packed: _Kept | _Part) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass(), self._lock, torch.no_grad():
            if isinstance(packed, _Kept):
                tensor, version = packed
                if tensor._version != version:
                    raise _written(tensor.dtype, tensor.shape)
                return tensor
            region, dtype, shape, stride, offset = packed
            memory = self._brought(region)
            if memory is None:
                raise _written(dtype, shape)
            self._note_backward(region)
            whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def _brought(self, region: _Region) -> torch.Tensor | None:
        """The bytes of a region, for the current stream; None: they are lost."""
        stream = self._current()
        if region.memory is None and not region.is_lost:
            # What is used is not what was expected.
            self._drop(self._ahead)
            self._copy_up(region)
        if region.is_lost or region.is_written:
            return None
        assert region.memory is not None
        self._ahead.discard(region)
        if stream is not None:
            if region.saved is None:
                stream.wait_event(region.copied)
            if stream != region.stream:
                region.memory.record_stream(stream)
        self._copy_ahead(region.serial)
        return region.memory

    def _copy_ahead(self, serial: int) -> None:
        """Regions that were saved before this one come."""
        nbytes = sum(region.nbytes for region in self._ahead)
        for earlier in range(serial - 1, max(serial - _LOOK_BACK, 0) - 1, -1):
            if nbytes >= _CROSSING_BYTES:
                break
            region = self._regions.get(earlier)
            if region is not None and region.memory is None and not region.is_lost:
                self._copy_up(region)
                self._ahead.add(region)
                nbytes += region.nbytes

    def _copy_up(self, region: _Region) -> None:
        assert region.piece is not None
        # On the stream that uses it, and frees it.
        stream = self._current()
        memory = torch.empty(region.nbytes, dtype=torch.uint8, device=self._device)
        with self._on(self._up, stream):
            if self._up is not None:
                self._up.wait_event(region.copied)
            memory.copy_(region.piece.memory, non_blocking=True)
            region.copied = self._up and self._up.record_event()
        region.memory, region.stream = memory, stream

    def _note_backward(self, region: _Region) -> None:
        """A graph that is kept has its regions in host memory again when the backward has ended."""
        running = backward_id()
        if running is None:
            # A program looks at what is saved.
            if region.saved is None:
                region.memory = None
            return
        if running not in self._back:
            self._back[running] = weakref.WeakSet()

            def end() -> None:
                with self._lock:
                    self._drop(self._back.pop(running))
                    # Not where it was within another one.
                    if not self._back:
                        self._drop(self._ahead)

            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._back[running].add(region)

    def _drop(self, regions: Iterable[_Region]) -> None:
        """Copies on the device go."""
        for region in list(regions):
            if region.saved is None:
                region.let_go()
            self._ahead.discard(region)


def _written(dtype: torch.dtype, shape: torch.Size) -> RuntimeError:
    """As torch says it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a `{dtype}` of `{tuple(shape)}` was written after autograd had saved it. "
        "hint: an operation that is not in place"
    )


def _finish(streams: Iterable[Any]) -> None:
    """Before what is copied from and to is unpinned."""
    # What a device that has failed says was said before.
    with contextlib.suppress(RuntimeError):
        for stream in streams:
            stream.synchronize()
