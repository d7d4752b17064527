"""The plan of an engine, from its configuration alone: what runs on the offload engine, and how.

`test_deepspeed_obstacles` has what does not, `test_deepspeed_options` the plans of real engines.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed_stand_ins import Engine, nvme, offload, ours, planned, stand_in
from stepwell.deepspeed.options import options_of
from stepwell.store.volume import Volume


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    return stand_in(monkeypatch)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_hpz_partition_size", 2),
        ("use_all_reduce_for_fetch_params", True),
    ],
)
def test_what_only_deepspeeds_hooks_gather_is_theirs(deepspeed, key, value):
    deepspeed.world_size = 2
    engine = Engine(zero_optimization_stage=3, block={"fetch": "stepwell"})
    setattr(engine._config.zero_config, key, value)
    found = planned(engine)
    assert found.fetch == "deepspeed"
    assert f"{key} and several ranks DeepSpeed fetches" in found.warning


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


def test_a_share_of_the_state_on_the_device_is_no_obstacle_and_there_is_none(tmp_path):
    for changed in (
        {},
        {"bf16_master_weights_and_gradients": True},
        {"zero_offload_optimizer": nvme(tmp_path)},
    ):
        changed |= {"zero_optimization_stage": 3, "zero_partial_offload": 0.5}
        found = planned(Engine(**changed))
        assert found.zero_class == "OffloadZeroOptimizerStage3"
        assert "ratio is `0.5`, but all state is off the device. hint: " in found.warning


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
            "`/nonexistent`, which is not there, expected a folder or a block device",
        ),
        ({"volume": "none"}, "`stepwell.volume` is `none`, expected a block"),
        ({"volume": {"paths": ["/"]}}, "`paths` is no option of the block `stepwell.volume`"),
        ({"volume": {"kepp": True}}, "did you mean `keep`?"),
        ({"volume": {"durability": "some"}}, "`durability` is `some`"),
    ],
)
def test_a_volume_that_cannot_be_is_refused(block, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        planned(Engine(block=block, zero_offload_optimizer=nvme(tmp_path)))


@pytest.mark.parametrize("options", [{}, {"optimizer": ours()}], ids=["DeepSpeed's", "ours"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "nvme_path is not set"),
        ("/nonexistent", "nvme_path is `/nonexistent`, which is no folder"),
    ],
)
def test_state_without_a_folder_is_in_host_memory_where_deepspeed_has_it_there(path, said, options):
    changed = {"zero_offload_optimizer": nvme(path)}
    for stage in (1, 2):
        found = planned(Engine(zero_optimization_stage=stage, **changed), **options)
        assert (found.zero_class, found.tier) == ("OffloadZeroOptimizer", "ram")
        assert found.volume is None
        assert "the state is in host memory, as DeepSpeed has it" in found.warning
        assert f"since offload_optimizer.{said}" in found.warning
        assert "hint: " in found.warning
    # What the block asks for is not given up.
    block = {"volume": {"durability": "none"}}
    with pytest.raises(ValueError, match=r"without a folder|expected a folder"):
        planned(Engine(block=block, **changed), **options)


def test_ranks_agree_on_where_their_state_is(deepspeed, tmp_path, monkeypatch):
    deepspeed.world_size = 2
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def gather(found, is_there):
        found[:] = [is_there, other]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for other in (True, False):
        found = planned(Engine(zero_offload_optimizer=nvme(tmp_path)))
        assert found.tier == ("volume" if other else "ram")


def test_a_folder_is_made_where_deepspeed_makes_it(tmp_path):
    path = tmp_path / "made" / "swapped"
    found = planned(Engine(zero_optimization_stage=3, zero_offload_optimizer=nvme(path)))
    assert (found.volume, found.warning) == (Volume([path]), None)
    assert path.is_dir()
    # DeepSpeed cannot go on there either.
    for path, said in (
        (None, "without a folder"),
        ("/proc/none", "`/proc/none`, which is not there"),
    ):
        changed = {"zero_optimization_stage": 3, "zero_offload_optimizer": nvme(path)}
        with pytest.raises(ValueError, match=said):
            planned(Engine(**changed))


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
        (
            {"zero_partial_offload": 0.5, "block": {"engine": False}},
            "ratio is `0.5`, and `AdamW` steps in host memory only",
        ),
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
    ("block", "said"),
    [
        ([], r"`stepwell` is `\[\]`, expected a block(.|\n)*hint"),
        ({"gatte": "step"}, "`gatte` is no option of the block `stepwell`(.|\\n)*mean `gate`"),
        ({"clip_norm": 1.0}, "`clip_norm` is no option of (.|\\n)*an option of `OffloadAdamW`"),
    ],
)
def test_a_block_that_cannot_be_understood_is_refused(block, said):
    with pytest.raises(ValueError, match=said):
        options_of(Engine(block=block))
