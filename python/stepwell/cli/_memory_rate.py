"""R, the rate at which the host's memory is read and written, and the bound that follows from it.

On a shared host R moves by a third within minutes. So it is measured beside each case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.planning.measuring import host_rate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryRate", "bound"]

_NUMEL = 256 << 20
_NUMEL_WITHOUT_GPU = 16 << 20


def _measure() -> float:
    """GB/s of 4-byte words that all cores read and write in place."""
    import torch

    numel = _NUMEL if torch.cuda.is_available() else _NUMEL_WITHOUT_GPU
    return host_rate(numel) / 1e9


class MemoryRate:
    """R, as it is between the cases of a run."""

    def __init__(self) -> None:
        self.gb_per_second = _measure()
        """Measured last."""

    def beside(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a case, with the larger rate of directly before and behind it."""
        before, result = self.gb_per_second, run()
        self.gb_per_second = _measure()
        return result | {"memory_gb_per_second": max(before, self.gb_per_second)}


def bound(result: dict[str, Any], alone_seconds: float, bytes_per_param: float) -> dict[str, Any]:
    """L + bytes / R, for the result of a case.

    Args:
        result: of `MemoryRate.beside`.
        alone_seconds: L, of forward and backward alone.
        bytes_per_param: what a step moves in host memory.
    """
    rate = result["memory_gb_per_second"] * 1e9
    step = bytes_per_param * result["num_params"] / rate
    return {"bound_seconds": alone_seconds + step, "bytes_per_param": bytes_per_param}
