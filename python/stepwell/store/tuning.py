"""What `stepwell tune` has measured of drives, and what a volume makes of it.

A drive's measurement is a file in its folder, so it goes where the drive goes. What a `Volume` does
not say is taken from these files, where every folder has one.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell import _core
from stepwell._checks import count

if TYPE_CHECKING:
    from stepwell.store.volume import Volume

__all__ = ["TUNING_FILE", "DriveTuning", "VolumeShape", "shape_of"]

TUNING_FILE = "stepwell_tuning.json"
"""The file's name."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DriveTuning:
    """One drive, as it was measured."""

    mb_per_second: int
    """Bytes (10^6) that are read and written together, records of a step; its weight."""
    stripe_bytes: int
    """The largest run of bytes that reaches that."""
    queue_depth: int
    """The most reads and writes at once that reach it."""
    date: str
    """When it was measured."""

    def __post_init__(self) -> None:
        for name, largest in (
            ("mb_per_second", _core.DRIVE_WEIGHT_MAX),
            ("stripe_bytes", _core.STRIPE_BYTES_MAX),
            ("queue_depth", _core.QUEUE_DEPTH_MAX),
        ):
            count(getattr(self, name), f"`{name}`", most=largest)

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> DriveTuning | None:
        """That of a folder; None where it was not measured, and of a block device.

        Raises:
            ValueError: the file is not one that `stepwell tune` has written.
            OSError: it cannot be read.
        """
        path = Path(folder) / TUNING_FILE
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
                # A FIFO or a device has no end, or is waited for.
                text = file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
        except (FileNotFoundError, NotADirectoryError):
            return None  # nothing has a place on a block device
        try:
            found = json.loads(text)
            return DriveTuning(**{field.name: found[field.name] for field in fields(DriveTuning)})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no measurement of a drive ({error}). hint: stepwell tune {folder}, or "
                "remove the file"
            ) from error

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Writes it to a folder, whole or not at all. Returns where."""
        path = Path(folder) / TUNING_FILE
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=2) + "\n")
        new.replace(path)
        return path


@dataclass(frozen=True)
class VolumeShape:
    """How a volume is laid out and used."""

    weights: list[int]
    """The bandwidth of each drive; empty: all are alike."""
    stripe_bytes: int
    """The most bytes of a record that lie together on one drive."""
    queue_depth: int
    """Reads and writes that each drive is given at once."""


def shape_of(volume: Volume) -> VolumeShape:
    """What the user says of a volume; the rest as measured, or as usual. The log says which.

    Raises:
        ValueError: a folder's measurement cannot be read as one.
    """
    said = (volume.weights, volume.stripe_bytes, volume.queue_depth)
    drives = [] if None not in said else [DriveTuning.read(path) for path in volume.paths]
    tuned = [drive for drive in drives if drive is not None]
    if tuned and len(tuned) < len(drives):
        _LOGGER.info(
            "%d of %d folders of a volume were measured by `stepwell tune`, so none of it is used; "
            "hint: stepwell tune %s",
            *(len(tuned), len(drives), " ".join(str(path) for path in volume.paths)),
        )
        tuned = []
    # Drives that differ: what none of them is slow with.
    shape = VolumeShape(
        weights=list(
            volume.weights
            if volume.weights is not None
            else [drive.mb_per_second for drive in tuned]
        ),
        stripe_bytes=volume.stripe_bytes
        or min((drive.stripe_bytes for drive in tuned), default=_core.STRIPE_BYTES),
        queue_depth=volume.queue_depth
        or min((drive.queue_depth for drive in tuned), default=_core.QUEUE_DEPTH),
    )
    if tuned:
        _LOGGER.info(
            "a volume as `stepwell tune` has measured its drives on %s: weights %s, stripes of %d "
            "bytes, queue depth %d",
            ", ".join(sorted({drive.date for drive in tuned})),
            *(shape.weights or "alike", shape.stripe_bytes, shape.queue_depth),
        )
    return shape
