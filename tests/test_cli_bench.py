"""`stepwell bench`: at sizes where nothing is learned about speed."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import fork_server
import pytest
import torch
from rich.console import Console
from stepwell.cli import _memory_rate, _pairs, _rank_runs, app
from stepwell.cli._adam_cases import Memory, Run, Streams, cases
from stepwell.cli._memory_rate import MemoryRate, bound
from stepwell.cli._report import write
from stepwell.cli.bench_adam import _check
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
TIMEOUT = 110


def stepwell(*arguments, cwd, **environment):
    """In a process of its own."""
    return fork_server.python(
        *("-m", "stepwell", *arguments), cwd=cwd, environment=environment, timeout=TIMEOUT
    )


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


# ---- pairs ----


def test_a_ratio_is_taken_pair_by_pair():
    # The machine slowed down threefold between the pairs: of unpaired medians nothing would be left
    # to say.
    ours = [1.0, 3.0, 1.0, 3.0, 1.0]
    ratio = _pairs.ratio([2.0 * seconds for seconds in ours], ours)
    assert (ratio.median, ratio.low, ratio.high, ratio.verdict) == (2.0, 2.0, 2.0, "faster")


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.02] * 9, "equal"),
        ([0.98] * 9, "equal"),
        ([1.1] * 9, "faster"),
        ([0.9] * 9, "slower"),
        ([0.5, 0.6, 0.7, 0.8, 1.2, 1.3, 1.4, 1.5, 1.6], "unclear"),
    ],
)
def test_a_verdict_needs_more_than_three_percent_and_one_side_of_the_interval(ratios, verdict):
    assert _pairs.ratio(ratios, [1.0] * len(ratios)).verdict == verdict


def test_every_round_runs_everyone_once_from_another_start():
    calls = []
    contenders = {name: {"pass": lambda name=name: calls.append(name)} for name in "abc"}
    seconds = _pairs.interleave(contenders, repeats=3)
    assert "".join(calls) == "cababcbcacab"
    assert {name: len(passes["pass"]) for name, passes in seconds.items()} == {
        "a": 3,
        "b": 3,
        "c": 3,
    }


# ---- cases ----


def test_memory_holds_the_same_values_in_every_dtype():
    memory = Memory(5000)
    assert memory.param(torch.float32) is memory.param(torch.float32)
    assert torch.equal(memory.param(torch.float32), memory.param(torch.bfloat16).float())
    assert not torch.equal(memory.param(torch.float32), memory.grad(torch.float32))


def test_a_stream_that_is_read_and_written_counts_twice():
    assert Streams(read_write=(4, 4, 4), read=(4,)).bytes == 28


def test_a_result_that_differs_from_the_peer_s_is_not_timed():
    case = next(case for case in cases(None) if case.name == "fp32")

    def prepare(memory):
        run = case.ours.prepare(memory)
        step = run.passes["step"]

        def wrong():
            step()
            memory.param(torch.float32)[7] += 1.0

        return Run(memory=memory, passes={"step": wrong}, weights=run.weights)

    assert _check(case, 1000)["torch fused"] < case.tolerance
    with pytest.raises(ValueError, match="case `fp32`: the result differs"):
        _check(replace(case, ours=replace(case.ours, prepare=prepare)), 1000)


def test_without_matplotlib_the_numbers_are_written_and_the_plot_is_missed(
    tmp_path, monkeypatch, capsys
):
    from rich.console import Console

    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    write(Console(), tmp_path / "new", "name", {"a": 1}, lambda figure: None)
    assert json.loads((tmp_path / "new" / "name.json").read_text()) == {"a": 1}
    assert not (tmp_path / "new" / "name.png").exists()
    assert "hint: pip install 'stepwell[plot]'" in capsys.readouterr().out


# ---- commands ----


@pytest.mark.slow
def test_bench_adam_without_a_compiler(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--numel", "65536", "--repeats", "3", "--threads", "1", "--out", "out"]
    empty = tmp_path / "ext"
    environment = {
        "PATH": "/nonexistent",
        "TORCH_EXTENSIONS_DIR": str(empty),
        "CXX": "/nonexistent/c++",
    }
    result = stepwell("bench", "adam", *arguments, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "without DeepSpeedCPUAdam" in result.stdout
    assert not list(empty.rglob("*.so"))
    report = json.loads((tmp_path / "out" / "bench_adam.json").read_text())
    assert report["deepspeed_absent"]
    assert report["command"] == f"stepwell bench adam {' '.join(arguments)}"
    assert (report["numel"], report["threads"], report["repeats"]) == (65536, 1, 3)
    assert {"cpu", "cores", "memory_gib", "isa"} <= report["machine"].keys()
    assert [case["name"] for case in report["cases"]] == [case.name for case in cases(None)]
    for case in report["cases"]:
        ours, *peers = case["contenders"]
        assert ours["name"] == "stepwell"
        assert ours["share_of_ceiling"] > 0
        assert all(difference <= case["tolerance"] for difference in case["difference"].values())
        for one in case["contenders"]:
            assert one["ns_per_param"] == pytest.approx(one["seconds"] / 65536 * 1e9)
            assert one["gb_per_second"] == pytest.approx(
                one["bytes_per_param"] / one["ns_per_param"]
            )
        for peer in peers:
            assert peer["ratio"]["low"] <= peer["ratio"]["median"] <= peer["ratio"]["high"]
    assert (tmp_path / "out" / "bench_adam.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_case_is_refused():
    result = invoke("bench", "adam", "--case", "fp33")
    assert result.exit_code == 2
    assert "fp33" in result.stderr


@pytest.mark.slow
def test_bench_codec(tmp_path):
    pytest.importorskip("transformers")
    size = ["--hidden-size", "64", "--layers", "1", "--steps", "4", "--at", "2", "--at", "4"]
    result = stepwell("bench", "codec", *size, "--out", "out", cwd=tmp_path)
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


# ---- offload ----


def test_offload_is_held_against_the_bound(tmp_path):
    pytest.importorskip("transformers")
    # A width of its own: what a piped table is cut to must not hide a column.
    ended = stepwell(
        *(
            "bench",
            "offload",
            "--size",
            "tiny",
            "--sequence-length",
            "16",
            "--steps",
            "3",
            "--accumulation",
            "2",
        ),
        *("--case", "stepwell", "--case", "torch", "--out", str(tmp_path)),
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "bench_offload.json").read_text())
    assert report["memory_gb_per_second"] > 0
    assert report["bus_gb_per_second"] == {}
    alone = report["forward_backward_seconds"]
    ours, torch_alone = report["cases"]
    assert ours["num_params"] == 4983040
    assert ours["bound_seconds"] == pytest.approx(
        alone + 26 * 4983040 / ours["memory_gb_per_second"] / 1e9
    )
    assert (
        ours["breakdown"]["bytes_downloaded"] == ours["breakdown"]["bytes_uploaded"] == 2 * 4983040
    )
    assert "bound_seconds" not in torch_alone
    # The same weights, text and arithmetic, up to the rounding of the gradients' norm and of the
    # masters' sums.
    assert ours["losses"][0] == torch_alone["losses"][0]
    assert ours["losses"] == pytest.approx(torch_alone["losses"], rel=1e-3)
    assert (tmp_path / "bench_offload.png").stat().st_size > 0


def test_offload_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    size = ("--size", "tiny", "--sequence-length", "16", "--steps", "3", "--warm-up", "1")
    ended = stepwell(
        *("bench", "offload", "--ranks", "2", "--case", "ddp, shard", *size),
        *("--out", str(tmp_path)),
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "bench_offload_ranks.json").read_text())
    assert report["ranks"] == 2
    (ours,) = report["cases"]
    assert "failure" not in ours, ours["failure"]
    assert ours["num_params"] == 4983040
    # State is stepped once on the host, whatever the number of ranks.
    assert ours["bytes_per_param"] == 26
    assert ours["bound_seconds"] == pytest.approx(
        report["forward_backward_seconds"]["ddp"]
        + 26 * 4983040 / ours["memory_gb_per_second"] / 1e9
    )
    assert ours["breakdown"]["bytes_downloaded"] < 2 * 4983040
    assert ours["breakdown"]["bytes_gathered"] + ours["breakdown"]["bytes_uploaded"] == 2 * 4983040
    assert ours["norms_agree"]
    assert ours["losses"][-1] < ours["losses"][0]


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("ddp, shard", "ddp"),
        ("deepspeed on stepwell, stage=2", "zero-2"),
        ("deepspeed on stepwell, stage=3", "fsdp2"),
    ],
)
def test_cases_are_held_against_forwards_that_reduce_as_theirs(monkeypatch, name, reduction):
    """Ranks are left out: DeepSpeed without Stepwell compiles an op for messages of CPUs."""
    alone = {
        "ddp": 0.1,
        "fsdp2": 0.2,
        "deepspeed, stage=2, all on the devices": 0.4,
        "deepspeed, stage=3, all on the devices": 0.8,
    }

    def run(console, name, workload, num_ranks):
        return {
            "name": name,
            "seconds": 1.0,
            "num_params": 10**9,
            "forward_backward_seconds": alone.get(name),
        }

    monkeypatch.setattr(_rank_runs, "_run", run)
    moved = {"stepwell": 26.0, "deepspeed": None, "deepspeed on stepwell": 28.0}
    monkeypatch.setattr(_memory_rate, "_measure", lambda: 100.0)
    kept = []
    report = _rank_runs.measure_ranks(
        Console(file=io.StringIO()),
        [*alone, name],
        None,
        2,
        memory=MemoryRate(),
        bytes_per_param=moved,
        keep=lambda known: kept.append([case["name"] for case in known["cases"]]),
    )
    # A run that is stopped has what came before.
    assert kept == [[*alone, name][:count] for count in range(1, 6)]
    seconds = {"ddp": 0.1, "fsdp2": 0.2, "zero-2": 0.4, "zero-3": 0.8}
    assert report["forward_backward_seconds"] == seconds
    *others, ours = report["cases"]
    before = report["forward_backward_seconds"][reduction]
    assert ours["bound_seconds"] == pytest.approx(before + ours["bytes_per_param"] / 100)
    assert ours["bytes_per_param"] == (26.0 if reduction == "ddp" else 28.0)
    # Nothing of it is stepped on the host.
    assert "bound_seconds" not in others[2]


def test_the_bound_takes_the_faster_memory(monkeypatch):
    rates = iter([100.0, 50.0, 200.0])
    monkeypatch.setattr(_memory_rate, "_measure", lambda: next(rates))
    memory, case = MemoryRate(), {"num_params": 10**9}
    first, second = (memory.beside(lambda: case) for _ in range(2))
    assert [each["memory_gb_per_second"] for each in (first, second)] == [100.0, 200.0]
    assert bound(second, 0.1, 26.0) == {
        "bound_seconds": pytest.approx(0.1 + 26 / 200),
        "bytes_per_param": 26.0,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "huge"), "huge"),
        (("--case", "fastest"), "fastest"),
        (("--ranks", "2", "--case", "torch"), "ddp, shard"),
    ],
)
def test_offload_names_what_it_does_not_know(arguments, said):
    ended = invoke("bench", "offload", *arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr


# ---- the picture ----


def test_the_readme_s_picture_is_drawn_by_one_command(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    # The command sets parameters of the process.
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    monkeypatch.chdir(tmp_path)
    data = ROOT / "docs" / "step_time.json"
    for name in ("one.svg", "two.svg", "both.png"):
        files = [str(data)] * (2 if name == "both.png" else 1)
        ended = invoke("bench", "plot", *files, "--out", name)
        assert ended.exit_code == 0, ended.output
    ended = invoke("bench", "plot", str(data), "--out", "steps.svg", "--every-step")
    assert ended.exit_code == 0, ended.output
    assert "slowest" in (tmp_path / "steps.svg").read_text()
    first = (tmp_path / "one.svg").read_bytes()
    assert first == (tmp_path / "two.svg").read_bytes()  # no date, no random identifiers
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "step_time.svg").is_file()
    assert "(docs/step_time.svg)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("content", ["", "[]", '{"cases": []}', '{"cases": [{"failure": "no"}]}'])
def test_what_is_not_a_report_is_not_drawn(tmp_path, content, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.json").write_text(content)
    ended = invoke("bench", "plot", "report.json")
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit)
    assert "report.json" in ended.stderr
