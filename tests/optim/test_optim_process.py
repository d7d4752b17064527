"""Threads, forked children, and what `import stepwell` costs and refuses."""

import subprocess
import sys
import threading

import fork_server
import pytest
import stepwell
import torch
from optim_cases import CODECS, assert_same, snapshot

JOIN_SECONDS_MAX = 60


def advance(optimizer, steps):
    for _ in range(steps):
        optimizer.step()


@pytest.mark.parametrize("moments", CODECS)
def test_threads_step_different_optimizers(moments):
    start = torch.randn(100_000)
    grads = [torch.randn(100_000) for _ in range(4)]

    def optimizer_over(grad):
        param = torch.nn.Parameter(start.clone())
        param.grad = grad.clone()
        return stepwell.AdamW([param], moments=moments)

    together, alone = ([optimizer_over(grad) for grad in grads] for _ in range(2))
    failures = []

    def run(optimizer):
        try:
            advance(optimizer, 50)
        except Exception as error:  # noqa: BLE001 - asserted on below
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(optimizer,), daemon=True) for optimizer in together
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS_MAX)
        assert not thread.is_alive()
    assert not failures
    for one, other in zip(together, alone, strict=True):
        advance(other, 50)
        assert_same(snapshot(other), snapshot(one))


FORK_PROGRAM = """
import os, sys
import torch, stepwell

torch.set_num_threads(1)
param = torch.nn.Parameter(torch.zeros(300_000))
param.grad = torch.ones(300_000)
optimizer = stepwell.AdamW([param], lr=0.1, weight_decay=0.0, eps=0.0)
if sys.argv[1] == "used":
    optimizer.step()
before = param[0].item()
child = os.fork()
if child == 0:
    for _ in range(3):
        optimizer.step()
    grandchild = os.fork()
    if grandchild == 0:
        optimizer.step()
        os._exit(0 if abs(param[-1].item() - before + 0.4) < 1e-5 else 4)
    _, status = os.waitpid(grandchild, 0)
    moved = abs(param[-1].item() - before + 0.3) < 1e-5
    os._exit(0 if status == 0 and moved else 3)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert param[0].item() == before, "the child's steps are its own"
optimizer.step()
assert abs(param[0].item() - before + 0.1) < 1e-5
print("forked")
"""


@pytest.mark.parametrize("before", ["used", "unused"])
def test_steps_go_on_in_a_forked_child(before):
    process = fork_server.python("-c", FORK_PROGRAM, before, timeout=60)
    assert (process.stdout, process.returncode) == ("forked\n", 0), process.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_get_a_clear_import_error(platform):
    program = f"import sys; sys.platform = {platform!r}; import stepwell"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode != 0
    assert (
        f"ImportError: stepwell runs on Linux only, this is `{platform}`. hint: " in process.stderr
    )
    assert "torch/" not in process.stderr, "refused before torch is imported"


def test_import_brings_no_framework_but_torch():
    program = "import sys, stepwell; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert not {
        "deepspeed",
        "transformers",
        "rich",
        "typer",
        "matplotlib",
        "torch.distributed.tensor",
    } & set(modules)


def test_public_names():
    assert set(stepwell.__all__) <= set(dir(stepwell))
    assert stepwell.__version__ == stepwell._core.__version__
    with pytest.raises(AttributeError, match="no attribute `Lion`"):
        _ = stepwell.Lion
