"""What moves records to and from drives through a volume, to be timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["PATTERNS", "Pattern", "ThroughVolume", "check_folders"]

Pattern: TypeAlias = Literal["write", "read", "swap"]
PATTERNS: tuple[Pattern, ...] = ("write", "read", "swap")
"""All records are written, or read, or both at once, as a step of an optimizer has them."""


def check_folders(drives: Sequence[Path]) -> None:
    """Raises ValueError for a block device: what is measured are files."""
    for drive in drives:
        if not drive.is_dir():
            raise ValueError(f"`{drive}` is to be measured, expected a folder on the drive")


@dataclass
class ThroughVolume:
    """Records through a volume: written, read and verified, or both as a step does."""

    folders: Sequence[Path]
    record_nbytes: int
    num_records: int
    num_buffers: int
    weights: Sequence[int]
    stripe_bytes: int
    queue_depth: int
    io_engine: str = "auto"
    name: str = "stepwell"
    patterns: Sequence[Pattern] = PATTERNS

    def __post_init__(self) -> None:
        self._passes = _core.VolumePasses(
            list(self.folders),
            record_nbytes=self.record_nbytes,
            num_records=self.num_records,
            num_buffers=self.num_buffers,
            weights=list(self.weights),
            stripe_bytes=self.stripe_bytes,
            queue_depth=self.queue_depth,
            io_engine=self.io_engine,
        )
        self.has_rings, self.is_direct = self._passes.has_rings, self._passes.is_direct

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """Bytes per second, read and written together, over at least so many seconds.

        Raises:
            OSError: a drive fails.
        """
        begin, nbytes = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds or not nbytes:
            nbytes += sum(self._passes.run(pattern))
        return nbytes / elapsed

    def close(self) -> None:
        """Removes what it has made."""
        self._passes.close()
