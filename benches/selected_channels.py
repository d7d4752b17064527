"""Selected channels on this machine's accelerator: their bits, then what they cost.

    python benches/selected_channels.py [--width 4096] [--layers 24] [--tokens 4096] [--steps 24]

First the bits. Runs in which everything, or a half, is selected are compared with exact runs, in
which the host steps: over ordinary and extreme values (denormal numbers, zeros, numbers near the
largest), for every dtype of parameters, with both kinds of weight decay. Any difference ends the
script with an error. (NaNs are left out: their payload may differ.)

Then seconds per step of a stack of linear layers in bfloat16: exact, deferred, and deferred with a
share of the channels selected; with the slowest step, the share of the squared norms that the
selection captures, and its device memory.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from stepwell import Deferred, OffloadAdamW
from torch import nn

WARMUP_STEPS = 10
EXTREMES = (0.0, -0.0, 1e-45, -1e-40, 1.1754942e-38, 6e-8, 6.1e-5, 65504.0, 1e18, -3e38, 3.38e38)


def drawn(param: torch.Tensor, seed: int, *, extreme: bool) -> torch.Tensor:
    """Values of the parameter's shape and dtype, all finite; with extreme ones among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(param.shape, generator=generator)
    if extreme:
        values *= 10.0 ** torch.randint(-44, 38, param.shape, generator=generator)
        which = torch.randint(0, len(EXTREMES), param.shape, generator=generator)
        is_one = torch.rand(param.shape, generator=generator) < 1 / 8
        values = torch.where(is_one, torch.tensor(EXTREMES)[which], values)
    most = torch.finfo(param.dtype).max
    return values.clamp(-most, most).nan_to_num().to(param.dtype).to(param.device)


def stack(width: int, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Linear layers with norms between them."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks).to(device, dtype)


def differences(
    dtype: torch.dtype, fraction: float, device: torch.device, width: int, *, extreme: bool
) -> int:
    """Elements of weights, masters and moments that an exact run has with other bits."""
    model = stack(width, 2, device, dtype)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(drawn(param, index, extreme=extreme))
    models = [model, copy.deepcopy(model)]
    deferred = Deferred(interval=2, fraction=fraction, reselect=2)
    optimizers = [
        OffloadAdamW(each, lr=1e-2, weight_decay=0.1, eps=1e-8, deferred=how)
        for each, how in zip(models, (deferred, None), strict=True)
    ]
    for step in range(7):
        for each, optimizer in zip(models, optimizers, strict=True):
            each(torch.zeros(2, width, device=device, dtype=dtype)).sum().backward()
            for index, param in enumerate(each.parameters()):
                param.grad = drawn(param, 100 * (step + 1) + index, extreme=extreme)
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.state_dict()
    count = 0
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        states = optimizers[0].state[one], optimizers[1].state[other]
        pairs = [
            (one.detach(), other.detach()),
            *((states[0][key], states[1][key]) for key in states[0]),
        ]
        for ours, theirs in pairs:
            if ours.is_floating_point():
                both_nan = ours.isnan() & theirs.isnan()
                bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
                count += int(((ours.view(bits) != theirs.view(bits)) & ~both_nan).sum())
            elif ours.shape == one.shape:
                # Trailing bits; those of a NaN mean nothing.
                count += int(((ours != theirs) & ~one.detach().cpu().isnan()).sum())
    return count


def check_bits(device: torch.device, width: int) -> None:
    """Ends the script where a bit differs."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for fraction in (1.0, 0.5):
            for extreme in (False, True):
                found = differences(dtype, fraction, device, width, extreme=extreme)
                kind = "extreme" if extreme else "ordinary"
                print(f"bits  {dtype!s:15} fraction {fraction:3} {kind:9} {found} differ")
                if found:
                    raise SystemExit(1)


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    name: str, deferred: Deferred | None, args: argparse.Namespace, device: torch.device
) -> None:
    """Prints a line of the table."""
    model = stack(args.width, args.layers, device, torch.bfloat16)
    optimizer = OffloadAdamW(model, lr=1e-5, clip_norm=1.0, deferred=deferred)
    optimizer.no_sync()
    x = torch.randn(args.tokens, args.width, device=device, dtype=torch.bfloat16)
    seconds = []
    for step in range(WARMUP_STEPS + args.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        wait(device)
        if step >= WARMUP_STEPS:
            seconds.append(time.perf_counter() - begin)
    timing = optimizer.timing
    print(
        f"{name:24} {statistics.mean(seconds):8.4f} {max(seconds):8.4f}"
        f" {timing.get('selected_share', 0):9.3f} {timing.get('selected_bytes', 0) / 1e9:7.2f}"
        f" {timing['norm']:8.4f} {timing['prepare']:8.4f} {timing['background']:8.4f}"
    )
    optimizer.synchronize()


def main() -> None:
    """Checks, then measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--bits-width", type=int, default=1536)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    check_bits(device, args.bits_width)
    print(f"\n{args.layers} layers of {args.width} x {args.width}, {args.tokens} tokens, {device}")
    print(f"{'':24} mean s/st slowest  captured GB dev   norm s prepare s backgr s")
    measure("exact", None, args, device)
    for interval in (2, 4):
        for fraction in (0.0, 0.05, 0.1):
            deferred = Deferred(interval=interval, fraction=fraction)
            measure(f"interval {interval}, fraction {fraction}", deferred, args, device)


if __name__ == "__main__":
    main()
