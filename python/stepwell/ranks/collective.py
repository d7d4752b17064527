"""Ranks that do something together: what one of them cannot do, none of them does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Ranks", "why_lost"]


class Ranks:
    """Some ranks. Every call is collective, of the same thread, in the same order on all of them.

    They tell each other by a group of the program's, of which the thread of a step is the only one
    that makes collectives.

    Args:
        group: the ranks; None: all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        """Of the default group."""
        self._num_met = 0

    def meet(self, mine: object = None, failure: Exception | None = None) -> list[Any]:
        """All ranks come here, and get the picklable objects of all, in their order.

        Args:
            mine: the object of this rank.
            failure: why this one cannot go on; None: it can.

        Raises:
            OSError: a rank cannot go on, or is gone.
        """
        self._num_met += 1
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            found = self._gather((text, mine))
        except RuntimeError as error:
            raise OSError(
                f"{why_lost(error)}. An optimizer is made, and a commit asked for, by all ranks "
                "that step together"
            ) from error
        texts = dict(zip(self.ranks, (text for text, _ in found), strict=True))
        if failed := [f"on rank {rank}: {text}" for rank, text in texts.items() if text]:
            raise OSError("; ".join(failed))
        return [each for _, each in found]

    def _gather(self, mine: object) -> list[Any]:
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, mine, group=self._group)
        return found

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """In this context the others wait for this rank where they meet next.

        An error that ends it before that is told to them there. All ranks stay together. Ctrl-C is
        not told: the others may be on their way out.
        """
        before = self._num_met
        try:
            yield
        except Exception as error:
            if self._num_met == before:
                # The error that this rank raises is its own.
                with contextlib.suppress(OSError):
                    self.meet(failure=error)
            raise


def why_lost(error: BaseException) -> str:
    """Why a collective has failed with `error`, and what to do."""
    if not dist.is_initialized():
        return (
            "destroy_process_group() was called before the ranks were done. "
            "hint: optimizer.synchronize() before it"
        )
    return (
        f"another rank is gone, or late by more than the timeout of the process group: {error}. "
        "hint: its own error says why; resume all ranks from a checkpoint"
    )
