"""`stepwell volume` and `tune`: what is listed, checked, removed and measured."""

import gc
import os
import re
import subprocess
from pathlib import Path

import pytest
import stepwell
import torch
from stepwell.cli import app
from stepwell.store.tuning import DriveTuning, shape_of
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
    text = run("ls", *folders)[1]
    assert "not in use" in text
    assert re.search(r"last written \d{4}-\d\d-\d\d \d\d:\d\d UTC", text)


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
    assert "members 1 are not on these drives" in text
    code, text = run("rm", *folders, "--all")
    assert code == 1
    assert "give all drives" in text


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


@pytest.fixture
def device(tmp_path):
    """A block device."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    command = ["losetup", "--find", "--show", str(image)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if made.returncode:
        pytest.skip(f"losetup makes no device here: {made.stderr}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "-d", str(path)], timeout=20, check=True)


@pytest.mark.root
def test_a_device_is_prepared_used_and_free_again(device, folders):
    with pytest.raises(OSError, match="volume format"):
        trained([device, folders[0]])
    with device.open("r+b") as file:
        file.seek(1080)
        file.write(b"\x53\xef")
    code, text = run("format", device)
    assert code == 1
    assert "is not empty" in text
    assert "--overwrite" in text
    assert run("format", device, "--overwrite") == (0, f"{device}: ready for a volume\n")
    drives = [device, folders[0]]
    optimizer = trained(drives)
    code, text = run("ls", *drives)
    assert code == 0
    assert f"0  {device}" in text
    assert str(os.getpid()) in text
    assert "is used by" in run("rm", *drives, "--name", "run")[1]
    expected = optimizer.param_groups[0]["params"][0].detach().clone()
    del optimizer
    gc.collect()
    assert "step 1 is committed" in run("check", *drives)[1]
    param = torch.nn.Parameter(torch.ones(70_000))
    tier = stepwell.Volume(drives, name="run", resume=True)
    optimizer = stepwell.OffloadAdamW([param], tier=tier, host_bytes_max=4 << 20, threads=1)
    assert torch.equal(param, expected)
    del optimizer
    gc.collect()
    assert run("rm", *drives, "--name", "run") == (0, "run: removed\n")
    assert f"{device}: a device without a volume" in run("ls", *drives)[1]
    code, text = invoke("tune", device)
    assert code == 1
    assert "expected a folder" in text.replace("\n", " ")


# ---- measurements: at sizes where nothing is learned about speed ----


def invoke(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_tune_writes_what_volumes_take(folders):
    code, text = invoke(
        *("tune", *folders, "--mib", 1, "--seconds", 0.001, "--rounds", 1),
        *("--io-engine", "positional"),
    )
    assert code == 0, text
    for folder in folders:
        found = DriveTuning.read(folder)
        assert str(found.mb_per_second) in text
        assert found.queue_depth in (4, 8, 16, 32, 64)
        assert found.stripe_bytes in {kib << 10 for kib in (64, 128, 256, 512, 1024)}
    shape = shape_of(stepwell.Volume(folders))
    assert shape.weights == [DriveTuning.read(folder).mb_per_second for folder in folders]
    code, text = invoke("tune", folders[0], "--io-engine", "none")
    assert code == 1
    assert "io_engine is `none`" in text.replace("\n", " ")
