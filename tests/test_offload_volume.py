"""State on a volume: the same bits as in host memory, whatever fits there, and what ends a step."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import stepwell
import torch
from interrupts import handler_runs_after
from offload_cases import assert_equal, train
from optim_cases import LAYOUT_IDS, LAYOUTS, bits
from stepwell import _core, _state
from stepwell.offload.places import Place
from stepwell.offload.swapped import StateInMemory, Swapped
from stepwell.offload.tuning import TUNING_FILE, DriveTuning, VolumeShape, shape_of
from stepwell.offload.twins import Twins
from torch.distributed.checkpoint.state_dict import get_state_dict

# Chunks have 65,536 elements: these are some, and a part of one.
SIZES = (7, 500, 501, 601, 3)


def net_of(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(*sizes) for sizes in pairwise(SIZES)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:]).to(dtype)


def pinned_bytes(net):
    return Twins(is_paged=True).nbytes(param for param in net.parameters() if param.requires_grad)


def folders(tmp_path, num=2):
    found = [tmp_path / f"drive{index}" for index in range(num)]
    for folder in found:
        folder.mkdir(exist_ok=True)
    return found


def on_volume(net, tmp_path, *, host_bytes=3 << 20, threads=2, num=2, lr=1e-2, **options):
    """An optimizer whose state is on a volume, but for `host_bytes`, buffers included."""
    volume = {name: options.pop(name) for name in VOLUME_OPTIONS if name in options}
    return stepwell.OffloadAdamW(
        net.named_parameters(),
        lr=lr,
        threads=threads,
        host_bytes_max=pinned_bytes(net) + host_bytes,
        tier=stepwell.Volume(folders(tmp_path, num), **volume),
        **options,
    )


VOLUME_OPTIONS = ("durability", "keep", "resume", "name", "io_engine", "weights", "stripe_bytes")


def pair(tmp_path, dtype=torch.float32, net=None, **options):
    """A model with its state on a volume, and the same with it in host memory."""
    net = net_of(dtype) if net is None else net
    twin = copy.deepcopy(net)
    plain = {
        name: value
        for name, value in options.items()
        if name not in (*VOLUME_OPTIONS, "host_bytes", "num")
    }
    reference = stepwell.OffloadAdamW(twin.named_parameters(), **{"lr": 1e-2, **plain})
    return (net, on_volume(net, tmp_path, **options)), (twin, reference)


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("drive*/*"))


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
    core = ours[1]._host.swapped.core
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
        {"gate": "step"},
        {"accumulation_steps": 1},
    ],
    ids=str,
)
def test_options_change_no_bits(tmp_path, options):
    ours, theirs = pair(tmp_path, torch.bfloat16, durability="none", **options)
    assert train(*ours, 4) == train(*theirs, 4)
    assert_equal(ours, theirs)


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
        return optimizers[-1]._host.swapped

    counts = set()
    for host_bytes in (1800 << 10, 3 << 20, whole - 1):
        swapped = opened(host_bytes, durability="none")
        in_memory = {param for param in params if param not in swapped}
        assert in_memory in (set(small), {*small, big[0]})
        # Of the others as much as there is room for.
        held = sum(sizes[param] for param in in_memory)
        assert swapped.memory_bytes == swapped.core.buffers_nbytes + swapped.core.ram_nbytes
        assert host_bytes - sizes[big[1]] < held + swapped.memory_bytes <= host_bytes
        counts.add(len(in_memory))
    assert counts == {len(small), len(small) + 1}
    # A volume that commits has all of it, and no other where there is room.
    commits = opened(whole)
    assert all(param in commits for param in params)
    assert opened(whole, durability="none").core is None


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
    swapped = optimizer._host.swapped
    everything = twins.nbytes(net.parameters()) // 2
    in_memory = twins.nbytes(param for param in net.parameters() if param not in swapped) // 2
    assert 0 < in_memory < everything
    # Of these two, weights and gradients. Sums come up and go down again in each backward.
    grads = everything if accumulate == "host" else in_memory
    assert optimizer._opened_engine()._core.pinned_nbytes == in_memory + grads
    # All of it is on the volume.
    commits = on_volume(net, tmp_path, accumulate=accumulate)._opened_engine()
    assert commits._core.pinned_nbytes == (everything if accumulate == "host" else 0)


def test_a_state_dict_is_a_snapshot_and_resumes_exactly(tmp_path):
    (net, optimizer), (twin, reference) = pair(tmp_path, torch.bfloat16, moments="q8")
    train(net, optimizer, 3)
    train(twin, reference, 3)
    saved = optimizer.state_dict()
    frozen = copy.deepcopy(saved)
    weights = copy.deepcopy(net.state_dict())
    train(net, optimizer, 2, first=3)
    for index, state in frozen["state"].items():
        for name, value in state.items():
            assert torch.equal(bits(saved["state"][index][name]), bits(value)), name
    # Back to it, here and in memory.
    net.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(twin, reference, 0)
    assert_equal((net, optimizer), (twin, reference))
    assert train(net, optimizer, 3, first=3) == train(twin, reference, 3, first=3)
    assert_equal((net, optimizer), (twin, reference))
    other = net_of(torch.bfloat16, seed=5)
    in_memory = stepwell.OffloadAdamW(other.named_parameters(), lr=0.5, moments="q8")
    other.load_state_dict(net.state_dict())
    in_memory.load_state_dict(optimizer.state_dict())
    assert train(other, in_memory, 2, first=6) == train(twin, reference, 2, first=6)


def test_what_is_written_to_the_state_counts(tmp_path):
    ours, theirs = pair(tmp_path, durability="none")
    for net, optimizer in (ours, theirs):
        train(net, optimizer, 2)
        for param in net.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
        train(net, optimizer, 1, first=2)
        del optimizer.state[net[2].weight]
        train(net, optimizer, 2, first=3)
    assert_equal(ours, theirs)


def test_parameters_without_gradient_stay_as_they_are(tmp_path):
    ours, theirs = pair(tmp_path, torch.bfloat16)
    for net, optimizer in (ours, theirs):
        for step in range(5):
            net[2].requires_grad_(step not in (0, 2, 3))
            train(net, optimizer, 1, first=step)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_writes_through_data_to_frozen_parameters_count(tmp_path, caplog, durability):
    ours, theirs = pair(tmp_path, torch.bfloat16, durability=durability)
    for net, optimizer in (ours, theirs):
        for step in range(6):
            net[2].requires_grad_(step not in (2, 3))
            train(net, optimizer, 1, first=step)
            if step in (1, 2, 3):
                # A forward has waited for it.
                net(torch.zeros(1, SIZES[0], dtype=torch.bfloat16))
                net[2].weight.data.mul_(0.5)
                if net is theirs[0]:
                    optimizer.reread_parameters()
    assert_equal(ours, theirs)
    # Nothing was seen.
    assert "were written by the program" not in caplog.text


def test_loaded_state_that_no_commit_has_is_told(tmp_path, caplog):
    net, optimizer = pair(tmp_path)[0]
    train(net, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    net[3].requires_grad_(False)
    with caplog.at_level("WARNING", logger="stepwell"):
        train(net, optimizer, 1, first=1)
        assert "state of 2 parameters without a gradient is in memory" in caplog.text
        net[3].requires_grad_(True)
        caplog.clear()
        train(net, optimizer, 2, first=2)
        assert not caplog.text


def assert_places_print(addresses):
    """Every tensor at these addresses, as the frames above have them, prints without a look."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    begin, end = addresses.address, addresses.address + addresses.nbytes
    places = [each for each in tensors if begin <= each.data_ptr() < end]
    assert places and all(type(each) is Place and "on a volume" in repr(each) for each in places)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_what_stands_for_state_on_a_volume_can_be_printed(tmp_path, monkeypatch, moments):
    """A traceback with the arguments of calls, as pytest prints it, would end the process."""
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, tmp_path, host_bytes=4 << 20, moments=moments)
    looks = set()

    def looking(function):
        def call(*args, **options):
            if function not in looks:
                looks.add(function)
                assert_places_print(optimizer._host.swapped._addresses)
                assert repr(args)
            return function(*args, **options)

        return call

    train(net, optimizer, 2)
    swapped = optimizer._host.swapped
    monkeypatch.setattr(optimizer, "_commit", looking(optimizer._commit))
    monkeypatch.setattr(swapped, "_tensor", looking(swapped._tensor))
    train(net, optimizer, 1, first=2)
    optimizer.state_dict()
    assert len(looks) == 2


def test_a_step_that_is_skipped_leaves_the_volume_alone(tmp_path):
    ours, theirs = pair(tmp_path)
    train(*ours, 2)
    train(*theirs, 2)
    net, optimizer = ours
    optimizer.synchronize()
    before = optimizer._host.swapped.core.bytes_moved
    for param in net.parameters():
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer._host.swapped.core.bytes_moved == before
    for group in theirs[1].param_groups:
        group["skipped_steps"] = 1
    assert train(*ours, 2, first=2) == train(*theirs, 2, first=2)
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
    ours[1]._host._bytes_max = None
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


def test_two_optimizers_and_the_files_of_each(tmp_path):
    first, theirs = pair(tmp_path)
    second, _ = pair(tmp_path)
    assert len(files(tmp_path)) == 4
    assert train(*first, 2) == train(*second, 2) == train(*theirs, 2)
    del first
    gc.collect()
    assert len(files(tmp_path)) == 2
    name = second[1]._host.swapped.core.name
    with pytest.raises(OSError, match=name):
        on_volume(net_of(), tmp_path, name=name, keep=False)
    del second
    gc.collect()
    assert not files(tmp_path)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    net = net_of()
    optimizer = stepwell.OffloadAdamW(
        net.named_parameters(), tier=stepwell.Volume(["drive0", "drive1"])
    )
    monkeypatch.chdir("/")
    train(net, optimizer, 1)
    optimizer.synchronize()
    assert len(files(tmp_path)) == 2
    del optimizer
    gc.collect()
    assert not files(tmp_path)


def test_torch_may_ask_for_state_before_the_first_step(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    # A look, and then a step that only makes state.
    assert not optimizer.state
    state = get_state_dict(net, optimizer)[1]["state"]
    for name in ("0.weight", "2.weight"):
        assert state[name]["exp_avg"].count_nonzero() == 0


def test_a_rank_adds_its_number_to_the_name_that_was_given(tmp_path, monkeypatch):
    stands_for = {"is_initialized": True, "get_rank": 3, "get_world_size": 4}
    for name, value in stands_for.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    optimizers = [on_volume(net_of(), tmp_path, name=name) for name in (None, None, "run")]
    names = [optimizer._host.swapped.core.name for optimizer in optimizers]
    assert names[2] == "run-3"
    assert len({*names, "None-3"}) == 4


# ---- commits ----


@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_resumed_volume_is_as_if_never_stopped(tmp_path, dtype, moments):
    options = {"moments": moments, "name": "run", "clip_norm": 1.0}
    (net, optimizer), theirs = pair(tmp_path, dtype, **options)
    assert optimizer.committed_steps == 0
    train(net, optimizer, 3)
    train(*theirs, 3)
    optimizer.synchronize()
    del optimizer
    gc.collect()
    assert len(files(tmp_path)) == 2
    net = net_of(dtype, seed=9)
    # Another share of it fits into memory.
    optimizer = on_volume(net, tmp_path, resume=True, host_bytes=5 << 20, **options)
    assert optimizer.committed_steps == 3
    assert_equal((net, optimizer), theirs)
    del optimizer
    gc.collect()
    net = net_of(dtype, seed=9)
    optimizer = on_volume(net, tmp_path, resume=True, host_bytes=2 << 20, **options)
    assert train(net, optimizer, 3, first=3) == train(*theirs, 3, first=3)
    assert_equal((net, optimizer), theirs)


def test_the_volume_of_another_model_is_refused(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 1)
    with pytest.raises(OSError, match="is used by"):
        on_volume(net_of(), tmp_path, name="run", resume=True)
    optimizer.synchronize()
    del optimizer
    gc.collect()
    with pytest.raises(ValueError, match="other parameters"):
        on_volume(net_of(torch.bfloat16), tmp_path, name="run", resume=True)
    with pytest.raises(ValueError, match="other parameters"):
        on_volume(net_of(), tmp_path, name="run", resume=True, moments="q8")
    with pytest.raises(OSError, match="missing"):
        on_volume(net_of(), tmp_path, name="walk", resume=True)
    assert len(files(tmp_path)) == 2


KILLED = """
    import sys
    sys.path.insert(0, {tests!r})
    import pathlib, torch
    from test_offload_volume import net_of, on_volume
    from offload_cases import train
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, pathlib.Path({path!r}), name="run", num=2)
    for step in range(1000):
        train(net, optimizer, 1, first=step)
        print(step, flush=True)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_job_that_is_killed_goes_on_from_a_step_that_was_committed(tmp_path, steps):
    program = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), path=str(tmp_path))
    job = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(steps):
            assert job.stdout.readline()
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait(60)
        job.stdout.close()
    net = net_of(torch.bfloat16, seed=9)
    optimizer = on_volume(net, tmp_path, name="run", resume=True)
    twin = net_of(torch.bfloat16)
    reference = stepwell.OffloadAdamW(twin.named_parameters(), lr=1e-2)
    done = int(optimizer.state[net[0].weight]["step"])
    assert done >= steps - 1
    train(twin, reference, done)
    assert_equal((net, optimizer), (twin, reference))
    assert train(net, optimizer, 2, first=done) == train(twin, reference, 2, first=done)


# ---- failures ----


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": "/tmp"}, "a list of folders"),
        ({"paths": []}, "is empty"),
        ({"paths": ["/nowhere"]}, "a folder or a block device that exists"),
        ({"paths": ["/tmp"], "durability": "full"}, "commit or none"),
        ({"paths": ["/tmp"], "durability": "none", "keep": True}, "`keep` is .*expected commit"),
        (
            {"paths": ["/tmp"], "durability": "none", "resume": True, "name": "run"},
            "`resume` is .*expected commit",
        ),
        ({"paths": ["/tmp"], "resume": True}, "`name` is not"),
        ({"paths": ["/tmp"], "weights": [1, 2]}, "one for each"),
        ({"paths": ["/tmp"], "weights": [-1]}, r"`weights` is `\[-1\]`, expected integers"),
        ({"paths": ["/tmp"], "weights": [1.5]}, r"`weights` is `\[1.5\]`, expected integers"),
        ({"paths": ["/tmp"], "queue_depth": 1.5}, "`queue_depth` is `1.5`, expected an integer"),
        ({"paths": ["/tmp"], "io_timeout": 0}, "`io_timeout` is `0`, expected seconds above 0"),
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
    with pytest.raises(ValueError, match="a folder or a block device that exists"):
        stepwell.Volume([tmp_path / "other"])


def test_what_does_not_go_with_a_volume_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`tier` is `\['/tmp'\]`, expected a stepwell.Volume"):
        stepwell.OffloadAdamW(net_of().named_parameters(), tier=["/tmp"])
    with pytest.raises(ValueError, match="buffers of a volume"):
        on_volume(net_of(), tmp_path, host_bytes=1000)
    with pytest.raises(ValueError, match="positional"):
        on_volume(net_of(), tmp_path, io_engine="fast")
    assert not files(tmp_path)


def test_ctrl_c_ends_a_look_at_the_state_and_harms_nothing(tmp_path):
    ours, theirs = pair(tmp_path, durability="none", host_bytes=1800 << 10)
    train(*ours, 1)
    train(*theirs, 1)
    optimizer = ours[1]
    optimizer.synchronize()
    interrupted = 0
    for attempt in range(1, 40):
        # All of it is read again each time.
        states = dict(optimizer._states)
        try:
            with handler_runs_after(attempt * 1e-4):
                optimizer._host.swapped.read(states)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    assert_equal(ours, theirs)
    assert train(*ours, 1, first=1) == train(*theirs, 1, first=1)
    assert_equal(ours, theirs)


def test_the_state_may_be_kept_over_steps(tmp_path):
    (net, optimizer), (twin, reference) = pair(tmp_path, durability="none")
    states = optimizer.state
    items = None
    for step in range(3):
        train(net, optimizer, 1, first=step)
        train(twin, reference, 1, first=step)
        if items is not None:
            # Of the step before.
            assert all(torch.isfinite(state["exp_avg"]).all() for _, state in items)
        items = optimizer.state.items()
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(states[param][name], reference.state[other][name])
    assert set(states) == set(net.parameters()) and len(dict(states)) == len(states)
    optimizer.state = optimizer.state
    train(net, optimizer, 1, first=3)
    train(twin, reference, 1, first=3)
    assert_equal((net, optimizer), (twin, reference))


def test_another_thread_may_look_at_the_state(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, durability="none")
    train(net, optimizer, 1, first=0)
    is_over, seen = threading.Event(), []

    def look():
        while not is_over.is_set():
            seen.append(optimizer.state[net[2].weight]["exp_avg"].isfinite().all().item())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for step in range(1, 6):
            train(net, optimizer, 1, first=step)
    finally:
        is_over.set()
        thread.join(timeout=60)
    assert not thread.is_alive() and seen and all(seen)


@pytest.mark.parametrize("change", ["order", "shape"])
def test_a_volume_of_other_names_or_shapes_is_refused(tmp_path, change):
    def model(shape=(300, 400)):
        torch.manual_seed(0)
        return torch.nn.ModuleDict(
            {name: torch.nn.Linear(shape[1], shape[0], bias=False) for name in "ab"}
        )

    def made(named, **options):
        return stepwell.OffloadAdamW(
            named, tier=stepwell.Volume(folders(tmp_path), name="v", **options)
        )

    net = model()
    optimizer = made(net.named_parameters(), keep=True)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    del optimizer
    gc.collect()
    other = model((400, 300)) if change == "shape" else model()
    named = list(other.named_parameters())
    with pytest.raises(ValueError, match="with their names and shapes"):
        made(named[::-1] if change == "order" else named, resume=True)
    made(net.named_parameters(), resume=True)


def test_weights_that_no_commit_has_are_told(tmp_path, caplog):
    net = net_of()
    optimizer = on_volume(net, tmp_path, durability="commit")
    train(net, optimizer, 1, first=0)
    net[0].weight.requires_grad_(False)
    with torch.no_grad():
        net[0].weight.zero_()
    train(net, optimizer, 1, first=1)
    assert "were written by the program (said once)" in caplog.text
    optimizer.state.clear()
    train(net, optimizer, 1, first=2)
    assert "or was deleted" in caplog.text


# ---- looks at state ----


def test_a_look_after_a_look_scans_nothing(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    train(net, optimizer, 1)
    scanned = []
    swapped = optimizer._host.swapped
    is_place = swapped.is_place
    monkeypatch.setattr(
        swapped, "is_place", lambda param, state: scanned.append(param) or is_place(param, state)
    )
    params = list(net.parameters())
    for param in params:
        assert optimizer.state[param]["exp_avg"].abs().sum() > 0
    # Once for all of them.
    assert len(scanned) == len(params)
    train(net, optimizer, 1, first=1)
    scanned.clear()
    assert all(int(optimizer.state[param]["step"]) == 2 for param in params)
    assert len(scanned) == len(params)


def test_a_snapshot_has_its_own_counts_of_parameters_without_elements(tmp_path):
    net = torch.nn.Linear(300, 300)
    net.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
    optimizer = on_volume(net, tmp_path)
    saved = []
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        saved.append(optimizer.state_dict()["state"])
    for count, states in enumerate(saved, 1):
        assert [int(state["step"]) for state in states.values()] == [count] * 3


def test_a_resumed_state_dict_has_the_keys_of_one_that_never_stopped(tmp_path):
    def net_with_nothing():
        torch.manual_seed(1)
        net = torch.nn.Linear(300, 300)
        net.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
        return net

    def step(net, optimizer):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    net = net_with_nothing()
    optimizer = on_volume(net, tmp_path, name="run")
    step(net, optimizer)
    step(net, optimizer)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 3
    del optimizer
    gc.collect()
    again = net_with_nothing()
    resumed = on_volume(again, tmp_path, name="run", resume=True).state_dict()
    assert resumed["state"].keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        assert state.keys() == resumed["state"][index].keys()
        for name, value in state.items():
            assert torch.equal(bits(resumed["state"][index][name]), bits(value)), (index, name)


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


def test_state_is_read_if_there_is_memory_for_it(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path)
    train(net, optimizer, 1)
    nbytes = sum(_state.nbytes(param, "fp32") for param in net.parameters())
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: nbytes - 1)
    with pytest.raises(ValueError, match=rf"takes `{nbytes}` bytes of host memory as tensors"):
        optimizer.state_dict()
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: nbytes)
    assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
    # Where it is not known how much is free.
    monkeypatch.setattr(_core, "free_memory_bytes", lambda: None)
    train(net, optimizer, 1, first=1)
    assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def test_a_volume_that_cannot_be_read_at_the_beginning_is_an_error(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 1)
    optimizer.synchronize()
    del optimizer
    gc.collect()

    def resumed(*_):
        raise OSError("cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(Swapped, "_resumed", resumed)
        with pytest.raises(OSError, match="cannot be read"):
            on_volume(net, tmp_path, name="run", resume=True, keep=False)
    # It is there, and free.
    assert on_volume(net, tmp_path, name="run", resume=True).committed_steps == 1


def test_the_state_is_a_dict_like_any():
    states = defaultdict(dict, {"a": {"step": 1}, "b": {"step": 2}})
    state = StateInMemory(lambda: states)
    assert "a" in state and "c" not in state
    assert list(state) == ["a", "b"] and list(reversed(state)) == ["b", "a"]
    assert (state == dict(states), state != dict(states), state == {}) == (True, False, False)
    assert repr(state) == repr(states)
    for other in (copy.copy(state), state.copy(), copy.deepcopy(state)):
        assert type(other) is defaultdict and other == states and other is not states
    assert copy.copy(state)["a"] is states["a"] is not copy.deepcopy(state)["a"]
    assert pickle.loads(pickle.dumps(state)) == states
    assert state | {"a": 3, "c": 4} == {"a": 3, "b": {"step": 2}, "c": 4}
    assert {"a": 3, "c": 4} | state == {"a": {"step": 1}, "b": {"step": 2}, "c": 4}
    kept = state
    kept |= {"c": {"step": 3}}
    assert kept is state and states["c"] == {"step": 3}
    assert state.pop("c") == {"step": 3} and state.pop("c", None) is None
    assert state.setdefault("d", {}) is states["d"]
    assert state.popitem() == ("d", {})
    state.update({"a": {}}, b={"step": 4})
    assert states == {"a": {}, "b": {"step": 4}}
    state.clear()
    assert not states


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
    sizes = [path.stat().st_size for path in optimizer._host.swapped.core.paths]
    assert 2 * sizes[1] < sizes[0]


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
    with pytest.raises(ValueError, match="`queue_depth` is `0`"):
        tuned(first, 1, queue_depth=0)
    with pytest.raises(ValueError, match="`stripe_bytes` is `0`"):
        stepwell.Volume([first], stripe_bytes=0)
