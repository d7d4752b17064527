"""How far ahead of its use DeepSpeed's coordinator gathers weights. Imports no DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["bound_prefetch", "is_little_ahead"]

# Elements that the coordinator gathers ahead of their use.
_PREFETCH_SIZE = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
# What it has begun to gather, and no module uses yet.
_IN_FLIGHT = "_PartitionedParameterCoordinator__inflight_param_registry"


def bound_prefetch(coordinator: Any, may_prefetch: Callable[[], bool]) -> None:
    """Has a coordinator gather ahead only while it may.

    DeepSpeed prefetches a bucket more with each module, so the first modules of a forward would
    wait for the whole step.
    """
    if (size := vars(coordinator).get(_PREFETCH_SIZE)) is not None:
        setattr(coordinator, _PREFETCH_SIZE, _BoundedSize(size, may_prefetch))


def is_little_ahead(coordinator: Any) -> bool:
    """Whether less than a bucket is gathered ahead of its use: the same on all ranks."""
    known = vars(coordinator)
    ahead: int = sum(param.ds_numel for param in known[_IN_FLIGHT])
    return ahead < int(known[_PREFETCH_SIZE])


class _BoundedSize(int):
    """A number of elements that is greater than none only while more may be gathered."""

    _may_prefetch: Callable[[], bool]

    def __new__(cls, size: int, may_prefetch: Callable[[], bool]) -> Self:
        self = super().__new__(cls, size)
        # The coordinator goes with the optimizer, whose method this is.
        self._may_prefetch = may_prefetch
        return self

    def __gt__(self, other: int) -> bool:
        return super().__gt__(other) and self._may_prefetch()
