"""A DeepSpeed program as it is: ZeRO-3 with CPU offload. `stepwell run` has it step on Stepwell.

stepwell run examples/zero.py --model meta-llama/Llama-3.2-1B
deepspeed --num_gpus 2 --module stepwell run examples/zero.py
"""

import argparse

import deepspeed
from small_llama import SMALL, batches, model_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
engine, *_ = deepspeed.initialize(model=model_of(args.model), config=config)
for ids in batches(args.steps):
    ids = ids.to(engine.device)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    print(f"loss {loss.item():.4f}")
engine.destroy()
