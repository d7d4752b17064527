"""transformers' Trainer, and TRL's trainers alike: one line makes its optimizer an OffloadAdamW.

python examples/trainer.py --model meta-llama/Llama-3.2-1B
"""

import argparse

import stepwell.offload
import torch
import transformers
from small_llama import SMALL, batches, model_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=SMALL)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="trainer-output")
args = parser.parse_args()

arguments = transformers.TrainingArguments(
    output_dir=args.out,
    max_steps=args.steps,
    learning_rate=1e-3,
    weight_decay=0.1,
    max_grad_norm=1.0,
    gradient_accumulation_steps=2,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
dataset = [{"input_ids": ids, "labels": ids} for batch in batches(32) for ids in batch]
trainer = transformers.Trainer(model_of(args.model), arguments, train_dataset=dataset)
stepwell.offload.offload_trainer(trainer, moments="q8")
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"loss {float(entry['loss']):.4f}")
