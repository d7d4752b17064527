"""A volume that commits its steps: what goes on from it, what does not, and what it lacks."""

import gc
import os
import signal
import textwrap
from pathlib import Path

import fork_server
import pytest
import stepwell
import torch
from offload_cases import assert_equal, train
from optim_cases import LAYOUT_IDS, LAYOUTS, bits
from stepwell.store.swapped import Swapped
from volume_models import files, folders, net_of, on_volume, pair


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


def test_drives_may_be_given_in_any_order(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 2)
    optimizer.synchronize()
    expected = [bits(param).clone() for param in net.parameters()]
    del optimizer
    gc.collect()
    again = net_of(seed=9)
    tier = stepwell.Volume(folders(tmp_path)[::-1], name="run", resume=True)
    optimizer = stepwell.OffloadAdamW(again, tier=tier)
    assert optimizer.committed_steps == 2
    for param, weight in zip(again.parameters(), expected, strict=True):
        assert torch.equal(bits(param), weight)


def test_a_volume_that_is_there_says_what_it_has_and_both_ways_on(tmp_path):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run")
    train(net, optimizer, 2)
    with pytest.raises(FileExistsError, match=r"is there, and cannot be .*used by"):
        on_volume(net_of(), tmp_path, name="run")
    del optimizer
    gc.collect()
    with pytest.raises(
        FileExistsError, match=r"has committed step `2`(.|\n)*resume=True(.|\n)*stepwell volume rm"
    ):
        on_volume(net_of(), tmp_path, name="run")
    with pytest.raises(FileExistsError, match=r"the state of other parameters(.|\n)*volume rm"):
        on_volume(torch.nn.Linear(3, 70_000), tmp_path, name="run", host_bytes=8 << 20)
    # Nothing was lost by it.
    assert on_volume(net_of(), tmp_path, name="run", resume=True).committed_steps == 2


KILLED = """
    import os, pathlib, sys, torch
    sys.path.insert(0, {tests!r})
    from volume_models import net_of, on_volume
    from offload_cases import train
    net = net_of(torch.bfloat16)
    optimizer = on_volume(
        net, pathlib.Path({path!r}), name="run", num=2, commit_interval={interval}, resume=True
    )
    told = open({told!r}, "w")
    print(os.getpid(), file=told, flush=True)
    for step in range(optimizer.committed_steps, 1000):
        train(net, optimizer, 1, first=step)
        print(step, file=told, flush=True)
"""


def kill_after(steps, path, interval=1):
    """Begins or goes on with a job, which is killed after so many steps: 0, once it could step."""
    told = path / "told"
    program = textwrap.dedent(KILLED).format(
        tests=str(Path(__file__).parent), path=str(path), told=str(told), interval=interval
    )
    with fork_server.telling(told, "-c", program, timeout=60) as (job, lines):
        pid = lines.readline()
        assert pid, job.result()
        assert all(lines.readline() for _ in range(steps))
        os.kill(int(pid), signal.SIGKILL)
        assert job.result().returncode == -signal.SIGKILL


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("steps", "interval"), [(2, 1), (5, 1), (7, 3)])
def test_a_job_that_is_killed_goes_on_from_a_step_that_was_committed(tmp_path, steps, interval):
    kill_after(steps, tmp_path, interval)
    net = net_of(torch.bfloat16, seed=9)
    optimizer = on_volume(net, tmp_path, name="run", resume=True)
    twin = net_of(torch.bfloat16)
    reference = stepwell.OffloadAdamW(twin, lr=1e-2)
    done = int(optimizer.state[net[0].weight]["step"])
    assert done >= steps - interval
    assert done % interval == 0
    train(twin, reference, done)
    assert_equal((net, optimizer), (twin, reference))
    assert train(net, optimizer, 2, first=done) == train(twin, reference, 2, first=done)


@pytest.mark.timeout(180)
def test_a_job_that_is_killed_before_its_first_commit_is_started_again_alike(tmp_path, caplog):
    kill_after(0, tmp_path)
    assert len(files(tmp_path)) == 2
    kill_after(0, tmp_path)
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", resume=True)
    assert "volume `run` has no committed step to go on from, and begins" in caplog.text
    assert optimizer.committed_steps == 0
    assert train(net, optimizer, 2) == train(*theirs, 2)
    assert_equal((net, optimizer), theirs)
    del optimizer
    gc.collect()
    kill_after(1, tmp_path)
    # The step before the kill may not have been committed.
    assert on_volume(net, tmp_path, name="run", resume=True).committed_steps in (2, 3)


@pytest.mark.parametrize("left", ["nothing", "one of two", "no header", "no bytes"])
def test_what_is_left_of_a_volume_that_was_never_completely_made_is_no_obstacle(tmp_path, left):
    if left != "nothing":
        kill_after(0, tmp_path)
    paths = sorted(tmp_path.glob("drive*/*"))
    if left == "one of two":
        paths[1].unlink()
    for path in paths:
        if left == "no header":
            with path.open("r+b") as file:
                file.write(bytes(256 << 10))
        elif left == "no bytes":
            path.write_bytes(b"")
    net = net_of(torch.bfloat16)
    optimizer = on_volume(net, tmp_path, name="run", resume=True)
    train(net, optimizer, 1)
    optimizer.synchronize()
    assert optimizer.committed_steps == 1
    assert len(files(tmp_path)) == 2


def test_a_volume_without_a_step_that_was_made_for_another_model_is_refused(tmp_path):
    kill_after(0, tmp_path)
    with pytest.raises(ValueError, match=r"no committed step, and was made for other(.|\n)*rm"):
        on_volume(net_of(torch.float16), tmp_path, name="run", resume=True)
    assert len(files(tmp_path)) == 2


# ---- volumes that do not go with the program ----


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
    for path in (tmp_path / "drive1").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(OSError, match=r"member `1`.*missing"):
        on_volume(net_of(), tmp_path, name="run", resume=True)
    for path in tmp_path.glob("*.stepwell"):
        path.rename(tmp_path / "drive1" / path.name)
    assert len(files(tmp_path)) == 2


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


# ---- what no commit has ----


def test_loaded_state_that_no_commit_has_is_told(tmp_path, caplog):
    net, optimizer = pair(tmp_path)[0]
    train(net, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    net[3].requires_grad_(False)
    with caplog.at_level("WARNING", logger="stepwell"):
        train(net, optimizer, 1, first=1)
        assert "state of 2 parameters that are not stepped now is in memory" in caplog.text
        net[3].requires_grad_(True)
        caplog.clear()
        train(net, optimizer, 2, first=2)
        assert not caplog.text


def test_state_that_was_looked_at_and_not_changed_is_not_told(tmp_path, caplog):
    net, optimizer = pair(tmp_path)[0]
    with caplog.at_level("WARNING", logger="stepwell"):
        for step in range(3):
            train(net, optimizer, 1, first=step)
            kept = optimizer.state_dict()
            optimizer.commit()
        net[3].requires_grad_(False)
        train(net, optimizer, 2, first=3)
        assert not caplog.text
        optimizer.state[net[3].bias]["exp_avg"].zero_()
        train(net, optimizer, 1, first=5)
        assert "state of 1 parameters that are not stepped now is in memory" in caplog.text
        net[3].requires_grad_(True)
        train(net, optimizer, 1, first=6)
        caplog.clear()
        # What the volume had when it was kept.
        optimizer.load_state_dict(kept)
        optimizer.commit()
        assert "state of" in caplog.text


def test_state_that_no_commit_has_is_told(tmp_path, caplog):
    net = net_of()
    optimizer = on_volume(net, tmp_path, durability="commit")
    train(net, optimizer, 1, first=0)
    net[0].weight.requires_grad_(False)
    optimizer.state.clear()
    train(net, optimizer, 1, first=2)
    assert "or was deleted" in caplog.text
