"""Volumes of ranks that step together: made together, and gone on from at one step.

Each rank has the state of what it steps on a volume of its own: its pieces of DTensors (FSDP2), or
its partitions under ZeRO (`deepspeed/zero/swapped.py`).

- SHV-1 The steps of all volumes have the same numbers, and the same of them are committed: a rank
  counts every step that it submits, also one that changes none of its rows, and a step that is
  submitted on one rank is so on all. With DTensors a rank may have no update where others step
  plain parameters of their own: it submits an empty step then.
- SHV-2 No rank begins to write a step before all have made the one before, and committed it where
  it is committed. Under ZeRO each rank's own step has ended before it takes part in the norm of the
  next one; with DTensors, before the ranks agree on the next one.
- SHV-3 So whenever the ranks are killed, and however a step fails, their volumes are at one commit,
  or at two that follow one another. A program that ends commits the last step of each rank
  (`volume_end.py`), which may be another one. Those that are ahead, by either, still have the
  commit before, whole (`rust/tier/volume/commit.rs`, CMT-5): all go back to the last one that all
  have. Before the commit of the first step is the beginning: there they make their volumes anew.
- SHV-4 Where volumes have no commit in common, or have other numbers of updates of the same
  parameter, or the commits that they go on from are those of several runs, all ranks refuse them. A
  run is a number that the ranks draw when they open volumes, and that all commits from then on
  have.

An error of one rank is raised on all of them.

Cost: some rounds between the ranks when the optimizer is made.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell._sharding import meshes
from stepwell.ranks.collective import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepwell.store.volume import Volume

__all__ = [
    "RUN_OF_ONE",
    "agree_on_counts",
    "close",
    "explain",
    "open_together",
    "ranks_of",
]

_LOGGER = logging.getLogger(__name__)

RUN_OF_ONE = 0
"""The run of a volume that steps with no other."""

# Where a volume without a committed step is; the first step is always committed.
_BEGINNING, _FIRST_STEP = 0, 1

# So many that no two runs draw the same.
_RUN_BITS = 64


def ranks_of(
    params: Iterable[torch.Tensor], *, commits: bool, known: Ranks | None = None
) -> Ranks | None:
    """The ranks that hold pieces of DTensors, which step together.

    Where some of them are on a mesh of all ranks, these are all ranks.

    Args:
        params: the parameters.
        commits: whether their steps are committed to volumes.
        known: those of some of the parameters.

    Returns:
        the ranks, `known` if they are; None: there are no DTensors, or nobody but this rank has
        pieces of them; or there is no group of just these ranks, and steps are not committed.

    Raises:
        ValueError: steps are committed, and there is no group of just these ranks.
    """
    found = meshes(params)
    if not found:
        return None
    of_meshes = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in found}
    together, group = tuple(range(torch.distributed.get_world_size())), None
    if together not in of_meshes:
        if len(of_meshes) > 1 or found[0].ndim > 1:
            if not commits:
                return known
            raise ValueError(
                f"`tier` has durability `commit`, and DTensor parameters are on the meshes "
                f"`{found}`, expected one of all ranks, or a single one of one dimension. hint: "
                "Volume(..., durability='none')"
            )
        (together,), group = of_meshes, found[0].get_group()
    if known is not None and tuple(sorted(known.ranks)) == together:
        return known
    return Ranks(group)


def open_together(
    ranks: Ranks,
    make: Callable[[int | None, int], _core.Swap | None],
    *,
    commit_interval: int,
) -> _core.Swap | None:
    """The volume of this rank, when all ranks have theirs, at the same step. Collective.

    Args:
        ranks: the ranks.
        make: makes it, or opens it at a step, None being its last one, for a run; None: this rank
            needs none.
        commit_interval: of this rank's volume.

    Raises:
        ValueError: as `make`; or the volumes are not those of one run, or commit other steps.
        OSError: as `make`; or another rank has failed.
    """
    run, *_ = ranks.meet(secrets.randbits(_RUN_BITS))
    core = _on_all(ranks, lambda: make(None, run), None)
    step = _BEGINNING if core is None else core.step or _BEGINNING
    before = None if core is None else core.step_before
    if step == _FIRST_STEP:
        before = _BEGINNING
    try:
        _check_intervals(ranks.meet(commit_interval))
        found = ranks.meet((step, before))
        common = _common_step(found)
    except BaseException:
        close(core)
        raise

    def go_back() -> _core.Swap | None:
        if core is None or step == common:
            return core
        name = core.name
        core.close(keep=common != _BEGINNING)
        made = make(common or None, run)
        _LOGGER.warning(
            "volume `%s` goes back from step %s to %s: the run has ended before all ranks had "
            "committed that step",
            name,
            step,
            common,
        )
        return made

    if len({last for last, _ in found}) > 1:
        core = _on_all(ranks, go_back, core)
    if common != _BEGINNING:
        try:
            _check_runs(ranks.meet(None if core is None else core.resumed_run))
        except BaseException:
            close(core)
            raise
    return core


def _check_runs(runs: Sequence[int | None]) -> None:
    """Raises ValueError if the commits that volumes go on from are not those of one run."""
    if len(set(runs)) > 1:
        raise ValueError(
            f"the volumes of the ranks are of the runs `{list(runs)}`, expected one run. hint: "
            "give each rank its volume of one run; else `stepwell volume rm` what is there, and go "
            "on from a checkpoint, without `resume`"
        )


def _check_intervals(intervals: Sequence[int]) -> None:
    """Raises ValueError if the ranks' volumes are to commit other steps."""
    if len(set(intervals)) > 1:
        raise ValueError(
            f"the volumes of the ranks have the `commit_interval`s `{list(intervals)}`, expected "
            "one: a step is on all volumes or on none"
        )


def _common_step(found: Sequence[tuple[int, int | None]]) -> int:
    """The last step that all volumes have.

    Args:
        found: of each volume its last committed step, and the one before; None: there is none.

    Raises:
        ValueError: there is none.
    """
    if common := set[int | None](found[0]).intersection(*found[1:]) - {None}:
        return max(step for step in common if step is not None)
    steps = [last for last, _ in found]
    raise ValueError(
        f"the volumes of the ranks are at the steps `{steps}`, expected one step on all, or two "
        "commits that follow one another: they are not of one run. hint: the same `resume`, and "
        "the drives of that run, on all ranks; else `stepwell volume rm` what is there, and go on "
        "from a checkpoint, or begin anew"
    )


def _on_all(
    ranks: Ranks, make: Callable[[], _core.Swap | None], before: _core.Swap | None
) -> _core.Swap | None:
    """What `make` makes, where it fails on no rank; else what there is, or was `before`, ends."""
    core = before
    try:
        with ranks.awaited():
            core = make()
        ranks.meet()
    except BaseException:
        close(core)
        raise
    return core


def close(core: _core.Swap | None) -> None:
    """Ends a volume in whose making something has failed.

    One that was made now has no step, and is not kept. One that was to be resumed is in any case,
    to be gone on from once that is mended.
    """
    if core is not None:
        core.close(keep=core.counts is not None)


def agree_on_counts(ranks: Ranks, mine: Sequence[int | None]) -> list[int]:
    """How many updates each parameter has seen, of resumed volumes. Collective.

    Args:
        ranks: the ranks.
        mine: of each parameter, or partition, that the ranks share, the count; None: this rank has
            nothing of it.

    Raises:
        ValueError: the volumes have different counts.
        OSError: another rank has failed.
    """
    counts = []
    for each in zip(*ranks.meet(list(mine)), strict=True):
        found = {count for count in each if count is not None}
        if len(found) > 1:
            raise ValueError(
                f"the volumes of the ranks have `{sorted(found)}` updates of one parameter, "
                "expected the same: they are not of one run. hint: give each rank its volume of "
                "one run; else `stepwell volume rm` what is there, and go on from a checkpoint, "
                "without `resume`"
            )
        counts.append(found.pop() if found else 0)
    return counts


def explain(
    error: ValueError, volume: Volume, rank: int, ranks: Sequence[int], resized_by: str
) -> None:
    """Raises an error that says more, where other ranks may have made what cannot be resumed.

    Only what lies in this rank's folders is known: others may be those of another host, and a
    group of other ranks may have volumes of the same name.
    """
    if not volume.resume:
        return
    made = _ranks_with((os.fspath(path) for path in volume.paths), f"{volume.name}-")
    if rank not in made or made == sorted(ranks):
        # The error says what is wrong.
        return
    raise ValueError(
        f"{error}; `{volume.name}` is there for the ranks `{made}` in the folders of rank "
        f"`{rank}`, and `{list(ranks)}` step together. hint: as many ranks go on from a volume as "
        f"have made it, each with its own drives; {resized_by}"
    ) from error


def _ranks_with(folders: Iterable[str], prefix: str) -> list[int]:
    """The ranks whose volumes are in these folders: their numbers come behind `prefix`."""
    names = {member.name for folder in folders for member in _core.list_members(folder)}
    ends = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    return sorted(int(end) for end in ends if end.isdecimal())
