"""The programs of examples/, each at a tiny size on the CPU, as a reader runs it."""

import re
from pathlib import Path

import fork_server
import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[1] / "examples"
TIMEOUT = 110
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the examples are not beside the tests"),
]

# By the file: what comes before it, and behind.
RUNS = {
    "plain_loop": ((), ()),
    "trainer": ((), ()),
    "fsdp2": (TWO_RANKS, ()),
    "zero": (("-m", "stepwell", "run"), ()),
    "streamed_weights": ((), ()),
    "volume": ((), ("--drive", ".")),
}


def run(name, folder, steps=20):
    before, behind = RUNS[name]
    program = str(FOLDER / f"{name}.py")
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = fork_server.python(
        *(*before, program, "--steps", steps, *behind),
        cwd=folder,
        environment=environment,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr
    return ended, [
        float(loss) for loss in re.findall(r"^loss ([\d.]+)", ended.stdout, re.MULTILINE)
    ]


def test_each_example_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RUNS, "small_llama"}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains_and_says_what_steps(name, tmp_path):
    ended, losses = run(name, tmp_path)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3
    said = [line for line in ended.stderr.splitlines() if line.startswith("stepwell: ")]
    assert len(said) == 1, ended.stderr
    assert "moments" in said[0]


def test_the_example_of_a_volume_goes_on(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    _, expected = run("volume", whole, 12)
    _, first = run("volume", halves, 6)
    ended, second = run("volume", halves, 12)
    assert "from step 6" in ended.stdout
    assert "volume `example` goes on from step 6" in ended.stderr
    assert first + second == expected
