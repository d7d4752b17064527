"""Models whose optimizer has its state on a volume, and the same in host memory."""

import copy
from itertools import pairwise

import stepwell
import torch
from stepwell.store.twins import Twins

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


def volume_of(drives, **options):
    """A volume that commits each step, unless the options say something else."""
    if options.get("durability") != "none":
        options.setdefault("commit_interval", 1)
    return stepwell.Volume(drives, **options)


def on_volume(net, tmp_path, *, host_bytes=3 << 20, threads=2, num=2, lr=1e-2, **options):
    """An optimizer whose state is on a volume, but for `host_bytes`, buffers included.

    Each step is committed, unless the options say something else.
    """
    volume = {name: options.pop(name) for name in VOLUME_OPTIONS if name in options}
    return stepwell.OffloadAdamW(
        net,
        lr=lr,
        threads=threads,
        host_bytes_max=pinned_bytes(net) + host_bytes,
        tier=volume_of(folders(tmp_path, num), **volume),
        **options,
    )


VOLUME_OPTIONS = (
    "durability",
    "commit_interval",
    "keep",
    "resume",
    "name",
    "io_engine",
    "weights",
    "stripe_bytes",
)


def pair(tmp_path, dtype=torch.float32, net=None, **options):
    """A model with its state on a volume, and the same with it in host memory."""
    net = net_of(dtype) if net is None else net
    twin = copy.deepcopy(net)
    plain = {
        name: value
        for name, value in options.items()
        if name not in (*VOLUME_OPTIONS, "host_bytes", "num")
    }
    reference = stepwell.OffloadAdamW(twin, **{"lr": 1e-2, **plain})
    return (net, on_volume(net, tmp_path, **options)), (twin, reference)


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("drive*/*"))
