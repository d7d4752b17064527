"""Programs (see deepspeed_run) of configurations that people have published.

`deepspeed_corpus.json` has them: facts, with where they are from, and why some cannot run here on
DeepSpeed alone.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed_engines import LR, initialize, perceptron, squared, train, vectors

CORPUS = json.loads(Path(__file__).parents[1].joinpath("deepspeed_corpus.json").read_text())
STEPS = 3
# Of them, those that a loss scale of 2 ** 32 takes to come down.
STEPS_MAX = 40
HIDDEN = 32


def filled(config, precision):
    """A configuration with its "auto" filled as HF Trainer does."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = json.loads(json.dumps(config))
    has_bf16 = "bf16" in config and precision != "fp16"
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
        bf16=has_bf16,
        bf16_full_eval=False,
        fp16=not has_bf16,
        fp16_full_eval=False,
        get_warmup_steps=lambda _: warmup if isinstance(warmup, int) else 1,
    )
    hf = HfTrainerDeepSpeedConfig(config)
    hf.trainer_config_process(arguments)
    # A user who has written a value down gives the same to Trainer.
    hf.mismatches.clear()
    hf.trainer_config_finalize(
        arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN)), 100
    )
    config = hf.config
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 4)
    return config


def client_optimizer(kind, groups, config):
    """The optimizer that the program gives to DeepSpeed; None: the JSON has it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if kind is None:
        return None
    if kind == "DeepSpeedCPUAdam":
        return DeepSpeedCPUAdam(groups, lr=LR)
    optimizer = torch.optim.AdamW(groups, lr=LR)
    if not config.get("zero_force_ds_cpu_optimizer", True):
        return optimizer
    # Trainer's way there.
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    return map_pytorch_optim_to_deepspeed(optimizer)


def num_applied(engine):
    """How many steps were taken and not skipped."""
    return engine.global_steps - engine.skipped_steps


def run(entry, folder):
    """What a configuration trains to, and the path that it takes. Its drive is a folder."""
    import deepspeed

    config = filled(entry["config"], entry.get("precision"))
    for block in config["zero_optimization"].values():
        if isinstance(block, dict) and "nvme_path" in block:
            block["nvme_path"] = folder
    model = perceptron()
    # As Trainer groups parameters.
    decaying = [param for param in model.parameters() if param.ndim > 1]
    plain = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = client_optimizer(entry.get("client"), groups, config)
    engine = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer else groups,
        config=config,
    )[0]
    losses, micro_batches = [], engine.gradient_accumulation_steps()
    while num_applied(engine) < STEPS and engine.global_steps < STEPS_MAX:
        batches = vectors(micro_batches, first=engine.global_steps * micro_batches)
        losses += train(engine, batches, squared)
    masters = [
        deepspeed.utils.safe_get_full_fp32_param(param).clone() for param in model.parameters()
    ]
    plan = getattr(engine, "stepwell_plan", None)
    result = {
        "losses": losses,
        "masters": masters,
        "skipped": engine.skipped_steps,
        "applied": num_applied(engine),
        "class": type(engine.optimizer).__name__,
        "reasons": None if plan is None else plan.reasons,
        "on engine": plan is not None and plan.zero_class is not None,
    }
    engine.destroy()
    return result


def program_corpus(result, registered, folder):
    """All that can run here: with Stepwell registered, or on DeepSpeed alone but for its op.

    Only the op that DeepSpeed would compile is Stepwell's then.
    """
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    if registered:
        import stepwell.deepspeed

        stepwell.deepspeed.register()
    else:
        from stepwell.deepspeed.native import cpu_adam

        OpBuilder._loaded_ops["cpu_adam"] = cpu_adam
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    # Makes cpuinfo quick.
    initialize(perceptron(), {"train_batch_size": 4}).destroy()
    for entry in CORPUS:
        if "not run alone" in entry and not registered:
            continue
        try:
            result[entry["origin"]] = run(entry, folder)
        except Exception as error:  # noqa: BLE001
            result[entry["origin"]] = {"error": f"{type(error).__name__}: {error}"}
