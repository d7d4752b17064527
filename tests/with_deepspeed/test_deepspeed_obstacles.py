"""What the plan of an engine leaves to DeepSpeed: each obstacle, and what is said of it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from deepspeed_stand_ins import Engine, PipelineModule, offload, planned, stand_in


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    return stand_in(monkeypatch)


class Subclass(torch.optim.AdamW):
    pass


OBSTACLES = {
    "optimizer": (
        {},
        {"optimizer": Subclass([torch.nn.Parameter(torch.ones(1))])},
        "the optimizer is `Subclass`, a subclass of AdamW",
        "own path, with `Subclass`",
    ),
    "torch's optimizer": (
        {},
        {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
        "the optimizer is `SGD`",
        "own path, with torch's `SGD`",
    ),
    "ZenFlow": (
        {"zenflow": True},
        {},
        "zenflow is on",
        "DeepSpeed's ZenFlow, on DeepSpeed's own op",
    ),
    "SuperOffload": (
        {"super_offload": True},
        {},
        "super_offload is on",
        "DeepSpeed's SuperOffload, on DeepSpeed's own op",
    ),
    "parameters": (
        {"zero_optimization_stage": 3, "zero_offload_param": offload("nvme")},
        {},
        "offload_param.device is `nvme`",
        "DeepSpeed's own path",
    ),
    "quantized": ({"zero_quantized_weights": True}, {}, "weights are quantized", "own path"),
    "quantized, frozen": (
        {"zero_quantized_nontrainable_weights": True},
        {},
        "weights are quantized",
        "own path",
    ),
    "compressed": (
        {"json": {"compression_training": {"weight_quantization": {}}}},
        {},
        "compression_training quantizes or prunes weights",
        "own path",
    ),
    "experts": (
        {"has_moe_layers": True, "zero_optimization_stage": 3},
        {},
        "mixtures of experts",
        "own path",
    ),
    "pipeline": ({"module": PipelineModule()}, {}, "is a pipeline", "own path"),
    "model parallel": ({"mpu": SimpleNamespace()}, {}, "the model is parallel", "own path"),
    "DeepCompile": ({"is_deepcompile_enabled": True}, {}, "DeepCompile is on", "own path"),
    "hybrid engine": ({"hybrid_engine": True}, {}, "the hybrid engine is on", "own path"),
    "version": ({}, {"unfit": "`step` is another"}, "`step` is another", "own path"),
    "off": ({"block": {"engine": False, "threads": 1}}, {}, '"engine" is false', "own path"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_each_obstacle_is_told_with_what_steps_instead(name):
    changed, options, reason, stepper = OBSTACLES[name]
    found = planned(Engine(**changed), **options)
    assert (found.zero_class, found.tier, found.gate) == (None, None, None)
    (told,) = found.reasons
    assert reason in told
    assert f"not on the offload engine: {told}. What steps: " in found.warning
    assert stepper in found.warning.partition("What steps: ")[2].partition(". hint: ")[0]
    keeps = '"stepwell": {"engine": false} in the JSON keeps it so without this warning'
    assert (keeps in found.warning) == (name != "off")
    assert ("without effect in the block" in found.warning) == (name == "off")


def test_releases_that_round_sums_in_fp32_keep_them(monkeypatch):
    changed = {"get_data_types": (torch.bfloat16, torch.float32)}
    assert planned(Engine(**changed)).zero_class == "OffloadZeroOptimizer"
    module = sys.modules["deepspeed.runtime.zero.stage_1_and_2"]
    monkeypatch.setattr(module, "DeepSpeedZeroOptimizer", SimpleNamespace())
    fp32 = {"get_data_types": (torch.float32, torch.float32)}
    half = fp32 | {"module": torch.nn.Linear(1, 1).bfloat16()}
    for changes in (changed, half):
        (told,) = planned(Engine(**changes)).reasons
        assert told.startswith("gradients of a 16-bit model are summed in fp32")
    for changes in (
        changed | {"zero_optimization_stage": 3},
        {},
        fp32,
    ):
        assert planned(Engine(**changes)).zero_class is not None


@pytest.mark.parametrize(
    ("key", "value"), [("zeropp_loco_param", {"err_beta": 0.8}), ("mics_shard_size", 2)]
)
def test_what_only_older_releases_have_of_zero_3_keeps_deepspeeds_path(key, value):
    engine = Engine(zero_optimization_stage=3)
    setattr(engine._config.zero_config, key, value)
    (told,) = planned(engine).reasons
    assert key in told
    engine = Engine()
    setattr(engine._config.zero_config, key, value)
    assert planned(engine).reasons == ()


@pytest.mark.parametrize(
    ("world_size", "stage", "is_there"), [(1, 2, False), (2, 2, True), (1, 3, True), (2, 1, True)]
)
def test_experts_are_one_rank_s_of_zero_2(deepspeed, world_size, stage, is_there):
    deepspeed.world_size = world_size
    found = planned(Engine(has_moe_layers=True, zero_optimization_stage=stage))
    assert bool(found.reasons) == is_there


@pytest.mark.parametrize(
    ("dtype", "is_there"), [(None, False), (torch.bfloat16, False), (torch.float16, True)]
)
def test_autocast_in_float16(deepspeed, dtype, is_there):
    deepspeed.autocast_dtype = dtype
    assert bool(planned(Engine()).reasons) == is_there


@pytest.mark.parametrize("accelerator", ["cpu", "cuda", "xpu"])
def test_accelerators(deepspeed, accelerator):
    deepspeed.accelerator = accelerator
    reasons = planned(Engine()).reasons
    assert reasons == (("the accelerator is `xpu`",) if accelerator == "xpu" else ())


@pytest.mark.parametrize("device", [None, "none"])
def test_nothing_is_offloaded(device):
    config = None if device is None else offload(device)
    found = planned(Engine(zero_offload_optimizer=config))
    assert (found.zero_class, found.tier, found.gate, found.reasons) == (None, None, None, ())
    assert found.warning is None
    block = {"threads": 1, "moments": "fp32", "accumulate": "host"}
    found = planned(Engine(block=block, zero_offload_optimizer=config))
    assert "nothing is offloaded. without effect in the block" in found.warning
    assert "`accumulate`, `threads`. hint: " in found.warning
