"""Copies of weights from host memory to the device, on a stream of their own: one rank.

Several ranks gather instead (`gather_lane.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Arrival", "CudaWeightLane", "HostWeightLane", "WeightLane"]

Arrival: TypeAlias = Any
"""A point of a stream: a CUDA event; None: it has passed."""


class WeightLane(Protocol):
    """What copies weights, and says when they have arrived."""

    num_ranks: int
    """How many copy together. Where they are several, what is copied, and when, depends on no
    clock."""

    def copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        """Copies the partitions of parameters, and returns them in the parameters' shapes.

        It waits for a step that writes them.
        """

    def wait(self, arrival: Arrival) -> bool:
        """The current stream waits. Returns whether no later use has to."""

    def free(self, params: Iterable[Any]) -> Arrival:
        """Frees the weights of parameters once the current stream has used them.

        Returns the point at which that stream is.
        """

    def has_ended(self, arrival: Arrival, *, is_waiting: bool) -> bool:
        """Whether a stream has passed a point; waits until it has if `is_waiting`."""

    def finish(self) -> None:
        """Waits until all copies have ended."""


class CudaWeightLane:
    """Copies on a stream of torch's, from which the memory is taken as well.

    Args:
        device: where weights go.
    """

    num_ranks = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        """See `WeightLane`."""
        # Waits for a step here, and not with another stream as the current one.
        sources = [param.ds_tensor.data for param in params]
        with torch.cuda.stream(self._stream):
            weights = [
                source.to(self._device, non_blocking=True).view(param.ds_shape)
                for source, param in zip(sources, params, strict=True)
            ]
            return weights, self._stream.record_event()

    def wait(self, arrival: Arrival) -> bool:
        """See `WeightLane`."""
        torch.cuda.current_stream(self._device).wait_event(arrival)
        # Another stream waits as well, as long as the copy is under way.
        return bool(arrival.query())

    def free(self, params: Iterable[Any]) -> Arrival:
        """See `WeightLane`."""
        stream = torch.cuda.current_stream(self._device)
        for param in params:
            weight = param.data
            # A program may have moved it.
            if weight.is_cuda:
                weight.record_stream(stream)
            param.data = weight.new_empty(0)
        return stream.record_event()

    def has_ended(self, arrival: Arrival, *, is_waiting: bool) -> bool:
        """See `WeightLane`."""
        if is_waiting:
            arrival.synchronize()
        return bool(arrival.query())

    def finish(self) -> None:
        """See `WeightLane`."""
        self._stream.synchronize()


class HostWeightLane:
    """Where the device is the host: weights are the partitions themselves, as DeepSpeed has it."""

    num_ranks = 1

    def copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        """See `WeightLane`."""
        return [param.ds_tensor.data.view(param.ds_shape) for param in params], None

    def wait(self, arrival: Arrival) -> bool:
        """See `WeightLane`."""
        return True

    def free(self, params: Iterable[Any]) -> Arrival:
        """See `WeightLane`."""
        for param in params:
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        return None

    def has_ended(self, arrival: Arrival, *, is_waiting: bool) -> bool:
        """See `WeightLane`."""
        return True

    def finish(self) -> None:
        """See `WeightLane`."""
