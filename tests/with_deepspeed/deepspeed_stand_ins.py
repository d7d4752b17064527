"""Stand-ins for what a plan asks of DeepSpeed and of its engine. DeepSpeed is not imported."""

import sys
from types import SimpleNamespace

import stepwell
import torch
from stepwell.deepspeed.case import device_of
from stepwell.deepspeed.plan import plan


class DeepSpeedCPUAdam(torch.optim.AdamW):
    pass


class PipelineModule(torch.nn.Module):
    pass


class Engine:
    """A DeepSpeedEngine of ZeRO-2 with CPU offload on one rank, but for what is given."""

    def __init__(self, block=None, json=None, **changed):
        self.values = {
            "zero_optimization_stage": 2,
            "zero_offload_optimizer": SimpleNamespace(device=SimpleNamespace(value="cpu")),
            "zero_offload_param": None,
            "zero_partial_offload": 1.0,
            "zero_elastic_checkpoint": False,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "super_offload": False,
            "bf16_master_weights_and_gradients": False,
            "fp16_master_weights_and_gradients": False,
            "bfloat16_enabled": True,
            "wall_clock_breakdown": False,
            "is_deepcompile_enabled": False,
            "optimizer_params": {},
            "bf16_optimizer_states": False,
            "get_data_types": (torch.bfloat16, torch.bfloat16),
            "gradient_accumulation_steps": 2,
            "zenflow_config": None,
        }
        self.fields = {
            "zenflow": False,
            "has_moe_layers": False,
            "mpu": None,
            "module": torch.nn.Linear(1, 1),
            "seq_data_parallel_group": None,
            "training_dataloader": None,
        }
        hybrid = changed.pop("hybrid_engine", False)
        for name, value in changed.items():
            known = self.values if name in self.values else self.fields
            assert name in known, name
            known[name] = value
        self._config = SimpleNamespace(
            _param_dict={**(json or {}), **({} if block is None else {"stepwell": block})},
            hybrid_engine=SimpleNamespace(enabled=hybrid),
            zero_config=SimpleNamespace(
                zero_hpz_partition_size=1, use_all_reduce_for_fetch_params=False
            ),
        )

    def __getattr__(self, name):
        if name in self.values:
            return lambda: self.values[name]
        return self.fields[name]


def stand_in(monkeypatch):
    """Puts what the plan asks of DeepSpeed in its place."""
    found = SimpleNamespace(accelerator="cuda", world_size=1, autocast_dtype=None)
    modules = {
        "deepspeed": SimpleNamespace(
            comm=SimpleNamespace(get_world_size=lambda group: found.world_size)
        ),
        "deepspeed.accelerator": SimpleNamespace(
            get_accelerator=lambda: SimpleNamespace(_name=found.accelerator)
        ),
        "deepspeed.ops.adam": SimpleNamespace(DeepSpeedCPUAdam=DeepSpeedCPUAdam),
        "deepspeed.runtime.pipe.module": SimpleNamespace(PipelineModule=PipelineModule),
        "deepspeed.runtime.zero.stage_1_and_2": SimpleNamespace(
            DeepSpeedZeroOptimizer=SimpleNamespace(_use_compact_grad_partition_buffer=None)
        ),
        "deepspeed.runtime.torch_autocast": SimpleNamespace(
            is_autocast_initialized=lambda: found.autocast_dtype is not None,
            # Of a run before, where there is none now.
            get_autocast_dtype=lambda: found.autocast_dtype or torch.float16,
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def cpu_adam(**options):
    return DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))], **options)


def ours(**options):
    return stepwell.AdamW([torch.nn.Parameter(torch.ones(1))], **options)


def offload(device):
    return SimpleNamespace(device=device)


def nvme(path):
    return SimpleNamespace(device="nvme", nvme_path=path)


def planned(engine, optimizer=None, *, is_zero=True, unfit=None, unfetched=None):
    asked = []

    def why_unfit(cls):
        asked.append(cls)
        return unfetched if cls in ("ModuleHooks", "Coordinator") else unfit

    found = plan(engine, optimizer or cpu_adam(), is_zero=is_zero, unfit=why_unfit)
    # The sources of DeepSpeed are read only where there is something to run on the engine.
    zero_classes = [cls for cls in asked if cls.startswith("OffloadZero")]
    assert len(zero_classes) == (device_of(engine.zero_offload_optimizer()) is not None)
    return found
