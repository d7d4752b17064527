"""`stepwell doctor`, and the command line as a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import stepwell
from stepwell import _core
from stepwell.cli import (
    _software,
    app,
    doctor,
)
from typer.testing import CliRunner

PACKAGE = Path(stepwell.__file__).parents[1]


def test_the_version_is_the_package_s():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"stepwell {stepwell.__version__}\n")


def help_of(*command, width):
    result = CliRunner().invoke(
        app, [*command, "--help"], terminal_width=width, env={"COLUMNS": str(width)}
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    # Nothing is cut at the edge of the terminal.
    assert max(map(len, lines)) <= width
    return " ".join(result.output.replace("\u2502", " ").split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "command",
    ["doctor", "plan", "run", "demo", "bench offload", "tune", "volume"],
)
def test_every_command_has_a_help_that_fits(command, width):
    assert "Usage" in help_of(*command.split(), width=width)


def test_a_help_does_not_wait_for_torch():
    program = "import sys; from stepwell.cli import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def doctor_json(*, imports=None, **environment):
    result = fork_server.python(
        *("-m", "stepwell", "doctor", "--json"),
        environment=environment,
        imports=imports,
        timeout=100,
    )
    assert "Traceback" not in result.stderr
    # stdout holds the object and nothing else, whatever DeepSpeed has to say.
    return result.returncode, json.loads(result.stdout)


def by_topic(report):
    return {finding["topic"]: finding for finding in report["findings"]}


@pytest.fixture(scope="module")
def usual():
    """The exit code and the report of this machine as it is."""
    return doctor_json()


def test_json_has_what_the_findings_are_drawn_from(usual):
    code, report = usual
    assert code == (1 if report["status"] == "broken" else 0)
    assert list(report) == [
        "status",
        "findings",
        "versions",
        "system",
        "build",
        "cuda",
        "deepspeed",
    ]
    assert report["versions"]["stepwell"] == _core.__version__
    assert report["system"]["isa"] in report["system"]["isas_available"]
    assert {finding["topic"] for finding in report["findings"]} >= {
        "instructions",
        "threads",
        "NUMA",
        "ranks",
        "huge pages",
        "free memory",
        "locked memory",
        "io_uring",
        "GPU",
        "AdamW",
        "OffloadAdamW",
        "DeepSpeed",
        "ZeRO-1 and -2",
        "ZeRO-3",
    }
    for finding in report["findings"]:
        assert list(finding) == ["topic", "status", "found", "meaning", "fix"]
        assert finding["fix"] or finding["status"] in ("ok", "note"), finding
    assert report["deepspeed"]["error"] is None
    assert any(seam["filled"] for seam in report["deepspeed"]["seams"])


def test_a_forced_isa_and_few_threads_are_told_with_their_way_back():
    code, report = doctor_json(STEPWELL_ISA="scalar", STEPWELL_THREADS="1")
    assert code == 0
    findings = by_topic(report)
    assert findings["instructions"]["status"] == "warning"
    assert findings["instructions"]["fix"] == "unset STEPWELL_ISA"
    if report["system"]["cpus"][-1]["core"] > 0:
        assert findings["threads"]["status"] == "note"
        assert "STEPWELL_THREADS is 1" in findings["threads"]["meaning"]


@pytest.mark.parametrize(
    ("variable", "value", "topic"),
    [
        ("STEPWELL_ISA", "mmx", "instructions"),
        ("STEPWELL_THREADS", "0", "threads"),
    ],
)
def test_a_setting_that_is_refused_is_a_finding_with_a_hint(variable, value, topic):
    code, report = doctor_json(**{variable: value})
    assert code == 1
    findings = by_topic(report)
    assert findings[topic]["status"] == "broken"
    assert f"`{value}`" in findings[topic]["found"]
    assert variable in findings[topic]["fix"]
    # What does not depend on the setting is there, and what does is not said to work.
    assert findings["free memory"]["status"] == "ok"
    assert findings["optimizers"]["status"] == findings["DeepSpeed"]["status"] == "broken"


BROKEN = {
    "torch that does not load": ("torch", "raise OSError('libcudart.so.12: not found')"),
    "DeepSpeed that raises": ("deepspeed", "raise RuntimeError('CUDA_HOME does not exist')"),
    "DeepSpeed that is empty": ("deepspeed", ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_that_is_broken_is_a_finding(tmp_path, case):
    package, program = BROKEN[case]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), str(PACKAGE)])
    imports = () if package == "torch" else None
    code, report = doctor_json(PYTHONPATH=path, imports=imports)
    assert code == 1
    findings = by_topic(report)
    topics = {"torch": ("GPU", "AdamW", "OffloadAdamW"), "deepspeed": ("DeepSpeed",)}[package]
    for topic in topics:
        assert findings[topic]["status"] == "broken"
        assert findings[topic]["fix"]
    assert findings["threads"]["status"] != "broken"
    if package == "deepspeed":
        assert findings["AdamW"]["status"] == "ok"


@pytest.fixture
def host():
    return {
        "isa": "avx2",
        "isa_error": None,
        "isas_available": ["scalar", "avx2"],
        "cpus": [{"id": cpu, "core": cpu, "node": 0, "kind": "performance"} for cpu in range(4)],
        "pool_cpus": [0, 1, 2, 3],
        "pool_error": None,
        "ranks_on_host": 1,
        "others_on_cpus": [],
        "numa_nodes": [0],
        "gpus": [],
        "huge_page_policy": "always [madvise] never",
        "free_memory_bytes": 64 << 30,
        "claimed_memory_bytes": 0,
        "claimants": [],
        "memlock_limit_bytes": None,
        "io_uring": "available",
    }


def run_with(monkeypatch, host, deepspeed=None, *options):
    monkeypatch.setattr(_core, "system_info", lambda: host)
    monkeypatch.setattr(_software, "look_at_deepspeed", lambda: deepspeed)
    for variable in ("STEPWELL_ISA", "STEPWELL_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return CliRunner().invoke(app, ["doctor", *options])


def test_a_machine_that_lacks_something_gets_a_warning_with_a_hint(monkeypatch, host):
    host |= {
        "huge_page_policy": "always madvise [never]",
        "pool_cpus": [2],
        "io_uring": "Operation not permitted",
    }
    result = run_with(monkeypatch, host)
    assert result.exit_code == 0
    assert "always madvise [never]" in result.output
    assert "Operation not permitted" in result.output
    assert result.output.count("warning") == 2
    assert result.output.count("hint:") >= 3
    assert "could be better: threads, huge pages" in result.output


def test_nodes_and_the_cores_of_each_rank_are_told(monkeypatch, host):
    host |= {
        "cpus": [
            {"id": cpu, "core": cpu, "node": cpu // 3, "kind": "performance"} for cpu in range(6)
        ],
        "pool_cpus": list(range(6)),
        "numa_nodes": [0, 1],
        "gpus": [("0000:3b:00.0", 1), ("0000:5e:00.0", 1), ("0000:61:00.0", None)],
        "claimed_memory_bytes": 16 << 30,
        "others_on_cpus": [77, 78],
    }
    places = [([3, 0, 1], "0000:3b:00.0"), ([4, 2], "0000:5e:00.0"), ([5], None)]
    monkeypatch.setattr(_core, "places_of_ranks", lambda num_ranks: places[:num_ranks])
    text = " ".join(run_with(monkeypatch, host).output.split())
    assert "2 nodes: node 0 has 3 cores; node 1 has 3 cores and 2 GPUs (0000:3b" in text
    assert "of 3 ranks on this host" in text
    first = "rank 0 gets 1 core of node 1 (CPUs 3) and 2 cores of node 0 (CPUs 0-1), beside GPU"
    assert first in text
    assert "rank 2 gets 1 core of node 1 (CPUs 5) if a launcher says" in text
    assert "other processes have claimed 16.0 GiB of it" in text
    assert "other processes (77, 78) step on the same cores" in text


def test_a_section_that_fails_ends_no_other(monkeypatch, host):
    del host["numa_nodes"]
    result = run_with(monkeypatch, host)
    assert result.exit_code == 1
    assert "KeyError: 'numa_nodes'" in result.output
    assert "huge pages" in result.output
    assert "does not work: NUMA" in result.output

    def fail():
        raise OSError("no machine")

    monkeypatch.setattr(_core, "system_info", fail)
    report = doctor.diagnose()
    assert report["status"] == "broken"
    assert report["system"] is None
    assert by_topic(report)["AdamW"]["status"] == "ok"


def test_a_result_that_is_not_torch_s_is_broken(monkeypatch, host):
    monkeypatch.setattr(_software, "_difference_after_a_step", lambda device, make: 1e-3)
    result = run_with(monkeypatch, host)
    assert result.exit_code == 1
    assert "does not work: AdamW, OffloadAdamW" in result.output


def test_a_seam_that_is_missing_is_broken(monkeypatch, host):
    seam = {"name": "op cpu_adam", "found": False, "filled": False, "note": "`OpBuilder` has gone"}
    facts = {"version": "0.19.8", "tested": ">=0.19.6,<=0.19.8", "seams": [seam], "error": None}
    result = run_with(monkeypatch, host, facts)
    assert result.exit_code == 1
    assert "`OpBuilder` has gone" in result.output
    facts |= {"seams": [], "error": "ImportError: deepspeed `0.1` lacks everything"}
    result = run_with(monkeypatch, host, facts)
    assert result.exit_code == 1
    assert "lacks everything" in result.output


def test_a_version_that_is_not_tested_and_a_seam_left_to_deepspeed_are_told(monkeypatch, host):
    seam = {
        "name": "offload engine, ZeRO-3 optimizer",
        "found": True,
        "filled": False,
        "note": "`step` takes `self, more` in this version of DeepSpeed",
    }
    facts = {"version": "0.99", "tested": ">=0.19.6,<=0.19.8", "seams": [seam], "error": None}
    result = run_with(monkeypatch, host, facts)
    assert result.exit_code == 0
    output = " ".join(result.output.split())
    assert "could be better: DeepSpeed" in output
    assert "DeepSpeed's own path on Stepwell's kernels" in output
    assert "`step` takes `self, more`" in output
