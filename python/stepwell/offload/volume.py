"""What a user says of a volume: the drives that state is kept on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeAlias

from stepwell import _core

__all__ = ["Durability", "Volume"]

Durability: TypeAlias = Literal["commit", "none"]

# With q8 moments a commit takes a quarter of a step longer: every eighth step, that is 3 % of the
# run, and a crash costs seven steps at most. The interval that loses least time, sqrt(2 * cost *
# time between failures) (J. W. Young, 1974, "A first order approximation to the optimum checkpoint
# interval"), is longer: 90 steps of 5 s where a machine fails once a day.
_COMMIT_INTERVAL = 8

# What the core counts steps in.
_COMMIT_INTERVAL_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Volume:
    """State of `OffloadAdamW` on drives: `OffloadAdamW(..., tier=Volume(["/mnt/a", "/mnt/b"]))`.

    Host memory is used first (`host_bytes_max`); what does not fit there is read from the drives
    and written back in every step. `docs/volume.md` has what it costs, and what is guaranteed.

    Raises:
        ValueError: an option that cannot work.
    """

    paths: Sequence[str | os.PathLike[str]]
    """A folder on each drive, where the files are made; or a block device, which `stepwell volume
    format` has prepared. A device has one volume at a time, and so one rank's."""

    _: KW_ONLY

    durability: Durability = "commit"
    """What is left after a crash. "commit": each `commit_interval`-th step ends with a commit, and
    a volume that is resumed is at the last one, whole. It takes twice the space, and commits write
    weights too where they are not the rounded copies of masters. "none": steps are written in
    place, and nothing is left when the process ends."""

    commit_interval: int | None = None
    """Steps from one commit to the next: a commit ends the first step of a new volume, and each
    step whose number is a multiple of it. Steps in between write no weights, and no state that is
    in host memory; after a crash they are to be made again. `OffloadAdamW.commit()` commits at any
    other step, and a volume that is kept commits the last one when the optimizer or the program
    ends. The same on all ranks. None: 8."""

    keep: bool | None = None
    """Whether the files stay when the program or the optimizer ends, and devices keep what they
    have. After a kill, those of durability "commit" do in any case. None: they do where the volume
    has a name."""

    resume: bool = False
    """Whether to go on from the volume of that name: the optimizer begins with its state, and
    writes its weights to the parameters. One without a committed step, or that is not there, is a
    new one, and a warning says so: a job can be started with it each time."""

    name: str | None = None
    """The name of the volume, and of its files. None: one that no other job has. Of several ranks
    each adds its number."""

    weights: Sequence[int] | None = None
    """The bandwidth of each drive, in any unit: a drive gets bytes in proportion to it. Empty: all
    are alike. None: as `stepwell tune` has measured all of the drives; else all are alike."""

    stripe_bytes: int | None = None
    """The most bytes of a record that lie together on one drive, rounded up to its blocks. None: as
    `stepwell tune` has measured, else 1 MiB."""

    queue_depth: int | None = None
    """Reads and writes that each drive is given at once. None: as `stepwell tune` has measured,
    else 32."""

    io_engine: Literal["auto", "io_uring", "positional"] = "auto"
    """What moves the bytes. "auto": io_uring where the kernel offers it, else positional calls,
    with a warning."""

    io_timeout: float = 60.0
    """Seconds that a drive may take to answer."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, (str, os.PathLike)):
            raise ValueError(  # noqa: TRY004
                f"`paths` is `{os.fspath(self.paths)}`, expected a list of folders or devices. "
                f"hint: Volume([{os.fspath(self.paths)!r}])"
            )
        if not self.paths:
            raise ValueError("`paths` is empty, expected a folder on each drive, or its device")
        for path in self.paths:
            if not Path(path).is_dir() and not Path(path).is_block_device():
                raise ValueError(
                    f"`paths` has `{os.fspath(path)}`, expected a folder or a block device that "
                    "exists"
                )
        if self.durability not in ("commit", "none"):
            raise ValueError(f"`durability` is `{self.durability}`, expected commit or none")
        if self.durability == "none" and (self.keep or self.resume):
            option = "keep" if self.keep else "resume"
            raise ValueError(
                f"`{option}` is given and `durability` is `none`, which leaves nothing behind, "
                "expected commit"
            )
        if self.resume and self.name is None:
            raise ValueError("`resume` is given and `name` is not, expected which volume it is")
        for name, largest in (
            ("commit_interval", _COMMIT_INTERVAL_MAX),
            ("stripe_bytes", _core.STRIPE_BYTES_MAX),
            ("queue_depth", _core.QUEUE_DEPTH_MAX),
        ):
            value = getattr(self, name)
            if value is not None and not _is_count(value, largest):
                raise ValueError(f"`{name}` is `{value}`, expected an integer of 1 to {largest}")
        if self.durability == "none" and self.commit_interval is not None:
            raise ValueError(
                f"`commit_interval` is `{self.commit_interval}` and `durability` is `none`, which "
                "commits no step, expected commit"
            )
        if not self.io_timeout > 0:
            raise ValueError(f"`io_timeout` is `{self.io_timeout}`, expected seconds above 0")
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"`weights` has `{len(self.weights)}` entries, expected one for each of "
                f"{len(self.paths)} paths"
            )
        if not all(_is_count(weight, _core.DRIVE_WEIGHT_MAX) for weight in self.weights or ()):
            raise ValueError(
                f"`weights` is `{list(self.weights or ())}`, expected integers of 1 to "
                f"{_core.DRIVE_WEIGHT_MAX}. hint: the MB/s of each drive"
            )

    @property
    def steps_per_commit(self) -> int:
        """The `commit_interval`, given or not."""
        return _COMMIT_INTERVAL if self.commit_interval is None else self.commit_interval

    @property
    def is_kept(self) -> bool:
        """Whether the files stay at the end."""
        if self.durability == "none":
            return False
        return self.name is not None if self.keep is None else self.keep


def _is_count(value: object, largest: int) -> bool:
    return isinstance(value, Integral) and 1 <= int(value) <= largest
