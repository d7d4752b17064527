"""Whether a step that ranks share has the bits of one that each takes whole, on this machine.

    torchrun --nproc-per-node 2 benches/shard_bits.py [--cpu]

Weights are gathered while the program has collectives of its own: BatchNorm's buffers are broadcast
at the beginning of each forward, and a loss is reduced behind each step. Ranks are late by turns,
and one of them looks at a weight now and then. Each rank prints `SAME` or `DIFFERENT`; the exit
code is 1 where a bit differs. Takes a minute on two GPUs.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from stepwell import OffloadAdamW
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE = 32


def stack(width: int, depth: int, device: torch.device) -> nn.Module:
    """Linear layers, whose sizes are no multiples of anything, with buffers between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        inner = width + 3
        layers += [nn.Linear(width, inner), nn.BatchNorm1d(inner), nn.GELU()]
        layers += [nn.Linear(inner, width)]
    return nn.Sequential(*layers).to(device)


def trained(
    args: argparse.Namespace, device: torch.device, *, shard: bool
) -> tuple[list[torch.Tensor], float]:
    """The weights after some steps, and the seconds that those took."""
    rank = dist.get_rank()
    net = stack(args.width, args.depth, device)
    model = DistributedDataParallel(net)
    optimizer = OffloadAdamW(model, lr=1e-3, clip_norm=1.0, shard=shard)
    begin = time.perf_counter()
    for step in range(args.steps):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(BATCH_SIZE, args.width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == rank % 2:
            time.sleep(0.01)
        dist.all_reduce(loss.detach().clone())
        if step % 7 == 0 and rank == 0:
            net[0].weight.sum().item()  # type: ignore[index]
    optimizer.synchronize()
    seconds = time.perf_counter() - begin
    return [param.detach().clone() for param in net.parameters()], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="gloo, and a tiny model")
    args = parser.parse_args()
    args.width, args.depth, args.steps = (64, 3, 4) if args.cpu else (2048, 24, 60)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu" if args.cpu else f"cuda:{local_rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    (shared, shared_seconds), (whole, whole_seconds) = (
        trained(args, device, shard=shard) for shard in (True, False)
    )
    is_same = all(map(torch.equal, shared, whole))
    print(
        f"rank {dist.get_rank()}: {'SAME' if is_same else 'DIFFERENT'}, shared "
        f"{shared_seconds:.1f} s, whole {whole_seconds:.1f} s",
        flush=True,
    )
    dist.destroy_process_group()
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
