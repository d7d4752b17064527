"""Host memory that DeepSpeed takes for weights, touched by all cores at once.

DeepSpeed copies weights from the device to memory of `torch.empty`, whose pages the copy then
touches for the first time, one by one: 1.4 s for 2.5 GB. A `_core.Buffer` is touched by the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from stepwell import _core
from stepwell._tensors import tensor_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TouchedMemory"]

_NBYTES_MIN = 1 << 20
"""Of a tensor that is worth a job of the pool."""


class TouchedMemory(TorchFunctionMode):
    """While it is entered `torch.empty` gives large tensors on the CPU memory of a `Buffer`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As torch's, but for `torch.empty(numel, dtype=, device="cpu")` of 1 MiB or more."""
        kwargs = kwargs or {}
        if (
            func is torch.empty
            and len(args) == 1
            and isinstance(args[0], int)
            and kwargs.keys() == {"dtype", "device"}
            and kwargs["device"] == "cpu"
        ):
            (numel,), dtype = args, kwargs["dtype"]
            nbytes = numel * dtype.itemsize
            if nbytes >= _NBYTES_MIN:
                return tensor_on(_core.Buffer(nbytes)).view(dtype)
        return func(*args, **kwargs)
