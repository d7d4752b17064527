"""The options of a volume: what is taken, what is refused, and what was measured of its drives."""

import os
from pathlib import Path

import pytest
import stepwell
from insides import swapped_of
from offload_cases import train
from stepwell import _core
from stepwell.store.tuning import TUNING_FILE, DriveTuning, VolumeShape, shape_of
from volume_models import files, folders, net_of, on_volume


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": "/tmp"}, "a list of folders"),
        ({"paths": []}, "is empty"),
        ({"paths": ["/nowhere"]}, "which is not there, expected a folder or a block device"),
        ({"paths": ["/tmp"], "durability": "full"}, "one of commit, none"),
        ({"paths": ["/tmp"], "durability": "none", "keep": True}, "`keep` is .*expected commit"),
        (
            {"paths": ["/tmp"], "durability": "none", "resume": True, "name": "run"},
            "`resume` is .*expected commit",
        ),
        ({"paths": ["/tmp"], "resume": True}, "`name` is not"),
        ({"paths": ["/tmp"], "weights": [1, 2]}, "one for each"),
        (
            {"paths": ["/tmp"], "weights": [-1]},
            "an entry of `weights` is `-1`, expected",
        ),
        ({"paths": ["/tmp"], "io_timeout": 0}, "`io_timeout` is `0`"),
        ({"paths": ["/tmp"], "io_timeout": float("nan")}, "`io_timeout` is `nan`"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stepwell.Volume(**options)


def test_options_of_a_volume_are_taken(tmp_path, monkeypatch):
    drives = folders(tmp_path)
    volume = stepwell.Volume(drives, weights=[3, 1], stripe_bytes=1, queue_depth=1)
    assert (volume.weights, volume.stripe_bytes, volume.queue_depth) == ([3, 1], 1, 1)
    kept = {
        (durability, keep, name): stepwell.Volume(
            drives, durability=durability, keep=keep, name=name
        ).is_kept
        for durability, keep in (
            ("commit", None),
            ("commit", True),
            ("commit", False),
            ("none", None),
        )
        for name in (None, "run")
    }
    # Where nothing is said, what has a name.
    assert [key for key, is_kept in kept.items() if is_kept] == [
        ("commit", None, "run"),
        ("commit", True, None),
        ("commit", True, "run"),
    ]
    # A folder, or a device.
    monkeypatch.setattr(Path, "is_block_device", lambda path: path.name == "device")
    assert stepwell.Volume([tmp_path / "device"]).paths == [tmp_path / "device"]
    with pytest.raises(ValueError, match="which is not there, expected a folder or a block device"):
        stepwell.Volume([tmp_path / "other"])


def test_what_does_not_go_with_a_volume_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`tier` is `\['/tmp'\]`, expected a stepwell.Volume"):
        stepwell.OffloadAdamW(net_of().named_parameters(), tier=["/tmp"])
    with pytest.raises(ValueError, match="buffers of a volume"):
        on_volume(net_of(), tmp_path, host_bytes=1000)
    with pytest.raises(ValueError, match="positional"):
        on_volume(net_of(), tmp_path, io_engine="fast")
    assert not files(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_records": 1 << 33}, ValueError, "`8589934592` records, expected at most"),
        # In stripes of a block each, 16 TiB of lists.
        ({"num_records": 1 << 20, "record_nbytes": 1 << 31}, OSError, "cannot take"),
    ],
)
def test_what_takes_more_memory_than_there_is_is_an_error(tmp_path, sizes, error, message):
    made = {"record_nbytes": 4000, "num_buffers": 2, "stripe_bytes": 1, **sizes}
    with pytest.raises(error, match=message):
        _core.VolumePasses(folders(tmp_path), **made)
    assert not files(tmp_path)


# ---- what `stepwell tune` has measured ----


def tuned(folder, mb_per_second, stripe_bytes=8192, queue_depth=4):
    DriveTuning(
        mb_per_second=mb_per_second,
        stripe_bytes=stripe_bytes,
        queue_depth=queue_depth,
        date="2026-01-01",
    ).write(folder)


def test_a_volume_is_laid_out_as_its_drives_were_measured(tmp_path, caplog):
    caplog.set_level("INFO", logger="stepwell")
    first, second = folders(tmp_path)
    volume = stepwell.Volume([first, second])
    assert shape_of(volume) == VolumeShape([], 1 << 20, 32)
    assert not caplog.text
    tuned(first, 3000)
    assert shape_of(volume) == VolumeShape([], 1 << 20, 32)
    assert "1 of 2 folders of a volume were measured" in caplog.text
    tuned(second, 1000, stripe_bytes=4096, queue_depth=8)
    caplog.clear()
    assert shape_of(volume) == VolumeShape([3000, 1000], 4096, 4)
    assert "weights [3000, 1000], stripes of 4096 bytes, queue depth 4" in caplog.text
    # What is said counts.
    said = stepwell.Volume([first, second], weights=(), stripe_bytes=5000, queue_depth=2)
    assert shape_of(said) == VolumeShape([], 5000, 2)
    # Three quarters of the bytes are the first drive's.
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 1)
    sizes = [path.stat().st_size for path in swapped_of(optimizer).volume.core.paths]
    assert 2 * sizes[1] < sizes[0]


@pytest.mark.timeout(60)
def test_a_measurement_that_is_none_is_refused(tmp_path):
    first, second = folders(tmp_path)
    tuned(first, 1)
    tuned(second, 1)
    whole = (second / TUNING_FILE).read_text()
    half = whole.replace('"mb_per_second": 1', '"mb_per_second": 1.5')
    for text in ("{}", "[]", "x", '{"mb_per_second": 0}', half):
        (second / TUNING_FILE).write_text(text)
        with pytest.raises(ValueError, match="is no measurement of a drive"):
            shape_of(stepwell.Volume([first, second]))
    # Nobody writes to it.
    (second / TUNING_FILE).unlink()
    os.mkfifo(second / TUNING_FILE)
    with pytest.raises(ValueError, match="is no measurement of a drive"):
        shape_of(stepwell.Volume([first, second]))
    with pytest.raises(ValueError, match="`queue_depth` is `0`"):
        tuned(first, 1, queue_depth=0)
    with pytest.raises(ValueError, match="`stripe_bytes` is `0`"):
        stepwell.Volume([first], stripe_bytes=0)
