"""Memory in a mapped file, into which state on a volume is brought: by chunks, as it is used.

Imports no DeepSpeed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING

import torch

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MappedState"]

_ALIGN_BYTES = 64
"""Of each tensor of a partition's state, in the file and among places."""


class MappedState:
    """Memory for the state of one partition, in a mapped file. Space is taken for what is brought.

    Args:
        folder: of the file, which has no name.
        places: tensors like those that the memory is for.
        numel: elements of the partition.
    """

    def __init__(
        self, folder: str | os.PathLike[str], places: Mapping[str, torch.Tensor], numel: int
    ) -> None:
        self.folder = folder
        """Where the file is."""
        self._numel = numel
        self._offsets: dict[str, int] = {}
        end = 0
        for name, place in places.items():
            self._offsets[name] = end
            end += -(-place.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        # It is open as long as the memory is there.
        self._file = tempfile.TemporaryFile(dir=folder, prefix="stepwell-export-")  # noqa: SIM115
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
        # Whole chunks that are there: first element, last one, and a digest of what they held.
        self._runs: list[tuple[int, int, bytes]] = []

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Runs of whole chunks that have elements from `begin` to `end`, and are not there."""
        size = _core.CHUNK_LEN
        there = {at for first, last, _ in self._runs for at in range(first, last, size)}
        runs: list[tuple[int, int]] = []
        for at in range(begin // size * size, end, size):
            if at in there:
                continue
            last = min(at + size, self._numel)
            if runs and runs[-1][1] == at:
                runs[-1] = runs[-1][0], last
            else:
                runs.append((at, last))
        return runs

    def take(self, begin: int, end: int) -> None:
        """Takes space for a run.

        Raises:
            OSError: there is none.
        """
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
                    os.fspath(self.folder),
                ) from error

    def note(self, begin: int, end: int) -> None:
        """A run is there."""
        self._runs.append((begin, end, self._digest(begin, end)))

    @property
    def is_written(self) -> bool:
        """Whether anything was written to what is there, where fragments can be had of it."""
        return any(self._digest(begin, end) != digest for begin, end, digest in self._runs)

    def _digest(self, begin: int, end: int) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors.values():
            if tensor.numel() == self._numel:
                found.update(tensor[begin:end].view(torch.uint8).numpy().data)
        return found.digest()
