"""Programs (see deepspeed_run) of ZenFlow on the offload engine: its updates are deferred."""

import importlib
import math
import os

import torch
from deepspeed_engines import (
    LR,
    Lines,
    configuration,
    initialize,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)
from insides import are_weights_late, partitions_of

ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 3,
    "update_interval": 3,
    "full_warm_up_rounds": 2,
    "overlap_step": True,
}
STEPS = 11
STAGES = (1, 2)
SAVED_AT, LAST = 7, 14
"""The step that a run is saved at, and the one that it is compared at."""


class Sums(torch.nn.Module):
    """The loss is linear in all parameters: gradients do not depend on how late weights are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # Rows that the border of two ranks cuts, a vector, and a branch that is not always used.
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, width) for width in (41, 8, 3))

    def forward(self, x, used=3):
        x = x.to(self.layers[0].weight.dtype)
        return sum(
            (layer(x).float() * (1 + place)).sum() for place, layer in enumerate(self.layers[:used])
        )


def linear(engine, step, rank, *, poison=False):
    """The loss of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(4, 37, generator=generator)
    if poison:
        x[0, 0] = math.nan
    return engine(x.to(engine.device), used=2 if step % 5 == 3 else 3)


def with_zenflow(**changed):
    return {"zenflow": {**ZENFLOW, **changed}}


def linear_run(config, *, steps=STEPS, poisoned=(), look=None):
    """What a run ends with. `look` is called after each step."""
    engine = initialize(Sums(), config)
    rank = torch.distributed.get_rank()
    every = config.get("gradient_accumulation_steps", 1)
    is_late = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        for micro in range(every):
            is_poisoned = step in poisoned and micro == 0
            engine.backward(linear(engine, step * every + micro, rank, poison=is_poisoned))
            engine.step()
        is_late.append(are_weights_late(engine.optimizer))
        if look is not None:
            look(engine, step)
    result = {
        "class": type(engine.optimizer).__name__,
        "late": is_late,
        "norm": float(engine.get_global_grad_norm()),
        "skipped": engine.skipped_steps,
    }
    if look is None and hasattr(engine.optimizer, "drain"):
        engine.optimizer.drain()
    result["weights"] = [param.detach().cpu().clone() for param in engine.module.parameters()]
    result["partitions"] = partitions(engine)
    engine.destroy()
    return result


CASES = {
    "ZeRO-2": {"dtype": "bf16", "clip": 0.5},
    "ZeRO-1, fp32": {"stage": 1},
    "accumulated": {"dtype": "bf16", "clip": 0.5, "gradient_accumulation_steps": 2},
    "fp16": {"dtype": "fp16", "precision": {"loss_scale": 8.0}},
}


def program_zenflow_exact_sums(result, cases):
    """Runs whose gradients are the same with and without delay."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    for name in cases:
        options = CASES[name]
        for is_deferred in (True, False):
            zero = with_zenflow() if is_deferred else {}
            result[name, is_deferred] = linear_run(configuration(**options, zero=zero))
    for is_deferred in (True, False):
        zero = with_zenflow() if is_deferred else {}
        config = configuration(**CASES["ZeRO-2"], zero=zero)
        result["poisoned", is_deferred] = linear_run(config, poisoned=(4, 7))


def program_zenflow_on_engine(result):
    """Training on one rank: against OffloadAdamW, looks, checkpoints, refusals, DeepSpeed's own."""
    import stepwell
    import stepwell.deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_grad,
    )

    stepwell.deepspeed.register()

    # The same run without DeepSpeed.
    engine = initialize(perceptron(), configuration(optimizer="StepwellAdamW", zero=with_zenflow()))
    result["losses"] = train(engine, vectors(STEPS), squared)
    result["oldest"] = engine.optimizer.timing["oldest_age"]
    model = perceptron()
    deferred = stepwell.Deferred(interval=3, fraction=0.1, reselect=3, warmup_steps=2)
    optimizer = stepwell.OffloadAdamW(model, lr=LR, weight_decay=0.01, deferred=deferred)
    expected = []
    for batch in vectors(STEPS):
        optimizer.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    result["expected losses"] = expected

    # Every look sees all updates.
    weights = [param.detach().clone() for param in engine.module.parameters()]
    result["weights"], result["expected weights"] = weights, [*model.parameters()]
    result["exact after a look"] = partitions_of(engine.optimizer).engine.is_settled
    train(engine, vectors(3, first=STEPS), squared)
    result["late"] = are_weights_late(engine.optimizer)
    looked = safe_get_full_fp32_param(engine.module[0].weight)
    result["master"] = torch.equal(looked, engine.module[0].weight.detach())
    result["late after a look"] = are_weights_late(engine.optimizer)
    train(engine, vectors(3, first=STEPS + 3), squared)
    looked = safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg").clone()
    engine.optimizer.drain()
    drained = safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")
    result["moment"] = torch.equal(looked, drained)

    # Gradients can be read before the step.
    loss = squared(engine, next(vectors(1, first=50)))
    engine.backward(loss)
    grad = safe_get_full_grad(engine.module[0].weight)
    result["gradient"] = None if grad is None else float(grad.norm())
    raised = []
    for access in (safe_set_full_grad, lambda param, _: safe_get_full_grad(param)):
        try:
            access(engine.module[0].weight, torch.ones(64, 32))
        except ValueError as error:
            raised.append(str(error))
        if len(raised) == 1:
            engine.step()
    result["refused"] = raised
    engine.destroy()

    # The end of an engine applies what is pending.
    result["ended"] = []
    for is_drained in (True, False):
        engine = initialize(perceptron(), configuration(dtype="bf16", zero=with_zenflow()))
        train(engine, vectors(STEPS), squared)
        params = list(engine.module.parameters())
        if is_drained:
            engine.optimizer.drain()
        engine.destroy()
        result["ended"].append([param.detach().clone() for param in params])

    # As exact while it warms up.
    config = {"dtype": "bf16", "clip": 0.1, "gradient_accumulation_steps": 2}
    for name, zero in (("warm-up", with_zenflow(full_warm_up_rounds=50)), ("exact", {})):
        engine = initialize(perceptron(), configuration(**config, zero=zero))
        losses = train(engine, vectors(8), squared)
        result[name] = losses, partitions(engine)
        engine.destroy()


def program_zenflow_saves(result, folder):
    """Ranks that save, go on, and resume, under ZeRO-1 and -2."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for stage in STAGES:
        saved_and_resumed(result.setdefault(stage, {}), f"{folder}/{stage}", stage)


def saved_and_resumed(result, folder, stage):
    from deepspeed.utils import logger, safe_get_full_fp32_param

    lines = Lines()
    logger.addHandler(lines)
    rank = int(os.environ["RANK"])
    config = configuration(
        stage=stage, dtype="bf16", clip=0.5, zero=with_zenflow(update_interval=2)
    )

    def trained(engine, first, last):
        return train(engine, vectors(last - first, first=first, rank=rank), squared)

    engine = initialize(perceptron(), config)
    trained(engine, 0, SAVED_AT)
    result["late before"] = are_weights_late(engine.optimizer)
    engine.save_checkpoint(folder)
    saved = partitions(engine)
    weights = [param.detach().clone() for param in engine.module.parameters()]
    losses = trained(engine, SAVED_AT, LAST)
    result["late"] = are_weights_late(engine.optimizer)
    # Of several ranks no look at the parameter has applied anything.
    result["masters"] = [safe_get_full_fp32_param(each) for each in engine.module.parameters()]
    result["went on"] = saved, weights, losses, partitions(engine)
    # Which has applied what is pending to the masters of each rank.
    result["late weights"] = [param.detach().clone() for param in engine.module.parameters()]
    engine.module.state_dict()
    engine.eval()
    with torch.no_grad():
        squared(engine, next(vectors(1)))
    engine.optimizer.drain()
    result["weights"] = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    # By an engine that has trained before.
    engine = initialize(perceptron(seed=1), config)
    trained(engine, 40, 44)
    engine.load_checkpoint(folder)
    result["loaded"] = partitions(engine)
    result["resumed"] = trained(engine, SAVED_AT, LAST), partitions(engine)
    engine.destroy()
    engine = initialize(perceptron(seed=1), config)
    engine.load_checkpoint(folder)
    result["one step"] = trained(engine, SAVED_AT, SAVED_AT + 1), partitions(engine)
    engine.destroy()
    logger.removeHandler(lines)
    result["warnings"] = [line for line in lines.lines if "updates, since several" in line]


def program_zenflow_loads(result, folder):
    """DeepSpeed without Stepwell loads what was saved, and takes a step."""
    # It would be compiled.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    rank = int(os.environ["RANK"])
    for stage in STAGES:
        config = configuration(
            stage=stage,
            dtype="bf16",
            clip=0.5,
            params={"torch_adam": True},
            zero_force_ds_cpu_optimizer=False,
        )
        engine = initialize(perceptron(seed=2), config)
        engine.load_checkpoint(f"{folder}/{stage}")
        found = result[stage] = {"class": type(engine.optimizer).__name__}
        found["base"] = type(engine.optimizer.optimizer).__module__
        found["loaded"] = partitions(engine)
        found["weights"] = [param.detach().clone() for param in engine.module.parameters()]
        losses = train(engine, vectors(1, first=SAVED_AT, rank=rank), squared)
        found["one step"] = losses, partitions(engine)
        engine.destroy()
