"""`stepwell volume`: the volumes on drives. What is there, is it whole, away with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check", "format_device", "ls", "rm"]

Drives = Annotated[
    list[Path],
    typer.Argument(
        metavar="DRIVE",
        exists=True,
        file_okay=False,
        help="The folders and block devices of the volume's members, in any order.",
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Only this volume.", show_default="all that are there")
]

_MIB = 1 << 20


@dataclass(frozen=True)
class _Found:
    """The files and devices of one volume, by the number of the member."""

    name: str
    members: dict[int, _core.MemberFile]

    @property
    def missing(self) -> list[int]:
        """The members that are not on the drives, as far as that is known."""
        known = [file.num_members for file in self.members.values() if file.num_members]
        return [number for number in range(max(known, default=0)) if number not in self.members]

    @property
    def drives(self) -> list[str]:
        return [str(self.members[number].drive) for number in sorted(self.members)]

    @property
    def holder(self) -> str | None:
        return next((file.holder for file in self.members.values() if file.holder), None)


def _found(drives: Sequence[Path], name: str | None) -> list[_Found]:
    """The volumes on these drives. Ends the program where there is none of this name."""
    volumes: dict[str, _Found] = {}
    for drive in dict.fromkeys(drive.resolve() for drive in drives):
        try:
            members = _core.list_members(drive)
        except OSError as error:
            _end(str(error))
        for file in members:
            volume = volumes.setdefault(file.name, _Found(file.name, {}))
            if other := volume.members.get(file.member):
                _end(
                    f"two are member `{file.member}` of volume `{file.name}`: {other.path} and "
                    f"{file.path}. hint: give the drives of one volume only"
                )
            volume.members[file.member] = file
    if name is not None and name not in volumes:
        _end(f"no volume `{name}` is on {', '.join(map(str, drives))}")
    return [volumes[each] for each in sorted(volumes) if name in (None, each)]


def _end(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def ls(drives: Drives) -> None:
    """List the volumes that have a member on these drives.

    Takes no lock: a volume may be in use.
    """
    volumes = _found(drives, None)
    for volume in volumes:
        files = [volume.members[number] for number in sorted(volume.members)]
        records = next((file.num_records for file in files if file.num_records is not None), None)
        state = f"used by {volume.holder}" if volume.holder else "not in use"
        if written := [file.path.stat().st_mtime for file in files if file.path.is_file()]:
            date = datetime.fromtimestamp(max(written), timezone.utc)
            state += f", last written {date:%Y-%m-%d %H:%M} UTC"
        if records is None:
            state += ", never completely made, or damaged"
        elif volume.missing:
            state += f", members {', '.join(map(str, volume.missing))} are elsewhere"
        typer.echo(
            f"{volume.name}: {len(files)} members, {records or 0} records, "
            f"{sum(file.nbytes for file in files) / _MIB:.1f} MiB, {state}"
        )
        for file in files:
            typer.echo(f"  {file.member}  {file.path}  {file.nbytes / _MIB:.1f} MiB")
    used = {file.drive for volume in volumes for file in volume.members.values()}
    for drive in drives:
        if drive.is_block_device() and drive.resolve() not in used:
            typer.echo(f"{drive}: a device without a volume")


def check(drives: Drives, name: Name = None) -> None:
    """Read every record of volumes that no job uses, and say what is wrong.

    The code is 1 where anything is.
    """
    volumes = _found(drives, name)
    is_whole = True
    for volume in volumes:
        if volume.missing:
            is_whole = False
            members = ", ".join(map(str, volume.missing))
            typer.echo(f"{volume.name}: members {members} are not on these drives")
            continue
        try:
            step, records, wrong = _core.check_volume(volume.name, volume.drives)
        except (OSError, ValueError) as error:
            is_whole = False
            typer.echo(f"{volume.name}: {error}")
            continue
        is_whole = is_whole and not wrong
        at = "no step is committed" if step is None else f"step {step} is committed"
        typer.echo(
            f"{volume.name}: {at}, {records} records, "
            + (f"{len(wrong)} are damaged" if wrong else "all that were written are whole")
        )
        for each in wrong:
            typer.echo(f"  {each}")
    if not volumes:
        typer.echo("no volume is there")
    if not is_whole:
        sys.exit(1)


def rm(
    drives: Drives,
    name: Name = None,
    every: Annotated[bool, typer.Option("--all", help="All volumes on these drives.")] = False,
) -> None:
    """Remove volumes that no job uses. Their devices are free then."""
    if (name is None) is not every:
        raise typer.BadParameter("expected --name or --all, one of them")
    is_removed = True
    for volume in _found(drives, name):
        try:
            _core.remove_volume(volume.name, _all_drives(volume))
        except (OSError, ValueError) as error:
            is_removed = False
            typer.echo(f"{volume.name}: {error}", err=True)
        else:
            typer.echo(f"{volume.name}: removed")
    if not is_removed:
        sys.exit(1)


def _all_drives(volume: _Found) -> list[str]:
    """The drives of all members, in their order."""
    if sorted(volume.members) == list(range(len(volume.members))) and not volume.missing:
        return volume.drives
    raise OSError(
        "some of its members are not on these drives. hint: give all drives of the volume, or "
        f"remove its files by hand ({', '.join(volume.drives)})"
    )


def format_device(
    devices: Annotated[
        list[Path],
        typer.Argument(
            metavar="DEVICE", exists=True, help="Block devices, such as /dev/nvme1n1. May be parts."
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option(help="Also where a file system, a partition table or other data is.")
    ] = False,
) -> None:
    """Prepare block devices for volumes. What is on them is lost.

    A device that anything uses is refused. So is one that has anything in its first or last 4 MiB,
    unless --overwrite is given. A volume takes no other devices than those that were prepared.
    """
    is_done = True
    for device in devices:
        try:
            _core.format_device(device, overwrite=overwrite)
        except (OSError, ValueError) as error:
            is_done = False
            typer.echo(f"{device}: {error}", err=True)
        else:
            typer.echo(f"{device}: ready for a volume")
    if not is_done:
        sys.exit(1)
