"""`stepwell demo`, with a model that is hardly one."""

import json

import fork_server
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

# Of losses near 5. Both runs round alike; a sum in another order moves a bf16 weight by one ulp
# here and there.
DISTANCE_MAX = 0.02


def demo(cwd, *arguments):
    # Nothing may be compiled: there is nothing to compile with, and nowhere to.
    environment = {
        "PATH": "/nonexistent",
        "CXX": "/nonexistent/c++",
        "TORCH_EXTENSIONS_DIR": str(cwd / "ext"),
    }
    size = ["--hidden-size", "64", "--layers", "1", "--out", "out"]
    return fork_server.python(
        *("-m", "stepwell", "demo", *size, *arguments),
        cwd=cwd,
        environment=environment,
        timeout=110,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "bytes_max"), [("fp32", 12.0), ("q8", 6.4)])
def test_both_runs_end_alike(tmp_path, moments, bytes_max):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    result = demo(tmp_path, "--text", "text", "--steps", "6", "--moments", moments, "--seed", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (tmp_path / "ext").exists() or not any((tmp_path / "ext").iterdir())
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    ours, reference = report["runs"]
    assert len(ours["losses"]) == len(reference["losses"]) == 6
    assert ours["losses"][0] == reference["losses"][0]
    assert ours["losses"][-1] < ours["losses"][0]
    assert report["distance"]["max"] == max(
        abs(mine - theirs) for mine, theirs in zip(ours["losses"], reference["losses"], strict=True)
    )
    assert report["distance"]["max"] < DISTANCE_MAX
    assert reference["state_bytes_per_param"] == 12.0
    assert 4.0 < ours["state_bytes_per_param"] <= bytes_max
    assert (report["steps"], report["seed"], report["moments"]) == (6, 3, moments)
    assert ours["optimizer_seconds_median"] > 0


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    result = demo(tmp_path, "--text", "text")
    assert result.returncode == 1
    assert "`5` bytes" in result.stdout + result.stderr
    assert "hint: --text FILE" in result.stdout + result.stderr
