"""Gathers of weights of which each rank has a partition, on a stream of their own.

All ranks call `copy` in one order with the same parameters (`gather_order.py` compares), on the
process group that DeepSpeed gathers on. The partitions of all ranks, one behind the other, are the
weight: each is gathered into its own memory, and nothing is copied before or after. What is
gathered together is one launch, and with backends that do not coalesce one for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepwell.deepspeed.zero.weight_lane import CudaWeightLane, HostWeightLane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.deepspeed.zero.weight_lane import Arrival

__all__ = ["CudaGatherLane", "HostGatherLane"]


class _Gathers:
    """Gathers on a process group.

    Args:
        group: the group, whose ranks have the partitions.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_coalesced = True

    def weights(self, params: Sequence[Any], mine: Sequence[torch.Tensor]) -> list[Any]:
        """The weights, in the parameters' shapes, of the partitions of all ranks.

        The current stream waits for them; without one the thread does.

        Args:
            params: DeepSpeed's parameters.
            mine: the partition of each that this rank has, on the device.
        """
        wholes = [part.new_empty(self._group.size() * part.numel()) for part in mine]
        # Parameters of one module may have several dtypes.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, part in enumerate(mine):
            by_dtype.setdefault(part.dtype, []).append(index)
        works: list[Any] = []
        for indices in by_dtype.values():
            works += self._begin([wholes[nth] for nth in indices], [mine[nth] for nth in indices])
        for work in works:
            work.wait()
        return [
            # Behind the last element of a parameter that does not divide by the ranks is nothing.
            (whole if whole.numel() == param.ds_numel else whole[: param.ds_numel]).view(
                param.ds_shape
            )
            for whole, param in zip(wholes, params, strict=True)
        ]

    def _begin(self, wholes: list[torch.Tensor], mine: list[torch.Tensor]) -> list[Any]:
        """Begins to gather tensors of one dtype: with one launch, where the backend can."""
        if self._is_coalesced:
            try:
                return [self._group.allgather_into_tensor_coalesced(wholes, mine)]
            except RuntimeError as error:
                # So torch says it, of any backend: on all ranks, before anything is sent.
                if "does not support" not in str(error):
                    raise
                self._is_coalesced = False
        # By which DeepSpeed gathers: every backend that it runs on has it.
        return [
            torch.distributed.all_gather_into_tensor(whole, part, group=self._group, async_op=True)
            for whole, part in zip(wholes, mine, strict=True)
        ]


class CudaGatherLane(CudaWeightLane):
    """Gathers on a stream of torch's, from which the memory is taken as well.

    Args:
        device: where weights go.
        group: the process group whose ranks have the partitions.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        super().__init__(device)
        self._gathers = _Gathers(group)
        self.num_ranks = group.size()

    def copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        """See `WeightLane`."""
        # Waits for a step here, and not with another stream as the current one.
        sources = [param.ds_tensor.data for param in params]
        # On the device a program may have written them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            mine = [source.to(self._device, non_blocking=True) for source in sources]
            return self._gathers.weights(params, mine), self._stream.record_event()


class HostGatherLane(HostWeightLane):
    """Where the device is the host.

    Args:
        group: the process group whose ranks have the partitions.
    """

    def __init__(self, group: Any) -> None:
        self._gathers = _Gathers(group)
        self.num_ranks = group.size()

    def copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        """See `WeightLane`."""
        return self._gathers.weights(params, [param.ds_tensor.data for param in params]), None
