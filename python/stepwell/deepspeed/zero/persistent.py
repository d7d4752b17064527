"""Weights that DeepSpeed keeps gathered between steps, and offloads all the same.

Under ZeRO-3 small parameters are persistent. With `offload_param` their partitions are in host
memory, and DeepSpeed gathers all of them at the end of `step()`: it would wait for the end of the
step in the background. On one rank nothing is gathered, and each of them goes up by itself, when a
forward or an access waits for it. Several ranks gather each of them behind the step
(`zero.gathers`), where it was stepped, also if partitions are on the device. All ranks do, in
the order of the partitions: whether one of them waits in `step()` is its own matter.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell.access.guard import Uploads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepwell.deepspeed.zero.partition import Fragment
    from stepwell.deepspeed.zero.partitions import Partitions

__all__ = ["PersistentUploads", "Upload"]


class Upload(NamedTuple):
    """One weight on its way up."""

    fragment: Fragment
    """What is stepped: the whole parameter, or this rank's partition of it."""
    source: torch.Tensor
    """Its weight, flat. It has no class that waits."""
    target: torch.Tensor
    """As many elements on the device, flat, for each rank."""


class PersistentUploads(Uploads):
    """New weights of persistent parameters: what a `Gate` waits for.

    Args:
        partitions: what steps them.
        device: where they go.
    """

    def __init__(self, partitions: Partitions, device: torch.device) -> None:
        self._partitions = partitions
        self._uploads: dict[torch.Tensor, Upload] = {}
        self._lock = threading.RLock()
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submission(self, uploads: Mapping[torch.Tensor, Upload]) -> list[partial[None]]:
        """The call that has uses wait for `uploads`, made directly after the step is submitted.

        Their targets were made on the current stream. Nothing waits for others by then.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return [partial(self._uploads.update, uploads)]

    def wait(self, params: Iterable[torch.Tensor], /) -> None:
        """Waits until the new weights of `params` are on the device, for all streams."""
        with self._lock:
            found = {param: self._uploads[param] for param in params if param in self._uploads}
            self._partitions.wait_for(upload.fragment for upload in found.values())
            if found:
                self._copy(found.values())
            # A program may write to them from now on.
            for param in found:
                del self._uploads[param]

    @torch.no_grad()
    def _copy(self, uploads: Iterable[Upload]) -> None:
        if self._stream is None:
            for _, source, target in uploads:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            for _, source, target in uploads:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def finish(self) -> None:
        """Waits until all of them are on the device."""
        self._partitions.finish()
        self.wait(list(self._uploads))
