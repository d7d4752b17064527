"""A user's script on two ranks: `net_ranks.py FOLDER`, with the variables of torchrun."""

import gc
import os
import sys
from pathlib import Path

import stepwell
import torch
import torch.distributed as dist
from net_runs import Net, digests, offloaded, state_tensors
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

FOLDER = Path(sys.argv[1])


def whole(net, optimizer):
    """Of the state of both ranks."""
    return digests(net, optimizer.full_state_dict(None))


def shared(moments):
    """Ranks that share the step. Each goes on alone, from the state of both."""
    net = Net()
    optimizer = offloaded(net, moments=moments, shard=True)
    net.train_from(optimizer, 0, 6)
    found = {"saved": whole(net, optimizer)}
    saved = optimizer.full_state_dict(None)
    optimizer = offloaded(net, moments=moments)
    optimizer.load_state_dict(saved)
    net.train_from(optimizer, 6, 4)
    return found | {"gone on": digests(net, optimizer.state_dict())}


def made_on_drives(net, moments, **options):
    tier = stepwell.Volume([FOLDER], name=f"net-{moments}", commit_interval=1, **options)
    limit = 8 * sum(param.numel() for param in net.parameters()) + (2 << 20)
    return offloaded(net, moments=moments, shard=True, tier=tier, host_bytes_max=limit)


def on_drives(moments):
    """The same on drives, resumed from what the ranks have committed."""
    net = Net()
    optimizer = made_on_drives(net, moments)
    net.train_from(optimizer, 0, 6)
    found = {"saved": whole(net, optimizer)}
    del net, optimizer
    gc.collect()
    net = Net()
    optimizer = made_on_drives(net, moments, resume=True)
    assert optimizer.committed_steps == 6
    net.train_from(optimizer, 6, 4)
    return found | {"gone on": whole(net, optimizer)}


def trained(mesh):
    """Weights and moments, of parameters in shards of rows; whole ones without a mesh."""

    def placed(tensor):
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    net = Net(((33,), (5, 7), (411, 512)))
    for part in net.parts:
        part.weight = nn.Parameter(placed(part.weight.detach()))
    optimizer = offloaded(net)
    for step in range(5):
        for part, grad in zip(net.parts, net.grads(step), strict=True):
            part.weight.grad = placed(grad.clone())
        optimizer.step()
    moments = state_tensors(optimizer.state_dict())
    found = [part.weight.detach() for part in net.parts]
    found += [value for (_, name), value in moments.items() if name.startswith("exp_avg")]
    return [value.full_tensor() if mesh is not None else value for value in found]


def main():
    dist.init_process_group("gloo")
    found = {
        f"{function.__name__} {moments}": function(moments)
        for moments in ("fp32", "bf16", "q8")
        for function in (shared, on_drives)
    }
    found["shards"] = trained(dist.init_device_mesh("cpu", (2,)))
    found["whole"] = trained(None)
    torch.save(found, FOLDER / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
