"""The program (see deepspeed_run) of `offload_optimizer.ratio` under ZeRO-3.

On the CPU accelerator DeepSpeed steps all sub-groups with DeepSpeedCPUAdam, as without a ratio.
"""

import os
from pathlib import Path

import torch
from deepspeed_engines import (
    configuration,
    initialize,
    initialize_groups,
    partitions,
    perceptron,
    train,
    vectors,
)
from deepspeed_engines import squared as loss_of
from deepspeed_paths import both, poisoned
from insides import is_on_device

# Each parameter is a sub-group. The device has the first half of them.
SUB_GROUPS = {"sub_group_size": 1}


def halved(ratio=0.5, **options):
    config = configuration(stage=3, zero=SUB_GROUPS, **options)
    config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    return config


def with_groups(config):
    engine = initialize_groups(config)
    train(engine, vectors(1), loss_of)
    # As a scheduler does.
    engine.optimizer.param_groups[0]["lr"] /= 2
    losses = train(engine, vectors(3, first=1), loss_of)
    found = losses, partitions(engine)
    engine.destroy()
    return found


def cleared(config):
    """Gradients are cleared between a backward and its step, and before another backward."""
    engine = initialize(perceptron(), config)
    optimizer = engine.optimizer
    found = train(engine, vectors(2), loss_of, before_step=optimizer.zero_grad)
    engine.backward(loss_of(engine, next(vectors(1))))
    optimizer.zero_grad()
    found += train(engine, vectors(2, first=2), loss_of)
    found = found, partitions(engine)
    engine.destroy()
    return found


def gradients():
    """Those of a parameter in the share and of another: found, set, and stepped."""
    from deepspeed import utils

    (batch,) = vectors(1)
    engine = initialize(perceptron(), halved(dtype="bf16"))
    found = []
    for index, param in enumerate((engine.module[0].weight, engine.module[2].bias)):
        assert is_on_device(engine.optimizer, param) == (index == 0)
        engine.backward(loss_of(engine, batch))
        before = utils.safe_get_full_grad(param).clone()
        utils.safe_set_full_grad(param, torch.full_like(before, 7.0))
        engine.step()
        moment = utils.safe_get_full_optimizer_state(param, "exp_avg").clone()
        found.append((before, moment, float(engine.get_global_grad_norm())))
    engine.destroy()
    reference = perceptron().bfloat16()
    loss_of(reference, batch).backward()
    return found, reference[0].weight.grad.float()


def checkpoints(folder):
    found = {}
    config = halved(dtype="bf16", clip=0.1)
    for saves in (True, False):
        saved = str(Path(folder) / str(saves))
        engine = initialize(perceptron(), {**config, "stepwell": {"engine": saves}})
        train(engine, vectors(2), loss_of)
        engine.save_checkpoint(saved)
        after = train(engine, vectors(2, first=2), loss_of), partitions(engine)
        engine.destroy()
        for loads in (True, False):
            if saves or loads:
                engine = initialize(perceptron(seed=1), {**config, "stepwell": {"engine": loads}})
                engine.load_checkpoint(saved)
                resumed = train(engine, vectors(2, first=2), loss_of), partitions(engine)
                engine.destroy()
                found[saves, loads] = after, resumed
    return found


def program_twin_flow(result, folder):
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    cases = {
        "bf16": halved(dtype="bf16", clip=0.1),
        "all on the device": halved(ratio=0.0, clip=0.1),
        "accumulated": halved(dtype="bf16", clip=0.1, gradient_accumulation_steps=2),
        "fp32": halved(clip=0.1),
        "Adam": halved(optimizer="Adam", params={"adam_w_mode": False}),
        "no correction": halved(params={"bias_correction": False}),
    }
    for name, config in cases.items():
        result[name] = both(config, steps=3)
    result["groups"] = [
        with_groups(halved() | {"stepwell": {"engine": engine}}) for engine in (True, False)
    ]
    result["cleared"] = [
        cleared(halved() | {"stepwell": {"engine": engine}}) for engine in (True, False)
    ]
    result["nonfinite"] = poisoned(halved(dtype="bf16"))
    result["gradients"] = gradients()
    result["checkpoints"] = checkpoints(folder)


def program_twin_flow_ranks(result):
    """What each of several ranks trains."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    for name, config in {"bf16": halved(dtype="bf16", clip=0.1), "fp32": halved(clip=0.1)}.items():
        result[name] = both(config, steps=3, rank=rank)
