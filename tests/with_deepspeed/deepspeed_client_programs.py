"""Programs (see deepspeed_run) of libraries between the user and DeepSpeed."""

import logging
import os
import sys

import torch
from deepspeed_engines import (
    Lines,
    configuration,
    llama,
    perceptron,
)

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
BATCHES = 3


def plugin():
    """A DeepSpeed JSON as accelerate takes it: with CPU offload, and without an optimizer."""
    config = configuration(dtype="bf16")
    del config["optimizer"]
    return {**config, "train_batch_size": 4}


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 32, generator=generator) for _ in range(BATCHES)]


def prepared(accelerator, make):
    """What three steps by way of accelerate come to."""
    model = perceptron()
    loader = torch.utils.data.DataLoader(torch.cat(batches()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, make(model.parameters()), loader)
    losses = []
    for batch in loader:
        loss = (model(batch.bfloat16()).float() - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero = model.optimizer
    (flat,) = zero.single_partition_of_fp32_groups
    return {
        "class": type(zero).__name__,
        "base": type(zero.optimizer).__module__ + "." + type(zero.optimizer).__name__,
        "losses": losses,
        "state": sorted(zero.optimizer.state[flat]),
        "flat": flat.clone(),
    }


def initialized(make):
    """The same steps by way of DeepSpeed alone."""
    import deepspeed

    model = perceptron()
    engine = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=plugin())[
        0
    ]
    losses = []
    for batch in batches():
        loss = (engine(batch.bfloat16()).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    (flat,) = engine.optimizer.single_partition_of_fp32_groups
    return {"losses": losses, "flat": flat.clone()}


def program_accelerate(result, when):
    """Stepwell's optimizers given to accelerate, which is imported before or after `register`."""
    import stepwell
    import stepwell.deepspeed

    if when == "before":
        import accelerate
    stepwell.deepspeed.register()
    stepwell.deepspeed.register()
    result["imported"] = "accelerate" in sys.modules
    import accelerate
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    result["wrapped once"] = not hasattr(
        map_pytorch_optim_to_deepspeed.stepwell_original, "stepwell_original"
    )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=plugin())
    )

    def q8(params):
        return stepwell.AdamW(params, moments="q8", **OPTIONS)

    result["q8"] = prepared(accelerator, q8), initialized(q8)
    torchs = map_pytorch_optim_to_deepspeed(torch.optim.AdamW(perceptron().parameters(), **OPTIONS))
    result["torch's"] = type(torchs).__name__, torchs.adam_w_mode
    try:
        map_pytorch_optim_to_deepspeed(stepwell.OffloadAdamW(perceptron().parameters()))
    except ValueError as error:
        result["OffloadAdamW"] = str(error)

    # A version that does it in another way.
    handler = Lines()
    logging.getLogger("stepwell").addHandler(handler)
    del accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed
    stepwell.deepspeed.register()
    result["missing"] = handler.lines


# ---- on both paths ----

TOKENS = 16


def both_paths(run, *args):
    """What a run comes to on the engine, and on DeepSpeed's own path."""
    return [run({"engine": is_engine}, *args) for is_engine in (True, False)]


def trainer_json(stage, has_optimizer, block):
    """A JSON with "auto" for all that Trainer knows."""
    config = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": "auto",
            **(
                {
                    "offload_param": {"device": "cpu", "pin_memory": True},
                    "stage3_prefetch_bucket_size": "auto",
                    "stage3_param_persistence_threshold": "auto",
                    "stage3_gather_16bit_weights_on_model_save": True,
                }
                if stage == 3
                else {}
            ),
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "stepwell": block,
    }
    if has_optimizer:
        params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": params}
        warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return config


def trainer_run(block, folder, stage, has_optimizer):
    """Trainer's losses and what it saves at the end."""
    import accelerate
    import transformers

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        deepspeed=trainer_json(stage, has_optimizer, block),
        bf16=True,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        warmup_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(64, (16, TOKENS), generator=generator)
    rows = [{"input_ids": text, "labels": text} for text in texts]
    trainer = transformers.Trainer(model=llama(), args=arguments, train_dataset=rows)
    trainer.train()
    engine = trainer.model_wrapped
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(folder)
    result = {
        "class": type(engine.optimizer).__name__,
        "base": type(engine.optimizer.optimizer).__name__,
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry["grad_norm"]) for entry in logged],
        "masters": masters(engine),
        "saved": dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()),
    }
    engine.destroy()
    # The next model is not made under ZeRO-3.
    transformers.integrations.unset_hf_deepspeed_config()
    return result


def masters(engine):
    from deepspeed import utils

    return [
        utils.safe_get_full_fp32_param(param).clone()
        for param in engine.module.parameters()
        if param.requires_grad
    ]


def program_clients(result, folder):
    """Clients of DeepSpeed on both paths."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for stage, has_optimizer in ((2, True), (3, False)):
        result["trainer", stage] = both_paths(trainer_run, folder, stage, has_optimizer)
