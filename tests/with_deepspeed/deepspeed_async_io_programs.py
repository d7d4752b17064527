"""The program (see deepspeed_run) of what DeepSpeed does through its op `async_io`."""

import os
import sys
from pathlib import Path

import torch
from deepspeed_engines import configuration, initialize, squared, train, vectors


def two_layers():
    """Weights of 2 MiB each in bf16: what DeepSpeed swaps is at least 1 MiB."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 32),
    )


def offloaded(device, folder, **aio):
    param = {"device": device, "buffer_count": 8, "buffer_size": 1 << 21, "max_in_cpu": 0}
    if device == "nvme":
        param["nvme_path"] = str(folder)
    config = configuration(
        stage=3,
        dtype="bf16",
        zero={
            "offload_param": param,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    )
    return {**config, "stepwell": {"engine": False}, "aio": aio}


def trained(config, steps=4):
    engine = initialize(two_layers(), config)
    losses = train(engine, vectors(steps), squared)
    swapper = getattr(engine.optimizer, "params_in_nvme_and_cpu", None)
    return engine, losses, swapper


def program_async_io(result, folder):
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    folder = Path(folder)
    _, result["cpu"], _ = trained(offloaded("cpu", folder))
    aio = {"block_size": 1 << 20, "queue_depth": 4, "intra_op_parallelism": 2}
    engine, result["nvme"], _ = trained(offloaded("nvme", folder, **aio))
    files = sorted((folder / "zero_stage_3").rglob("*.swp"))
    result["files"] = [(path.name, path.stat().st_size) for path in files]
    # A file that is cut short is an error of the next step, not another result.
    for path in files:
        os.truncate(path, 4096)
    try:
        train(engine, vectors(1), squared)
    except OSError as error:
        result["truncated"] = (error.errno, str(error))
    _write_fast(result, folder)
    _run_ds_io(result, folder)


def _write_fast(result, folder):
    """A checkpoint through FastFileWriter."""
    from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.utils import UtilsBuilder

    # On CPU accelerators DeepSpeed has a builder in its place that refuses.
    fast_file_writer.UtilsBuilder = UtilsBuilder
    handle = AsyncIOBuilder().load().aio_handle(1 << 16, 8, False, True, 2)
    state = {"weight": torch.randn(301, 1001), "step": 7}
    for is_double in (True, False):
        pinned = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
        path = folder / f"fast_{is_double}.pt"
        writer = FastFileWriter(
            str(path),
            FastFileWriterConfig(
                dnvme_handle=handle, pinned_tensor=pinned, double_buffer=is_double
            ),
        )
        torch.save(state, writer)
        writer.close()
        handle.free_cpu_locked_tensor(pinned)
        loaded = torch.load(path)
        result[f"fast {is_double}"] = loaded["step"] == 7 and torch.equal(
            loaded["weight"], state["weight"]
        )


def _run_ds_io(result, folder):
    """DeepSpeed's own measurement: what a thread of it does."""
    from deepspeed.nvme.ds_aio_args import get_validated_args
    from deepspeed.nvme.ds_aio_basic import AIOBasic_Engine
    from deepspeed.nvme.ds_aio_handle import AIOHandle_Engine

    sys.argv = ["ds_io", "--folder", str(folder), "--io_size", "1M", "--loops", "2", "--validate"]
    args = get_validated_args()
    data = torch.arange(1 << 20).to(torch.uint8).numpy().tobytes()
    for make in (AIOHandle_Engine, AIOBasic_Engine):
        args.read = False
        writer = make(args, 0, False)
        writer.write(args, 0, 0)
        args.read = True
        # What is read is made by a program, where it is not there.
        (folder / "_aio_read_1048576.pt.0_0").write_bytes(data)
        (folder / "_aio_read_1048576.pt.0").write_bytes(data)
        reader = make(args, 0, True)
        reader.read(args, 0, 0)
        result[make.__name__] = bool(writer.ctxt["elapsed_sec"] and reader.ctxt["elapsed_sec"])
