"""The scripts of `benches/` that this machine can run, at sizes where nothing is learned."""

import json
import sys
from pathlib import Path

import fork_server
import pytest
from stepwell.store.tuning import TUNING_FILE, DriveTuning

ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(ROOT / "benches"))
try:
    import pairs
finally:
    del sys.path[0]


def bench(name, *arguments, cwd, **environment):
    """In a process of its own."""
    return fork_server.python(
        str(ROOT / "benches" / f"{name}.py"),
        *map(str, arguments),
        cwd=cwd,
        environment=environment,
        timeout=110,
    )


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.02] * 9, "equal"),
        ([1.1] * 9, "faster"),
        ([0.9] * 9, "slower"),
        ([0.5, 0.6, 0.7, 0.8, 1.2, 1.3, 1.4, 1.5, 1.6], "unclear"),
    ],
)
def test_a_verdict_needs_more_than_three_percent_and_one_side_of_the_interval(ratios, verdict):
    assert pairs.ratio(ratios, [1.0] * len(ratios)).verdict == verdict


@pytest.mark.slow
def test_adam_without_a_compiler(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--numel", "65536", "--repeats", "3", "--threads", "1", "--out", "out"]
    empty = tmp_path / "ext"
    environment = {
        "PATH": "/nonexistent",
        "TORCH_EXTENSIONS_DIR": str(empty),
        "CXX": "/nonexistent/c++",
    }
    result = bench("adam", *arguments, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "without DeepSpeedCPUAdam" in result.stdout
    assert not list(empty.rglob("*.so"))
    report = json.loads((tmp_path / "out" / "bench_adam.json").read_text())
    assert report["deepspeed_absent"]
    assert report["command"] == f"python benches/adam.py {' '.join(arguments)}"
    assert report["cases"]
    for case in report["cases"]:
        ours, *peers = case["contenders"]
        assert ours["name"] == "stepwell"
        assert ours["share_of_ceiling"] > 0
        assert all(difference <= case["tolerance"] for difference in case["difference"].values())
        assert all(peer["ratio"]["median"] > 0 for peer in peers)
    assert (tmp_path / "out" / "bench_adam.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_codec(tmp_path):
    pytest.importorskip("transformers")
    size = ["--hidden-size", "64", "--layers", "1", "--steps", "4", "--at", "2", "--at", "4"]
    result = bench("codec", *size, "--out", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "out" / "bench_codec.json").read_text())
    keys = [(error["moments"], error["how"], error["step"]) for error in report["errors"]]
    assert keys == [
        (moments, how, step)
        for moments in ("bf16", "q8")
        for how in ("once", "tracked")
        for step in (2, 4)
    ]
    # Something was rounded, and sanely: 8 bits of mantissa, 8 bits in all.
    bounds = {"bf16": (1e-4, 1e-2), "q8": (1e-3, 1e-1)}
    for error in report["errors"]:
        low, high = bounds[error["moments"]]
        assert low < error["update_error"] < high, error
    assert report["final_loss"].keys() == {"fp32", "bf16", "q8", "fp32, seed 1", "fp32, seed 2"}
    assert report["seed_spread"] > 0
    assert {len(losses) for losses in report["losses"].values()} == {4}


def test_drives_are_measured_side_by_side(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    DriveTuning(mb_per_second=3, stripe_bytes=65536, queue_depth=4, date="d").write(folders[0])
    DriveTuning(mb_per_second=1, stripe_bytes=65536, queue_depth=8, date="d").write(folders[1])
    tiny = ["--mib", 1, "--record-kib", 100, "--buffers", 2, "--seconds", 0.01, "--rounds", 2]
    # Without fio: of so short a time it says that nothing moved.
    ended = bench(
        *("volume", *folders, *tiny, "--no-deepspeed", "--out", "out"), cwd=tmp_path, PATH="/none"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "out" / "bench_volume.json").read_text())
    assert (report["weights"], report["stripe_bytes"], report["queue_depth"]) == ([3, 1], 65536, 4)
    assert report["absent"] == {"fio": "fio is not installed"}
    steps = {"steps, fp32", "steps, q8"}
    names = {"stepwell", *steps, "plain calls"}
    assert report["mb_per_second"].keys() == names
    for name, by_pattern in report["mb_per_second"].items():
        assert by_pattern.keys() == ({"swap"} if name in steps else {"write", "read", "swap"})
        assert all(len(rates) == 2 and min(rates) > 0 for rates in by_pattern.values())
    assert report["ratio"].keys() == names - {"stepwell"}
    # What was measured with is gone.
    left = sorted(path.name for folder in folders for path in folder.iterdir())
    assert left == [TUNING_FILE] * 2


def test_the_readme_s_picture_is_drawn_by_one_command(tmp_path):
    pytest.importorskip("matplotlib")
    data = ROOT / "docs" / "step_time.json"
    for name in ("one.svg", "two.svg"):
        ended = bench("plot", data, "--out", name, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    ended = bench("plot", data, data, "--out", "steps.svg", "--every-step", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "slowest" in (tmp_path / "steps.svg").read_text()
    # No date, no random identifiers.
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "(docs/step_time.svg)" in (ROOT / "README.md").read_text()


def test_offload_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    size = ("--size", "tiny", "--sequence-length", "16", "--steps", "3", "--warm-up", "1")
    names = ("fsdp2", "fsdp2 cpu_offload", "torch fsdp2 cpu_offload")
    cases = [word for name in names for word in ("--case", name)]
    ended = bench(
        "offload_ranks",
        *("--ranks", "2", *cases, *size),
        *("--out", tmp_path),
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "bench_offload_ranks.json").read_text())
    assert report["ranks"] == 2
    for case in report["cases"]:
        assert "failure" not in case, case["failure"]
    ours, offloaded, theirs = report["cases"]
    assert offloaded["losses"] == ours["losses"]
    assert offloaded["norms"] == ours["norms"]
    assert "bound_seconds" not in theirs
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-2)
    assert ours["num_params"] == 4983040
    # State is stepped once on the host, whatever the number of ranks.
    assert ours["bytes_per_param"] == 26
    assert ours["bound_seconds"] == pytest.approx(
        report["forward_backward_seconds"]["fsdp2"]
        + 26 * 4983040 / ours["memory_gb_per_second"] / 1e9
    )
    assert ours["breakdown"]["bytes_downloaded"] < 2 * 4983040
    assert ours["norms_agree"]
    assert ours["losses"][-1] < ours["losses"][0]


def test_weights_in_host_memory_beside_those_on_the_device(tmp_path):
    pytest.importorskip("transformers")
    size = ("--size", "tiny", "--tokens", "16", "--steps", "2", "--activations", "host")
    ended = bench("streamed", *size, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout.splitlines()[-1])
    assert (row["tokens"], row["activations"]) == (16, "host")
    assert min(row[name] for name in ("streamed_forward", "streamed_backward", "step")) > 0
