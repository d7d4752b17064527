"""Ranks that do something together: what one of them cannot do, none of them does."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Ranks", "WholeWorld"]


class Ranks(abc.ABC):
    """Some ranks. Every call is collective, of the same thread, in the same order on all of them.

    Args:
        ranks: their numbers in the default group.
    """

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        """Of the default group."""

    @abc.abstractmethod
    def objects(self, mine: object) -> list[Any]:
        """The picklable objects of all ranks, in their order."""

    def awaited(self) -> AbstractContextManager[None]:
        """A context in which the others wait for what this rank tells them next."""
        return contextlib.nullcontext()

    def tell_failure(self, failure: Exception | None) -> None:
        """All ranks tell whether they have failed; where one has, all raise, and stay together.

        Args:
            failure: why this one has; None: it has not.

        Raises:
            ValueError: `failure`.
            OSError: likewise; or another rank has failed, or is gone.
        """
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            texts = self.objects(text)
        except OSError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        failed = {self.ranks[rank]: each for rank, each in enumerate(texts) if each is not None}
        if failed:
            raise OSError("; ".join(f"on rank {rank}: {each}" for rank, each in failed.items()))


class WholeWorld(Ranks):
    """All ranks, by their default group: for what has no process group of its own."""

    def __init__(self) -> None:
        super().__init__(list(range(dist.get_world_size())))

    def objects(self, mine: object) -> list[Any]:
        """As `Ranks.objects`."""
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, mine)
        return found
