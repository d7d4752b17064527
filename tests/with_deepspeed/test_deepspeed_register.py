"""`register`: when it is called, what it fills, which DeepSpeed it refuses.

The seams that `stepwell doctor` shows.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import deepspeed_run
import fork_server
import pytest
import stepwell.deepspeed
import torch
from deepspeed_release import RELEASE
from stepwell.deepspeed import after_import

PROGRAM_TIMEOUT = 120
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 60)


@slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_register_before_and_after_the_import(tmp_path, when):
    result = deepspeed_run.run("register", tmp_path, timeout=PROGRAM_TIMEOUT, when=when)
    assert result["wrapped once"]
    assert result["ops"] == ["stepwell.deepspeed.native.cpu_adam"] * 2 + [
        "stepwell.deepspeed.native.fused_adam"
    ]
    assert result["targets"] == [True, True]
    assert result["loader"] == "SourceFileLoader"
    assert all(seam.found for seam in result["report"])
    assert all(seam.filled for seam in result["report"])
    json.dumps([dataclasses.asdict(seam) for seam in result["report"]])
    if when == "before":
        assert not result["imported"]
    else:
        assert all(seam.found and not seam.filled for seam in result["unfilled"])
        assert [seam.name for seam in result["unfilled"]] == [
            seam.name for seam in result["report"]
        ]
    assert result["vendor"] == ("unknown", True)
    assert result["cpuinfo"]
    assert not result["fused_adam on cuda"]
    unused = [seam for seam in result["report on cuda"] if not seam.filled]
    assert [seam.name for seam in unused] == ["op fused_adam", "step of FusedAdam"]
    assert all(seam.found and "the accelerator is `cuda`" in seam.note for seam in unused)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    folder = tmp_path_factory.mktemp("missing_seam")
    return deepspeed_run.run("missing_seam", folder, timeout=PROGRAM_TIMEOUT)


@slow
def test_a_seam_that_all_need_is_named_and_nothing_is_filled(without):
    assert (
        "step_subgroup` takes `self, closure, subgroup_id`, expected self, subgroup_id, closure"
        in without["error"]
    )
    assert f"expected {stepwell.deepspeed.VERSIONS}" in without["error"]
    assert "hint: " in without["error"]
    assert without["ops"] == []
    assert len([seam for seam in without["report"] if not seam.found]) == 2
    assert not any(seam.filled for seam in without["report"])


@slow
def test_a_feature_without_its_seam_is_deepspeeds_own(without):
    (line,) = without["warnings"]
    assert "the processes of ZenFlow and SuperOffload: DeepSpeed's own code runs" in line
    assert "zenflow_utils.zenflow_optimizer_process` does not exist" in line
    assert f"expected {stepwell.deepspeed.VERSIONS}" in line
    # All of its seams are left alone, and those of other features are filled.
    left = {seam.name for seam in without["report without ZenFlow"] if not seam.filled}
    assert left == {"process of ZenFlow", "process of SuperOffload"}


@slow
@pytest.mark.parametrize(
    ("case", "method", "cls"),
    [
        ("overridden", "DeepSpeedZeroOptimizer.step", "DeepSpeedZeroOptimizer"),
        ("calling", "DeepSpeedEngine._backward_epilogue", "DeepSpeedZeroOptimizer"),
    ],
)
def test_a_changed_method_is_told_once_and_the_class_is_deepspeeds(without, case, method, cls):
    (changed, untested), lines = without[case]
    assert changed == cls
    assert untested.startswith("OffloadZeroOptimizer")
    (line,) = [line for line in lines if "stepwell" in line]
    assert f"differs from {RELEASE}, which was" in line
    assert f".{method}`" in line
    assert "hint: pip install 'deepspeed==" in line
    assert "STEPWELL_UNTESTED_DEEPSPEED=1" in line
    assert without["unchanged"] == "OffloadZeroOptimizer"


OLD_DEEPSPEED = {
    "deepspeed/__init__.py": "__version__ = '0.1.0'",
    "deepspeed/accelerator.py": "class get_accelerator:\n    _name = 'cpu'",
    "deepspeed/ops/__init__.py": "",
    "deepspeed/ops/op_builder/__init__.py": "",
    "deepspeed/ops/op_builder/builder.py": "class OpBuilder:\n    _loaded_ops = {}",
}


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_old_deepspeed_is_refused(tmp_path, when):
    for name, source in OLD_DEEPSPEED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    calls = ["stepwell.deepspeed.register()", "import deepspeed"]
    program = f"""
import stepwell.deepspeed
for attempt in range(2):
    try:
        {"; ".join(calls if when == "before" else reversed(calls))}
    except ImportError as error:
        print(error)
print(stepwell.deepspeed.seam_report())
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = fork_server.python("-c", program, environment={"PYTHONPATH": path}, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, report = done.stdout.strip().split("\n")
    assert first == second
    assert first.startswith("deepspeed `0.1.0` lacks what Stepwell fills for DeepSpeedCPUAdam, ")
    assert "step of DeepSpeedCPUAdam: `deepspeed.ops.adam.cpu_adam` cannot be imported" in first
    assert "hint: pip install" in first
    # The one seam that it has is found, and left alone.
    assert report.count("found=True, filled=False") >= 1
    assert "filled=True" not in report


def test_without_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"deepspeed is not installed.* hint: pip install"):
        stepwell.deepspeed.register()
    report = stepwell.deepspeed.seam_report()
    assert report
    assert not any(seam.found or seam.filled for seam in report)
    assert all("deepspeed is not installed" in seam.note for seam in report)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="`nonfinite` is `skip`"):
        stepwell.deepspeed.register(nonfinite="skip")


def test_importing_the_package_imports_no_deepspeed():
    program = (
        "import stepwell.deepspeed, sys; stepwell.deepspeed.register(); "
        "assert 'deepspeed' not in sys.modules"
    )
    assert fork_server.python("-c", program, timeout=60).returncode == 0


@slow
def test_deepspeed_cpu_adam_steps_as_a_whole(tmp_path):
    result = deepspeed_run.run("optimizer", tmp_path, timeout=PROGRAM_TIMEOUT)
    assert "a gradient is not finite" in result["nan"]
    assert "`exp_avg` has `99` elements" in result["shape"]
    first, *others = result["values"]
    for values in others:
        for value, kept in zip(values, first, strict=True):
            assert torch.equal(value, kept)
    assert result["steps"] == [[1, 1, 1]] * 3 + [[2, 2, 2]]
    assert result["loss"] == 42.0
    assert "a gradient is not finite" in result["fused"]
    assert result["propagated"]


def test_after_import(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("import imported_later.inner")
    (tmp_path / "imported_later").mkdir()
    (tmp_path / "imported_later" / "__init__.py").write_text(
        "value = 1\nfrom imported_later import inner"
    )
    (tmp_path / "imported_later" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    calls = []

    def then():
        calls.append(sys.modules["imported_later"].value)
        if len(calls) == 1:
            raise ImportError("not yet")

    after_import.after_import("imported_later", then)
    after_import.after_import("imported_later", then)
    assert importlib.util.find_spec("imported_later") is not None
    assert calls == []
    with pytest.raises(ImportError, match="not yet"):
        import imported_later
    import imported_later

    assert calls == [1, 1]
    assert imported_later.__spec__.loader is imported_later.__loader__
    assert "value" in imported_later.__loader__.get_source("imported_later")
    import imported_later

    assert calls == [1, 1]
    for name in ("imported_later", "imported_later.inner"):
        monkeypatch.delitem(sys.modules, name)


# ---- against DeepSpeed's own op ----

BUILD_TIMEOUT = 900
# As in test_deepspeed_training: the same steps, rounded elsewhere.
ROUNDING_RTOL = 2e-5
# Moments and weights of 8 bits, each of which a rounding elsewhere can tip over.
BF16_RTOL = 0.05


def folder_of_op():
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("cpu_adam", verbose=False))


def is_built(folder):
    """Whether it would be taken as it is: it was built in the environment that is running."""
    rules = folder / "build.ninja"
    return (folder / "cpu_adam.so").exists() and f"{sys.prefix}/" in rules.read_text()


def run_compiled(program, tmp_path, **options):
    """Runs a program that compiles DeepSpeed's own op, or takes what was compiled before."""
    folder = folder_of_op()
    if not is_built(folder) and not os.environ.get("STEPWELL_TEST_COMPILE"):
        pytest.skip(
            f"DeepSpeed's own cpu_adam is not built ({folder}); STEPWELL_TEST_COMPILE=1 builds it, "
            "in minutes"
        )
    # ninja is a Python package as well.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "TORCH_EXTENSIONS_DIR": str(folder.parent)}
    try:
        return deepspeed_run.run(
            program, tmp_path, timeout=BUILD_TIMEOUT, environment=environment, **options
        )
    finally:
        # A build that was killed leaves it, and the next build would wait for it forever.
        (folder / "lock").unlink(missing_ok=True)


@slow
@pytest.mark.compiler
@pytest.mark.timeout(BUILD_TIMEOUT + 60)
def test_curves_of_deepspeeds_own_op(tmp_path):
    result = run_compiled("native", tmp_path)
    for name, theirs in result["native"].items():
        ours = torch.tensor(result["stepwell"][name]["losses"])
        rtol = BF16_RTOL if name.startswith("bf16") else ROUNDING_RTOL
        torch.testing.assert_close(ours, torch.tensor(theirs["losses"]), rtol=rtol, atol=0)


@slow
@pytest.mark.compiler
@pytest.mark.timeout(BUILD_TIMEOUT + 60)
@pytest.mark.parametrize(("stage", "overlap"), [(2, True), (3, False)])
def test_zenflow_that_the_engine_does_not_take_is_deepspeeds(tmp_path, stage, overlap):
    result = run_compiled("deepspeeds_zenflow", tmp_path, stage=stage, overlap=overlap)
    name, op = result["optimizer"]
    assert name == "ZenFlowCPUAdam"
    assert Path(op).name == "cpu_adam.so"
    assert result["other"] == "stepwell.deepspeed.native.cpu_adam"
    assert result["of a process"]
    losses = torch.tensor(result["losses"])
    assert losses.isfinite().all()
    assert losses[-4:].mean() < losses[:4].mean()
    if overlap:
        assert result["was_alive"]
        assert not result["is_alive"]
        with pytest.raises(ProcessLookupError):
            os.kill(result["pid"], 0)
    if stage == 2:
        # The JSON says so.
        assert result["warnings"] == []
    else:
        reason = "zenflow is on: zero_optimization.stage is neither 1 nor 2"
        (line,) = result["warnings"]
        assert f"not on the offload engine: zero_optimization.{reason}. What steps: " in line
        assert "hint: leave out zenflow" in line
        assert "on DeepSpeed's own op, which a C++ compiler builds" in line


@slow
def test_only_zenflow_and_superoffload_of_deepspeed_want_a_compiler(tmp_path):
    result = deepspeed_run.run("without_compiler", tmp_path, timeout=PROGRAM_TIMEOUT)
    assert result["asked"] == 0
    assert "own op `cpu_adam`" in result["error"]
    assert "hint: leave out zero_optimization.zenflow or" in result["error"]
