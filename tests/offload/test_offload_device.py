"""stepwell.OffloadAdamW beside the accelerator of this machine.

With a GPU its copies and streams are CUDA's, elsewhere the host's.
"""

import os

import pytest
import stepwell
import torch
from stepwell.store import adder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a GPU wide enough for copies that take longer than a launch.
WIDTH = 1024 if DEVICE.type == "cuda" else 48
# For deterministic matrix products; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def net(dtype):
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        for _ in range(4)
    ]
    return torch.nn.Sequential(
        torch.nn.Embedding(512, WIDTH), *blocks, torch.nn.LayerNorm(WIDTH)
    ).to(DEVICE, dtype)


def backward(model, seed):
    tokens = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )
    loss = (model(tokens).float() - 1).square().mean()
    loss.backward()
    return loss.detach()


def train(model, optimizer, steps=8):
    losses = []
    for step in range(steps):
        losses += [backward(model, 2 * step), backward(model, 2 * step + 1)]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return torch.stack(losses).tolist(), [param.detach().clone() for param in model.parameters()]


MODES = [
    {},
    {"accumulation_steps": 2},
    {"accumulation_steps": 2, "model": None},
    {"accumulate": "host", "clip_norm": None},
]


@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=["untold", "told", "told, no model", "accumulate=host"])
def test_every_mode_gives_the_bits_of_waiting(mode, dtype, moments, monkeypatch):
    # Sums come and go in many pieces, and the thread waits for earlier ones.
    monkeypatch.setattr(adder, "_SLOT_BYTES", 1 << 16)
    monkeypatch.setattr(adder, "_UNDER_WAY_BYTES_MAX", 1 << 18)
    options = {"lr": 1e-3, "moments": moments, "clip_norm": 0.05}
    model = net(dtype)
    # Sums of two are the same wherever they are made; norms are not, so no clipping where that is
    # the host.
    reference = {**options, "clip_norm": mode.get("clip_norm", 0.05)}
    expected = train(model, stepwell.OffloadAdamW(model.parameters(), **reference))
    model = net(dtype)
    ours = {"model": model, **options, **mode}
    losses, params = train(model, stepwell.OffloadAdamW(model.parameters(), **ours))
    assert losses == expected[0]
    assert all(torch.equal(param, other) for param, other in zip(params, expected[1], strict=True))


# A device of the host has no memory that is pinned.
@pytest.mark.gpu
@pytest.mark.parametrize("durability", ["none", "commit"])
@pytest.mark.parametrize("moments", ["fp32", "q8"])
@pytest.mark.parametrize(
    "mode",
    [{"accumulation_steps": 2}, {"accumulate": "host", "clip_norm": None}],
    ids=["told", "accumulate=host"],
)
def test_a_volume_gives_the_bits_of_host_memory(tmp_path, mode, moments, durability):
    """What waits for drives is copied from and to memory that is not pinned."""
    options = {"lr": 1e-3, "moments": moments, "clip_norm": 0.05, **mode}
    model = net(torch.bfloat16)
    expected = train(model, stepwell.OffloadAdamW(model, **options))
    model = net(torch.bfloat16)
    twins = 2 * sum(-(-param.nbytes // 4096) * 4096 for param in model.parameters())
    optimizer = stepwell.OffloadAdamW(
        model,
        **options,
        threads=2,
        host_bytes_max=twins + (32 << 20),
        tier=stepwell.Volume([tmp_path], durability=durability),
    )
    losses, params = train(model, optimizer)
    assert optimizer.timing["bytes_written"] > 0
    assert losses == expected[0]
    assert all(torch.equal(param, other) for param, other in zip(params, expected[1], strict=True))


def test_follows_torch_on_the_device():
    model, other = net(torch.float32), net(torch.float32)
    optimizer = stepwell.OffloadAdamW(model, lr=1e-4, clip_norm=0.05)
    reference = torch.optim.AdamW(other.parameters(), lr=1e-4)
    for step in range(5):
        ours, theirs = backward(model, step), backward(other, step)
        # Their sums of squares are rounded in another order.
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        optimizer.zero_grad()
        reference.zero_grad()


def test_gradients_may_be_written_and_freed_right_after_the_step():
    model, other = net(torch.bfloat16), net(torch.bfloat16)
    optimizer = stepwell.OffloadAdamW(model, lr=1e-3)
    reference = stepwell.OffloadAdamW(other.parameters(), lr=1e-3)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        else:
            # The caller's own code, of which the optimizer knows nothing.
            for param in model.parameters():
                param.grad.fill_(float("nan"))
        optimizer.zero_grad()
        # Takes the memory that the gradients had.
        garbage = [torch.full_like(param, float("nan")) for param in model.parameters()]
        backward(other, step)
        reference.step()
        reference.zero_grad()
        del garbage
    optimizer.synchronize()
    reference.synchronize()
    assert all(
        torch.equal(param, twin)
        for param, twin in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.gpu
def test_a_model_that_was_moved_is_refused():
    model = net(torch.float32)
    optimizer = stepwell.OffloadAdamW(model, lr=1e-3)
    model.cpu()
    loss = model(torch.zeros(2, 3, dtype=torch.long)).sum()
    loss.backward()
    with pytest.raises(ValueError, match="hint: move the model before the optimizer is made"):
        optimizer.step()
