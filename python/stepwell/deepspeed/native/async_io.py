"""DeepSpeed's native op `async_io`, function for function, over the core's files of tensors.

DeepSpeed's parameter offload to NVMe, its FastFileWriter and `ds_io` use it. What is in a file, and
where, is as with DeepSpeed's own op: a tensor's bytes from the offset on, in a file that is never
truncated. Unlike that op:

- Every result is looked at. What fails is an OSError with path and offset: of `wait`, of a
  synchronous call, or of the call that cannot open the file.
- Sizes, offsets and addresses may be any.
- Tensors are kept until their I/O has ended. Where they are on a device or not contiguous, a copy
  in host memory is read or written.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from stepwell import _core
from stepwell._tensors import ordinary_tensors
from stepwell.deepspeed.native import locked_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_Path: TypeAlias = "str | bytes | os.PathLike[str]"

_ALIGNMENT_BYTES = 512
_BLOCK_BYTES_MAX = 1 << 30
# What is read at once to be compared.
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A read or write in flight."""

    buffer: torch.Tensor
    """The caller's tensor."""
    host: torch.Tensor
    """What is read or written: that tensor, or a copy of it in host memory."""
    is_read: bool
    place: Path | int
    offset: int
    is_validated: bool

    def finish(self) -> None:
        if self.is_validated:
            self._validate()
        if self.is_read and self.host is not self.buffer:
            self.buffer.copy_(self.host)

    def _validate(self) -> None:
        """Raises OSError where the file has other bytes than the tensor, read once more."""
        expected = self.host.reshape(-1).view(torch.uint8).numpy().data
        with Path(
            f"/proc/self/fd/{self.place}" if isinstance(self.place, int) else self.place
        ).open("rb") as file:
            for begin in range(0, len(expected), _COMPARED_BYTES):
                part = expected[begin : begin + _COMPARED_BYTES]
                file.seek(self.offset + begin)
                if file.read(len(part)) != part:
                    raise OSError(
                        errno.EBADMSG,
                        f"{self.place} has other bytes than were "
                        f"{'read' if self.is_read else 'written'}, from offset "
                        f"`{self.offset + begin}` on",
                    )


class aio_handle:  # noqa: N801  # DeepSpeed's name for it
    """Reads and writes of tensors, several in flight.

    Args:
        block_size: bytes that one call moves at most; up to 1 GiB.
        queue_depth: calls in flight at most, for each of `intra_op_parallelism`; 4096 in all.
        single_submit: without effect: the core submits what there is.
        overlap_events: without effect: completions and new calls always overlap.
        intra_op_parallelism: how many times `queue_depth`. It has no part in what is in a file.

    Raises:
        ValueError: for a size or number below 1.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if value < 1:
                raise ValueError(f"`{name}` is `{value}`, expected at least 1")
        self._block_size, self._queue_depth = int(block_size), int(queue_depth)
        self._single_submit, self._overlap_events = bool(single_submit), bool(overlap_events)
        self._intra_op_parallelism = int(intra_op_parallelism)
        self._files = _core.Files(
            block_bytes=min(self._block_size, _BLOCK_BYTES_MAX),
            queue_depth=min(self._queue_depth * self._intra_op_parallelism, _core.QUEUE_DEPTH_MAX),
        )
        self._lock = threading.RLock()
        self._waits = False
        self._in_flight: list[_Transfer] = []

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """One thread at a time.

        Raises:
            OSError: this thread waits already, and a signal's handler uses the handle meanwhile.
        """
        with self._lock:
            if self._waits:
                raise OSError(
                    errno.EDEADLK,
                    "an `aio_handle` is used by the handler of a signal, while it waits on the "
                    "same thread. hint: a handle of its own for the handler",
                )
            yield

    def get_block_size(self) -> int:
        """As it was given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """As it was given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As it was given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As it was given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """As it was given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """What DeepSpeed makes sizes in bytes multiples of. They may be others."""
        return _ALIGNMENT_BYTES * self._intra_op_parallelism

    @ordinary_tensors
    def _begin(
        self,
        buffer: torch.Tensor,
        place: _Path | int,
        offset: int,
        *,
        is_read: bool,
        is_validated: bool = False,
    ) -> None:
        where = place if isinstance(place, int) else Path(os.fsdecode(place))
        if offset < 0:
            raise ValueError(f"`file_offset` is `{offset}`, expected bytes from 0 on")
        # Not the caller's object: its memory may be exchanged (`.data = ...`).
        buffer = buffer.detach()
        is_plain = buffer.device.type == "cpu" and buffer.is_contiguous() and not buffer.is_neg()
        if is_plain and not buffer.is_conj():
            host = buffer
        elif is_read:
            host = torch.empty(buffer.shape, dtype=buffer.dtype)
        else:
            host = buffer.resolve_conj().resolve_neg().to("cpu").contiguous()
        begin = self._files.read if is_read else self._files.write
        with self._in_use():
            begin(
                where,  # type: ignore[arg-type]  # only writes take a descriptor
                offset=int(offset),
                address=host.data_ptr(),
                nbytes=host.nbytes,
                owner=host,
            )
            self._in_flight.append(
                _Transfer(buffer, host, is_read, where, int(offset), is_validated)
            )

    @ordinary_tensors
    def wait(self) -> int:
        """Waits until all that was begun since the last wait is over. How many those were.

        Interrupted by a signal, it goes on where it was when it is called again.

        Raises:
            OSError: one has failed: the first of them, with path and offset. All are over, and what
                the tensors of failed reads hold is not said.
        """
        with self._in_use():
            self._waits = True
            try:
                num = self._files.wait()
            except OSError:
                if not self._files.num_pending:
                    self._in_flight.clear()
                raise
            finally:
                self._waits = False
            ended, self._in_flight = self._in_flight, []
        for transfer in ended:
            transfer.finish()
        return num

    def read(
        self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0
    ) -> int:
        """Reads the file from `file_offset` to its end. Returns 0.

        Raises:
            ValueError: the tensor is of another size.
            OSError: the file cannot be read, or `validate` has found other bytes.
        """
        _check_size(buffer, filename, file_offset)
        self._begin(buffer, filename, file_offset, is_read=True, is_validated=validate)
        self.wait()
        return 0

    def write(
        self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0
    ) -> int:
        """Writes the tensor to the file from `file_offset` on. Returns 0.

        Raises:
            OSError: the file cannot be written, or `validate` has found other bytes.
        """
        self._begin(buffer, filename, file_offset, is_read=False, is_validated=validate)
        self.wait()
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        is_async: bool | None = None,
        file_offset: int = 0,
        **named: bool,
    ) -> int:
        """Reads the tensor from the file, from `file_offset` on.

        Args:
            buffer: what is read to.
            filename: the file.
            validate: whether the file is read once more and compared, in the wait.
            is_async: whether to return at once. By name it is `async`.
            file_offset: in bytes.
            **named: `async`, which Python has for itself.

        Returns:
            0 if asynchronous, else what `wait` returns.
        """
        is_async = _async_of(is_async, named)
        self._begin(buffer, filename, file_offset, is_read=True, is_validated=validate)
        return 0 if is_async else self.wait()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        is_async: bool | None = None,
        file_offset: int = 0,
        **named: bool,
    ) -> int:
        """Writes the tensor to the file, from `file_offset` on. Arguments as for `pread`."""
        is_async = _async_of(is_async, named)
        self._begin(buffer, filename, file_offset, is_read=False, is_validated=validate)
        return 0 if is_async else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Reads the tensor from `file_offset` on. Returns what `wait` returns."""
        self._begin(buffer, filename, file_offset, is_read=True)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Writes the tensor from `file_offset` on. Returns what `wait` returns."""
        self._begin(buffer, filename, file_offset, is_read=False)
        return self.wait()

    def async_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Begins to read the tensor from `file_offset` on. Returns 0.

        Raises:
            OSError: the file cannot be opened. Whatever else fails is raised by `wait`.
        """
        self._begin(buffer, filename, file_offset, is_read=True)
        return 0

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: _Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begins to write the tensor from `file_offset` on. Returns 0.

        Args:
            buffer: what is written; it must not change before `wait` has returned.
            filename: the file, or a descriptor of it, which stays the caller's.
            file_offset: in bytes.
            fd: the descriptor, by name.

        Raises:
            OSError: the file cannot be opened. Whatever else fails is raised by `wait`.
        """
        place = filename if fd is None else fd
        if place is None or (filename is not None and fd is not None):
            raise TypeError("expected `filename` or `fd`, one of them")
        self._begin(buffer, place, file_offset, is_read=False)
        return 0

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A flat tensor of `num_elem` zeros of the dtype of `example_tenosr`, locked in RAM."""
        return locked_memory.allocate(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was locked memory, which it no longer counts as.

        The memory is freed with the last tensor on it, and no I/O uses it then.
        """
        return locked_memory.free(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the tensor is pinned by torch, or all of it is locked memory."""
        return locked_memory.is_pinned(buffer)


def _async_of(is_async: bool | None, named: dict[str, bool]) -> bool:
    if is_async is None and named.keys() == {"async"}:
        return bool(named["async"])
    if is_async is None or named:
        raise TypeError("expected `async` as the fourth argument or by name, and no other names")
    return bool(is_async)


def _check_size(buffer: torch.Tensor, filename: _Path, offset: int) -> None:
    nbytes = Path(os.fsdecode(filename)).stat().st_size - offset
    if buffer.nbytes != nbytes:
        raise ValueError(
            f"`buffer` has `{buffer.nbytes}` bytes, expected the `{nbytes}` of "
            f"{os.fsdecode(filename)} from offset `{offset}` on. hint: `pread` reads a part"
        )


def aio_read(
    buffer: torch.Tensor,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Reads a whole file to a tensor of its size. Returns 0.

    Raises:
        ValueError: the tensor is of another size.
        OSError: the file cannot be read, or `validate` has found other bytes.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes a tensor to a file. Returns 0.

    Raises:
        OSError: the file cannot be written, or `validate` has found other bytes.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    return handle.write(buffer, filename, validate)


@ordinary_tensors
def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies a float32 tensor. Returns 0.

    Raises:
        ValueError: for another dtype, or sizes that differ.
    """
    for name, tensor in (("dest", dest), ("src", src)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"`{name}` is `{tensor.dtype}`, expected torch.float32")
    if dest.numel() != src.numel():
        raise ValueError(
            f"`dest` has `{dest.numel()}` elements and `src` `{src.numel()}`, expected as many"
        )
    dest.copy_(src.view(dest.shape))
    return 0
