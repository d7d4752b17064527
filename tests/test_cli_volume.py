"""`stepwell volume`: what is listed, checked and removed."""

import gc
import os

import pytest
import stepwell
import torch
from stepwell.cli import app
from typer.testing import CliRunner


def run(*words):
    result = CliRunner().invoke(app, ["volume", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def folders(tmp_path):
    found = [tmp_path / "a", tmp_path / "b"]
    for folder in found:
        folder.mkdir()
    return found


def trained(folders, name="run"):
    """An optimizer that has committed a step."""
    param = torch.nn.Parameter(torch.zeros(70_000))
    tier = stepwell.Volume(folders, name=name)
    optimizer = stepwell.OffloadAdamW([param], tier=tier, host_bytes_max=4 << 20, threads=1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    return optimizer


def test_a_volume_in_use_is_listed_and_left_alone(folders):
    optimizer = trained(folders)
    code, text = run("ls", *folders)
    assert code == 0
    assert "run: 2 members" in text
    assert str(os.getpid()) in text
    for command in ("check", "rm"):
        code, text = run(command, *folders, "--name", "run")
        assert code == 1
        assert "is used by" in text
    del optimizer
    gc.collect()
    assert "not in use" in run("ls", *folders)[1]


def test_whole_and_damaged_volumes(folders):
    trained(folders)
    gc.collect()
    # The order of folders does not matter.
    code, text = run("check", *reversed(folders))
    assert code == 0, text
    assert "step 1 is committed" in text
    assert "are whole" in text
    path = folders[1] / "run.1.stepwell"
    with path.open("r+b") as file:
        # Behind headers and indices, which are whole.
        for offset in range(256 << 10, path.stat().st_size, 4096):
            file.seek(offset)
            file.write(b"\x55")
    code, text = run("check", *folders)
    assert code == 1
    assert "damaged" in text
    assert "run.1.stepwell" in text
    path.rename(folders[1] / "elsewhere")
    code, text = run("check", *folders)
    assert code == 1
    assert "members 1 are not in these folders" in text
    code, text = run("rm", *folders, "--all")
    assert code == 1
    assert "give all folders" in text


def test_what_is_removed(folders):
    for name in ("run", "walk"):
        trained(folders, name)
    gc.collect()
    assert run("rm", *folders)[0] == 2
    code, text = run("rm", *folders, "--name", "stroll")
    assert code == 1
    assert "no volume `stroll`" in text
    code, text = run("rm", *folders, "--name", "run")
    assert (code, text.strip()) == (0, "run: removed")
    assert "walk" in run("ls", *folders)[1]
    assert run("rm", *folders, "--all")[0] == 0
    assert run("ls", *folders)[1] == ""
