"""The plan of an engine with a block `zenflow`, from its configuration alone."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed_stand_ins import Engine, offload, ours, planned, stand_in
from stepwell.deepspeed.plan import zenflow_plan


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    return stand_in(monkeypatch)


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
        ({"full_warm_up_rounds": -1}, {"warmup_steps": 0}),
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
