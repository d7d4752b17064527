"""Programs (see deepspeed_run) of gradients that must, or must not, be stepped by the engine."""

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
from deepspeed_paths import Forked, uneven
from deepspeed_release import fp32_sums
from insides import partitions_of

OUTSIDE = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2, accumulated": {"stage": 2, "gradient_accumulation_steps": 2},
    "ZeRO-3, small buckets": {"stage": 3, "zero": {"reduce_bucket_size": 100}},
}
"""Options of runs that use a layer outside of the engine's forward."""
LEFT_OUT = {"one backward": {}, "two": {"gradient_accumulation_steps": 2}}
"""Options of runs whose program leaves steps out."""


def fail_backward(engine, batch, *, plainly=False, loss_of=squared):
    """A backward that raises when some gradients are there already."""

    def fail(_):
        raise RuntimeError("out of memory")

    handle = engine.module[0].weight.register_hook(fail)
    loss = loss_of(engine, batch)
    try:
        loss.backward() if plainly else engine.backward(loss)
    except RuntimeError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("the backward did not fail")
    finally:
        handle.remove()


def recovered(config, failures, *, rank=0, model=perceptron):
    """A run in which backwards fail before some micro-batches; after each the hint is followed."""
    engine = initialize(model(), config)
    losses = []
    for number, batch in enumerate(
        vectors(4 * config.get("gradient_accumulation_steps", 1), rank=rank)
    ):
        if number in failures:
            (other,) = vectors(1, first=100 + number, rank=rank)
            fail_backward(engine, other, plainly=number % 2 == 1)
            engine.zero_grad()
            engine.optimizer.zero_grad()
        losses += train(engine, [batch], squared)
    found = losses, partitions(engine)
    engine.destroy()
    return found


def unrecovered(stage, after):
    """What the next call after a failed backward raises."""
    engine = initialize(perceptron(), configuration(dtype="bf16", stage=stage))
    first, second = vectors(2)
    fail_backward(engine, first)
    try:
        if after == "step":
            engine.step()
        elif after == "backward":
            engine.backward(squared(engine, second))
        else:
            squared(engine, second).backward()
    except ValueError as error:
        return str(error)
    finally:
        engine.optimizer.zero_grad()
        engine.destroy()
    return ""


def cleared(config):
    """`zero_grad` between the micro-batches of a step, none of which has failed."""
    engine = initialize(perceptron(), config)
    losses = train(engine, vectors(6), squared, before_step=engine.optimizer.zero_grad)
    found = losses, partitions(engine)
    engine.destroy()
    return found


def left_out(config, *, extra, drop=lambda engine: engine.optimizer.zero_grad()):
    """A run that has the backwards of a step, and drops them, `extra` times before each step."""
    engine = initialize(perceptron(), config)
    count = engine.gradient_accumulation_steps()
    losses = []
    for nth in range(4):
        for again in range(extra + 1):
            is_kept = again == extra
            for batch in vectors(count, first=nth * 10 + (0 if is_kept else 5 + again)):
                loss = squared(engine, batch)
                engine.backward(loss)
                is_boundary = engine.is_gradient_accumulation_boundary()
                if is_kept or not is_boundary:
                    engine.step()
                else:
                    drop(engine)
                    # Where the first micro-batch of the same step is next.
                    engine.micro_steps -= count - 1
            losses += [loss.item()] * is_kept
    found = losses, partitions(engine)
    engine.destroy()
    return found


def outside(config):
    """A run whose loss uses a layer outside of the engine's forward: its gradients come first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    body, head = model
    model.forward = body.forward

    def loss_of(engine, x):
        return (head(engine(x.bfloat16())).float() - 1).square().mean()

    engine = initialize(model, config)
    losses = train(engine, vectors(6), loss_of)
    found = losses, partitions(engine)
    engine.destroy()
    return found


def from_two_forwards(config):
    """A run whose losses are of two forwards each; one backward of them raises, and is dropped."""

    def loss_of(engine, x):
        return squared(engine, x) + squared(engine, -x)

    engine = initialize(perceptron(), config)
    losses = []
    for nth in range(4):
        if nth == 2 and config["stepwell"]["engine"]:
            (other,) = vectors(1, first=100)
            fail_backward(engine, other, loss_of=loss_of)
            engine.optimizer.zero_grad()
        losses += train(engine, vectors(1, first=nth), loss_of)
        # As a program that clears before each backward.
        engine.optimizer.zero_grad()
    found = losses, partitions(engine)
    engine.destroy()
    return found


def refused(*, is_on_engine):
    """Losses after a step that was refused for a NaN."""
    block = {"engine": is_on_engine}
    engine = initialize(perceptron(), configuration(dtype="bf16", stepwell=block))
    # As the versions of DeepSpeed that do not look unless the JSON says so.
    engine.optimizer.check_grad_overflow = False
    train(engine, vectors(1), squared)
    (bad,) = vectors(1, first=5)
    bad[0, 0] = math.nan
    before = partitions(engine)
    try:
        train(engine, [bad], squared)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
    # What DeepSpeed's own path needs, after an exception in its step.
    engine.optimizer.zero_grad()
    found = {"before": before, "after": partitions(engine), "message": message}
    found["losses"] = train(engine, vectors(3, first=10), squared)
    found["partitions"] = partitions(engine)
    engine.destroy()
    return found


COUNTS = (1, 3, 1, 2)
"""How many micro-batches a step has, one after the other."""


def resized(config):
    """A run in which the program changes how many micro-batches a step has, as the batch grows."""
    engine = initialize(perceptron(), config)
    losses, first = [], 0
    for count in COUNTS:
        engine.set_train_batch_size(count * engine.train_micro_batch_size_per_gpu())
        losses += train(engine, vectors(2 * count, first), squared)
        first += 2 * count
    found = losses, partitions(engine), engine.global_steps
    engine.destroy()
    return found


def huge(config, factor):
    """A step with finite gradients, of which float32 cannot hold the squares."""
    engine = initialize(perceptron(), config)
    train(engine, vectors(1), squared)
    before = partitions(engine)
    (batch,) = vectors(1, first=1)
    handles = [
        param.register_hook(lambda grad: grad * factor) for param in engine.module.parameters()
    ]
    train(engine, [batch], squared)
    for handle in handles:
        handle.remove()
    found = {
        "before": before,
        "after": partitions(engine),
        "norm": float(engine.get_global_grad_norm()),
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return found


def skipped(stage):
    """The moments of a parameter that had a gradient only in a step that was skipped."""
    from deepspeed import utils

    engine = initialize(
        Forked(), configuration(dtype="bf16", stage=stage, params={"betas": [0.5, 0.5]})
    )
    first, second = vectors(2)
    weight = engine.module.second.weight
    engine.backward(squared(engine, first))
    utils.safe_set_full_grad(engine.module.first.weight, torch.full((32, 32), math.nan))
    engine.step()
    assert engine.skipped_steps == 1
    train(engine, [second], squared)
    found = utils.safe_get_full_optimizer_state(weight, "exp_avg").clone()
    engine.destroy()
    return found


def without_memory(stage, *, is_refused):
    """A run in which there is no memory for a step, or that batch does not come."""
    engine = initialize(perceptron(), configuration(dtype="bf16", stage=stage))
    losses = train(engine, vectors(1), squared)
    if is_refused:
        stepping = partitions_of(engine.optimizer)
        prepare = stepping.prepare

        def refuse(*_, **__):
            raise MemoryError

        stepping.prepare = refuse
        try:
            train(engine, vectors(1, first=5), squared)
        except MemoryError:
            stepping.prepare = prepare
    losses += train(engine, vectors(2, first=10), squared)
    found = losses, partitions(engine)
    engine.destroy()
    return found


def failed_backwards(stage):
    """Runs with and without backwards that fail, and what comes without what the hint says."""
    found = {}
    for name, gas in {"at once": 1, "accumulated": 3}.items():
        config = configuration(stage=stage, dtype="bf16", gradient_accumulation_steps=gas)
        # In the first micro-batch of a step: nothing else is lost.
        found[name] = recovered(config, ()), recovered(config, (0, 2 * gas))
    for after in ("step", "backward", "plain backward"):
        found[after] = unrecovered(stage, after)
    return found


def program_gradients(result):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for name, options in OUTSIDE.items():
        result[f"outside, {name}"] = [
            outside(configuration(dtype="bf16", stepwell={"engine": engine}, **options))
            for engine in (True, False)
        ]
    for stage in (1, 2, 3):
        config = configuration(stage=stage, dtype="bf16")
        paths = [{**config, "stepwell": {"engine": engine}} for engine in (True, False)]
        result["failed", stage] = failed_backwards(stage)
        for name, options in LEFT_OUT.items():
            result["left out", stage, name] = [
                left_out({**config, **options}, extra=extra) for extra in (0, 2)
            ]
        # This drops no gradient that lies in host memory.
        result["not dropped", stage] = left_out(
            config, extra=2, drop=lambda engine: engine.zero_grad()
        )
        result["cleared", stage] = [
            cleared({**each, "gradient_accumulation_steps": 3}) for each in paths
        ]
        result["two forwards", stage] = [from_two_forwards(each) for each in paths]
        # What is clipped has a norm in whose last bit the paths differ.
        result["resized", stage] = [resized({**each, "gradient_clipping": 10.0}) for each in paths]
        result["skipped", stage] = skipped(stage)
        result["without memory", stage] = [
            without_memory(stage, is_refused=is_refused) for is_refused in (False, True)
        ]
        result["huge", stage] = [
            huge(configuration(stage=stage, clip=0.1), factor) for factor in (1.0, 2.0**80)
        ]
    # The stage at which DeepSpeed adds them all.
    result["not dropped", "DeepSpeed"] = left_out(
        configuration(stage=3, dtype="bf16", stepwell={"engine": False}),
        extra=2,
        drop=lambda _: None,
    )
    result["refused"] = [refused(is_on_engine=each) for each in (True, False)]


def program_gradients_ranks(result):
    """Two ranks, on both of which backwards fail."""
    import os

    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    for stage in (1, 2, 3):
        for name, options in {
            "": {"zero": {"reduce_bucket_size": 1500}},
            ", fp32 sums": {"gradient_accumulation_steps": 2, **fp32_sums(stage)},
        }.items():
            config = configuration(stage=stage, dtype="bf16", **options)
            result[f"ZeRO-{stage}{name}"] = [
                recovered(config, failures, rank=rank, model=uneven) for failures in ((), (0, 4))
            ]
        result[f"huge, ZeRO-{stage}"] = huge(configuration(stage=stage, clip=1.0), 2.0**80)
