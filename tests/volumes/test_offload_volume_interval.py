"""A volume that commits every few steps: what its commits have, and what they cost."""

import gc
import logging
from contextlib import nullcontext

import pytest
import torch
from insides import swapped_of
from offload_cases import assert_equal, loss_of, train
from optim_cases import LAYOUT_IDS, LAYOUTS
from stepwell import OffloadAdamW, Volume
from stepwell.ranks.collective import Ranks
from volume_models import net_of, on_volume, pair


class Alone(Ranks):
    def __init__(self):
        self.ranks, self._num_met = [0], 0

    def _gather(self, mine):
        return [mine]


def again(tmp_path, dtype, **options):
    """Another model, with what the volume has."""
    gc.collect()
    net = net_of(dtype, seed=9)
    return net, on_volume(net, tmp_path, name="run", resume=True, **options)


def end_as_if_killed(optimizer):
    """Nothing is committed any more. Its last step is over."""
    swapped_of(optimizer).volume.core.close()


@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_resumed_volume_is_at_its_last_commit(tmp_path, dtype, moments, caplog):
    options = {"moments": moments, "clip_norm": 1.0, "commit_interval": 3}
    (net, optimizer), theirs = pair(tmp_path, dtype, name="run", **options)
    losses = train(net, optimizer, 5)
    assert losses[:3] == train(*theirs, 3)
    optimizer.synchronize()
    assert optimizer.committed_steps == 3
    with caplog.at_level(logging.WARNING, logger="stepwell"):
        end_as_if_killed(optimizer)
    del net, optimizer
    assert "ends at step 5 and is kept at step 3" in caplog.text
    net, optimizer = again(tmp_path, dtype, **options, host_bytes=5 << 20)
    assert optimizer.committed_steps == 3
    assert_equal((net, optimizer), theirs)
    # A look has its state in memory, and the next steps write that.
    assert train(net, optimizer, 4, first=3) == train(*theirs, 4, first=3)
    optimizer.synchronize()
    assert optimizer.committed_steps == 6
    assert_equal((net, optimizer), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("host_bytes", [2 << 20, 32 << 20])
def test_a_commit_has_what_its_own_step_does_not_step(tmp_path, dtype, host_bytes):
    options = {"commit_interval": 4, "host_bytes": host_bytes}
    (net, optimizer), theirs = pair(tmp_path, dtype, name="run", **options)
    for each, its in ((net, optimizer), theirs):
        train(each, its, 2)
        # The third step and the fourth, of the commit, leave a layer out.
        each[0].requires_grad_(False)
        train(each, its, 2, first=2)
    optimizer.synchronize()
    assert optimizer.committed_steps == 4
    del net, optimizer
    resumed = again(tmp_path, dtype, **options)
    theirs[0][0].requires_grad_(True)
    assert_equal(resumed, theirs)
    assert train(*resumed, 3, first=4) == train(*theirs, 3, first=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_last_step_is_committed_where_the_program_says_so(tmp_path, dtype, caplog):
    options = {"commit_interval": 100}
    (net, optimizer), theirs = pair(tmp_path, dtype, name="run", **options)
    optimizer.commit()
    assert optimizer.committed_steps == 0
    for step in range(3):
        train(net, optimizer, 1, first=step)
        optimizer.commit()
        optimizer.commit()
        assert optimizer.committed_steps == step + 1
    train(*theirs, 3)
    with caplog.at_level(logging.WARNING, logger="stepwell"):
        del net, optimizer
        resumed = again(tmp_path, dtype, **options)
    assert not caplog.text
    assert_equal(resumed, theirs)
    assert train(*resumed, 2, first=3) == train(*theirs, 2, first=3)


def test_weights_that_were_written_after_their_step_are_committed_as_it_left_them(tmp_path):
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", commit_interval=9)
    train(net, optimizer, 2)
    train(*theirs, 2)
    optimizer.synchronize()
    with torch.no_grad():
        net[0].weight.zero_()
    optimizer.commit()
    del net, optimizer
    assert_equal(again(tmp_path, torch.bfloat16), theirs)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("steps_then", [0, 2])
def test_weights_that_a_skipped_step_has_read_are_not_committed(tmp_path, nonfinite, steps_then):
    interval = 9 if steps_then == 0 else 4
    options = {"commit_interval": interval, "nonfinite": nonfinite}
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", **options)
    train(net, optimizer, 2)
    train(*theirs, 2)
    for each in (net, theirs[0]):
        # Of a layer that no step updates from here on.
        if each is net:
            optimizer.synchronize()
            with torch.no_grad():
                each[0].weight.zero_()
    optimizer.zero_grad()
    loss_of(net, 2).backward()
    net[2].weight.grad.fill_(float("nan"))
    with pytest.raises(ValueError, match="nan") if nonfinite == "raise" else nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    expected = theirs[0][0].weight.detach().clone()
    if steps_then:
        # The second of these commits.
        net[0].requires_grad_(False)
        train(net, optimizer, steps_then, first=2)
        optimizer.synchronize()
    else:
        optimizer.commit()
    assert optimizer.committed_steps == 2 + steps_then
    del net, optimizer
    resumed = again(tmp_path, torch.bfloat16)
    assert torch.equal(resumed[0][0].weight, expected)
    if not steps_then:
        assert_equal(resumed, theirs)
        assert train(*resumed, 3, first=2) == train(*theirs, 3, first=2)


def test_a_parameter_that_leaves_is_committed_as_its_last_step_left_it(tmp_path):
    (net, optimizer), theirs = pair(tmp_path, torch.bfloat16, name="run", commit_interval=3)
    train(net, optimizer, 2)
    train(*theirs, 2)
    for each, its in ((net, optimizer), theirs):
        its.param_groups[0]["params"].remove(each[0].weight)
        each[0].weight.grad = None
        each[0].weight.requires_grad_(False)
        train(each, its, 3, first=2)
    optimizer.synchronize()
    assert optimizer.committed_steps == 3
    optimizer.commit()
    assert optimizer.committed_steps == 5
    del net, optimizer
    net, optimizer = again(tmp_path, torch.bfloat16)
    assert all(map(torch.equal, net.parameters(), theirs[0].parameters()))
    assert int(optimizer.state[net[0].weight]["step"]) == 2


def test_a_commit_that_failed_is_the_end(tmp_path, monkeypatch):
    net = net_of()
    optimizer = on_volume(net, tmp_path, name="run", commit_interval=9)
    train(net, optimizer, 2)

    def failed():
        raise OSError("no drive")

    volume = swapped_of(optimizer).volume
    volume.ranks = Alone()
    with monkeypatch.context() as patched:
        patched.setattr(volume, "write_weights", failed)
        with pytest.raises(OSError, match="no drive"):
            optimizer.commit()
    volume.ranks = None
    with pytest.raises(OSError, match="a commit failed before: no drive"):
        train(net, optimizer, 1, first=2)


def test_only_a_volume_that_commits_can_be_told_to(tmp_path):
    net = net_of()
    optimizers = [
        OffloadAdamW(net, lr=1e-3),
        on_volume(net, tmp_path, durability="none"),
    ]
    for optimizer in optimizers:
        with pytest.raises(ValueError, match="no volume that commits"):
            optimizer.commit()


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_an_interval_is_a_number_of_steps(tmp_path, interval):
    with pytest.raises(ValueError, match=f"`commit_interval` is `{interval}`, expected "):
        Volume([tmp_path], commit_interval=interval)
    with pytest.raises(ValueError, match="an integer, 9223372036854775807 at most"):
        Volume([tmp_path], commit_interval=1 << 63)
    for steps in (1, 2, 8):
        with pytest.raises(ValueError, match="which commits no step"):
            Volume([tmp_path], durability="none", commit_interval=steps)
