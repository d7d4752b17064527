"""`stepwell doctor`, and the command line as a whole."""

import json
import os
import subprocess
import sys

import pytest
import stepwell
from stepwell import _core
from stepwell.cli import app, doctor
from typer.testing import CliRunner


def test_the_version_is_the_package_s():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"stepwell {stepwell.__version__}\n")


def test_every_command_has_a_help():
    for command in (["doctor"], ["run"], ["demo"], ["bench", "adam"], ["bench", "codec"]):
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0, command
        assert "Usage" in result.output


def doctor_json(**environment):
    command = [sys.executable, "-m", "stepwell", "doctor", "--json"]
    result = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # stdout holds the object and nothing else, whatever DeepSpeed has to say.
    return result.returncode, json.loads(result.stdout)


def test_json_has_what_the_findings_are_drawn_from():
    code, report = doctor_json()
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
        "cores",
        "NUMA",
        "huge pages",
        "free memory",
        "memlock",
        "io_uring",
        "CUDA",
        "DeepSpeed",
    }
    for finding in report["findings"]:
        assert list(finding) == ["topic", "status", "found", "meaning", "fix"]
        assert finding["fix"] or finding["status"] in ("ok", "note"), finding
    assert report["deepspeed"]["error"] is None
    assert any(seam["filled"] for seam in report["deepspeed"]["seams"])


def test_a_forced_isa_and_few_threads_are_told_with_their_way_back():
    code, report = doctor_json(STEPWELL_ISA="scalar", STEPWELL_THREADS="1")
    assert code == 0
    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert findings["instructions"]["status"] == "warning"
    assert findings["instructions"]["fix"] == "unset STEPWELL_ISA"
    if report["system"]["cpus"][-1]["core"] > 0:
        assert findings["cores"]["status"] == "note"
        assert "STEPWELL_THREADS is 1" in findings["cores"]["meaning"]


@pytest.fixture
def host():
    return {
        "isa": "avx2",
        "isas_available": ["scalar", "avx2"],
        "cpus": [{"id": cpu, "core": cpu, "node": 0, "kind": "performance"} for cpu in range(4)],
        "pool_cpus": [0, 1, 2, 3],
        "numa_nodes": [0],
        "huge_page_policy": "always [madvise] never",
        "free_memory_bytes": 64 << 30,
        "memlock_limit_bytes": None,
        "io_uring": "available",
    }


def run_with(monkeypatch, host, deepspeed=None):
    monkeypatch.setattr(_core, "system_info", lambda: host)
    monkeypatch.setattr(doctor, "_deepspeed", lambda: deepspeed)
    for variable in ("STEPWELL_ISA", "STEPWELL_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return CliRunner().invoke(app, ["doctor"])


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


def test_a_seam_that_is_missing_is_broken(monkeypatch, host):
    seam = {"name": "op cpu_adam", "found": False, "filled": False, "note": "`OpBuilder` has gone"}
    result = run_with(monkeypatch, host, {"seams": [seam], "error": None})
    assert result.exit_code == 1
    assert "`OpBuilder` has gone" in result.output
    result = run_with(
        monkeypatch, host, {"seams": [], "error": "ImportError: deepspeed `0.1` lacks everything"}
    )
    assert result.exit_code == 1
    assert "lacks everything" in result.output
