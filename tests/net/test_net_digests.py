"""Runs that are saved and go on, on each face: the bits that 7c4e5c5 had (`digests.json`)."""

import gc

import pytest
import stepwell
import torch
from net_runs import FOLDER, MOMENTS, Net, digests, offloaded, recorded, resumed_from, run

pytestmark = pytest.mark.filterwarnings("default")
LATE = {"deferred": stepwell.Deferred(interval=3)}
ALL = {"device_bytes_max": 1 << 24}
# The small parameters' state, and that of the first large one.
PART = {"device_bytes_max": 3 << 20}


def on_volume(net, folder, **options):
    """With a part of the state on a drive."""
    volume = {
        name: options.pop(name)
        for name in ("durability", "name", "commit_interval", "resume")
        if name in options
    }
    numel = sum(param.numel() for param in net.parameters())
    # For what crosses the bus, for gradients that wait, and room to work.
    host_bytes_max = (22 if "deferred" in options else 8) * numel + (2 << 20)
    tier = stepwell.Volume([folder], **volume)
    return offloaded(net, tier=tier, host_bytes_max=host_bytes_max, **options)


@pytest.mark.parametrize("moments", MOMENTS)
def test_in_host_memory(moments):
    def made(net):
        return stepwell.AdamW(net.parameters(), lr=1e-2, moments=moments, seed=7)

    assert run(made) == recorded()[f"{moments} exact"]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("time", ["exact", "late"])
def test_beside_a_device(moments, time):
    deferred = LATE if time == "late" else {}
    found = run(lambda net: offloaded(net, moments=moments, **deferred))
    assert found == recorded()[f"{moments} {time}"]


@pytest.mark.parametrize("options", [ALL, PART, PART | LATE], ids=["all", "part", "part late"])
def test_with_state_on_the_device(options):
    assert run(lambda net: offloaded(net, **options)) == recorded()["fp32 exact"]


def test_with_all_channels_selected():
    deferred = stepwell.Deferred(interval=3, fraction=1.0)
    assert run(lambda net: offloaded(net, deferred=deferred)) == recorded()["fp32 exact"]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("time", ["exact", "late"])
def test_on_a_volume_that_keeps_nothing(moments, time, tmp_path):
    options = {"durability": "none", "moments": moments, **(LATE if time == "late" else {})}
    found = run(lambda net: on_volume(net, tmp_path, **options))
    assert found == recorded()[f"{moments} {time}"]


@pytest.mark.parametrize("commit_interval", [1, 4])
@pytest.mark.parametrize("moments", MOMENTS)
def test_on_a_volume_that_is_resumed(moments, commit_interval, tmp_path):
    """Its commits have weights and state: nothing else is saved or loaded."""
    expected = recorded()[f"{moments} exact"]
    options = {"name": "run", "commit_interval": commit_interval, "moments": moments}
    net = Net()
    optimizer = on_volume(net, tmp_path, **options)
    net.train_from(optimizer, 0, 6)
    optimizer.synchronize()
    del net, optimizer  # Which commits the last step.
    gc.collect()
    net = Net()
    optimizer = on_volume(net, tmp_path, resume=True, **options)
    assert optimizer.committed_steps == 6
    assert digests(net, optimizer.state_dict()) == expected["saved"]
    net.train_from(optimizer, 6, 4)
    assert digests(net, optimizer.state_dict()) == expected["gone on"]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("face", ["host", "offload", "resident", "late", "volume"])
def test_a_file_of_7c4e5c5_loads(moments, face, tmp_path):
    def made(net):
        if face == "host":
            return stepwell.AdamW(net.parameters(), lr=1e-2, moments=moments, seed=7)
        options = {"resident": PART, "late": LATE}.get(face, {})
        if face == "volume":
            return on_volume(net, tmp_path, durability="none", moments=moments)
        return offloaded(net, moments=moments, **options)

    expected = recorded()[f"{moments} from the file"]
    net, optimizer = resumed_from(torch.load(FOLDER / "saved.pt")[moments], made)
    loaded = digests(net, optimizer.state_dict())
    net.train_from(optimizer, 5, 3)
    gone_on = digests(net, optimizer.state_dict())
    if face == "resident" and moments != "fp32":
        # Decoded, and not coded again.
        loaded, gone_on = loaded["weights"], expected["gone on"]
        expected["saved"] = expected["saved"]["weights"]
    elif face == "late" and moments != "fp32":
        # Coded once per turn, and not in each step.
        gone_on = expected["gone on"]
    assert loaded == expected["saved"]
    assert gone_on == expected["gone on"]
