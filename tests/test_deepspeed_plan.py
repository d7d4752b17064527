"""The plan of an engine, from its configuration alone: every row of obstacles, gates, warnings.

DeepSpeed is not imported. The engine and what the plan asks of DeepSpeed are stand-ins.
`test_deepspeed_options` has the plans of real ones.
"""

import re
import sys
from types import SimpleNamespace

import pytest
import stepwell
import torch
from stepwell.deepspeed import fingerprints
from stepwell.deepspeed.options import Options, options_of
from stepwell.deepspeed.plan import device_of, inference_plan, plan, zenflow_plan
from stepwell.deepspeed.zero import seams
from stepwell.offload.volume import Volume


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
        )

    def __getattr__(self, name):
        if name in self.values:
            return lambda: self.values[name]
        return self.fields[name]


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    """What the plan asks of DeepSpeed."""
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
        return unfetched if cls in ("ModuleHooks", "Fetcher") else unfit

    found = plan(engine, optimizer or cpu_adam(), is_zero=is_zero, unfit=why_unfit)
    # The sources of DeepSpeed are read only where there is something to run on the engine.
    zero_classes = [cls for cls in asked if cls.startswith("OffloadZero")]
    assert len(zero_classes) == (device_of(engine.zero_offload_optimizer()) is not None)
    return found


# ---- on the engine ----


@pytest.mark.parametrize(
    ("changed", "zero_class", "gate"),
    [
        ({}, "OffloadZeroOptimizer", "module"),
        ({"zero_optimization_stage": 1}, "OffloadZeroOptimizer", "module"),
        ({"block": {"gate": "step"}}, "OffloadZeroOptimizer", "step"),
        ({"wall_clock_breakdown": True}, "OffloadZeroOptimizer", "step"),
        ({"zero_optimization_stage": 3}, "OffloadZeroOptimizerStage3", "step"),
        (
            {"zero_optimization_stage": 3, "zero_offload_param": offload("cpu")},
            "OffloadZeroOptimizerStage3",
            "module",
        ),
        # At these stages DeepSpeed does as if they were not there.
        ({"zero_offload_param": offload("nvme")}, "OffloadZeroOptimizer", "module"),
        ({"zero_offload_param": offload("none")}, "OffloadZeroOptimizer", "module"),
        ({"mpu": SimpleNamespace(initialize_sequence_parallel=None)}, None, "module"),
        ({"has_moe_layers": True}, "OffloadZeroOptimizer", "module"),
        ({"zero_elastic_checkpoint": True}, "OffloadZeroOptimizer", "module"),
        ({"zero_optimization_stage": 3, "zero_partial_offload": 0.5}, None, "step"),
        ({"bf16_master_weights_and_gradients": True}, "OffloadZeroOptimizer", "module"),
    ],
)
def test_what_the_engine_takes(changed, zero_class, gate):
    found = planned(Engine(**changed))
    assert found.zero_class is not None
    assert zero_class in (None, found.zero_class)
    assert (found.tier, found.gate, found.reasons, found.warning) == ("ram", gate, (), None)
    assert found.is_pinned
    assert not found.propagates


def test_offloaded_weights_are_fetched_by_stepwell_on_one_rank(deepspeed):
    offloaded = {"zero_optimization_stage": 3, "zero_offload_param": offload("cpu")}
    assert planned(Engine(**offloaded)).fetch == "stepwell"
    assert planned(Engine()).fetch == "deepspeed"
    said = planned(Engine(**offloaded, block={"fetch": "deepspeed"}), unfetched="they differ")
    assert (said.fetch, said.warning) == ("deepspeed", None)
    found = planned(Engine(**offloaded), unfetched="they differ")
    assert (found.zero_class, found.fetch) == ("OffloadZeroOptimizerStage3", "deepspeed")
    assert "DeepSpeed's hooks fetch weights: they differ" in found.warning
    deepspeed.world_size = 2
    found = planned(Engine(**offloaded, block={"fetch": "stepwell"}))
    assert found.fetch == "deepspeed"
    assert "with several ranks DeepSpeed fetches" in found.warning


@pytest.mark.parametrize(
    "changed",
    [
        {"zero_optimization_stage": 1},
        {"zero_optimization_stage": 2},
        {"zero_optimization_stage": 3},
        {"zero_optimization_stage": 3, "zero_offload_param": offload("cpu")},
    ],
)
def test_several_ranks_wait_in_their_forwards(deepspeed, changed, monkeypatch):
    deepspeed.world_size = 2
    for gate in ("module", "step"):
        found = planned(Engine(block={"gate": gate}, **changed))
        assert (found.gate, found.warning) == (gate, None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = planned(Engine(block={"gate": "module"}, **changed))
    assert found.gate == "step"
    assert "but with CUDA_DEVICE_MAX_CONNECTIONS=1" in found.warning


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"wall_clock_breakdown": True}, "but with wall_clock_breakdown"),
        ({"zero_optimization_stage": 3}, "but under ZeRO-3 without offload_param"),
    ],
)
def test_a_gate_that_is_written_and_not_followed_is_told(changed, said):
    found = planned(Engine(block={"gate": "module"}, **changed))
    assert said in found.warning
    assert 'hint: "gate": "step" says so' in found.warning


def test_other_keys_that_are_not_followed_are_told():
    found = planned(Engine(block={"accumulate": "host"}, zero_optimization_stage=1))
    assert "under ZeRO-1 without effect in the block `stepwell`: `accumulate`" in found.warning
    assert planned(Engine(block={"accumulate": "host"})).warning is None
    found = planned(Engine(block={"volume": {"durability": "none"}, "nvme_paths": ["/"]}))
    assert "without effect in the block `stepwell`: `nvme_paths`, `volume`" in found.warning


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_on_nvme_is_on_a_volume(stage, tmp_path):
    changed = {"zero_optimization_stage": stage, "zero_offload_optimizer": nvme(tmp_path)}
    found = planned(Engine(**changed))
    assert found.zero_class is not None
    assert (found.tier, found.reasons, found.warning) == ("volume", (), None)
    assert found.volume == Volume([tmp_path])
    assert not found.is_resumed
    block = {
        "nvme_paths": [str(tmp_path), str(tmp_path.parent)],
        "volume": {"name": "run-7", "resume": True, "weights": [2, 1]},
    }
    found = planned(Engine(block=block, **changed))
    assert found.volume == Volume(block["nvme_paths"], **block["volume"])
    assert found.is_resumed


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"nvme_paths": "/"}, "`stepwell.nvme_paths` is `/`, expected a list"),
        ({"nvme_paths": []}, "`paths` is empty"),
        (
            {"nvme_paths": ["/nonexistent"]},
            "`/nonexistent`, expected a folder or a block device that exists",
        ),
        ({"volume": "none"}, "`stepwell.volume` is `none`, expected a block"),
        ({"volume": {"paths": ["/"], "kept": 1}}, "`kept, paths` in the block `stepwell.volume`"),
        ({"volume": {"durability": "some"}}, "`durability` is `some`"),
        ({}, "without a folder"),
    ],
)
def test_a_volume_that_cannot_be_is_refused(block, said, tmp_path):
    path = tmp_path if block else None
    with pytest.raises(ValueError, match=re.escape(said)):
        planned(Engine(block=block, zero_offload_optimizer=nvme(path)))


def test_what_speaks_to_deepspeeds_swapper_is_named(tmp_path):
    said = {"buffer_count": 4, "pipeline_read": False, "nvme_path": str(tmp_path)}
    json = {"zero_optimization": {"offload_optimizer": said}, "aio": {"thread_count": 1}}
    found = planned(Engine(json=json, zero_offload_optimizer=nvme(tmp_path)))
    names = "`offload_optimizer.buffer_count`, `offload_optimizer.pipeline_read`, `aio`"
    assert found.warning.endswith(f": {names}")
    assert planned(Engine(json=json)).warning is None


def test_state_that_deepspeed_does_not_put_on_nvme_is_told():
    changed = {"zero_offload_optimizer": nvme("/"), "zero_quantized_weights": True}
    assert "own path, with the state in host memory" in planned(Engine(**changed)).warning
    found = planned(Engine(zero_optimization_stage=3, **changed))
    assert "DeepSpeed's NVMe swapper, on Stepwell's kernels" in found.warning


@pytest.mark.parametrize(("pin", "is_pinned"), [(None, True), (True, True), (False, False)])
def test_pinning_is_what_the_json_says(pin, is_pinned):
    block = {} if pin is None else {"pin_memory": pin}
    json = {"zero_optimization": {"offload_optimizer": block}}
    assert planned(Engine(json=json)).is_pinned == is_pinned
    assert planned(Engine(json={"zero_optimization": "auto"})).is_pinned


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_propagation_is_what_the_json_says(key):
    json = {key: {"check_grad_overflow": False}}
    assert planned(Engine(json=json)).propagates
    assert not planned(Engine(json={key: {"check_grad_overflow": True}})).propagates
    assert not planned(Engine(json={key: {}})).propagates
    assert not planned(Engine(json=json, bfloat16_enabled=False)).propagates
    # Also where the engine does not step.
    assert planned(Engine(json=json, zenflow=True)).propagates
    assert planned(Engine(json=json, zero_offload_optimizer=None)).propagates
    # The optimizer's own word is nearer to it.
    assert planned(Engine(json=json), ours()).propagates
    assert planned(Engine(json=json, optimizer_params=None), ours()).propagates
    params = {"nonfinite": "raise"}
    assert planned(Engine(json=json, optimizer_params=params), ours()).propagates is False
    assert planned(Engine(json=json, optimizer_params=params)).propagates


# ---- not on the engine ----


class Subclass(torch.optim.AdamW):
    pass


OBSTACLES = {
    "ratio, nvme": (
        {
            "zero_optimization_stage": 3,
            "zero_offload_optimizer": offload("nvme"),
            "zero_partial_offload": 0.5,
        },
        {},
        "offload_optimizer.ratio is `0.5`, and offload_optimizer.device is `nvme`",
        "NVMe swapper",
    ),
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
    "ZenFlow": ({"zenflow": True}, {}, "zenflow is on", "DeepSpeed's ZenFlow, on Stepwell's"),
    "SuperOffload": (
        {"super_offload": True},
        {},
        "super_offload is on",
        "DeepSpeed's SuperOffload",
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
    "ratio, bf16 masters": (
        {"zero_partial_offload": 0.5, "bf16_master_weights_and_gradients": True},
        {},
        "ratio is `0.5`, and masters are in 16 bits",
        "Twin-Flow",
    ),
    "ratio, fp16 masters": (
        {"zero_partial_offload": 0.5, "fp16_master_weights_and_gradients": True},
        {},
        "ratio is `0.5`, and masters are in 16 bits",
        "Twin-Flow",
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


def test_without_zero_nothing_is_offloaded(deepspeed):
    deepspeed.accelerator = "cpu"
    found = planned(Engine(zero_optimization_stage=0), is_zero=False)
    (told,) = found.reasons
    assert told == "zero_optimization.stage is `0`, at which DeepSpeed offloads nothing"
    assert "What steps: DeepSpeed without ZeRO, on Stepwell's kernels" in found.warning
    deepspeed.accelerator = "cuda"
    reasons = planned(Engine(zero_optimization_stage=0), is_zero=False).reasons
    assert reasons == ("optimizer state is on `cuda`", told)


def test_a_user_who_has_turned_the_engine_off_knows():
    found = planned(Engine(block={"engine": False}))
    assert found.zero_class is None
    assert found.warning is None


def test_another_version_is_advised_to_be_the_tested_one():
    found = planned(Engine(), unfit="`step` is another")
    assert f"pip install 'deepspeed=={fingerprints.releases()[-1]}'" in found.warning


def test_all_obstacles_are_told():
    found = planned(Engine(zenflow=True, is_deepcompile_enabled=True))
    assert len(found.reasons) == 2
    assert "; ".join(found.reasons) in found.warning


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


# ---- optimizers of Stepwell's ----


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"zero_offload_optimizer": None}, "optimizer state is on `cuda`"),
        ({"zero_elastic_checkpoint": True}, "elastic_checkpoint cannot cut the state of `AdamW`"),
        (
            {
                "zero_optimization_stage": 3,
                "zero_offload_optimizer": offload("nvme"),
                "is_deepcompile_enabled": True,
            },
            "DeepCompile is on",
        ),
        ({"zenflow": True}, "zenflow is on"),
        ({"super_offload": True}, "super_offload is on"),
        ({"zero_partial_offload": 0.5}, "ratio is `0.5`, and `AdamW` steps in host memory only"),
    ],
)
def test_ours_is_refused_where_it_cannot_step(changed, said):
    with pytest.raises(
        ValueError, match=r"optimizer `AdamW` steps in host memory(.|\n)*hint: "
    ) as (raised):
        planned(Engine(**changed), ours())
    assert said in str(raised.value)
    # What stops ours does not stop DeepSpeed's.
    planned(Engine(**changed))


def test_ours_steps_on_deepspeeds_own_path_where_it_can(deepspeed):
    found = planned(Engine(is_deepcompile_enabled=True), ours())
    assert "What steps: DeepSpeed's own path, on Stepwell's kernels. hint: " in found.warning
    assert planned(Engine(), ours()).zero_class == "OffloadZeroOptimizer"
    deepspeed.accelerator = "cpu"
    assert planned(Engine(zero_offload_optimizer=None), ours()).reasons == ()
    # It is not ZeRO that steps it, and its state is in host memory.
    found = planned(Engine(zero_optimization_stage=0), ours(), is_zero=False)
    assert "stage is `0`" in found.reasons[0]


def test_moments_are_the_optimizer_s():
    assert planned(Engine(block={"moments": "q8"}), ours(moments="q8")).options.moments == "q8"
    assert planned(Engine(block={"moments": "fp32"})).options.moments == "fp32"
    with pytest.raises(ValueError, match=r"moments` is `q8`(.|\n)*`AdamW` with `fp32`"):
        planned(Engine(block={"moments": "q8"}), ours())
    with pytest.raises(ValueError, match="`DeepSpeedCPUAdam` with `fp32`"):
        planned(Engine(block={"moments": "q8"}))
    with pytest.raises(ValueError, match="`AdamW` with `q8`"):
        planned(Engine(block={"moments": "fp32"}), ours(moments="q8"))


# ---- the block ----


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"engine": False},
        {"moments": "bf16", "gate": "step", "accumulate": "device", "threads": 1},
        {"threads": None, "host_bytes_max": None, "moments": None},
        {"host_bytes_max": 0},
    ],
)
def test_a_block_says_what_it_says(block):
    found = options_of(Engine(block=block))
    assert found == Options(**block)
    assert inference_plan(Engine(block=block)).options == found


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ([], r"`stepwell` is `\[\]`, expected a block(.|\n)*hint"),
        ({"b": 1, "a": 2, "gate": "step"}, "`a, b` in the block `stepwell`"),
        ({"engine": 1}, "`stepwell.engine` is `1`"),
        ({"moments": "fp8"}, "`stepwell.moments` is `fp8`"),
        ({"gate": None}, "`stepwell.gate` is `None`"),
        ({"accumulate": "gpu"}, "`stepwell.accumulate` is `gpu`"),
        ({"threads": 0}, "`stepwell.threads` is `0`"),
        ({"threads": True}, "`stepwell.threads` is `True`"),
        ({"threads": 1.0}, r"`stepwell.threads` is `1\.0`"),
        ({"host_bytes_max": True}, "`stepwell.host_bytes_max` is `True`"),
        ({"host_bytes_max": 1e9}, "`stepwell.host_bytes_max` is `1000000000.0`"),
    ],
)
def test_a_block_that_cannot_be_understood_is_refused(block, said):
    with pytest.raises(ValueError, match=said):
        options_of(Engine(block=block))


def test_devices():
    assert device_of(None) is None
    assert device_of(offload("none")) is None
    assert device_of(offload("cpu")) == "cpu"
    assert device_of(offload(SimpleNamespace(value="nvme"))) == "nvme"


# ---- ZenFlow ----


def zenflow(**changed):
    """An engine that has not looked at its block yet, whose keys are DeepSpeed's defaults."""
    of_engine = {name: changed.pop(name) for name in ("block", "engine") if name in changed}
    keys = {
        "topk_ratio": 0.1,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "overlap_step": False,
        "offload": False,
        "auto_ratio": 0.99,
        "full_warm_up_rounds": 0,
        "pt_reserved_cores_perc": 0.5,
        "steps_per_epoch": None,
    }
    return Engine(
        json={"zero_optimization": {"zenflow": changed}},
        block=of_engine.get("block"),
        zenflow_config=SimpleNamespace(**{**keys, **changed}),
        **of_engine.get("engine", {}),
    )


def taken(engine, unfit=None):
    return zenflow_plan(engine, lambda _: unfit)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"interval": 4, "fraction": 0.1, "reselect": 16, "warmup_steps": 0}),
        ({"topk_ratio": 0.3, "full_warm_up_rounds": 7}, {"fraction": 0.3, "warmup_steps": 7}),
        ({"update_interval": 8}, {"interval": 8}),
        ({"select_strategy": "step", "select_interval": 9}, {"reselect": 9}),
        ({"select_strategy": "step", "select_interval": 0}, {"reselect": 1}),
        (
            {"select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 5},
            {"reselect": 10},
        ),
        ({"engine": {"training_dataloader": range(24)}}, {"reselect": 12}),
    ],
)
def test_a_zenflow_block_in_the_terms_of_deferred(keys, expected):
    found, why = taken(zenflow(**keys))
    assert why is None and found.remarks == () and found.threads is None
    assert {name: getattr(found.deferred, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "remark"),
    [
        ({"overlap_step": False}, "overlap_step is false"),
        ({"offload": True}, "zenflow.offload is true"),
        ({"auto_ratio": 0.9}, "auto_ratio has no effect"),
        ({"select_strategy": "epoch", "select_interval": 1}, "every 16 steps"),
        ({"select_interval": 5}, "select_interval is `5`, but select_strategy is `auto`"),
    ],
)
def test_keys_of_zenflow_without_effect_are_said(keys, remark):
    found, _ = taken(zenflow(**keys))
    assert len(found.remarks) == 1 and remark in found.remarks[0]


def test_cores_that_zenflow_leaves_to_torch():
    found, _ = taken(zenflow(pt_reserved_cores_perc=1.0))
    assert found.threads == 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"block": {"zenflow": False}}, '"zenflow" is false'),
        ({"block": {"moments": "q8"}}, "`stepwell.moments` is `q8`"),
        ({"block": {"gate": "step"}}, "`stepwell.gate` is `step`"),
        ({"block": {"engine": False}}, '"engine" is false'),
        ({"update_interval": 9}, "update_interval is `9`, expected 8 at most"),
        ({"engine": {"zero_optimization_stage": 3}}, "neither 1 nor 2"),
        ({"engine": {"zero_offload_optimizer": None}}, "nothing is offloaded"),
        ({"engine": {"zero_offload_optimizer": offload("nvme")}}, "of state in RAM"),
        ({"engine": {"bf16_master_weights_and_gradients": True}}, "masters are in 16 bits"),
        ({"engine": {"bf16_optimizer_states": True}}, "moments are in 16 bits"),
        ({"engine": {"get_data_types": (torch.bfloat16, torch.float32)}}, "grad_accum_dtype"),
        ({"engine": {"is_deepcompile_enabled": True}}, "DeepCompile is on"),
    ],
)
def test_blocks_that_deepspeed_keeps(keys, why):
    found, reason = taken(zenflow(**keys))
    assert found is None and why in reason
    engine = Engine(zenflow=True)
    engine.stepwell_zenflow_obstacle = reason
    assert planned(engine).reasons[0] == f"zero_optimization.zenflow is on: {reason}"
    assert taken(zenflow(), unfit="a method differs") == (None, "a method differs")


def test_a_plan_with_zenflow():
    engine = zenflow(overlap_step=True, block={"accumulate": "host"})
    engine.stepwell_zenflow, _ = taken(engine)
    found = planned(engine)
    assert found.zenflow.deferred.fraction == 0.1
    assert found.zero_class == "OffloadZeroOptimizer" and found.gate == "module"
    assert "are summed on the GPU" in found.warning
    with pytest.raises(ValueError, match=r"cannot run on the offload engine: the optimizer is"):
        planned(engine, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1))
    with pytest.raises(ValueError, match="`AdamW` are not fp32"):
        planned(engine, ours(moments="q8"))
    # The user's own choice is not warned of.
    left = Engine(zenflow=True, block={"zenflow": False})
    assert planned(left).warning is None


def test_what_is_compiled_later_is_compiled_once_when_it_is_called():
    compiled = []

    def compiles(**options):
        def decorate(function):
            compiled.append((function.__name__, options))
            return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

        return decorate

    @seams._compiled_later(compiles)(fullgraph=True)
    def update(x, *, scale):
        return x * scale

    assert (compiled, update.__name__) == ([], "update")
    assert update(2, scale=3) == update(3, scale=2) == ("compiled", 6)
    assert compiled == [("update", {"fullgraph": True})]
