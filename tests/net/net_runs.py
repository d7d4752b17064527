"""Runs whose bits are the same on every machine, what they are saved as, and digests of both.

Weights and gradients are made of integers, without a sum: nothing hangs on the order in which a
machine adds up. `python tests/net/net_runs.py` writes `digests.json` and `saved.pt` anew.
"""

import functools
import gc
import hashlib
import io
import json
import math
from pathlib import Path

import stepwell
import torch
from net_cases import TAKES_MODEL, bits
from torch import nn

FOLDER = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The last has chunks of whole rows, and more state than fits in memory beside a volume.
SHAPES = ((), (0,), (33,), (5, 7), (411, 512))
SMALL = ((33,), (5, 7))
MOMENTS = ["fp32", "bf16", "q8"]


@functools.cache
def hashed(seed, shape, scale, dtype):
    """Numbers within `scale` out of integers; exact in fp32, where `scale` is a power of two."""
    mixed = (torch.arange(math.prod(shape)) + seed * 7919) * 2654435761 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 32)
    return (((mixed >> 8) - (1 << 23)).float() * (scale / (1 << 23))).view(shape).to(dtype)


class Part(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, grad):
        return (self.weight * grad).sum().float()


class Net(nn.Module):
    """Parameters of each shape and dtype; the gradient of each is what is given."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.parts = nn.ModuleList(
            Part(hashed(index, shape, 1.0, dtype).clone())
            for index, shape in enumerate(shapes)
            for dtype in DTYPES
        )

    def forward(self, grads):
        return sum(part(grad) for part, grad in zip(self.parts, grads, strict=True))

    def grads(self, step):
        """Of a step: large ones, and others that are nearly nothing."""
        scale = 2.0 ** -(step * 3 % 10)
        return [
            hashed(1000 * step + index, part.weight.shape, scale, part.weight.dtype)
            for index, part in enumerate(self.parts)
        ]

    def train_from(self, optimizer, first, steps):
        for step in range(first, first + steps):
            optimizer.zero_grad()
            self(self.grads(step)).backward()
            optimizer.step()


def by_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bits(tensor).numpy().tobytes())
    return found.hexdigest()[:32]


def state_tensors(state_dict):
    """By index and name. Fingerprints follow from the weights."""
    return {
        (index, name): value
        for index, state in sorted(state_dict["state"].items())
        for name, value in sorted(state.items())
        if isinstance(value, torch.Tensor) and name != "fingerprints"
    }


def digests(net, state_dict):
    weights = digest(part.weight for part in net.parts)
    tensors = state_tensors(state_dict)
    names = sorted({name for _, name in tensors})
    return {"weights": weights} | {
        name: digest(value for (_, each), value in tensors.items() if each == name)
        for name in names
    }


def recorded():
    return json.loads((FOLDER / "digests.json").read_text())


def offloaded(net, **options):
    if TAKES_MODEL:
        options["model"] = net
    return stepwell.OffloadAdamW(
        net.named_parameters(), lr=1e-2, **{"threads": 2, "seed": 7, **options}
    )


def run(make, steps=6, rest=4):
    """What a run is behind `steps` and behind `rest` more, with and without a load between."""
    net = Net()
    optimizer = make(net)
    net.train_from(optimizer, 0, steps)
    at_save = digests(net, optimizer.state_dict())
    saved = by_file([net.state_dict(), optimizer.state_dict()])
    net.train_from(optimizer, steps, rest)
    gone_on = digests(net, optimizer.state_dict())
    del net, optimizer
    gc.collect()
    net = Net()
    optimizer = make(net)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    del saved
    assert digests(net, optimizer.state_dict()) == at_save
    net.train_from(optimizer, steps, rest)
    assert digests(net, optimizer.state_dict()) == gone_on
    return {"saved": at_save, "gone on": gone_on}


def small_run(moments):
    """A state dict of some kilobytes, with its weights."""
    net = Net(SMALL)
    optimizer = stepwell.AdamW(net.parameters(), lr=1e-2, moments=moments, seed=7)
    net.train_from(optimizer, 0, 5)
    return [net.state_dict(), optimizer.state_dict()]


def resumed_from(saved, make):
    net = Net(SMALL)
    optimizer = make(net)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return net, optimizer


def record():
    found = {}
    for moments in MOMENTS:
        found[f"{moments} exact"] = run(lambda net, m=moments: offloaded(net, moments=m))
        late = stepwell.Deferred(interval=3)
        found[f"{moments} late"] = run(
            lambda net, m=moments, late=late: offloaded(net, moments=m, deferred=late)
        )
    small = {moments: small_run(moments) for moments in MOMENTS}
    torch.save(small, FOLDER / "saved.pt")
    for moments, saved in small.items():
        net, optimizer = resumed_from(saved, lambda net, m=moments: offloaded(net, moments=m))
        loaded = digests(net, optimizer.state_dict())
        net.train_from(optimizer, 5, 3)
        found[f"{moments} from the file"] = {
            "saved": loaded,
            "gone on": digests(net, optimizer.state_dict()),
        }
    (FOLDER / "digests.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
