"""`stepwell run`: with `python` itself as the oracle."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

TIMEOUT = 100  # seconds of one command: several of them import torch and DeepSpeed on few cores

SHOW = """
import json, sys
spec = repr(__spec__) if __spec__ is None else __spec__.name
print(json.dumps([sys.argv, sys.path, __name__, __file__, spec]))
assert sys.modules["__main__"].__dict__ is globals()
"""

SPAWN = """
import multiprocessing, sys

class Sample:  # travels by the name of its module
    pass

def registered(sample):
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder
    assert type(sample) is Sample
    return OpBuilder._loaded_ops["cpu_adam"].__name__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("CHILD", pool.apply(registered, (Sample(),)))
"""

RANK = """
import json, os, sys
import deepspeed, torch, torch.distributed as dist
from deepspeed.ops.op_builder.builder import OpBuilder
dist.init_process_group("gloo")
ranks = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(ranks)
op = OpBuilder._loaded_ops["cpu_adam"].__name__
seen = json.dumps([dist.get_rank(), ranks.item(), sys.argv, op])
os.write(1, f"RANK {seen}\\n".encode())  # one write: the other rank's line must not come between
dist.destroy_process_group()
"""


def execute(*command, cwd, **environment):
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANK", "LOCAL_", "WORLD_"))
    }
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=variables | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT)
        finally:
            # A launcher that did not end in time has ranks, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def stepwell(*arguments, cwd, **environment):
    return execute(sys.executable, "-m", "stepwell", *arguments, cwd=cwd, **environment)


@pytest.mark.parametrize(
    "arguments",
    [["package/show.py", "-m", "--help", "--", "--lr=3"], ["-m", "package", "run", "--help"]],
    ids=["script", "module"],
)
def test_a_program_sees_what_python_shows_it(tmp_path, arguments):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("show.py", "__main__.py"):
        (package / name).write_text(SHOW)
    ours = stepwell("run", *arguments, cwd=tmp_path)
    python = execute(sys.executable, *arguments, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, python.stdout)
    (line,) = ours.stderr.splitlines()
    assert "no optimizer on Stepwell came to be" in line


ALONE = """
import deepspeed, torch
model = torch.nn.Linear(4, 4)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
engine.step()
print("ON ENGINE", engine.stepwell_plan.is_on_engine)
"""


@pytest.mark.slow
def test_one_process_needs_no_launcher_and_says_what_steps(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    ours = stepwell("run", "alone.py", cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert ours.returncode == 0, ours.stderr
    assert "ON ENGINE True" in ours.stdout
    (line,) = [line for line in ours.stderr.splitlines() if line.startswith("stepwell: ")]
    assert "ZeRO-2 on the offload engine, 20 parameters" in line
    assert "in host memory, fp32 moments, about 0.00 GiB" in line


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(7)",
        "sys.exit('reason')",
        "raise EOFError",
        "raise BrokenPipeError(32, 'x')",
        "raise KeyboardInterrupt",
    ],
)
def test_a_script_ends_as_under_python(tmp_path, ending):
    (tmp_path / "end.py").write_text(f"import sys\n{ending}\n")
    # What else is imported for others has something to say in the end.
    ours = fork_server.python(
        *("-m", "stepwell", "run", "end.py"), cwd=tmp_path, timeout=TIMEOUT, imports=("torch",)
    )
    python = execute(sys.executable, "end.py", cwd=tmp_path)
    assert ours.returncode == python.returncode
    assert ours.stderr.splitlines()[-1:] == python.stderr.splitlines()[-1:]


def test_what_cannot_be_run_is_refused(tmp_path):
    ours = stepwell("run", "absent.py", cwd=tmp_path)
    assert ours.returncode == 2
    # Without a terminal nothing is wrapped.
    assert "`absent.py` is not a file. hint: a module is run by `stepwell run -m" in ours.stderr


@pytest.mark.slow
def test_a_spawned_process_is_registered_before_the_script_is_imported(tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN)
    ours = stepwell("run", "spawn.py", cwd=tmp_path)
    assert "CHILD stepwell.deepspeed.native.cpu_adam" in ours.stdout, ours.stderr


LAUNCHERS = {
    "torchrun -m": "torchrun --standalone --nproc-per-node 2 -m stepwell run rank.py --lr 3",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no "
    "--main_process_port 0 -m stepwell run rank.py --lr 3",
    "deepspeed --module": "deepspeed --num_gpus 2 --module stepwell run rank.py --lr 3",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", LAUNCHERS)
def test_two_ranks_under_a_launcher(tmp_path, form):
    launcher, *arguments = LAUNCHERS[form].split()
    folder = Path(sys.executable).parent
    program = shutil.which(launcher, path=folder)
    if program is None:
        pytest.skip(f"{launcher} is not installed")
    if launcher == "deepspeed":
        arguments = ["--master_port", str(29600 + os.getpid() % 1000), *arguments]
    (tmp_path / "rank.py").write_text(RANK)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    result = execute(
        program, *arguments, cwd=tmp_path, PATH=path, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu"
    )
    seen = sorted(
        json.loads(line.removeprefix("RANK "))
        for line in result.stdout.splitlines()
        if line.startswith("RANK ")
    )
    # As `deepspeed rank.py` does, unless it is told --no_local_rank.
    given = [[f"--local_rank={rank}"] if form == "deepspeed --module" else [] for rank in range(2)]
    assert seen == [
        [rank, 3.0, ["rank.py", *given[rank], "--lr", "3"], "stepwell.deepspeed.native.cpu_adam"]
        for rank in range(2)
    ], result.stdout + result.stderr
