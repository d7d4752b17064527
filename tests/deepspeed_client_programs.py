"""Programs (see deepspeed_run) of libraries between the user and DeepSpeed."""

import logging
import os
import sys

import torch
from deepspeed_engines import Lines, configuration, perceptron

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
