"""The machine that is planned for: its memories, and how fast what moves.

It is described, or measured (`measuring`). Of a described one what is not said is assumed, and
`assumed` names it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell._quantities import flops_of, nbytes_of, rate_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Machine", "described"]

# PCIe 4 with 16 lanes, 16-bit products of a 24 GB card, and the memory of a desktop with two
# channels of DDR5.
_ASSUMED = {"bus": 25e9, "flops": 150e12, "host_rate": 60e9}
# That card's memory moves 900 GB/s, and that of larger ones as much more as they compute more.
_ASSUMED_FLOPS_PER_BYTE = 167
_ASSUMED_CORES = 8
# Together both directions of PCIe move about one and a half times what one does.
_BOTH_WAYS = 1.5
# Seconds of one core per parameter of a step, where memory does not bind: 16 cores of a Xeon with
# AVX-512 step 9.87 G parameters with q8 moments per second (`benches/README.md`, "One step over
# host memory"), and 0.16 ns are what fp32 moments take in cache.
_CORE_SECONDS = {"fp32": 0.26e-9, "bf16": 0.47e-9, "q8": 1.62e-9}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memories in bytes, rates in bytes and operations per second."""

    name: str
    gpu_memory: int
    """Of each GPU."""
    host_memory: int
    """What this program may take of it."""
    bus_up: float
    """To the device, from pinned memory."""
    bus_down: float
    bus_both: float
    """Both ways at once, together."""
    flops: float
    """Of a large product of 16-bit matrices."""
    device_rate: float
    """At which the device's memory is read and written, together."""
    host_rate: float
    """R: at which all cores read and write host memory in place, together."""
    core_seconds: dict[str, float] = field(default_factory=lambda: dict(_CORE_SECONDS))
    """Seconds of one core per parameter of a step, where memory does not bind, by codec."""
    cores: int = 16
    """That step."""
    drive_rate: float = 0.0
    """At which all drives are read and written, together; 0: there are none."""
    drives: tuple[str, ...] = ()
    """Folders, for the line of code."""
    assumed: tuple[str, ...] = ()
    """The fields that nobody has said or measured."""
    measured_at: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def of_dict(values: Mapping[str, Any]) -> Machine:
        """What `to_dict` gave.

        Raises:
            TypeError: a field is missing, or there is another.
        """
        lists = {name: tuple(values[name]) for name in ("drives", "assumed") if name in values}
        return Machine(**{**values, **lists})

    def with_drives(self, drives: Sequence[str]) -> Machine:
        """The machine with drives: rates, as "3GB/s", or folders that `stepwell tune` has measured.

        Raises:
            ValueError: one is neither.
        """
        rate, folders = 0.0, []
        for drive in drives:
            if not Path(drive).is_dir():
                try:
                    rate += rate_of(drive, "a drive")
                except ValueError as error:
                    raise ValueError(
                        f"a drive is `{drive}`, expected a folder on it, or what it reads and "
                        "writes together, as 3GB/s"
                    ) from error
                continue
            from stepwell.store.tuning import DriveTuning

            found = DriveTuning.read(drive)
            if found is None:
                raise ValueError(
                    f"`{drive}` was not measured, expected a folder that was. hint: stepwell tune "
                    f"{drive}, or its rate, as 3GB/s"
                )
            rate += found.mb_per_second * 1e6
            folders.append(str(drive))
        return replace(self, drive_rate=rate, drives=tuple(folders)) if drives else self


def described(
    *,
    gpu_memory: str | int,
    host_memory: str | int,
    bus: str | float | None = None,
    flops: str | float | None = None,
    device_rate: str | float | None = None,
    host_rate: str | float | None = None,
    cores: int | None = None,
) -> Machine:
    """A machine from what is said of it.

    Args:
        gpu_memory: of each GPU, in bytes or as "24GB".
        host_memory: that the program may take, likewise.
        bus: one way between host and GPU, as "25GB/s"; a number is in GB/s.
        flops: what the GPU sustains in products of 16-bit matrices, as "150TFLOPS"; a number is in
            TFLOP/s.
        device_rate: of the GPU's memory, as "900GB/s".
        host_rate: of host memory, read and written together.
        cores: of the host.

    Raises:
        ValueError: one of them is no such quantity.
    """
    given = {"bus": bus, "flops": flops, "device_rate": device_rate, "host_rate": host_rate}
    if cores is not None and cores < 1:
        raise ValueError(f"`cores` is `{cores}`, expected an integer, 1 or more")
    found = dict(_ASSUMED)
    for name, value in given.items():
        if value is not None:
            read = flops_of if name == "flops" else rate_of
            found[name] = read(value, f"`{name}`")
    found.setdefault("device_rate", found["flops"] / _ASSUMED_FLOPS_PER_BYTE)
    one_way = found["bus"]
    return Machine(
        name="the machine that is described",
        gpu_memory=nbytes_of(gpu_memory, "`gpu_memory`"),
        host_memory=nbytes_of(host_memory, "`host_memory`"),
        bus_up=one_way,
        bus_down=one_way,
        bus_both=_BOTH_WAYS * one_way,
        flops=found["flops"],
        device_rate=found["device_rate"],
        host_rate=found["host_rate"],
        cores=_ASSUMED_CORES if cores is None else cores,
        assumed=tuple(name for name, value in {**given, "cores": cores}.items() if value is None),
    )
