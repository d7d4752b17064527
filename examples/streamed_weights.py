"""A model whose 16-bit weights do not fit on the GPU: layers fetch them from host memory.

python examples/streamed_weights.py --model meta-llama/Llama-3.1-8B --tokens 8192
"""

import argparse

import stepwell
import torch
from small_llama import SMALL, batches, model_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--tokens", type=int, default=64, help="per sample, of which a batch has 4")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = model_of(args.model)  # stays on the CPU
model.gradient_checkpointing_enable()
optimizer = stepwell.OffloadAdamW(model, lr=1e-3, clip_norm=1.0, weights="host", device=device)
for ids in batches(args.steps, args.tokens):
    ids = ids.to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
