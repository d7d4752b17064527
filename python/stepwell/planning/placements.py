"""All placements of a training run on a machine.

Bytes are those that the library takes (`state_bytes`); of peers those of their documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.planning.offloaded import deferred, device_share, exact
from stepwell.planning.on_device import all_on_device, paged_8_bit
from stepwell.planning.on_drives import volume
from stepwell.planning.placement import CONTEXT_BYTES, PROCESS_BYTES, Placement, Run
from stepwell.planning.streamed import streamed

if TYPE_CHECKING:
    from stepwell.planning.machine import Machine
    from stepwell.planning.model import Model
    from stepwell.planning.workload import Workload

__all__ = ["placements"]


def placements(model: Model, workload: Workload, machine: Machine) -> list[Placement]:
    """All placements, with what each takes and lacks."""
    run = Run(model, workload, machine)
    found = [
        all_on_device(run),
        paged_8_bit(run),
        exact(run, "fp32"),
        exact(run, "q8"),
        device_share(run),
        deferred(run),
        streamed(run, "fp32"),
        streamed(run, "q8"),
        streamed(run, "q8", activations_on_host=True),
        volume(run, "fp32", is_streamed=False),
        volume(run, "q8", is_streamed=True),
    ]
    for placement in found:
        _compare(placement, machine)
    return found


def _compare(placement: Placement, machine: Machine) -> None:
    """Notes what the machine lacks."""
    lacks = {
        "GPU": placement.peak + CONTEXT_BYTES - machine.gpu_memory,
        "host": placement.host_total + PROCESS_BYTES - machine.host_memory,
    }
    placement.lacks |= {name: nbytes for name, nbytes in lacks.items() if nbytes > 0}
