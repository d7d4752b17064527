"""State on a volume: the same bits as in host memory, whatever fits there, and its files."""

import gc

import pytest
import stepwell
import torch
from insides import core_of, lift_limit, swapped_of
from offload_cases import assert_equal, train
from optim_cases import LAYOUT_IDS, LAYOUTS
from stepwell import _core, _state
from stepwell.store.twins import Twins
from volume_models import SIZES, files, folders, net_of, on_volume, pair


@pytest.mark.parametrize(
    ("durability", "host_bytes"), [("none", 1800 << 10), ("commit", 3800 << 10)]
)
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_training_has_the_bits_of_training_in_memory(
    tmp_path, dtype, moments, host_bytes, durability
):
    ours, theirs = pair(
        tmp_path,
        dtype,
        moments=moments,
        host_bytes=host_bytes,
        durability=durability,
        clip_norm=1.0,
    )
    core = swapped_of(ours[1]).volume.core
    if core is None:
        pytest.skip("all of it fits into memory")
    assert train(*ours, 3) == train(*theirs, 3)
    assert_equal(ours, theirs)
    # It was looked at: the next step goes on from what was read.
    assert train(*ours, 3, first=3) == train(*theirs, 3, first=3)
    _, written = core.bytes_moved
    assert written > 0
    assert_equal(ours, theirs)
    assert train(*ours, 1, first=6) == train(*theirs, 1, first=6)
    ours[1].synchronize()
    # Where all of it is in memory, it is written and not read.
    state = sum(_state.nbytes(param, moments) for param in ours[0].parameters())
    assert (core.bytes_moved[0] > 0) == (core.ram_nbytes < state)
    assert core.bytes_moved[1] > written


@pytest.mark.parametrize(
    "options",
    [
        {"io_engine": "positional"},
        {"threads": 1, "num": 1},
        {"weights": [3, 1], "stripe_bytes": 8192},
        # Rounded up to blocks, and no divisor of a record.
        {"stripe_bytes": 5000},
        {"accumulate": "host"},
        {"accumulation_steps": 1},
    ],
    ids=str,
)
def test_options_change_no_bits(tmp_path, options):
    ours, theirs = pair(tmp_path, torch.bfloat16, durability="none", **options)
    assert train(*ours, 4) == train(*theirs, 4)
    assert_equal(ours, theirs)


def test_a_step_that_is_skipped_leaves_the_volume_alone(tmp_path):
    ours, theirs = pair(tmp_path)
    train(*ours, 2)
    train(*theirs, 2)
    net, optimizer = ours
    optimizer.synchronize()
    before = swapped_of(optimizer).volume.core.bytes_moved
    for param in net.parameters():
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert swapped_of(optimizer).volume.core.bytes_moved == before
    for group in theirs[1].param_groups:
        group["skipped_steps"] = 1
    assert train(*ours, 2, first=2) == train(*theirs, 2, first=2)
    assert_equal(ours, theirs)


# ---- which parameters ----


def test_parameters_without_gradient_stay_as_they_are(tmp_path):
    ours, theirs = pair(tmp_path, torch.bfloat16)
    for net, optimizer in (ours, theirs):
        for step in range(5):
            net[2].requires_grad_(step not in (0, 2, 3))
            train(net, optimizer, 1, first=step)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_writes_through_data_to_frozen_parameters_count(tmp_path, durability):
    ours, theirs = pair(tmp_path, torch.bfloat16, durability=durability)
    for net, optimizer in (ours, theirs):
        for step in range(6):
            net[2].requires_grad_(step not in (2, 3))
            train(net, optimizer, 1, first=step)
            if step in (1, 2, 3):
                # A forward has waited for it.
                net(torch.zeros(1, SIZES[0], dtype=torch.bfloat16))
                net[2].weight.data.mul_(0.5)
    assert_equal(ours, theirs)


def test_parameters_that_are_added_or_thaw_later(tmp_path):
    net = net_of()
    net[3].requires_grad_(False)
    ours, theirs = pair(tmp_path, net=net, durability="none", host_bytes=1500 << 10)
    with pytest.raises(ValueError, match="host_bytes_max"):
        ours[1].add_param_group({"params": [("big", torch.nn.Parameter(torch.zeros(1 << 16)))]})
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        # In memory until the next step, and not of what may be taken.
        assert optimizer.state_dict()["state"]
        net[3].bias.requires_grad_(True)
        added = torch.nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [("added", added)], "lr": 0.1})
        train(net, optimizer, 2, first=2)
    assert_equal(ours, theirs)
    commits = on_volume(net_of(), tmp_path)
    with pytest.raises(ValueError, match="commits its steps"):
        commits.add_param_group({"params": [("late", torch.nn.Parameter(torch.zeros(3)))]})


def test_parameters_that_go_and_come_back_keep_their_state(tmp_path):
    ours, theirs = pair(tmp_path, torch.bfloat16, durability="none")
    # Memory of what has gone is pinned on, and counts.
    lift_limit(ours[1])
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        group = optimizer.param_groups[0]
        param = net[3].weight
        place = next(index for index, one in enumerate(group["params"]) if one is param)
        del group["params"][place]
        train(net, optimizer, 1, first=2)
        group["params"].insert(place, param)
        train(net, optimizer, 2, first=3)
    for param, expected in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(param, expected)


# ---- memory ----


def test_memory_is_taken_by_small_state_and_by_the_first(tmp_path):
    net = net_of()
    params = list(net.parameters())
    small = [param for param in params if param.numel() < _core.CHUNK_LEN]
    big = [param for param in params if param.numel() >= _core.CHUNK_LEN]
    assert len(small) > 2 and len(big) == 2
    sizes = {param: _state.nbytes(param, "fp32") for param in params}
    whole = sum(sizes.values())
    optimizers = []

    def opened(host_bytes, **options):
        optimizers.append(on_volume(net, tmp_path, host_bytes=host_bytes, **options))
        return swapped_of(optimizers[-1])

    counts = set()
    for host_bytes in (1800 << 10, 3 << 20, whole - 1):
        swapped = opened(host_bytes, durability="none")
        in_memory = {param for param in params if param not in swapped}
        assert in_memory in (set(small), {*small, big[0]})
        # Of the others as much as there is room for.
        held = sum(sizes[param] for param in in_memory)
        volume = swapped.volume
        assert volume.memory_bytes == volume.core.buffers_nbytes + volume.core.ram_nbytes
        assert host_bytes - sizes[big[1]] < held + volume.memory_bytes <= host_bytes
        counts.add(len(in_memory))
    assert counts == {len(small), len(small) + 1}
    # A volume that commits has all of it, and no other where there is room.
    commits = opened(whole)
    assert all(param in commits for param in params)
    assert opened(whole, durability="none").volume.core is None


@pytest.mark.parametrize(
    ("durability", "host_bytes", "committed", "has_moved"),
    [("commit", 3 << 20, 2, True), ("none", 3 << 20, None, True), ("none", 64 << 20, None, False)],
    ids=["commits", "none", "unused"],
)
def test_a_volume_tells_what_it_has_committed_and_moved(
    tmp_path, durability, host_bytes, committed, has_moved
):
    net = net_of()
    optimizer = on_volume(net, tmp_path, durability=durability, host_bytes=host_bytes)
    train(net, optimizer, 2)
    optimizer.synchronize()
    assert optimizer.committed_steps == committed
    assert ("bytes_written" in optimizer.timing) == has_moved


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_what_waits_for_drives_is_not_pinned(tmp_path, accumulate):
    net, twins = net_of(), Twins(is_paged=True)
    optimizer = on_volume(net, tmp_path, durability="none", accumulate=accumulate)
    swapped = swapped_of(optimizer)
    everything = twins.nbytes(net.parameters()) // 2
    in_memory = twins.nbytes(param for param in net.parameters() if param not in swapped) // 2
    assert 0 < in_memory < everything
    # Of these two, weights and gradients. Sums come up and go down again in each backward.
    grads = everything if accumulate == "host" else in_memory
    assert core_of(optimizer).pinned_nbytes == in_memory + grads
    # All of it is on the volume.
    commits = on_volume(net, tmp_path, accumulate=accumulate)
    pinned_nbytes = core_of(commits).pinned_nbytes
    assert pinned_nbytes == (everything if accumulate == "host" else 0)


# ---- files ----


def test_two_optimizers_and_the_files_of_each(tmp_path):
    first, theirs = pair(tmp_path)
    second, _ = pair(tmp_path)
    assert len(files(tmp_path)) == 4
    assert train(*first, 2) == train(*second, 2) == train(*theirs, 2)
    del first
    gc.collect()
    assert len(files(tmp_path)) == 2
    name = swapped_of(second[1]).volume.core.name
    with pytest.raises(OSError, match=name):
        on_volume(net_of(), tmp_path, name=name, keep=False)
    del second
    gc.collect()
    assert not files(tmp_path)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    net = net_of()
    optimizer = stepwell.OffloadAdamW(net, tier=stepwell.Volume(["drive0", "drive1"]))
    monkeypatch.chdir("/")
    train(net, optimizer, 1)
    optimizer.synchronize()
    assert len(files(tmp_path)) == 2
    del optimizer
    gc.collect()
    assert not files(tmp_path)


def test_a_rank_adds_its_number_to_the_name_that_was_given(tmp_path, monkeypatch):
    stands_for = {"is_initialized": True, "get_rank": 3, "get_world_size": 4}
    for name, value in stands_for.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    optimizers = [on_volume(net_of(), tmp_path, name=name) for name in (None, None, "run")]
    names = [swapped_of(optimizer).volume.core.name for optimizer in optimizers]
    assert names[2] == "run-3"
    assert len({*names, "None-3"}) == 4
