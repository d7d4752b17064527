"""Which path a DeepSpeed JSON takes, what is said of it, and which options are refused."""

import deepspeed_run
import pytest

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    return deepspeed_run.run("options", folder, timeout=PROGRAM_TIMEOUT)


def test_options(result):
    expected = {
        "unknown": "`engin` in the block `stepwell` of the DeepSpeed JSON, "
        "expected engine, moments, gate, accumulate, fetch, threads, host_bytes_max",
        "no block": "`stepwell` is `[1]`",
        "engine": "`stepwell.engine` is `1`",
        "moments": "`stepwell.moments` is `fp8`",
        "gate": "`stepwell.gate` is `layer`",
        "accumulate": "`stepwell.accumulate` is `gpu`",
        "threads": "`stepwell.threads` is `0`",
        "host_bytes_max": "`stepwell.host_bytes_max` is `'1 GB'`",
        "too little": "`1000` are left of `host_bytes_max`",
        "twice": "`moments` is `bf16` in the params of optimizer `StepwellAdamW`, but `q8`",
        "client": "`stepwell.moments` is `q8`, but the optimizer is `AdamW`",
    }
    for name, part in expected.items():
        assert part in result[name]
    ours = "DeepSpeedCPUAdam"
    zero = "DeepSpeedZeroOptimizer"
    off = '"engine" is false in the block `stepwell`'
    kept_so = '"stepwell": {"engine": false} in the JSON keeps it so without this warning'
    idle_gate = "without effect in the block `stepwell`: `gate`"
    paths = {
        "off": (zero, ours),
        "off, keys": (zero, ours, off, idle_gate),
        "ratio": (
            "DeepSpeedZeroOptimizer_Stage3",
            ours,
            "ratio is `0.5`, and masters are in 16 bits. What steps: DeepSpeed's Twin-Flow: ",
            "the share in host memory, on Stepwell's kernels. hint: leave out ratio",
            kept_so,
        ),
        "no offload": (zero, "FusedAdam"),
        "no offload, keys": (zero, "FusedAdam", "nothing is offloaded", "`threads`"),
        "torch": (
            zero,
            "AdamW",
            "torch's `AdamW` with amsgrad. What steps: DeepSpeed's own path, with torch's `AdamW`",
            "hint: optimizer type Adam or AdamW in the JSON",
            kept_so,
        ),
        "ZeRO-3": ("OffloadZeroOptimizerStage3", ours),
        "ZeRO-3, gate": ("OffloadZeroOptimizerStage3", ours, "under ZeRO-3", '"gate": "step"'),
        "ZeRO-3, q8": ("OffloadZeroOptimizerStage3", "StepwellAdamW"),
        "parameters": ("OffloadZeroOptimizerStage3", ours),
        "idle keys": (
            zero,
            "StepwellAdamW",
            "without effect in the block `stepwell`: `gate`, `threads`.",
        ),
        "ZeRO-2, parameters": ("OffloadZeroOptimizer", ours),
        "nvme, no folder": (
            "OffloadZeroOptimizer",
            ours,
            "the state is in host memory, as DeepSpeed has it",
        ),
        "several": (zero, "SGD"),
        "other version": (
            zero,
            ours,
            "which was tested, in `deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.",
            "reduce_ipg_grads` (STEPWELL_UNTESTED_DEEPSPEED=1",
            "What steps: DeepSpeed's own path, on Stepwell's kernels",
            "hint: pip install",
            kept_so,
        ),
    }
    for name, (cls, base, *parts) in paths.items():
        found_cls, found_base, lines = result[f"path, {name}"]
        assert (found_cls, found_base) == (cls, base), name
        assert len(lines) == bool(parts), (name, lines)
        for part in parts:
            assert part in lines[0], (name, lines)
        # One line each, and the same.
        assert result.get(f"said by DeepSpeed, {name}", lines) == lines
    (no_zero,) = result["path, no ZeRO"]
    assert "stage is `0`, at which DeepSpeed offloads nothing" in no_zero
    assert 'DeepSpeed without ZeRO, on Stepwell\'s kernels. hint: set "stage": 2' in no_zero


def test_plans(result):
    found = {
        name.removeprefix("plan, "): plan
        for name, plan in result.items()
        if name.startswith("plan, ")
    }
    expected = {
        "ZeRO-2": ("OffloadZeroOptimizer", "ram", "module", ()),
        "gate step": ("OffloadZeroOptimizer", "ram", "step", ()),
        "ZeRO-3": ("OffloadZeroOptimizerStage3", "ram", "step", ()),
        "no offload": (None, None, None, ()),
        "several": (
            None,
            None,
            None,
            ('"engine" is false in the block `stepwell`', "the optimizer is `SGD`"),
        ),
        "inference": (None, None, None, ()),
    }
    assert {
        name: (plan.zero_class, plan.tier, plan.gate, plan.reasons) for name, plan in found.items()
    } == expected
    assert found["inference"].options.moments == "q8"
    assert len({found[name] for name in expected}) == len(expected)
