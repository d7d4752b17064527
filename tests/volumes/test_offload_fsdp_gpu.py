"""OffloadAdamW(tier=Volume(...)) over FSDP2 on GPUs: two ranks, or one where there is one GPU."""

import pytest
import torch
from fsdp_volumes import (
    drives_in,
    files,
    first_run,
    go_on,
    same_as_in_memory,
    with_room_for_some,
)
from optim_ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    count = min(torch.cuda.device_count(), 2)
    ranks = Ranks(count, tmp_path_factory.mktemp("ranks"), "cuda")
    yield ranks
    ranks.stop()


@pytest.fixture
def drives(tmp_path):
    return drives_in(tmp_path)


@with_room_for_some
def test_bits_are_those_of_training_in_memory(ranks, drives, dtype, moments, durability, host_kib):
    moved = ranks.run(same_as_in_memory, drives, dtype, moments, durability, host_kib << 10)
    assert all(read > 0 and written > 0 for read, written in moved)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_a_resumed_run_is_as_if_never_stopped(ranks, drives, moments):
    count = ranks.world_size
    assert ranks.run(first_run, drives, 3, moments) == [3] * count
    assert len(files(drives)) == 2 * count
    assert ranks.run(go_on, drives, 3, moments) == [6] * count
