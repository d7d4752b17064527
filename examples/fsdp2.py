"""FSDP2: shards on the GPUs, their optimizer state in host memory, each rank its own.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --model meta-llama/Llama-3.2-1B
"""

import argparse
import os

import stepwell
import torch
from small_llama import SMALL, batches, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
model = model_of(args.model).to(kind)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
# After fully_shard, whose shards it steps.
optimizer = stepwell.OffloadAdamW(model, lr=1e-3, clip_norm=1.0, accumulation_steps=1)
for ids in batches(args.steps):
    mine = ids.to(kind).chunk(mesh.size())[mesh.get_local_rank()]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if mesh.get_local_rank() == 0:
        print(f"loss {loss.item():.4f}")
optimizer.synchronize()
torch.distributed.destroy_process_group()
