"""The line that a run on an `OffloadAdamW` begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell._budget import GIB
from stepwell._sharding import local

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from stepwell import _state
    from stepwell.store.host_side import HostSide
    from stepwell.store.residents import Residents

__all__ = ["start_line"]


def start_line(
    host: HostSide,
    residents: Residents,
    states: Mapping[torch.Tensor, _state.State],
    moments: str,
) -> str:
    """What steps where, with which moments, and how much memory that takes.

    Args:
        host: has what is stepped in host memory.
        residents: what is stepped on the device.
        states: what a volume has had.
        moments: how moments are held in host memory.
    """
    numel = sum(local(param).numel() for param in host.twins)
    place = "" if host.weights is None else ", with their weights in host memory"
    parts = [
        f"OffloadAdamW steps {numel:,} parameters on the host{place}",
        f"{moments} moments",
        f"{host.held_bytes(states) / GIB:.2f} GiB of host memory",
    ]
    if len(residents):
        parts.append(f"{residents.numel:,} parameters on {host.device} itself, fp32 moments")
    if host.deferred is not None:
        parts.append(f"updates wait up to {host.deferred.interval} steps")
    volume = None if host.swapped is None else host.swapped.volume
    if volume is not None and volume.core is not None:
        parts.append(f"state on volume `{volume.core.name}`")
    return ", ".join(parts)
