"""This machine, measured once: what `Machine` has of it, kept in a file of the host.

The file is in the user's cache, `stepwell/machine-HOST.json`. Rates of a shared host change within
minutes, so `machine_here(again=True)` measures anew.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell import _core
from stepwell.planning.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["bus_rates", "host_rate", "machine_file", "machine_here", "step_core_seconds"]

_BUS_BYTES = 1 << 30
_ROUNDS = 5
# Of a product of square matrices: as large as those of a layer.
_PRODUCT = 8192
# As long as a device needs to reach the clock that it holds.
_PRODUCT_SECONDS = 2.0
# Elements that stay in a core's cache.
_IN_CACHE = 64 << 10


def machine_file() -> Path:
    """Where the measurements of this host are."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stepwell" / f"machine-{socket.gethostname()}.json"


def machine_here(*, again: bool = False) -> Machine:
    """This machine, as it was measured, or is now.

    Free host memory is that of now.

    Args:
        again: whether it is measured though it was before.

    Raises:
        ValueError: there is no GPU that torch can use.
    """
    file = machine_file()
    machine = None
    if not again:
        try:
            machine = Machine.of_dict(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            machine = None  # not measured, or by another version
    if machine is None:
        machine = _measured()
        _write(file, machine)
    return Machine.of_dict({**machine.to_dict(), "host_memory": _free_bytes()})


def _write(file: Path, machine: Machine) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(machine.to_dict(), indent=2) + "\n")
        new.replace(file)
    except OSError:
        return  # then it is measured each time


def _free_bytes() -> int:
    free = _core.free_memory_bytes()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages if free is None else free


def _measured() -> Machine:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU that torch can use, expected one, or a described machine. "
            "hint: --gpu-memory 24GB --host-memory 64GB"
        )
    properties = torch.cuda.get_device_properties(0)
    rates = bus_rates()
    system = _core.system_info()
    cpus = system["pool_cpus"]
    device = torch.device("cuda", 0)
    return Machine(
        name=f"{properties.name} of {socket.gethostname()}",
        gpu_memory=properties.total_memory,
        host_memory=_free_bytes(),
        bus_up=rates["up"],
        bus_down=rates["down"],
        bus_both=rates["both"],
        flops=_product_flops(device),
        device_rate=_device_rate(device),
        host_rate=host_rate(),
        core_seconds=step_core_seconds(),
        # One of them launches work on the device.
        cores=max(len(cpus) - 1, 1) if isinstance(cpus, list) else 1,
        measured_at=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def host_rate(numel: int = 256 << 20) -> float:
    """R: bytes per second of so many 4-byte words that all cores read and write in place."""
    seconds = _core.stream_ceiling(
        numel=numel, read_write_bytes=[4], read_bytes=[], write_bytes=[], passes=9
    )
    return 8 * numel / seconds


def step_core_seconds() -> dict[str, float]:
    """Seconds of one core per parameter of a step whose memory is in its cache, by codec."""
    pool = _core.Pool(threads=1)
    hyper = _core.Hyper(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)
    memory: list[_core.Buffer] = []

    def run(dtype: str, numel: int) -> _core.TensorView:
        memory.append(_core.Buffer(4 * numel))
        return _core.TensorView(address=memory[-1].address, dtype=dtype, numel=numel)

    found = {}
    for codec in _core.moments_codecs():
        parts: dict[str, Any] = {
            part.name: run(part.dtype, _IN_CACHE if part.per_element else part.length(_IN_CACHE))
            for part in _core.moments_parts(codec)
        }
        # Beside a float32 parameter: that of a bfloat16 one is verified here, which no step of an
        # engine does.
        tensor = _core.AdamTensor(
            param=run("float32", _IN_CACHE), grad=run("bfloat16", _IN_CACHE), **parts
        )
        found[codec] = _seconds_of(partial(_step, tensor, hyper, pool)) / _IN_CACHE
    return found


def _step(tensor: _core.AdamTensor, hyper: _core.Hyper, pool: _core.Pool) -> None:
    _core.adam_step([tensor], steps=[2], hyper=hyper, pool=pool)


def _seconds_of(step: Callable[[], None]) -> float:
    """The least of many calls: nothing else runs in it."""
    least = float("inf")
    for _ in range(50):
        begin = time.perf_counter()
        step()
        least = min(least, time.perf_counter() - begin)
    return least


def bus_rates() -> dict[str, float]:
    """Bytes per second between pinned memory and the GPU: "down", "up" and "both" ways at once.

    Nothing without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    hosts = [torch.empty(_BUS_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    theres = [torch.empty(_BUS_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    down, up = (hosts[0], theres[0]), (theres[1], hosts[1])
    rates = {
        name: len(copies) * _BUS_BYTES / _copy_seconds(copies)
        for name, copies in (("down", [down]), ("up", [up]), ("both", [down, up]))
    }
    del hosts, theres, down, up
    torch.cuda.empty_cache()
    return rates


def _copy_seconds(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The median of copies at once, each a target and a source."""
    import torch

    streams = [torch.cuda.Stream() for _ in copies]  # type: ignore[no-untyped-call]
    seconds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for stream, (target, source) in zip(streams, copies, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[_ROUNDS // 2]


def _product_flops(device: torch.device) -> float:
    """Of products of 16-bit matrices, one after the other, once the clock has settled."""
    import torch

    left, right = (
        torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    out = torch.empty_like(left)
    count, begin = 0, time.perf_counter()
    last = (0, begin)
    while (now := time.perf_counter()) - begin < _PRODUCT_SECONDS:
        last = (count, now) if now - begin < _PRODUCT_SECONDS / 2 else last
        for _ in range(4):
            torch.mm(left, right, out=out)
        count += 4
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - last[1]
    return (count - last[0]) * 2 * _PRODUCT**3 / seconds


def _device_rate(device: torch.device) -> float:
    """Bytes per second of a sum of two 16-bit tensors into a third."""
    import torch

    first, second = (
        torch.zeros(_BUS_BYTES // 4, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    out = torch.empty_like(first)
    seconds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            torch.add(first, second, out=out)
        torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - begin) / _ROUNDS)
    return 3 * first.nbytes / sorted(seconds)[_ROUNDS // 2]
