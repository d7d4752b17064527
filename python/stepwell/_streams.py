"""Devices and their streams, as the core knows them."""

from __future__ import annotations

import torch

__all__ = ["current_stream", "device_name", "stream_of"]


def device_name(device: torch.device) -> str:
    """What the core calls `device`."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def current_stream(device: torch.device) -> int:
    """The current stream of `device`, as the core knows it."""
    if device.type != "cuda":
        return 0
    # Hooks ask for every gradient, and torch.cuda.current_stream makes an object each time.
    stream: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return stream


def stream_of(stream: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of torch's that the core knows as `stream`."""
    if stream == 0:
        # torch takes the address 0 for none, and makes a new stream.
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
