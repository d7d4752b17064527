"""What the net shares: faces, which are ways to train, small models, and how results compare."""

import copy
import inspect
import itertools
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import stepwell
import torch
from net_models import Mlp
from torch import nn

# The keyword came later. Until then the parameters alone are given.
TAKES_MODEL = "model" in inspect.signature(stepwell.OffloadAdamW).parameters

# Both round each operation to fp32, and ours are fused: a few units in the last place per step.
# Behind all steps of a program, with the forwards and backwards between them, at most a fifth of
# this was seen.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


# Seconds that a script may take.
TIMEOUT = 100 * float(os.environ.get("STEPWELL_TEST_PATIENCE", "1"))


def environments(ranks):
    """What torchrun gives to each of some ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    return [
        {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        }
        for rank in range(ranks)
    ]


def run_deepspeed(folder):
    """What `net_deepspeed.py` finds."""
    environment = environments(1)[0] | {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    script = Path(__file__).parent / "net_deepspeed.py"
    command = ["-m", "stepwell", "run", str(script), str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return torch.load(folder / "programs.pt")


class TorchAdamW(torch.optim.AdamW):
    """torch's, with the options of ours done around it."""

    def __init__(self, params, *, clip_norm=None, nonfinite="propagate", **options):
        super().__init__(params, **options)
        self.clip_norm, self.nonfinite, self.skipped_steps = clip_norm, nonfinite, 0
        self.register_step_pre_hook(lambda *_: self.prepare())

    def prepare(self):
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        if self.nonfinite == "skip" and not all(grad.isfinite().all() for grad in grads):
            self.skipped_steps += 1
            self.zero_grad()  # Nothing is stepped.
        elif self.clip_norm is not None:
            nn.utils.clip_grad_norm_(params, self.clip_norm)


class MasterAdamW(TorchAdamW):
    """torch's over fp32 masters: what ours is to 16-bit parameters."""

    def __init__(self, params, **options):
        self.live = list(params)
        super().__init__([param.detach().float() for param in self.live], **options)

    def zero_grad(self, set_to_none=True):
        for param in self.live:
            param.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for param, master in zip(self.live, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        super().step()
        for param, master in zip(self.live, masters, strict=True):
            param.copy_(master)


@dataclass
class Face:
    """A way to train: `make(params, model=net, **options)` gives the optimizer."""

    cls: type = stepwell.OffloadAdamW
    options: dict = field(default_factory=dict)
    width: int = 24
    net_class: type = Mlp
    gives_model: bool = False
    is_drained: bool = False
    # Where set, the state of each optimizer is on drives there.
    folder: object = None

    def net(self, device):
        torch.manual_seed(3)
        return self.net_class(self.width).to(device)

    def __call__(self, params, *, model, ours=None, **options):
        """`ours`: what only `OffloadAdamW` takes."""
        options = {"lr": 1e-2, "weight_decay": 0.05, **options}
        if self.cls is stepwell.OffloadAdamW:
            options |= {"threads": 1, **self.options, **(ours or {})}
            if TAKES_MODEL and (self.gives_model or "deferred" in options):
                options["model"] = model
        elif self.cls is stepwell.AdamW:
            options.pop("clip_norm", None)
        if self.folder is not None:
            folder = self.folder / str(len(list(self.folder.iterdir())))
            folder.mkdir()
            options["tier"] = stepwell.Volume([folder], durability="none")
            # 8 bytes per parameter for what crosses the bus, and room to work.
            numel = sum(param.numel() for param in model.parameters())
            options.setdefault("host_bytes_max", 8 * numel + (2 << 20))
        optimizer = self.cls(params, **options)
        if self.is_drained:
            optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.drain())
        return optimizer


def batch(step, device, width=8):
    """Inputs of a step, the same everywhere."""
    index = torch.arange(4 * width, dtype=torch.float32).view(4, width)
    return torch.sin(index * 0.37 + step).to(device)


def loss_of(net, step):
    param = next(net.parameters())
    return net(batch(step, param.device).to(param.dtype))


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def weights(net):
    return [param.detach().clone() for param in net.parameters()]


def result(net, *optimizers):
    """All that training has made: weights, then moments and counts."""
    found = weights(net)
    for optimizer in optimizers:
        states = optimizer.state_dict()["state"]
        for index, name in itertools.product(
            sorted(states), ("step", "exp_avg", "exp_avg_sq", "master", "trailing")
        ):
            if name in states[index]:
                found.append(copy.deepcopy(states[index][name]))
    return found


def bits(tensor):
    """As integers: NaN equals itself, and 0 is not -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(kinds[tensor.itemsize])


def assert_same_bits(ours, theirs):
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other)), f"tensor {index} of {len(ours)}"


def assert_near(ours, theirs, **tolerance):
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            one.detach().cpu().float(),
            other.detach().cpu().float(),
            **(tolerance or NEAR),
            msg=lambda text, index=index: f"tensor {index} of {len(ours)}: {text}",
        )
