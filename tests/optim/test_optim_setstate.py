"""`__setstate__` on a living optimizer, and `state` replaced as a whole: as torch takes them."""

from collections import defaultdict

import pytest
import stepwell
import torch
from optim_cases import bits

NEAR = {"rtol": 1e-5, "atol": 1e-6}


def by_setstate(optimizer):
    optimizer.__setstate__({"state": defaultdict(dict)})


def by_setstate_with_groups(optimizer):
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.__setstate__({"state": defaultdict(dict), "param_groups": groups})


def by_attribute(optimizer):
    optimizer.state = defaultdict(dict)


def by_clear(optimizer):
    optimizer.state.clear()


def by_entry(optimizer):
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def by_load(optimizer):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


RESETS = [
    by_setstate,
    by_setstate_with_groups,
    by_attribute,
    by_clear,
    by_entry,
    by_load,
]


def offload(**more):
    return lambda net, **options: stepwell.OffloadAdamW(
        net.parameters(), threads=1, **options, **more
    )


def plain(cls):
    return lambda net, **options: cls(net.parameters(), **options)


def on_volume(net, **options):
    """Of a folder that the test has set."""
    tier = stepwell.Volume([on_volume.folder])
    return offload(tier=tier, host_bytes_max=5 << 20)(net, **options)


FACES = {
    "plain": plain(stepwell.AdamW),
    "offload": offload(),
    "deferred": offload(deferred=stepwell.Deferred(interval=2)),
    "resident": offload(device_bytes_max=1 << 30),
    "volume": on_volume,
}


def trained(make, change):
    """Weights, moments and counts of some steps with a change in between, drained in each step."""
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    optimizer = make(net, lr=0.05)
    for step in range(6):
        if step in (2, 3):
            change(optimizer)
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 5) + step).square().sum().backward()
        optimizer.step()
        if step == 4:
            getattr(optimizer, "synchronize", lambda: None)()
    moments = [
        optimizer.state[param][key].float().clone()
        for param in net.parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [param.detach().clone() for param in net.parameters()], moments


@pytest.mark.parametrize("change", RESETS)
@pytest.mark.parametrize("face", FACES)
def test_state_that_is_reset_begins_anew(face, change, tmp_path):
    on_volume.folder = tmp_path
    expected = trained(plain(torch.optim.AdamW), change)
    assert all(count == 3 for count in expected[1][::3])
    found = trained(FACES[face], change)
    if face == "deferred":
        # Gradients of its forwards are late.
        assert all(count == 3 for count in found[1][::3])
    else:
        torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.parametrize("make", [stepwell.AdamW, stepwell.OffloadAdamW])
@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_parts_of_what_there_is_change_nothing(make, moments):
    """What is not said stays; state that is its own is taken as it is."""
    found = []
    for change in (False, True):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.bfloat16))
        optimizer = make([param], lr=0.05, moments=moments)
        for step in range(4):
            if change and step == 2:
                optimizer.__setstate__({})
                optimizer.__setstate__({"param_groups": optimizer.param_groups})
                optimizer.__setstate__({"state": optimizer.state})
            param.grad = torch.full_like(param, step + 0.7)
            optimizer.step()
        optimizer.state_dict()  # After it all of `state` is as it is saved.
        found.append([param.detach().clone(), *optimizer.state[param].values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("make", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_other_groups_are_refused_with_what_to_do(make):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = make([params[0]], lr=0.05)
    group = optimizer.param_groups[0]
    more = [dict(group), dict(group, params=[params[1]])]
    with pytest.raises(ValueError, match=r"`param_groups` has `2` groups, expected 1.*hint: add_"):
        optimizer.__setstate__({"param_groups": more})
    assert optimizer.param_groups == [group]
    with pytest.raises(ValueError, match="`exp_avg`"):
        optimizer.__setstate__({"state": {params[0]: {"step": 1, "exp_avg": torch.ones(2)}}})
    # Other parameters, as torch takes them.
    optimizer.__setstate__({"param_groups": [dict(group, params=[params[1]])]})
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(params[0], torch.ones(3))
    assert not torch.equal(params[1].detach(), torch.ones(3))
