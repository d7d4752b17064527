"""A program (see deepspeed_run) of a checkpoint that is saved and read without memory for state."""

import contextlib
import ctypes
import resource
from pathlib import Path

import pytest
import torch
from deepspeed_engines import configuration, initialize, squared, train
from deepspeed_nvme_programs import on_volume
from insides import partitions_of

WIDTH, LAYERS = 2048, 4
NUMEL = WIDTH * WIDTH * LAYERS
COPY_BYTES = 4 * NUMEL
"""Of the fp32 masters, or of a moment. State has three such."""
LEFT_BYTES = COPY_BYTES // 2
"""That can be taken for a checkpoint. What takes less is no copy of state; noise is some 2 MB."""

# Of malloc.h: from this size on memory is mapped by itself.
M_MMAP_THRESHOLD = -3

# Beside weights and gradients. State has no room there.
BUFFERS_BYTES = 16 << 20


def model():
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return torch.nn.Sequential(*layers)


def vectors(count):
    for index in range(count):
        yield torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


def status(key):
    """Bytes that the kernel counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(found) * 1024


@contextlib.contextmanager
def memory_left(nbytes):
    """Allocations fail that take more than this together. Files that are mapped do not count.

    No peak is missed, as by samples of what is resident.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def program_nvme_export(result, *, folder):
    import stepwell.deepspeed

    # Stacks of threads that torch begins under the limit would count.
    torch.set_num_threads(1)
    # What is freed counts no more: in the heap it would, until the C library trims that.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    stepwell.deepspeed.register()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    drive, saved = Path(folder) / "drive", Path(folder) / "saved"
    drive.mkdir(parents=True)
    config = on_volume(
        configuration(stage=3, dtype="bf16"),
        drive,
        host_bytes_max=4 * NUMEL + BUFFERS_BYTES,
        durability="none",
    )
    engine = initialize(model(), config)
    result["tier"] = engine.stepwell_plan.tier
    train(engine, vectors(1), squared)
    partitions_of(engine.optimizer).finish()

    with memory_left(LEFT_BYTES):
        engine.save_checkpoint(str(saved))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(COPY_BYTES, dtype=torch.uint8)
    (file,) = saved.rglob("*_optim_states.pt")
    result["file_bytes"] = file.stat().st_size

    before = status("RssAnon")
    weights = get_fp32_state_dict_from_zero_checkpoint(str(saved), lazy_mode=True)
    result["taken"] = status("RssAnon") - before
    (flat,) = engine.optimizer.fp32_partitioned_groups_flat
    result["same"] = [
        torch.equal(weight.contiguous().view(-1), master)
        for weight, master in zip(weights.values(), flat.chunk(LAYERS), strict=True)
    ]
    engine.destroy()
