"""What an optimizer is told beside weights in host memory: it trains as with resident weights.

State on volumes, runs that go on from one, gradients that are not finite, a GradScaler.
"""

import copy
import gc
import os

import pytest
import stepwell
import torch
from host_weight_cases import WIDTH, Net, assert_same, loss_of, made
from volume_models import pinned_bytes

# cuBLAS is told before it is used first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Wide(torch.nn.Module):
    """Two chunks of a weight, and some of them do not fit into memory."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 8192), torch.nn.Linear(8192, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def wide():
    return Net([Wide(), Wide()])


def zeroed():
    """What a volume that is resumed has weights for."""
    net = wide()
    for param in net.parameters():
        param.data.zero_()
    return net


def on_volume(weights, folder, *, make=wide, **options):
    """A model, and its optimizer with half of the state on a volume, which reads it in each step.

    `options`: of the volume, and of the optimizer.
    """
    folder.mkdir(exist_ok=True)
    names = ("durability", "resume", "name", "commit_interval")
    volume = {name: options.pop(name) for name in names if name in options}
    net = make().to(options.setdefault("dtype", torch.bfloat16))
    host_bytes_max = pinned_bytes(net) + (2 << 20)
    tier = stepwell.Volume([folder], **volume)
    return made(weights, "cpu", make, tier=tier, host_bytes_max=host_bytes_max, **options)


def train(net, optimizer, steps, first=0, backwards=1):
    seen = []
    for step in range(first, first + steps):
        for nth in range(backwards):
            loss = loss_of(net, step + 100 * nth)
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.grad_norm)
    return seen


def all_of(net, optimizer):
    """Copies: what comes later writes there."""
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))


@pytest.mark.parametrize("durability", ["none", "commit"])
@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_on_a_volume_is_stepped_alike(tmp_path, durability, moments, dtype):
    options = {"moments": moments, "dtype": dtype, "durability": durability}
    runs = []
    for weights in ("host", "device"):
        net, optimizer = on_volume(weights, tmp_path / weights, **options)
        seen = train(net, optimizer, 3, backwards=2)
        # What is looked at goes to the volume again.
        state = all_of(net, optimizer)
        seen += train(net, optimizer, 2, first=3)
        assert optimizer.timing["bytes_read"] > 0
        runs.append((seen, state, all_of(net, optimizer)))
    assert_same(*runs)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("order", [("device", "host"), ("host", "device"), ("host", "host")])
def test_a_run_goes_on_from_its_volume_with_weights_elsewhere(tmp_path, order, moments):
    options = {"moments": moments, "name": "run", "durability": "commit"}
    first, second = order
    net, optimizer = on_volume(first, tmp_path / "drive", **options)
    train(net, optimizer, 3)
    optimizer.commit()
    del net, optimizer
    gc.collect()
    net, optimizer = on_volume(second, tmp_path / "drive", make=zeroed, resume=True, **options)
    assert optimizer.committed_steps == 3
    resumed = all_of(net, optimizer)
    seen = train(net, optimizer, 3, first=3)
    expected_net, expected = on_volume("device", tmp_path / "other", **options)
    train(expected_net, expected, 3)
    assert_same(resumed, all_of(expected_net, expected))
    assert_same(seen, train(expected_net, expected, 3, first=3))
    assert_same(all_of(net, optimizer), all_of(expected_net, expected))


def writes(net):
    """As programs do, some past autograd."""
    with torch.no_grad():
        net.head.weight.mul_(0.9)
        net.layers[0].up.weight.data.clamp_(-0.05, 0.05)
        net.layers[1].down.bias.data = torch.full_like(net.layers[1].down.bias, 0.1)


@pytest.mark.parametrize("commits_each", [True, False])
def test_what_is_written_is_committed(tmp_path, commits_each):
    """Behind a step: a commit has the weights of the program, as it has for resident ones."""
    found = []
    for weights in ("host", "device"):
        options = {"name": "run", "commit_interval": 1 if commits_each else 8}
        net, optimizer = on_volume(weights, tmp_path / weights, **options)
        train(net, optimizer, 2)
        writes(net)
        seen = train(net, optimizer, 1, first=2)
        optimizer.commit()
        ended = all_of(net, optimizer)
        del net, optimizer
        gc.collect()
        net, optimizer = on_volume(weights, tmp_path / weights, make=zeroed, resume=True, **options)
        assert optimizer.committed_steps == 3
        found.append((seen, ended, all_of(net, optimizer), train(net, optimizer, 2, first=3)))
    assert_same(*found)
    assert_same(*found[0][1:3])


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_what_is_done_between_steps_counts(tmp_path, durability):
    """A write, a look at the state, a frozen layer, a state dict that is loaded."""
    found = []
    for weights in ("host", "device"):
        net, optimizer = on_volume(weights, tmp_path / weights, durability=durability)
        seen = train(net, optimizer, 1)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        writes(net)
        seen += train(net, optimizer, 1, first=1)
        seen.append({k: v.clone() for k, v in optimizer.state[net.head.weight].items()})
        net.layers[0].requires_grad_(False)
        seen += train(net, optimizer, 2, first=2)
        net.layers[0].requires_grad_(True)
        seen += train(net, optimizer, 1, first=4)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        seen += train(net, optimizer, 2, first=1)
        found.append((seen, all_of(net, optimizer)))
    assert_same(*found)


# ---- gradients that are not finite, and scaled ones ----


@pytest.mark.parametrize("nonfinite", ["skip", "raise", "propagate"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("is_on_volume", [False, True])
def test_gradients_that_are_not_finite(tmp_path, nonfinite, value, is_on_volume):
    found = []
    for weights in ("host", "device"):
        options = {"nonfinite": nonfinite, "make": wide}
        if is_on_volume:
            del options["make"]
            net, optimizer = on_volume(weights, tmp_path / weights, **options)
        else:
            net, optimizer = made(weights, "cpu", **options)
        train(net, optimizer, 1)
        message = None
        for nth in range(2):
            (loss_of(net, nth) * (value if nth else 1)).backward()
        try:
            optimizer.step()
        except ValueError as error:
            message = str(error)
        optimizer.zero_grad()
        skipped = optimizer.skipped_steps
        assert skipped == (nonfinite == "skip")
        assert (message is not None) == (nonfinite == "raise")
        before = all_of(net, optimizer)
        found.append((skipped, before, repr(train(net, optimizer, 2, first=1))))
        found[-1] += all_of(net, optimizer)
    assert_same(*found)


@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison_at", [None, 2])
def test_a_grad_scaler(device, moments, poison_at):
    found = []
    for weights in ("host", "device"):
        net, optimizer = made(weights, device, dtype=torch.float16, moments=moments)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**6, growth_interval=2)
        for step in range(5):
            for nth in range(2):
                factor = torch.inf if (step, nth) == (poison_at, 0) else 1.0
                scaler.scale(loss_of(net, step + 100 * nth) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((scaler.get_scale(), optimizer.skipped_steps, all_of(net, optimizer)))
    assert_same(*found)
    assert found[0][1] == (poison_at is not None)
