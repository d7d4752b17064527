"""A user's script for DeepSpeed: `stepwell run net_deepspeed.py FOLDER PART`.

It knows nothing of Stepwell. What comes of it lies in `FOLDER/PART.pt`, each by its name.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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
CORPUS = Path(__file__).resolve().parents[1] / "deepspeed_corpus.json"
STEPS = 3
# Of them, those that a loss scale of 2 ** 32 takes to come down.
STEPS_MAX = 40


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def loss_of(model, index):
    x = torch.sin(torch.arange(4 * 32.0).view(4, 32) * 0.37 + index)
    return (model(x.to(next(iter(model.parameters())).dtype)).float() - 1).square().mean()


def is_ours(engine):
    return any(each.__module__.startswith("stepwell") for each in type(engine.optimizer).__mro__)


# ---- published configurations ----


def filled(config, precision):
    """A configuration with its "auto" filled as HF Trainer does."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = json.loads(json.dumps(config))
    is_bf16 = "bf16" in config and precision != "fp16"
    warmup = config.get("scheduler", {}).get("params", {}).get("warmup_num_steps")
    arguments = SimpleNamespace(
        world_size=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
        learning_rate=LR,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.01,
        save_on_each_node=False,
        bf16=is_bf16,
        bf16_full_eval=False,
        fp16=not is_bf16,
        fp16_full_eval=False,
        get_warmup_steps=lambda _: warmup if isinstance(warmup, int) else 1,
    )
    trainer = HfTrainerDeepSpeedConfig(config)
    trainer.trainer_config_process(arguments)
    # A user who has written a value down gives the same to Trainer.
    trainer.mismatches.clear()
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=32))
    trainer.trainer_config_finalize(arguments, model, 100)
    if "train_batch_size" not in trainer.config:
        trainer.config.setdefault("train_micro_batch_size_per_gpu", 4)
    return trainer.config


def client_of(kind, groups, config):
    """The optimizer that the program gives to DeepSpeed; None: the JSON has it."""
    if kind is None:
        return None
    if kind == "DeepSpeedCPUAdam":
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=LR)
    optimizer = torch.optim.AdamW(groups, lr=LR)
    if not config.get("zero_force_ds_cpu_optimizer", True):
        return optimizer
    # Trainer's way there.
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    return map_pytorch_optim_to_deepspeed(optimizer)


def published(entry, folder):
    config = filled(entry["config"], entry.get("precision"))
    for block in config["zero_optimization"].values():
        if isinstance(block, dict) and "nvme_path" in block:
            block["nvme_path"] = str(folder)
    model = perceptron()
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in model.parameters() if each.ndim <= 1], "weight_decay": 0.0},
    ]
    client = client_of(entry.get("client"), groups, config)
    engine = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=None if client else groups, config=config
    )[0]
    losses = []
    while len(losses) < STEPS_MAX and engine.global_steps - engine.skipped_steps < STEPS:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, 100 * engine.global_steps + micro)
            losses.append(round(loss.item(), 6))
            engine.backward(loss)
            engine.step()
    masters = [safe_get_full_fp32_param(param) for param in model.parameters()]
    found = {
        "on the engine": is_ours(engine),
        "skipped": engine.skipped_steps,
        "losses": losses,
        "size of masters": round(sum(float(each.abs().sum()) for each in masters), 3),
    }
    engine.destroy()
    return found


def corpus(folder):
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for entry in json.loads(CORPUS.read_text()):
        try:
            found[entry["origin"]] = published(entry, folder)
        except Exception as error:  # noqa: BLE001
            found[entry["origin"]] = {"error": f"{type(error).__name__}: {error}"}
    return found


# ---- programs ----


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
    folder, part = Path(sys.argv[1]), sys.argv[2]
    found = {"corpus": corpus, "programs": programs}[part](folder)
    torch.save(found, folder / f"{part}.pt")


if __name__ == "__main__":
    main()
