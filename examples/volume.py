"""Optimizer state on drives, with commits. The same command goes on after a crash.

python examples/volume.py --model meta-llama/Llama-3.2-1B --drive /mnt/nvme0 --drive /mnt/nvme1
"""

import argparse

import stepwell
import torch
from small_llama import SMALL, batches, model_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--drive", action="append", required=True, help="a folder on each drive")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = model_of(args.model).to(device)
tier = stepwell.Volume(args.drive, name="example", resume=True, commit_interval=8)
optimizer = stepwell.OffloadAdamW(model, lr=1e-3, clip_norm=1.0, tier=tier)
# Weights and state are those of the last commit. The position in the data is the program's.
first = optimizer.committed_steps
print(f"from step {first}")
for ids in batches(args.steps, first=first):
    ids = ids.to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
