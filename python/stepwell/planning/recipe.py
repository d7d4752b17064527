"""What to write for a placement: lines of Python, or a DeepSpeed JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepwell.planning.placement import Placement
    from stepwell.planning.workload import Workload

__all__ = ["recipe_of"]

_LR = "lr=1e-5"


def recipe_of(placement: Placement, workload: Workload) -> str:
    """The code of a placement, for `model`; or the JSON."""
    if placement.kind == "streamed" and workload.gpus > 1:
        return _deepspeed(placement, workload)
    # transformers' `from_pretrained` gives a model in evaluation mode, which checkpoints nothing.
    lines = ["model.train()"]
    if workload.checkpointing:
        lines.append("model.gradient_checkpointing_enable()")
    lines = [*_imports(placement, workload), *lines]
    if workload.gpus > 1:
        lines.append("fully_shard(model)  # and each layer before it")
    if placement.options.get("weights") == "host":
        lines.insert(0, "# The model is on the CPU, in 16 bits.")
    elif workload.gpus == 1:
        lines.append("model.cuda()")
    if placement.kind == "torch":
        call = f"torch.optim.AdamW(model.parameters(), {_LR}, fused=True)  # over fp32 masters"
    elif placement.kind == "bitsandbytes":
        call = f"bitsandbytes.optim.PagedAdamW8bit(model.parameters(), {_LR})"
    else:
        call = _offload(placement, workload)
    return "\n".join([*lines, f"optimizer = {call}"])


def _imports(placement: Placement, workload: Workload) -> list[str]:
    found = []
    if placement.kind == "torch":
        found.append("import torch")
    elif placement.kind == "bitsandbytes":
        found.append("import bitsandbytes")
    else:
        names = ["OffloadAdamW"]
        names += ["Deferred"] if "deferred" in placement.options else []
        names += ["Volume"] if "tier" in placement.options else []
        found.append(f"from stepwell import {', '.join(sorted(names))}")
    if workload.gpus > 1:
        found.append("from torch.distributed.fsdp import fully_shard")
    return found


def _offload(placement: Placement, workload: Workload) -> str:
    given: dict[str, str] = {"lr": "1e-5", "clip_norm": "1.0"}
    if placement.options.get("weights") != "host":
        given["accumulation_steps"] = str(workload.accumulation)
    for name, value in placement.options.items():
        if name == "deferred":
            given[name] = f"Deferred(interval={value})"
        elif name == "tier":
            drives = ", ".join(f'"{drive}"' for drive in value["drives"] or ("FOLDER",))
            commits = value["durability"] == "commit"
            more = 'name="run", resume=True' if commits else 'durability="none"'
            given[name] = f"Volume([{drives}], {more})"
        elif name.endswith("_bytes_max"):
            # A little below, in whole MiB.
            given[name] = f"{value >> 20} << 20"
        else:
            given[name] = f'"{value}"' if isinstance(value, str) else str(value)
    arguments = "".join(f"    {name}={value},\n" for name, value in given.items())
    return f"OffloadAdamW(\n    model,\n{arguments})"


def _deepspeed(placement: Placement, workload: Workload) -> str:
    on_cpu = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": on_cpu,
            "offload_param": on_cpu,
        },
    }
    if placement.moments != "fp32":
        config["stepwell"] = {"moments": placement.moments}
    return json.dumps(config, indent=2)
