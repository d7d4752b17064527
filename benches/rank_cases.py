"""One rank of a training run of `offload_ranks.py`, in a process of its own.

It is started as `python rank_cases.py JSON`, with the variables of a launcher. The last line that
rank 0 prints is a JSON object with what was measured on all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from stepwell.cli import _offload_cases as alone
from stepwell.cli._workload import (
    Run,
    Workload,
    forward_backward,
    host_bytes,
    host_peak_bytes,
    sync,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES", "MODELS", "prepare"]

CASES = (
    *("ddp", "fsdp2", "fsdp2 cpu_offload", "torch fsdp2 cpu_offload"),
    *("deepspeed, stage=2, all on the devices", "deepspeed, stage=2"),
    "deepspeed on stepwell, stage=2",
    *("deepspeed, stage=3, all on the devices", "deepspeed, stage=3"),
    "deepspeed on stepwell, stage=3",
)
"""All that there are."""


def _replicated(model: torch.nn.Module) -> torch.nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sharded(
    model: torch.nn.Module, *, is_offloaded: bool = False, is_mixed: bool = False
) -> torch.nn.Module:
    """`is_mixed`: shards are fp32, and what FSDP2 computes with is bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
    }
    if is_offloaded:
        # Pinned memory needs a GPU.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if is_mixed:
        model = model.float()
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


_STAGES: dict[int, dict[str, object]] = {
    # Made for offload on several ranks: each rank's part has layers of the whole model.
    2: {**alone.ZERO_2, "round_robin_gradients": True},
    3: {
        "stage": 3,
        "reduce_bucket_size": alone.BUCKET,
        "stage3_prefetch_bucket_size": alone.BUCKET,
    },
}


MODELS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "ddp": _replicated,
    "fsdp2": _sharded,
    "fsdp2 cpu_offload": partial(_sharded, is_offloaded=True),
    "torch fsdp2 cpu_offload": partial(_sharded, is_offloaded=True, is_mixed=True),
}
"""What a case of plain PyTorch makes of the model first. That is timed alone as well."""


def prepare(name: str, workload: Workload, model: torch.nn.Module) -> Run:
    """The run of a case on this rank; `name`: one of `CASES`."""
    if name == "torch fsdp2 cpu_offload":
        return alone.torch_run(workload, model)
    if name.startswith("fsdp2"):
        # Every backward reduces its gradients.
        return alone.stepwell_run(workload, model, accumulation_steps=workload.accumulation)
    if name == "ddp":
        return alone.stepwell_run(workload, model)
    zero, params = _STAGES[3 if "stage=3" in name else 2], {}
    if _is_on_devices(name):
        # Reduces gradients, and has weights, as where the state is offloaded.
        zero = {**zero, "offload_optimizer": {"device": "none"}}
        # Its own op would be compiled.
        params = {"torch_adam": True}
    register = "on stepwell" in name
    return alone.deepspeed_run(
        workload, model, register=register, zero=zero, params=params, is_alone=False
    )


def _is_on_devices(name: str) -> bool:
    return name.endswith("all on the devices")


def _over_ranks(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main(name: str, workload: Workload) -> dict[str, Any]:
    """Runs a case on this rank, and says what was measured on all, as plain values."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # gloo as well: it gathers what is in host memory.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = workload.model(device)
    numel = sum(param.numel() for param in model.parameters())
    # Each rank has samples of its own, and the weights of all.
    own = replace(workload, seed=workload.seed + 1000 * rank)
    bare_seconds = None
    if name in MODELS:
        model = MODELS[name](model)
        bare = alone.bare_run(own, model)
        bare_seconds = max(_over_ranks(forward_backward(own, device, bare)))
    sync(device)
    before = host_bytes()
    begin = time.perf_counter()
    run = prepare(name, workload, model)
    del model
    sync(device)
    prepared = time.perf_counter() - begin
    result = train(own, device, run)
    if _is_on_devices(name):
        bare_seconds = max(_over_ranks(forward_backward(own, device, run)))
    # `torch.cuda.max_memory_allocated` is not there without a GPU.
    device_peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    ranks = _over_ranks(
        {
            "host_bytes": host_bytes() - before,
            "host_peak_bytes": host_peak_bytes(),
            "device_peak_bytes": device_peak,
            "losses": result["losses"],
            "seconds": result["seconds"],
            "norms": result["norms"],
        }
    )
    losses = zip(*(each["losses"] for each in ranks), strict=True)
    return result | {
        "name": name,
        "forward_backward_seconds": bare_seconds,
        "num_params": numel,
        "prepare_seconds": prepared,
        "start_seconds": prepared + max(result["first_step_seconds"] - result["seconds"], 0.0),
        # Ranks wait for one another, so that one is as slow as the other but for the last step.
        "seconds": max(each["seconds"] for each in ranks),
        "losses": [sum(of_step) / len(of_step) for of_step in losses],
        "host_bytes_per_param": sum(each["host_bytes"] for each in ranks) / numel,
        "host_peak_gib": sum(each["host_peak_bytes"] for each in ranks) / 2**30,
        "device_peak_gib": None
        if device_peak is None
        else max(each["device_peak_bytes"] for each in ranks) / 2**30,
        "norms_agree": all(each["norms"] == ranks[0]["norms"] for each in ranks),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    measured = main(asked["name"], Workload(**asked["plan"]))
    if os.environ["RANK"] == "0":
        print(json.dumps(measured), flush=True)
    dist.barrier()
    # Not through the interpreter's end: DeepSpeed leaves threads behind.
    os._exit(0)
