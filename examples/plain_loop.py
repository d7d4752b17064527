"""A loop of your own: the model on the GPU, its optimizer in host memory.

python examples/plain_loop.py --model meta-llama/Llama-3.2-1B
"""

import argparse

import stepwell
import torch
from small_llama import SMALL, batches, model_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = model_of(args.model).to(device)
optimizer = stepwell.OffloadAdamW(model, lr=1e-3, clip_norm=1.0)
for ids in batches(args.steps):
    ids = ids.to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()  # clips, and returns early: new weights arrive during the next forward
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}, norm of the gradients {optimizer.grad_norm:.3f}")
