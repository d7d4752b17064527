"""One training run of `stepwell bench offload`, in a process of its own.

It is started as `python -m stepwell.cli._offload_cases JSON`. The last line that it prints is a
JSON object with what was measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepwell.cli._cases import Case
from stepwell.cli._processes import launched
from stepwell.cli._quiet import quiet_deepspeed
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
    from collections.abc import Callable, Mapping

__all__ = [
    "BUCKET",
    "ZERO_2",
    "bare_run",
    "deepspeed_run",
    "prepare",
    "stepwell_run",
    "torch_run",
]

_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


def _torch(workload: Workload, model: torch.nn.Module) -> Run:
    """Everything on the device: fp32 masters beside bfloat16 weights, torch's fused AdamW."""
    params: list[torch.Tensor] = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(
        masters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    @torch.no_grad()
    def step() -> float:
        norm = torch.nn.utils.clip_grad_norm_(params, workload.clip_norm, foreach=True)
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        torch._foreach_copy_(params, masters)
        optimizer.zero_grad()
        return float(norm)

    return Run(_loss_of(model), _backward_of(workload), step)


def _stepwell(case: Case, workload: Workload, model: torch.nn.Module) -> Run:
    from stepwell import _core
    from stepwell.offload import Deferred, Volume
    from stepwell.store.deferred import Extents, memory_of
    from stepwell.store.twins import Twins

    given = case.options
    options: dict[str, Any] = {"moments": case.moments}
    deferred = None
    if "deferred" in given:
        fraction = given.get("fraction", 0.0)
        deferred = options["deferred"] = Deferred(interval=given["deferred"], fraction=fraction)
    if case.is_on_drives:
        options["tier"] = Volume(
            workload.drives,
            durability=given.get("durability", "commit"),
            commit_interval=given.get("commit_interval"),
        )
        # No state fits in beside the buffers, or little.
        twins = Twins(have_gradients=deferred is None, is_paged=True)
        host_bytes_max = twins.nbytes(model.parameters()) + _BUFFERS_BYTES
        if deferred is not None:
            host_bytes_max += memory_of(Extents.of(model.parameters()), deferred).pinned
        options["host_bytes_max"] = host_bytes_max
    if "resident" in given:
        numel = sum(param.numel() for param in model.parameters())
        numel = int(given["resident"] * numel)
        options["device_bytes_max"] = _core.DeviceSteps.state_nbytes(numel)
    if "streamed" in given:
        options["weights"] = "host"
    if "untold" not in given:
        options["accumulation_steps"] = workload.accumulation
    return stepwell_run(workload, model, gives_model="no model" not in given, **options)


def torch_run(workload: Workload, model: torch.nn.Module) -> Run:
    """A run of torch's fused AdamW over the model's own parameters, wherever they are."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        params, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    def step() -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(params, workload.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return Run(_loss_of(model), _backward_of(workload), step)


def stepwell_run(
    workload: Workload, model: torch.nn.Module, *, gives_model: bool = True, **options: Any
) -> Run:
    """A run of OffloadAdamW with `options`."""
    from stepwell.offload import OffloadAdamW

    optimizer = OffloadAdamW(
        model.named_parameters(),
        model=model if gives_model else None,
        lr=_LR,
        betas=_BETAS,
        eps=_EPS,
        weight_decay=_WEIGHT_DECAY,
        clip_norm=workload.clip_norm,
        **options,
    )

    def step() -> float | None:
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.grad_norm

    return Run(
        _loss_of(model),
        _backward_of(workload),
        step,
        breakdown=lambda: optimizer.timing,
        finish=optimizer.synchronize,
    )


_BUFFERS_BYTES = 256 << 20
BUCKET = int(2e8)
_ON_CPU = {"device": "cpu", "pin_memory": True}
ZERO_2 = {"stage": 2, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
_ZERO_3_OFFLOAD_PARAM = {
    "stage": 3,
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    "offload_param": _ON_CPU,
}
_ZENFLOW = {
    **ZERO_2,
    "zenflow": {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 16,
        "update_interval": 4,
        "overlap_step": True,
    },
}
_TWIN_FLOW = {
    "stage": 3,
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    # Several sub-groups, of which a share is on the device.
    "sub_group_size": BUCKET // 2,
}


# What DeepSpeed's swapper is advised to use.
_AIO = {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 2, "overlap_events": True}
_BUFFERS = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def _deepspeed(case: Case, workload: Workload, model: torch.nn.Module) -> Run:
    given, is_registered = case.options, case.system == "deepspeed on stepwell"
    zero: dict[str, Any] = {}
    block: dict[str, Any] = {name: given[name] for name in ("accumulate", "fetch") if name in given}
    if case.moments != "fp32":
        block["moments"] = case.moments
    more: dict[str, Any] = {}
    if "zenflow" in given:
        zero |= _ZENFLOW
    if "offload_param" in given:
        zero |= _ZERO_3_OFFLOAD_PARAM
    if "ratio" in given:
        zero |= {**_TWIN_FLOW, "offload_optimizer": {**_ON_CPU, "ratio": given["ratio"]}}
    if "nvme" in given:
        # On the drives, of which DeepSpeed's swapper uses the first.
        path = {"device": "nvme", "nvme_path": workload.drives[0], "pin_memory": True}
        zero |= {
            "stage": 3,
            "reduce_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET // 4,
            "sub_group_size": BUCKET,
            "offload_optimizer": path if is_registered else {**path, **_BUFFERS},
        }
        numel = sum(param.numel() for param in model.parameters())
        block |= {
            "nvme_paths": list(workload.drives),
            # Weights, gradients and buffers; no state fits in, or little.
            "host_bytes_max": 4 * numel + _BUFFERS_BYTES,
            "volume": {
                "durability": given.get("durability", "commit"),
                "commit_interval": given.get("commit_interval"),
            },
        }
        more = {} if is_registered else {"aio": _AIO}
    return deepspeed_run(
        workload,
        model,
        register=is_registered,
        zero=zero or ZERO_2,
        block=block if is_registered else None,
        more=more,
    )


def deepspeed_run(
    workload: Workload,
    model: torch.nn.Module,
    *,
    register: bool,
    zero: Mapping[str, object],
    block: Mapping[str, object] | None = None,
    more: Mapping[str, object] | None = None,
    params: Mapping[str, object] | None = None,
    is_alone: bool = True,
) -> Run:
    """A run of DeepSpeed's engine.

    Args:
        workload: what is trained.
        model: likewise.
        register: whether Stepwell is registered.
        zero: what is particular of `zero_optimization`.
        block: the JSON's `stepwell`.
        more: other blocks of the JSON.
        params: more of its optimizer's.
        is_alone: whether there is no other rank, and no launcher has said so.
    """
    if is_alone:
        os.environ |= launched(1)[0]
    if torch.cuda.is_available():
        # What DeepSpeed builds is for this device. A list that is there may name others in a
        # way that it does not read (`10.0a`).
        capability = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, capability))
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if register:
        import stepwell.deepspeed

        stepwell.deepspeed.register()
    with quiet_deepspeed():
        import deepspeed

        adam = {"lr": _LR, "betas": list(_BETAS), "eps": _EPS, "weight_decay": _WEIGHT_DECAY}
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": workload.micro_batch,
                "gradient_accumulation_steps": workload.accumulation,
                "bf16": {"enabled": True},
                "gradient_clipping": workload.clip_norm,
                "zero_optimization": {
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "offload_optimizer": _ON_CPU,
                    **zero,
                },
                "optimizer": {"type": "AdamW", "params": {**adam, **(params or {})}},
                "steps_per_print": 10**9,
                "stepwell": block or {},
                **(more or {}),
            },
        )

    def step() -> float | None:
        engine.step()
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def breakdown() -> dict[str, float]:
        return engine.optimizer.timing if register else {}

    return Run(
        _loss_of(engine),
        engine.backward,
        step,
        breakdown=breakdown,
        finish=getattr(engine.optimizer, "drain", lambda: None),
        steps_itself=True,
    )


def _loss_of(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda batch: model(input_ids=batch, labels=batch).loss


def _backward_of(workload: Workload) -> Callable[[torch.Tensor], object]:
    return lambda loss: torch.autograd.backward(loss / workload.accumulation)


def prepare(name: str, workload: Workload, model: torch.nn.Module) -> Run:
    """The run of a case.

    Raises:
        ValueError: there is no case of that name.
    """
    case = Case.parse(name)
    if case.system == "torch":
        return _torch(workload, model)
    train_with = _stepwell if case.system.startswith("stepwell") else _deepspeed
    return train_with(case, workload, model)


def bare_run(workload: Workload, model: torch.nn.Module) -> Run:
    """A run without an optimizer: its step clears the gradients."""
    return Run(_loss_of(model), _backward_of(workload), model.zero_grad)


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _kernel_pinned() -> int:
    """Bytes that the kernel has pinned for this process: buffers that are registered with rings."""
    status = Path("/proc/self/status").read_text()
    words = next((line for line in status.splitlines() if line.startswith("VmPin:")), "VmPin: 0 kB")
    return int(words.split()[1]) << 10


def main(name: str, workload: Workload) -> dict[str, Any]:
    """Runs a case, and says what was measured, as plain values."""
    device = _device()
    result: dict[str, Any] = {"name": name, "plan": asdict(workload)}
    if name == "forward and backward":
        run = bare_run(workload, workload.model(device))
        return result | {"seconds": forward_backward(workload, device, run)}
    model = workload.model(device)
    sync(device)
    before = host_bytes()
    begin = time.perf_counter()
    run = prepare(name, workload, model)
    sync(device)
    prepared = time.perf_counter() - begin
    if device.type == "cuda":
        # Weights that training has in host memory were made on the device.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result |= train(workload, device, run)
    # ZeRO-3 leaves nothing in a parameter itself.
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    if "drive_bytes_per_step" in result:
        from stepwell._budget import pinned_bytes

        result["drive_bytes_per_param"] = [each / numel for each in result["drive_bytes_per_step"]]
        result |= {"pinned_bytes": pinned_bytes(), "registered_bytes": _kernel_pinned()}
    return result | {
        "num_params": numel,
        "prepare_seconds": prepared,
        "start_seconds": prepared + max(result["first_step_seconds"] - result["seconds"], 0.0),
        "host_bytes_per_param": (host_bytes() - before) / numel,
        "host_peak_gib": host_peak_bytes() / 2**30,
        "device_peak_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else None,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(main(asked["name"], Workload(**asked["plan"]))), flush=True)  # noqa: T201
    # Not through the interpreter's end: DeepSpeed leaves threads behind.
    os._exit(0)
