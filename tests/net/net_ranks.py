"""A user's script on two ranks: `net_ranks.py FOLDER`, with the variables of torchrun."""

import gc
import os
import sys
from pathlib import Path

import stepwell
import torch
import torch.distributed as dist
from net_runs import Net, offloaded, state_tensors
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

FOLDER = Path(sys.argv[1])


def trained(mesh=None, *, is_on_drives=False):
    """Weights and moments, of parameters in shards of rows; whole ones without a mesh.

    On drives the run ends and goes on from there.
    """

    def placed(tensor):
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    def made(**options):
        tier = stepwell.Volume([FOLDER], name="net", commit_interval=1, **options)
        return offloaded(net, **({"tier": tier} if is_on_drives else {}))

    net = Net(((33,), (5, 7), (411, 512)))
    for part in net.parts:
        part.weight = nn.Parameter(placed(part.weight.detach()))
    optimizer = made()
    for step in range(6):
        if is_on_drives and step == 3:
            del optimizer
            gc.collect()
            optimizer = made(resume=True)
            assert optimizer.committed_steps == step
        for part, grad in zip(net.parts, net.grads(step), strict=True):
            part.weight.grad = placed(grad.clone())
        optimizer.step()
    moments = state_tensors(optimizer.state_dict())
    found = [part.weight.detach() for part in net.parts]
    found += [value for (_, name), value in moments.items() if name.startswith("exp_avg")]
    return [value.full_tensor() if mesh is not None else value for value in found]


def main():
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    found = {
        "whole": trained(),
        "in memory": trained(mesh),
        "on drives": trained(mesh, is_on_drives=True),
    }
    torch.save(found, FOLDER / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
