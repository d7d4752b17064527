"""The kernels for GPUs compile, where no GPU is needed: by the compiler that torch's triton has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TEXTS = sorted((Path(__file__).parents[1] / "rust/device").glob("*.ptx"))


def compiler() -> Path:
    triton = pytest.importorskip("triton", reason="triton has the compiler")
    path = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not path.exists():
        pytest.skip("this triton has no ptxas")
    return path


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_kernels_compile(text: Path, target: str, tmp_path: Path) -> None:
    command = [compiler(), f"-arch={target}", text, "-o", tmp_path / "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # A warning is that the text is not PTX, strictly, which another compiler may refuse.
    assert (done.returncode, done.stderr) == (0, "")
