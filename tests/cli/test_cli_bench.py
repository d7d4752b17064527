"""`stepwell bench offload`: at sizes where nothing is learned about speed."""

import json
import re

import fork_server
import pytest
from stepwell.cli import app
from typer.testing import CliRunner

TIMEOUT = 110


def stepwell(*arguments, cwd, **environment):
    """In a process of its own."""
    return fork_server.python(
        *("-m", "stepwell", *arguments), cwd=cwd, environment=environment, timeout=TIMEOUT
    )


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


def test_the_help_begins_with_what_people_use():
    text = invoke("bench", "offload", "--help").output
    first = re.findall(r"--[a-z-]+", text.partition("Options")[2])[:5]
    assert first == ["--size", "--sequence-length", "--micro-batch", "--accumulation", "--case"]
    assert text.index("resident=0.5") > text.index("--out")


def test_offload_is_held_against_the_bound(tmp_path):
    pytest.importorskip("transformers")
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "huge"), "huge"),
        (("--case", "fastest"), "fastest"),
        (("--case", "torch q8"), "torch q8"),
        (("--case", "stepwell, nvme"), "`nvme`"),
        (("--case", "stepwell, deferred=often"), "`deferred=often`"),
        (("--case", "stepwell, untold=1"), "`untold=1`"),
        (("--case", "stepwell, fraction=0.1"), "`deferred`"),
        (("--case", "stepwell volume q8, durability=none"), "--drive"),
    ],
)
def test_offload_names_what_it_does_not_know(arguments, said):
    ended = invoke("bench", "offload", *arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr
