"""`stepwell volume`: the volumes that lie in folders. What is there, is it whole, away with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepwell import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check", "ls", "rm"]

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="The folders of the volume's members, in any order.",
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Only this volume.", show_default="all that are there")
]

_MIB = 1 << 20


@dataclass(frozen=True)
class _Found:
    """The files of one volume, by the number of the member."""

    name: str
    members: dict[int, _core.MemberFile]

    @property
    def missing(self) -> list[int]:
        """The members whose files are not in the folders, as far as that is known."""
        known = [file.num_members for file in self.members.values() if file.num_members]
        return [number for number in range(max(known, default=0)) if number not in self.members]

    @property
    def folders(self) -> list[str]:
        return [str(self.members[number].path.parent) for number in sorted(self.members)]

    @property
    def holder(self) -> str | None:
        return next((file.holder for file in self.members.values() if file.holder), None)


def _found(folders: Sequence[Path], name: str | None) -> list[_Found]:
    """The volumes in these folders. Ends the program where there is none of this name."""
    volumes: dict[str, _Found] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for file in _core.list_members(folder):
            volume = volumes.setdefault(file.name, _Found(file.name, {}))
            if other := volume.members.get(file.member):
                _end(
                    f"two files are member `{file.member}` of volume `{file.name}`: {other.path} "
                    f"and {file.path}. hint: give the folders of one volume only"
                )
            volume.members[file.member] = file
    if name is not None and name not in volumes:
        _end(f"no volume `{name}` is in {', '.join(map(str, folders))}")
    return [volumes[each] for each in sorted(volumes) if name in (None, each)]


def _end(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def ls(folders: Folders) -> None:
    """List the volumes that have a member in these folders.

    Takes no lock: a volume may be in use.
    """
    for volume in _found(folders, None):
        files = [volume.members[number] for number in sorted(volume.members)]
        records = next((file.num_records for file in files if file.num_records is not None), None)
        state = f"used by {volume.holder}" if volume.holder else "not in use"
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


def check(folders: Folders, name: Name = None) -> None:
    """Read every record of volumes that no job uses, and say what is wrong.

    The code is 1 where anything is.
    """
    volumes = _found(folders, name)
    is_whole = True
    for volume in volumes:
        if volume.missing:
            is_whole = False
            members = ", ".join(map(str, volume.missing))
            typer.echo(f"{volume.name}: members {members} are not in these folders")
            continue
        try:
            step, records, wrong = _core.check_volume(volume.name, volume.folders)
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
    folders: Folders,
    name: Name = None,
    every: Annotated[bool, typer.Option("--all", help="All volumes in these folders.")] = False,
) -> None:
    """Remove volumes that no job uses."""
    if (name is None) is not every:
        raise typer.BadParameter("expected --name or --all, one of them")
    is_removed = True
    for volume in _found(folders, name):
        try:
            _core.remove_volume(volume.name, _all_folders(volume))
        except (OSError, ValueError) as error:
            is_removed = False
            typer.echo(f"{volume.name}: {error}", err=True)
        else:
            typer.echo(f"{volume.name}: removed")
    if not is_removed:
        sys.exit(1)


def _all_folders(volume: _Found) -> list[str]:
    """The folders of all members, in their order."""
    if sorted(volume.members) == list(range(len(volume.members))) and not volume.missing:
        return volume.folders
    raise OSError(
        "some of its members are not in these folders. hint: give all folders of the volume, or "
        f"remove its files by hand ({', '.join(volume.folders)})"
    )
