"""What is asked of a parameter that is whole on the device only while modules use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

__all__ = ["Weight"]


class Weight(Protocol):
    """A parameter. Who keeps it makes one of these, which is hashed by its identity."""

    param: torch.nn.Parameter
    key: int
    """Its number, which is the same on all ranks."""
    numel: int
    shape: torch.Size
    part_numel: int
    """How many elements each rank has between uses; the last ranks may have fewer, or none."""
    users: set[Hashable]
    """What uses it. While something does, it stays."""
    is_persistent: bool
    """Whether it stays on the device in all passes, so that a rank may use it by itself."""
    stays: bool
    """Whether it leaves the device only when all weights do."""

    @property
    def state(self) -> Any:
        """Whether it is on the device, in words of who keeps it. Other code may change it."""

    @property
    def source(self) -> torch.Tensor:
        """Its elements between uses: all of them, or those that this rank has.

        While a step may write them, it is of another class than `torch.Tensor`, whose use waits.
        """

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Has `source`, which is plain, copied to the device on the current stream.

        Returns the copy, which the parameter has from `put` on.
        """

    def put(self, whole: torch.Tensor) -> None:
        """The parameter has its weight from now on.

        Raises:
            RuntimeError: other code has begun to bring it.
        """

    def discard(self) -> None:
        """What was copied is not put."""

    def rest(self) -> None:
        """Nothing uses it, and it stays on the device for its next use."""

    def resume(self) -> None:
        """A use of what rests begins."""

    def drop(self) -> None:
        """The parameter has no elements from now on."""
