"""How far ahead of its use DeepSpeed's coordinator gathers weights. Imports no DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bound_prefetch", "is_little_ahead"]

# Elements that the coordinator gathers ahead of their use.
_PREFETCH_SIZE = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
# What it has begun to gather, and no module uses yet.
_IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"


def bound_prefetch(coordinator: Any, may_prefetch: Callable[[], bool]) -> None:
    """Has a coordinator gather ahead only while it may.

    DeepSpeed prefetches a bucket more with each module, so the first modules of a forward would
    wait for the whole step. A coordinator of another release may have no such bucket.
    """
    known = vars(coordinator)
    if _PREFETCH_SIZE in known and _IN_FLIGHT in known:
        size = _BoundedSize(known[_PREFETCH_SIZE])
        # The coordinator goes with the optimizer, whose method this is.
        size.may_prefetch = may_prefetch
        setattr(coordinator, _PREFETCH_SIZE, size)


def is_little_ahead(coordinator: Any) -> bool:
    """Whether less than a bucket is gathered ahead of its use: the same on all ranks."""
    known = vars(coordinator)
    ahead: int = sum(param.ds_numel for param in known[_IN_FLIGHT])
    return ahead < int(known[_PREFETCH_SIZE])


class _BoundedSize(int):
    """A number of elements that is greater than none only while more may be gathered."""

    may_prefetch: Callable[[], bool]

    def __gt__(self, other: int) -> bool:
        return super().__gt__(other) and self.may_prefetch()
