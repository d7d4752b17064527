"""A program (see deepspeed_run) of ZeRO on a GPU."""

from deepspeed_engines import configuration, initialize, partitions, squared, train, vectors
from deepspeed_nvme_programs import BUFFERS_BYTES
from deepspeed_offload_param_programs import offloaded
from deepspeed_paths import wide

STEPS = 5


def run(config):
    """What a run on a GPU ends with."""
    engine = initialize(wide(), config)
    norms, losses = [], []
    for batch in vectors(STEPS * config.get("gradient_accumulation_steps", 1)):
        losses += train(engine, [batch.to(engine.device)], squared)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    result = {
        "losses": losses,
        "norms": norms,
        "partitions": partitions(engine),
        "skipped": engine.skipped_steps,
        "device": str(engine.device.type),
        "class": type(engine.optimizer).__name__,
        "read": getattr(engine.optimizer, "timing", {}).get("bytes_read", 0),
    }
    engine.destroy()
    return result


def program_gpu(result):
    """The same configurations on both paths."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    scale = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    several = {"dtype": "bf16", "clip": 0.1, "gradient_accumulation_steps": 3}
    cases = {
        "ZeRO-1": configuration(dtype="bf16", stage=1),
        "ZeRO-2": configuration(dtype="bf16"),
        "ZeRO-2, fp32": configuration(),
        "ZeRO-2, fp16": configuration(dtype="fp16", precision=scale),
        "ZeRO-2, clipped, accumulated": configuration(**several),
        "ZeRO-2, overlap_comm": configuration(dtype="bf16", zero={"overlap_comm": True}),
        "ZeRO-3": configuration(dtype="bf16", stage=3, zero={"sub_group_size": 50_000}),
        "ZeRO-3, fp16": configuration(dtype="fp16", stage=3, precision=scale),
        "ZeRO-3, clipped, accumulated": configuration(stage=3, **several),
        "ZeRO-3, offload_param": offloaded(pinned=True, persistent=5000),
        "ZeRO-3, offload_param, fp32": offloaded(dtype="fp32", pinned=True),
        "ZeRO-3, offload_param, accumulated": offloaded(gradient_accumulation_steps=3),
    }
    for name, config in cases.items():
        result[name] = [
            run({**config, "stepwell": {"engine": is_engine}}) for is_engine in (True, False)
        ]


def program_two_gpus(result):
    """Gradients that are reduced in buckets, some of which are smaller than a parameter."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    small = {"overlap_comm": True, "reduce_bucket_size": 20_000}
    cases = {
        "overlap_comm": configuration(dtype="bf16", zero={"overlap_comm": True}),
        "overlap_comm, small buckets": configuration(dtype="bf16", zero=small),
        "overlap_comm, accumulated": configuration(
            dtype="bf16", zero=small, gradient_accumulation_steps=3
        ),
        "ZeRO-1, overlap_comm": configuration(dtype="bf16", stage=1, zero=small),
        "no overlap_comm": configuration(dtype="bf16", zero={"overlap_comm": False}),
    }
    for name, config in cases.items():
        result[name] = [
            run({**config, "stepwell": {"engine": is_engine}}) for is_engine in (True, False)
        ]


def program_gpu_volume(result, drive):
    """The same configurations with their state on a volume, and in host memory."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    numel = sum(param.numel() for param in wide().parameters())
    for name, config in {
        "ZeRO-2": configuration(dtype="bf16"),
        "ZeRO-2, accumulated": configuration(dtype="bf16", gradient_accumulation_steps=3),
        "ZeRO-3": configuration(dtype="bf16", stage=3, zero={"sub_group_size": 50_000}),
    }.items():
        on_drive = {"device": "nvme", "nvme_path": drive}
        zero = {**config["zero_optimization"], "offload_optimizer": on_drive}
        block = {"host_bytes_max": 4 * numel + BUFFERS_BYTES}
        on_volume = {**config, "zero_optimization": zero, "stepwell": block}
        result[name] = [run(on_volume), run(config)]
