"""A user's script for DeepSpeed: `stepwell run net_deepspeed.py FOLDER`.

It knows nothing of Stepwell. What comes of it lies in `FOLDER/programs.pt`, each by its name.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

LR, CLIP = 1e-2, 0.05


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def loss_of(model, index):
    x = torch.sin(torch.arange(4 * 32.0).view(4, 32) * 0.37 + index)
    return (model(x.to(next(iter(model.parameters())).dtype)).float() - 1).square().mean()


def is_ours(engine):
    return any(each.__module__.startswith("stepwell") for each in type(engine.optimizer).__mro__)


def engine_of(config):
    model = perceptron()
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]


def train(engine, first, steps, micros=1):
    for step in range(first, first + steps):
        for micro in range(micros):
            engine.backward(loss_of(engine, 10 * step + micro))
            engine.step()


def contents(engine):
    """Masters and moments."""
    return [
        found.detach().clone()
        for param in engine.module.parameters()
        for found in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
            safe_get_full_optimizer_state(param, "exp_avg_sq"),
        )
    ]


def written_and_resumed(config, folder, micros):
    """Trains, looks, writes masters and moments, saves; then goes on, and resumes beside that."""
    engine = engine_of(config)
    found = {"on the engine": is_ours(engine)}
    train(engine, 0, 3, micros)
    for micro in range(micros):
        engine.backward(loss_of(engine, 30 + micro))
        if micro < micros - 1:
            engine.step()
    found["gradients"] = [safe_get_full_grad(param) for param in engine.module.parameters()]
    engine.step()
    weight = engine.module[0].weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)
    exp_avg = safe_get_full_optimizer_state(weight, "exp_avg")
    safe_set_full_optimizer_state(weight, torch.zeros_like(exp_avg), "exp_avg")
    train(engine, 4, 2, micros)
    engine.save_checkpoint(str(folder), tag="net")
    train(engine, 6, 2, micros)
    found["contents"] = contents(engine)
    engine.destroy()
    engine = engine_of(config)
    engine.load_checkpoint(str(folder), tag="net")
    train(engine, 6, 2, micros)
    found["resumed"] = contents(engine)
    engine.destroy()
    return found


def with_torch(micros):
    """The same, of which nothing is saved."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    found = {}
    for step in range(8):
        optimizer.zero_grad()
        for micro in range(micros):
            (loss_of(model, 10 * step + micro) / micros).backward()
        if step == 3:
            found["gradients"] = [param.grad.clone() for param in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if step == 4:
            # A master that was written gets to the weights with the next step.
            model[0].weight.data *= 0.5
            optimizer.state[model[0].weight]["exp_avg"].zero_()
        optimizer.step()
    states = optimizer.state.values()
    found["contents"] = [
        tensor
        for param, state in zip(model.parameters(), states, strict=True)
        for tensor in (param.detach(), state["exp_avg"], state["exp_avg_sq"])
    ]
    return found


def programs(folder):
    found = {"torch": with_torch(1), "torch, two micro-batches": with_torch(2)}
    for stage in (1, 2, 3):
        for device in ("cpu", "nvme"):
            for dtype in ("fp32", "bf16"):
                name = f"{stage} {device} {dtype}"
                micros = 2 if stage == 2 else 1
                offload = {"device": device, "nvme_path": str(folder)}
                config = {
                    "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": micros,
                    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.05}},
                    "gradient_clipping": CLIP,
                    "zero_optimization": {"stage": stage, "offload_optimizer": offload},
                }
                if dtype != "fp32":
                    config[dtype] = {"enabled": True}
                place = folder / name.replace(" ", "-")
                found[name] = written_and_resumed(config, place, micros)
    return found


def main():
    folder = Path(sys.argv[1])
    torch.save(programs(folder), folder / "programs.pt")


if __name__ == "__main__":
    main()
