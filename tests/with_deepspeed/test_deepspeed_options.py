"""Which path a DeepSpeed JSON takes, what is said of it, and which options are refused."""

import deepspeed_run
import pytest

PROGRAM_TIMEOUT = 150
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    return deepspeed_run.run("options", folder, timeout=PROGRAM_TIMEOUT)


def test_what_contradicts_is_refused(result):
    for name, part in {
        "too little": "`1000` are left of `host_bytes_max`",
        "twice": "`moments` is `bf16` in the params of optimizer `StepwellAdamW`, but `q8`",
        "client": "`stepwell.moments` is `q8`, but the optimizer is `AdamW`",
    }.items():
        assert part in result[name]


OURS = "DeepSpeedCPUAdam"
ZERO = "DeepSpeedZeroOptimizer"
KEPT_SO = '"stepwell": {"engine": false} in the JSON keeps it so without this warning'
PATHS = {
    "off": (ZERO, OURS),
    "ratio": (
        "OffloadZeroOptimizerStage3",
        OURS,
        "ratio is `0.5`, but all state is off the device. hint: leave out ratio",
    ),
    "no offload, keys": (ZERO, "FusedAdam", "nothing is offloaded", "`threads`"),
    "torch": (
        ZERO,
        "AdamW",
        "torch's `AdamW` with amsgrad. What steps: DeepSpeed's own path, with torch's `AdamW`",
        "hint: optimizer type Adam or AdamW in the JSON",
        KEPT_SO,
    ),
    "ZeRO-3, gate": ("OffloadZeroOptimizerStage3", OURS, "under ZeRO-3", '"gate": "step"'),
    "ZeRO-3, q8": ("OffloadZeroOptimizerStage3", "StepwellAdamW"),
    "nvme, no folder": (
        "OffloadZeroOptimizer",
        OURS,
        "the state is in host memory, as DeepSpeed has it",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_the_path_of_a_json_and_the_one_line_that_is_said_of_it(result, name):
    cls, base, *parts = PATHS[name]
    found_cls, found_base, lines = result[f"path, {name}"]
    assert (found_cls, found_base) == (cls, base)
    assert len(lines) == bool(parts)
    for part in parts:
        assert part in lines[0]
    # The same among DeepSpeed's lines.
    assert result[f"said by DeepSpeed, {name}"] == lines


def test_without_zero_nothing_is_offloaded(result):
    (line,) = result["path, no ZeRO"]
    assert "stage is `0`, at which DeepSpeed offloads nothing" in line
    assert 'DeepSpeed without ZeRO, on Stepwell\'s kernels. hint: set "stage": 2' in line


def test_an_engine_for_inference_has_a_plan(result):
    plan = result["inference"]
    assert (plan.zero_class, plan.reasons, plan.options.moments) == (None, (), "q8")
