"""The stream on which weights come to the device: copies, and gathers of several ranks.

On one rank a weight is a copy of its source. On several each rank has a part of it, and all parts,
one behind the other, are the weight. Each is gathered into its own memory, and nothing is copied
before or after. What is gathered together is one launch, and with backends that do not coalesce one
for each. All ranks call `copy` in one order with the same weights (`gather_order.py` compares).

Where the device is the host there is no stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.weights.weight import Weight

__all__ = ["Arrival", "Lane"]

Arrival: TypeAlias = Any
"""A point of a stream: a CUDA event; None: it has passed."""


class Lane:
    """Brings weights, and says when they have arrived. Memory is taken from its stream as well.

    Args:
        device: where weights go.
        group: the process group whose ranks have the parts; None: there is one rank.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._group = group
        self._is_coalesced = True
        self.num_ranks: int = 1 if group is None else group.size()
        """How many copy together: where they are several, all the same, whatever the time is."""

    def copy(self, weights: Sequence[Weight]) -> tuple[list[torch.Tensor], Arrival]:
        """Brings weights. Returns them in their shapes, and the point at which they are there.

        It waits for a step that writes them.
        """
        # Waits for a step here, and not with another stream as the current one.
        sources = [weight.source.data for weight in weights]
        if self._stream is None:
            return self._wholes(weights, self._parts(weights, sources)), None
        if self._group is not None:
            # On the device a program may have written them.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            parts = self._parts(weights, sources)
            return self._wholes(weights, parts), self._stream.record_event()

    def _parts(
        self, weights: Sequence[Weight], sources: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        pairs = zip(weights, sources, strict=True)
        return [weight.copy(source, self._device) for weight, source in pairs]

    def _wholes(self, weights: Sequence[Weight], parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weights in their shapes, by this rank's parts of them, which are on the device."""
        wholes = parts
        if self._group is not None:
            # Behind the last element of a weight that does not divide by the ranks is nothing.
            wholes = [
                whole if whole.numel() == weight.numel else whole[: weight.numel]
                for whole, weight in zip(self._gathered(parts), weights, strict=True)
            ]
        return [whole.view(weight.shape) for whole, weight in zip(wholes, weights, strict=True)]

    def _gathered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of all ranks. The current stream waits for them, or without one the thread."""
        wholes = [part.new_empty(self.num_ranks * part.numel()) for part in parts]
        # Weights of one module may have several dtypes.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, part in enumerate(parts):
            by_dtype.setdefault(part.dtype, []).append(index)
        works: list[Any] = []
        for indices in by_dtype.values():
            works += self._begin([wholes[nth] for nth in indices], [parts[nth] for nth in indices])
        for work in works:
            work.wait()
        return wholes

    def _begin(self, wholes: list[torch.Tensor], parts: list[torch.Tensor]) -> list[Any]:
        """Begins to gather tensors of one dtype: with one launch, where the backend can."""
        if self._is_coalesced:
            try:
                return [self._group.allgather_into_tensor_coalesced(wholes, parts)]
            except RuntimeError as error:
                # So torch says it, of any backend: on all ranks, before anything is sent.
                if "does not support" not in str(error):
                    raise
                self._is_coalesced = False
        # Every backend has it.
        return [
            torch.distributed.all_gather_into_tensor(whole, part, group=self._group, async_op=True)
            for whole, part in zip(wholes, parts, strict=True)
        ]

    def wait(self, arrival: Arrival) -> bool:
        """The current stream waits. Returns whether no later use has to."""
        torch.cuda.current_stream(self._device).wait_event(arrival)
        # Another stream waits as well, as long as the copy is under way.
        return bool(arrival.query())

    def release(self, wholes: Sequence[torch.Tensor]) -> Arrival:
        """Frees the memory of weights behind a point: where the current stream is now."""
        if self._stream is None:
            return None
        stream = torch.cuda.current_stream(self._device)
        for whole in wholes:
            # A program may have moved it.
            if whole.is_cuda:
                whole.record_stream(stream)
        return stream.record_event()

    def finish(self) -> None:
        """Waits until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()
