"""What a user says of a volume: the drives that state is kept on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from stepwell import _core
from stepwell._checks import choice, count, counts, flag, optional, positive
from stepwell._option_names import named_options
from stepwell._sizes import COMMIT_INTERVAL

__all__ = ["Durability", "Volume"]

Durability: TypeAlias = Literal["commit", "none"]
IoEngine: TypeAlias = Literal["auto", "io_uring", "positional"]

_SECONDS_MAX = 1e9


@named_options("`Volume`")
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

    io_engine: IoEngine = "auto"
    """What moves the bytes. "auto": io_uring where the kernel offers it, else positional calls,
    with a warning."""

    io_timeout: float = 60.0
    """Seconds that a drive may take to answer."""

    def __post_init__(self) -> None:
        paths: object = self.paths
        if not isinstance(paths, Sequence) or isinstance(paths, (str, bytes)):
            raise ValueError(  # noqa: TRY004
                f"`paths` is `{paths!r}`, expected a list of folders or devices. "
                "hint: Volume([FOLDER, ...])"
            )
        if not self.paths:
            raise ValueError("`paths` is empty, expected a folder on each drive, or its device")
        for path in self.paths:
            is_path = isinstance(path, (str, os.PathLike))
            if not is_path or not (Path(path).is_dir() or Path(path).is_block_device()):
                is_there = is_path and Path(path).exists()
                raise ValueError(
                    f"`paths` has `{path}`, which {'is neither' if is_there else 'is not there'}, "
                    "expected a folder or a block device"
                )
        self._check_each()
        if self.durability == "none" and (self.keep or self.resume):
            option = "keep" if self.keep else "resume"
            raise ValueError(
                f"`{option}` is given and `durability` is `none`, which leaves nothing behind, "
                "expected commit"
            )
        if self.resume and self.name is None:
            raise ValueError("`resume` is given and `name` is not, expected which volume it is")
        if self.durability == "none" and self.commit_interval is not None:
            raise ValueError(
                f"`commit_interval` is `{self.commit_interval}` and `durability` is `none`, which "
                "commits no step, expected commit"
            )
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"`weights` has `{len(self.weights)}` entries, expected one for each of "
                f"{len(self.paths)} paths"
            )

    def _check_each(self) -> None:
        """Raises ValueError for an option that cannot work whatever the others are."""
        choice(self.durability, "`durability`", get_args(Durability))
        choice(self.io_engine, "`io_engine`", get_args(IoEngine))
        if self.name is not None and not isinstance(self.name, str):
            raise ValueError(f"`name` is `{self.name!r}`, expected a text or None")
        checked: dict[str, Any] = {
            "commit_interval": optional(count, self.commit_interval, "`commit_interval`"),
            "keep": optional(flag, self.keep, "`keep`"),
            "resume": flag(self.resume, "`resume`"),
            "weights": optional(
                counts,
                self.weights,
                "`weights`",
                most=_core.DRIVE_WEIGHT_MAX,
                hint="the MB/s of each drive",
            ),
            "stripe_bytes": optional(
                count, self.stripe_bytes, "`stripe_bytes`", most=_core.STRIPE_BYTES_MAX
            ),
            "queue_depth": optional(
                count, self.queue_depth, "`queue_depth`", most=_core.QUEUE_DEPTH_MAX
            ),
            "io_timeout": positive(
                self.io_timeout, "`io_timeout`", unit="seconds", most=_SECONDS_MAX
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def steps_per_commit(self) -> int:
        """The `commit_interval`, given or not."""
        return COMMIT_INTERVAL if self.commit_interval is None else self.commit_interval

    @property
    def is_kept(self) -> bool:
        """Whether the files stay at the end."""
        if self.durability == "none":
            return False
        return self.name is not None if self.keep is None else self.keep
