"""`stepwell plan`."""

import json
import subprocess
import sys
import time

import pytest
from stepwell.cli import app
from typer.testing import CliRunner

DESCRIBED = ("--gpu-memory", "24GB", "--host-memory", "64GB")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_described_machine_takes_no_torch_and_under_two_seconds(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    program = (
        "import sys\nfrom stepwell.cli import app\n"
        f"try:\n    app(['plan', sys.argv[1], *{DESCRIBED}, '--drive', '6GB/s'])\n"
        "finally:\n    assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    seconds = []
    for model in (tmp_path, "7B"):
        begin = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-c", program, str(model)], check=False, capture_output=True, text=True
        )
        seconds.append(time.perf_counter() - begin)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert 'weights="host"' in ended.stdout
    assert min(seconds) < 2, seconds


def test_the_table_says_what_fits_what_binds_and_what_to_write():
    ended = invoke("7B", *DESCRIBED, "--drive", "6GB/s", "--bus", "20GB/s")
    assert ended.exit_code == 0, ended.output
    assert "assumed, since not said: --flops, --device-rate, --host-rate, --cores" in ended.output
    assert "best: weights and state in host memory, q8" in ended.output
    assert "lacks " in ended.output
    assert 'moments="q8"' in ended.output
    # Nothing fits: no code.
    ended = invoke("70B", *DESCRIBED)
    assert "nothing fits on this machine" in ended.output


def test_json_is_one_object():
    ended = invoke("7B", *DESCRIBED, "--json", "--micro-batch", 2, "--accumulation", 3)
    found = json.loads(ended.stdout)
    assert found["workload"]["tokens_of_step"] == 4096 * 6
    best = found["placements"][found["best"][0]]
    assert best["kind"] == "streamed"
    assert best["code"].startswith("# The model is on the CPU")


def test_a_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    ended = invoke("1B", *DESCRIBED, "--plot", tmp_path / "plan.png")
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "plan.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.json", *DESCRIBED), "expected a config.json"),
        (("7B", "--gpu-memory", "24GB"), "expected --gpu-memory and --host-memory"),
        (("7B", "--bus", "25"), "`--bus` is given"),
        (("7B", *DESCRIBED, "--again"), "expected one of the two"),
        (("7B", *DESCRIBED, "--measure"), "expected one of the two"),
        (("7B", *DESCRIBED, "--bus", "wide"), "expected bytes per second, as 25GB/s"),
        (("7B", *DESCRIBED, "--drive", "nowhere"), "expected a folder on it"),
        (("7B", *DESCRIBED, "--tokens", "0"), "`tokens` is `0`"),
        (("7B", *DESCRIBED, "--dtype", "fp8"), "expected one of bfloat16"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(arguments, said):
    ended = invoke(*arguments)
    assert ended.exit_code == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_fits_is_run_beside_its_plan(tmp_path):
    from rich.console import Console
    from stepwell.cli import _plan_runs
    from stepwell.planning import described, plan

    tiny = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    machine = described(gpu_memory="24GB", host_memory="64GB")
    found = plan(tmp_path, tokens=64, machine=machine)
    _plan_runs.check_measurable(str(tmp_path), found)
    # One with weights on the device, and one with weights in host memory.
    for each in found.placements:
        if (each.kind, each.moments) not in {("exact", "q8"), ("streamed", "fp32")}:
            each.refused = "left out"
    console = Console(width=120, record=True, quiet=False)
    rows = _plan_runs.measure(console, str(tmp_path), found)
    assert [found.placements[row["placement"]].kind for row in rows] == ["exact", "streamed"]
    assert all(min(row["seconds"]) > 0 for row in rows)
    _plan_runs.print_measured(console, rows)
    assert "use: weights" in console.export_text()


def test_only_what_a_case_is_can_be_measured(tmp_path):
    from stepwell.cli import _plan_runs
    from stepwell.planning import described, plan

    machine = described(gpu_memory="24GB", host_memory="64GB")
    with pytest.raises(ValueError, match=r"`7B`, expected the config\.json of a Llama"):
        _plan_runs.check_measurable("7B", plan("7B", machine=machine))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = plan(tmp_path, machine=machine, gpus=2)
    with pytest.raises(ValueError, match="with `--gpus`, expected it to be left out"):
        _plan_runs.check_measurable(str(tmp_path), found)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has a GPU")
def test_without_a_gpu_a_machine_is_to_be_described(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = invoke("7B")
    assert (ended.exit_code, "hint: --gpu-memory 24GB" in ended.stderr) == (1, True)
