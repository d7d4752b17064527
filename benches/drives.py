"""What moves bytes to and from drives, to be measured side by side: the contenders.

Each moves as much as it can for some seconds, on all folders at once, and says how many bytes that
were. Three patterns: reads or writes of all records or whole files (`read`, `write`), and both at
once, as a step of an optimizer has them (`swap`). A volume itself is `ThroughVolume`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from stepwell import OffloadAdamW, Volume, _core, _state
from stepwell.cli._drive_rates import PATTERNS, Pattern
from stepwell.cli._quiet import quiet_deepspeed
from stepwell.store.state_volume import MEMORY_PER_BUFFERS
from stepwell.store.swapped import Swapped
from stepwell.store.twins import Twins

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stepwell.optim import Moments

__all__ = [
    "Contender",
    "DeepSpeedAio",
    "Fio",
    "OptimizerSteps",
    "PlainCalls",
    "optimizer_on",
]

_MIB = 1 << 20
# As most benchmarks of drives have it.
_BLOCK_BYTES = _MIB
_FILE_NAME = "stepwell_bench.tmp"

_PARAM_NUMEL_MAX = 4 << 20


class Contender(Protocol):
    """What is measured."""

    name: str
    patterns: Sequence[Pattern]
    """Those that it has."""

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """Bytes per second, read and written together, over at least so many seconds.

        Raises:
            OSError: a drive fails.
        """

    def close(self) -> None:
        """Removes what it has made."""


def optimizer_on(volume: Volume, moments: Moments, state_nbytes: int) -> OffloadAdamW:
    """Steps bfloat16 parameters with about so many bytes of state; their gradients stay.

    All state that is stepped is on the volume. It has the buffers that it would choose by itself,
    but no more bytes of them than half of the state. The first parameter has no gradient.

    Raises:
        ValueError: the volume has too little memory, or is in use.
        OSError: a drive fails, or is full.
    """
    chunk = torch.empty(_core.CHUNK_LEN, dtype=torch.bfloat16, device="meta")
    chunk_nbytes = _state.nbytes(chunk, moments)
    numel = max(state_nbytes * chunk.numel() // chunk_nbytes, 1)
    count = -(-numel // _PARAM_NUMEL_MAX)
    generator = torch.Generator().manual_seed(0)
    params = []
    for number in range(count):
        nth = (number + 1) * numel // count - number * numel // count
        # In place: tensors of another dtype, made before, would leave holes in memory.
        param, grad = (
            torch.empty(nth, dtype=torch.bfloat16).normal_(0, std, generator=generator)
            for std in (1, 1e-3)
        )
        param.requires_grad_().grad = grad
        params.append(param)
    plenty = 1 << 50
    left = Swapped(volume, moments, None).lay_out({param: param for param in params}, plenty)
    buffers = plenty - left
    buffers = min(buffers, state_nbytes // MEMORY_PER_BUFFERS)
    # The memory that the buffers leave has the first state. So that is of a parameter that no step
    # touches. There are whole buffers only, so that they leave up to one of them more.
    idle_numel = (buffers // chunk_nbytes + 2) * chunk.numel()
    params.insert(0, torch.zeros(idle_numel, dtype=torch.bfloat16, requires_grad=True))
    return OffloadAdamW(
        params,
        lr=1e-4,
        clip_norm=1.0,
        moments=moments,
        tier=volume,
        host_bytes_max=Twins(is_paged=True).nbytes(params) + MEMORY_PER_BUFFERS * buffers,
    )


class OptimizerSteps:
    """Steps of an optimizer whose state is on a volume, one after the other, without a model.

    Args:
        volume: where; durability `none`.
        moments: as `OffloadAdamW` has it.
        state_nbytes: of all folders.
    """

    patterns: Sequence[Pattern] = ("swap",)

    def __init__(self, volume: Volume, moments: Moments, state_nbytes: int) -> None:
        self.name = f"steps, {moments}"
        self._optimizer: OffloadAdamW | None = optimizer_on(volume, moments, state_nbytes)
        # A first step reads nothing.
        self._optimizer.step()
        self._moved()

    def _moved(self) -> float:
        """Bytes read and written since the volume was made, once the last step is over."""
        assert self._optimizer is not None
        self._optimizer.synchronize()
        timing = self._optimizer.timing
        return timing["bytes_read"] + timing["bytes_written"]

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """As `Contender.rate`; of whole steps."""
        assert pattern in self.patterns
        assert self._optimizer is not None
        before, begin = self._moved(), time.perf_counter()
        # A step begins when the one before it is over, and goes on behind the call.
        self._optimizer.step()
        while time.perf_counter() - begin < seconds:
            self._optimizer.step()
        return (self._moved() - before) / (time.perf_counter() - begin)

    def close(self) -> None:
        """As `Contender.close`."""
        self._optimizer = None


@contextlib.contextmanager
def _removed(paths: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _fill(path: Path, nbytes: int) -> None:
    """Makes a file without holes, and writes it out."""
    block = os.urandom(_MIB)
    with path.open("wb") as file:
        for begin in range(0, nbytes, _MIB):
            file.write(block[: min(_MIB, nbytes - begin)])
        file.flush()
        os.fsync(file.fileno())


@dataclass
class PlainCalls:
    """`pread` and `pwrite` of whole blocks, on threads, past the page cache: the plain ceiling."""

    folders: Sequence[Path]
    file_nbytes: int
    calls_at_once: int
    """Of each drive."""
    name: str = "plain calls"
    patterns: Sequence[Pattern] = PATTERNS
    _files: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._paths = [folder / _FILE_NAME for folder in self.folders]
        with _removed(self._paths):
            for path in self._paths:
                _fill(path, self.file_nbytes)
                try:
                    self._files.append(os.open(path, os.O_RDWR | os.O_DIRECT))
                except OSError:  # a file system without O_DIRECT
                    self._files.append(os.open(path, os.O_RDWR))

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """As `Contender.rate`."""
        moved = [0] * (self.calls_at_once * len(self._files))
        errors: list[OSError] = []
        begin = time.perf_counter()

        def run(number: int) -> None:
            file = self._files[number // self.calls_at_once]
            memory = mmap.mmap(-1, _BLOCK_BYTES)  # page-aligned
            writes = pattern == "write" or (pattern == "swap" and number % 2 == 0)
            call = os.pwritev if writes else os.preadv
            num_blocks = max(self.file_nbytes // _BLOCK_BYTES, 1)
            block = number % self.calls_at_once
            try:
                while not moved[number] or time.perf_counter() - begin < seconds:
                    moved[number] += call(file, [memory], block % num_blocks * _BLOCK_BYTES)
                    block += self.calls_at_once
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(moved))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(moved) / (time.perf_counter() - begin)

    def close(self) -> None:
        """As `Contender.close`."""
        for file in self._files:
            os.close(file)
        self._files.clear()
        for path in self._paths:
            path.unlink(missing_ok=True)


@dataclass
class Fio:
    """fio with io_uring, one job for each folder."""

    folders: Sequence[Path]
    file_nbytes: int
    calls_at_once: int
    """Of each drive."""
    name: str = "fio"
    patterns: Sequence[Pattern] = PATTERNS

    @staticmethod
    def absence() -> str | None:
        """Why it is not there."""
        return None if shutil.which("fio") else "fio is not installed"

    def __post_init__(self) -> None:
        self._paths = [folder / f"fio_{_FILE_NAME}" for folder in self.folders]
        with _removed(self._paths):
            for path in self._paths:
                _fill(path, self.file_nbytes)

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """As `Contender.rate`."""
        command = [
            *("fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", "--bs=1M"),
            *(f"--iodepth={self.calls_at_once}", "--time_based", f"--runtime={seconds:g}"),
            f"--rw={'rw' if pattern == 'swap' else pattern}",
            *(f"--size={self.file_nbytes}", "--thread", "--overwrite=1"),
        ]
        for number, path in enumerate(self._paths):
            command += [f"--name=drive{number}", f"--filename={path}"]
        ended = subprocess.run(command, capture_output=True, timeout=seconds + 60, check=False)
        if ended.returncode:
            raise OSError(f"fio has failed: {ended.stderr.decode()[-500:]}")
        jobs = json.loads(ended.stdout)["jobs"]
        return float(sum(job[way]["bw_bytes"] for job in jobs for way in ("read", "write")))

    def close(self) -> None:
        """As `Contender.close`."""
        for path in self._paths:
            path.unlink(missing_ok=True)


@dataclass
class DeepSpeedAio:
    """DeepSpeed's own `async_io`, a file for each folder; 1 MiB blocks."""

    folders: Sequence[Path]
    file_nbytes: int
    calls_at_once: int
    """Of each drive and way."""
    native: Any
    name: str = "deepspeed aio"
    patterns: Sequence[Pattern] = PATTERNS

    @staticmethod
    def load() -> tuple[Any | None, str | None]:
        """DeepSpeed's op, or why there is none. Nothing is registered in this process."""
        try:
            with quiet_deepspeed():
                from deepspeed.ops.op_builder import AsyncIOBuilder

                return AsyncIOBuilder().load(verbose=False), None
        # Compiler, linker, libaio: whatever stands in the way is the answer.
        except Exception as error:  # noqa: BLE001
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return None, (
                f"its op cannot be built: {lines[0].strip()} hint: it needs a C++ compiler, ninja "
                "and libaio"
            )

    def __post_init__(self) -> None:
        self._paths = [
            [folder / f"{way}_{_FILE_NAME}" for way in ("read", "write")] for folder in self.folders
        ]
        with _removed([path for paths in self._paths for path in paths]):
            for paths in self._paths:
                for path in paths:
                    _fill(path, self.file_nbytes)
            aio_handle = self.native.aio_handle
            self._handles = [
                [aio_handle(_BLOCK_BYTES, self.calls_at_once, False, True, 1) for _ in "rw"]
                for _ in self.folders
            ]
            example = torch.empty(0, dtype=torch.uint8)
            self._memory = [
                [handle.new_cpu_locked_tensor(self.file_nbytes, example) for handle in handles]
                for handles in self._handles
            ]

    def rate(self, pattern: Pattern, seconds: float) -> float:
        """As `Contender.rate`."""
        ways = {"read": (0,), "write": (1,), "swap": (0, 1)}[pattern]
        begin, nbytes = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds or not nbytes:
            begun = []
            for paths, handles, memory in zip(
                self._paths, self._handles, self._memory, strict=True
            ):
                for way in ways:
                    submit = (handles[way].async_pread, handles[way].async_pwrite)[way]
                    submit(memory[way], str(paths[way]), 0)
                    begun.append(handles[way])
            nbytes += self.file_nbytes * sum(handle.wait() for handle in begun)
        return nbytes / elapsed

    def close(self) -> None:
        """As `Contender.close`."""
        for handles, memory in zip(self._handles, self._memory, strict=True):
            for handle, tensor in zip(handles, memory, strict=True):
                handle.free_cpu_locked_tensor(tensor)
        for paths in self._paths:
            for path in paths:
                path.unlink(missing_ok=True)
