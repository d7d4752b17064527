"""Memory in a mapped file, into which state on a volume is brought: by chunks, as it is used.

It takes no host memory that the kernel could not take back, and space on a drive while it is there.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["MappedState"]

_LOGGER = logging.getLogger(__name__)

_ALIGN_BYTES = 64
"""Of each tensor of a partition's state, in the file and among places."""


class MappedState:
    """Memory for the state of one partition, in a mapped file. Space is taken for what is brought.

    Args:
        paths: of a volume. The file, which has no name, is in the folder with the most room; in
            that for temporary files where all are devices.
        places: tensors like those that the memory is for.
        numel: elements of the partition.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        places: Mapping[str, torch.Tensor],
        numel: int,
    ) -> None:
        folders = [path for path in paths if Path(path).is_dir()] or [tempfile.gettempdir()]
        self._folder = max(folders, key=lambda path: shutil.disk_usage(path).free)
        self._numel = numel
        self._offsets: dict[str, int] = {}
        end = 0
        for name, place in places.items():
            self._offsets[name] = end
            end += -(-place.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        # It is open as long as the memory is there.
        self._file = tempfile.TemporaryFile(dir=self._folder, prefix="stepwell-export-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        os.ftruncate(self._file.fileno(), end)
        memory = mmap.mmap(self._file.fileno(), end)
        # Each has a storage of its own: torch saves no two dtypes of one, and of a storage all.
        self.tensors = {
            name: torch.frombuffer(
                memory, dtype=place.dtype, count=place.numel(), offset=self._offsets[name]
            ).view(place.shape)
            for name, place in places.items()
        }
        # Of the chunks that are there: a digest of what each held.
        self._digests: dict[int, bytes] = {}
        self.is_lent = False
        """Whether a program may write all of it. Else it may write parts that it has looked at."""

    def bring(self, begin: int, end: int, read: Callable[[int, int], None]) -> None:
        """Has whole chunks with elements from `begin` to `end` be there.

        Args:
            begin: the first element.
            end: the one behind the last.
            read: reads those of whole chunks.

        Raises:
            OSError: as `read`; or there is no space.
        """
        size = _core.CHUNK_LEN
        missing = set(range(begin // size * size, end, size)) - self._digests.keys()
        for first in sorted(missing):
            if first - size in missing:
                continue
            last = next(at for at in range(first, end + size, size) if at not in missing)
            last = min(last, self._numel)
            self._take(first, last)
            read(first, last)
            self._digests.update((at, self._digest(at)) for at in range(first, last, size))
            _LOGGER.info(
                "%d of %d elements of a partition's state are read from the volume into a mapped "
                "file in `%s`",
                last - first,
                self._numel,
                os.fspath(self._folder),
            )

    def _take(self, begin: int, end: int) -> None:
        """Takes space for a run."""
        for name, tensor in self.tensors.items():
            # Of codes and scales there are fewer than elements: a block more at the beginning.
            first = max(begin * tensor.nbytes // self._numel - mmap.PAGESIZE, 0)
            last = min(-(-end * tensor.nbytes // self._numel), tensor.nbytes)
            offset = self._offsets[name] + first
            try:
                os.posix_fallocate(self._file.fileno(), offset, max(last - first, 1))
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"state on a volume takes `{last - first}` bytes for `{name}` while it is read "
                    f"by the program, which are not free (`{error.strerror}`). hint: more room in "
                    "one of the folders, or no access to masters and moments between steps",
                    os.fspath(self._folder),
                ) from error

    @property
    def is_written(self) -> bool:
        """Whether anything was written to what is there, where fragments can be had of it."""
        return self.is_lent or any(
            self._digest(at) != digest for at, digest in self._digests.items()
        )

    def _digest(self, begin: int) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors.values():
            if tensor.numel() == self._numel:
                chunk = tensor.detach()[begin : begin + _core.CHUNK_LEN]
                found.update(chunk.view(torch.uint8).numpy().data)
        return found.digest()
