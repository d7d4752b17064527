"""A program (see deepspeed_run) of what DeepSpeed's users read, set and say.

On the offload engine, and on DeepSpeed's own path.
"""

import math

import torch
from deepspeed_engines import (
    configuration,
    initialize,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)
from insides import core_of_partitions, partitions_of

PRECISE = 1.0009765625
"""Not a bf16 number."""


class Forked(torch.nn.Module):
    """Its second branch is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.first(x)


def program_access(result):
    """By the names of cases: what the engine shows, and what DeepSpeed's own path does."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    scaled = {"loss_scale": 1024.0}
    overflowing = {"initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 1000}
    unchecked = {"check_grad_overflow": False}
    for stage in (2, 3):
        named = {
            "read": (read, configuration(dtype="bf16", clip=0.01)),
            "read, scaled": (read, configuration(dtype="fp16", precision=scaled, clip=0.01)),
            "read, overflow": (read, configuration(dtype="fp16", precision=overflowing)),
            "set": (set_gradients, configuration(dtype="bf16")),
            "state": (set_state, configuration(dtype="bf16")),
            "set early": (
                set_early,
                configuration(dtype="bf16", gradient_accumulation_steps=2),
            ),
            "unchecked": (poisoned, configuration(dtype="bf16", clip=1.0, precision=unchecked)),
        }
        if stage == 2:
            used = {"ignore_unused_parameters": False}
            named |= {
                "set, clipped": (set_gradients, configuration(dtype="bf16", clip=0.1)),
                "set, accumulated": (
                    set_gradients,
                    configuration(dtype="bf16", gradient_accumulation_steps=2),
                ),
                "unused": (unused, configuration(dtype="bf16", zero=used)),
            }
        for name, (run, config) in named.items():
            config["zero_optimization"]["stage"] = stage
            result[f"{name}, ZeRO-{stage}"] = [
                run({**config, "stepwell": {**config.get("stepwell", {}), "engine": engine}})
                for engine in (True, False)
            ]
    result["too early"] = [too_early(stage) for stage in (2, 3)]
    result["clipped by what is set"] = clipped_by_what_is_set()
    result["pinned"] = [pinned(says) for says in (None, True, False)]
    result["timed"] = timed()


def too_early(stage):
    """What reading a moment before the first step says."""
    from deepspeed import utils

    said = []
    for is_engine in (True, False):
        config = configuration(stage=stage, optimizer="StepwellAdamW")
        engine = initialize(perceptron(), {**config, "stepwell": {"engine": is_engine}})
        try:
            utils.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")
        except ValueError as error:
            said.append(str(error))
        engine.destroy()
    return said


def weights(engine):
    return [getattr(param, "ds_tensor", param).float() for param in engine.module.parameters()]


def read(config, *, model=perceptron, rank=0):
    """Gradients and norms before and after steps."""
    from deepspeed import utils

    engine = initialize(model(), config)
    weight, bias = engine.module[0].weight, engine.module[2].bias
    seen = []

    def look():
        if engine.is_gradient_accumulation_boundary():
            grads = [utils.safe_get_full_grad(param).float() for param in (weight, bias)]
            seen.extend(grad.clone() for grad in grads)
        if hasattr(engine.optimizer, "scaled_global_norm"):
            seen.append(float(engine.optimizer.scaled_global_norm()))

    look()
    for batch in vectors(3, rank=rank):
        engine.backward(squared(engine, batch))
        look()
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_last:
            seen.append(utils.safe_get_full_grad(weight).float().clone())
        seen.append(float(engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return seen


def set_gradients(config, *, model=perceptron, rank=0):
    """Gradients that are set, as they are read, and what steps make of them."""
    from deepspeed import utils

    engine = initialize(model(), config)
    weight, bias, other = engine.module[0].weight, engine.module[2].bias, engine.module[2].weight
    seen = []
    for count, batch in enumerate(vectors(4, rank=rank)):
        if count == 3:
            # A gradient takes its place.
            utils.safe_set_full_grad(other, torch.full(other.shape, PRECISE))
        engine.backward(squared(engine, batch))
        if count == 1:
            utils.safe_set_full_grad(weight, torch.full(weight.shape, PRECISE))
            utils.safe_update_full_grad_vectorized([other], lambda grad, _: grad * PRECISE)
        if count == 1 and hasattr(weight, "ds_id"):
            local = utils.safe_get_local_grad(bias)
            utils.safe_set_local_grad(bias, torch.full(local.shape, PRECISE))
        params = (weight, bias, other)
        is_last = engine.is_gradient_accumulation_boundary()
        if is_last:
            seen += [utils.safe_get_full_grad(param).float().clone() for param in params]
        engine.step()
        if not is_last:
            continue
        seen += [utils.safe_get_full_grad(param).float().clone() for param in params]
        seen += [utils.safe_get_full_optimizer_state(param, "exp_avg").clone() for param in params]
    seen += [flat for flat, _ in partitions(engine)]
    engine.destroy()
    return seen


def set_early(config):
    """A gradient that is set after the first of two backwards of a step, and before the first."""
    from deepspeed import utils

    engine = initialize(perceptron(), config)
    weight = engine.module[0].weight
    seen = []
    for count, batch in enumerate(vectors(4)):
        if count == 2:
            utils.safe_set_full_grad(weight, torch.full(weight.shape, PRECISE))
        engine.backward(squared(engine, batch))
        if count == 0:
            utils.safe_set_full_grad(weight, torch.full(weight.shape, PRECISE))
        seen.append(utils.safe_get_full_grad(weight).float().clone() if count < 2 else count)
        engine.step()
    seen += [flat for flat, _ in partitions(engine)]
    engine.destroy()
    return seen


def set_state(config):
    """Parameters and moments that are set, as they are read, and what a step makes of them."""
    from deepspeed import utils

    engine = initialize(perceptron(), config)
    train(engine, vectors(1), squared)
    weight, bias = engine.module[0].weight, engine.module[2].bias
    utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, PRECISE))
    for name in ("exp_avg", "exp_avg_sq"):
        utils.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.1), name)
    seen = [utils.safe_get_full_fp32_param(param).clone() for param in (weight, bias)]
    if hasattr(weight, "ds_id"):
        local = utils.safe_get_local_fp32_param(bias)
        utils.safe_set_local_fp32_param(bias, torch.full(local.shape, PRECISE))
        utils.safe_set_local_optimizer_state(bias, torch.full(local.shape, 0.1), "exp_avg")
        seen += [
            utils.safe_get_local_fp32_param(bias).clone(),
            utils.safe_get_local_optimizer_state(bias, "exp_avg").clone(),
        ]
    train(engine, vectors(1, first=1), squared)
    seen += [
        utils.safe_get_full_optimizer_state(weight, name).clone()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    seen += [flat for flat, _ in partitions(engine)] + weights(engine)
    engine.destroy()
    return seen


def poisoned(config):
    """A step with a NaN among the gradients, and one after it."""
    engine = initialize(perceptron(), config)
    train(engine, vectors(1), squared)
    hook = engine.module[0].bias.register_hook(
        lambda grad: torch.cat([torch.full_like(grad[:1], math.nan), grad[1:]])
    )
    train(engine, vectors(1, first=1), squared)
    hook.remove()
    seen = [flat for flat, _ in partitions(engine)] + weights(engine)
    seen += [float(engine.get_global_grad_norm()), engine.skipped_steps]
    train(engine, vectors(1, first=2), squared)
    seen += [flat for flat, _ in partitions(engine)]
    engine.destroy()
    return seen


def unused(config):
    """What is raised for a parameter without a gradient, and what has changed."""
    engine = initialize(Forked(), config)
    before = weights(engine)
    try:
        train(engine, vectors(1), squared)
    except AssertionError as error:
        return [
            "Assertion",
            "ignore_unused_parameters" in str(error),
            *(torch.equal(*pair) for pair in zip(before, weights(engine), strict=True)),
        ]
    return ["nothing was raised"]


def clipped_by_what_is_set():
    """Under ZeRO-3, where DeepSpeed's own path clips by the gradients of the backward."""
    from deepspeed import utils

    engine = initialize(perceptron(), configuration(dtype="bf16", stage=3, clip=1e-3))
    weight = engine.module[0].weight
    engine.backward(squared(engine, next(vectors(1))))
    utils.safe_set_full_grad(weight, torch.full((64, 32), 7.0))
    engine.step()
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg").clone()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return moment, float(norm)


def pinned(says):
    """How many bytes are pinned where the JSON says `says` of it; None: it does not."""
    config = configuration(dtype="bf16")
    if says is not None:
        config["zero_optimization"]["offload_optimizer"]["pin_memory"] = says
    engine = initialize(perceptron(), config)
    losses = train(engine, vectors(3), squared)
    pinned_nbytes = core_of_partitions(partitions_of(engine.optimizer)).pinned_nbytes
    engine.destroy()
    return pinned_nbytes, losses


def timed():
    """What is under way when a step returns, with timers and without; and what they say of it.

    In milliseconds; and the seconds that the step took.
    """
    found = []
    for is_timed in (True, False):
        config = configuration(dtype="bf16", wall_clock_breakdown=is_timed)
        engine = initialize(perceptron(), config)
        train(engine, vectors(1), squared)
        timers, logged = engine.optimizer.timers, []
        # The log begins them anew.
        timers.log = lambda names, timers=timers, logged=logged, **_: logged.extend(
            timers(name).elapsed(reset=False) for name in names if name == "optimizer_step"
        )
        engine.backward(squared(engine, next(vectors(1, first=1))))
        engine.step()
        busy = partitions_of(engine.optimizer).is_busy
        found.append((engine.stepwell_plan.gate, busy, logged, engine.optimizer.timing["step"]))
        engine.destroy()
    return found
