"""Drives that fail under a volume: what ends a step, and what is left as it was."""

import copy
import gc
import os
import subprocess

import pytest
import torch
from offload_cases import train
from volume_models import files, folders, net_of, on_volume


def truncate(tmp_path, nbytes):
    for path in tmp_path.glob("drive1/*"):
        os.truncate(path, nbytes)


def test_a_read_that_fails_ends_the_optimizer_and_uploads_nothing(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    train(net, optimizer, 1)
    optimizer.synchronize()
    weights = copy.deepcopy(net.state_dict())
    truncate(tmp_path, 1 << 18)
    with pytest.raises(OSError, match=r"(?s)member `1`.*drive1"):
        train(net, optimizer, 2, first=1)
        optimizer.synchronize()
    for look in (lambda one: one.state_dict(), lambda one: one.state, lambda one: one.step()):
        with pytest.raises(OSError, match="member `1`"):
            look(optimizer)
    del optimizer
    gc.collect()
    for name, param in net.named_parameters():
        assert torch.equal(param.detach().as_subclass(torch.Tensor), weights[name]), name


@pytest.mark.root
def test_a_full_drive_is_an_error_at_the_beginning(tmp_path):
    drive = folders(tmp_path)[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", drive], check=True)
    try:
        with pytest.raises(OSError, match="member `1`") as error:
            on_volume(net_of(), tmp_path)
        assert error.value.errno == 28
        assert not files(tmp_path)
    finally:
        subprocess.run(["umount", drive], check=True)


def test_a_member_that_is_removed_while_it_is_used_fails_the_step(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 1)
    optimizer.synchronize()
    (tmp_path / "drive1" / "run.1.stepwell").unlink()
    (tmp_path / "drive1").rmdir()
    with pytest.raises(OSError, match=r"drive1/run\.1\.stepwell\) was removed while it is used"):
        for first in range(1, 3):
            train(net, optimizer, 1, first=first)
            optimizer.synchronize()
