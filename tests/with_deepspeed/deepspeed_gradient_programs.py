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
from insides import partitions_of, release_of_sums

NOT_DROPPED = {
    "engine.zero_grad()": lambda engine: engine.zero_grad(),
    "module.zero_grad()": lambda engine: engine.module.zero_grad(),
    "nothing": lambda _: None,
}
"""What drops no gradient that lies in host memory."""
OUTSIDE = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-2, accumulated": {"stage": 2, "gradient_accumulation_steps": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3, small buckets": {"stage": 3, "zero": {"reduce_bucket_size": 100}},
}
"""Options of runs that use a layer outside of the engine's forward."""


def left_out_options(stage):
    """Options of runs whose program leaves steps out."""
    return {
        "one backward": {},
        "two": {"gradient_accumulation_steps": 2},
        "two on the device": {
            "gradient_accumulation_steps": 2,
            "stepwell": {"accumulate": "device"},
        },
        "fp32 sums": {"gradient_accumulation_steps": 2, **fp32_sums(stage)},
    }


def raise_once(owner, name, error):
    """The next call of a method raises `error`; those behind it are as before."""
    kept = getattr(owner, name)

    def fail(*_, **__):
        setattr(owner, name, kept)
        raise error

    setattr(owner, name, fail)


def fail_backward(engine, batch, *, plainly=False):
    """A backward that raises when some gradients are there already."""

    def fail(_):
        raise RuntimeError("out of memory")

    handle = engine.module[0].weight.register_hook(fail)
    loss = squared(engine, batch)
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


def failed_backwards(result):
    """Backwards that raise, with and without what the error's hint says."""
    cases = {
        f"ZeRO-{stage}{name}": configuration(stage=stage, dtype="bf16", **options)
        for stage in (1, 2, 3)
        for name, options in {
            "": {},
            ", overlap_comm": {"zero": {"overlap_comm": True}},
            ", timed": {"wall_clock_breakdown": True},
            ", accumulated": {"gradient_accumulation_steps": 3},
            ", fp32 sums": {"gradient_accumulation_steps": 3, **fp32_sums(stage)},
        }.items()
    }
    for name, config in cases.items():
        # In the first micro-batch of a step: nothing else is lost.
        gas = config.get("gradient_accumulation_steps", 1)
        result[name] = recovered(config, ()), recovered(config, (0, 2 * gas))
    for stage in (1, 2, 3):
        config = configuration(stage=stage, dtype="bf16", gradient_accumulation_steps=3)
        # In the second: the first goes with it. DeepSpeed's own ZeRO-1 is the only stage that
        # gets over it.
        result[f"ZeRO-{stage}, second micro-batch"] = (
            recovered({**config, "stepwell": {"engine": False}}, (1,)) if stage == 1 else None,
            recovered(config, (1,)),
        )
        for after in ("step", "backward", "plain backward"):
            result[f"ZeRO-{stage}, {after}"] = unrecovered(stage, after)


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


class Shifted(torch.nn.Module):
    """Parameters whose gradients lie in the memory of what autograd has for the layer before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.one, self.two = (torch.nn.Parameter(torch.randn(4, 32)) for _ in range(2))

    def forward(self, x):
        shifted = self.first(x.unsqueeze(0)) + self.one.unsqueeze(0) + self.two.unsqueeze(0)
        return self.last(shifted)[0]


def shared_memory(engine, rank):
    """Losses where some gradients share memory, and each is reduced when the next one comes."""
    made = initialize(
        Shifted(),
        configuration(
            stage=3,
            dtype="bf16",
            zero={"reduce_bucket_size": 4 * 32, "stage3_param_persistence_threshold": 0},
            stepwell={"engine": engine},
        ),
    )
    losses = train(made, vectors(5, first=10 * rank), squared)
    made.destroy()
    return losses, []


def transposed(param, _):
    """The gradient is another one, whose rows do not lie one after the other."""
    if param.grad.dim() == 2:
        shape = param.grad.shape
        # No view, which would have a base.
        memory = torch.empty_strided(shape, (1, shape[0]), dtype=param.grad.dtype)
        param.grad = memory.copy_(param.grad)


def held(param, found):
    """The program has the memory of the gradient as an array, which no tensor knows of."""
    array = param.grad.numpy().copy()
    param.grad = torch.from_numpy(array)
    found.append(array)


def widened(param, _):
    """Gradients come in another dtype than the weights have: the program says so before."""


HOOKS = {
    transposed: {"dtype": "bf16"},
    held: {},
    widened: {"dtype": "bf16", **fp32_sums(3)},
}
"""What comes before DeepSpeed's hooks, and the options of its runs."""


def hooked(engine, rank, hook, numel):
    """Losses, and the sums of what the program holds, with buckets of so many elements."""
    model, found = perceptron(), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: hook(param, found))
        if hook is widened and hasattr(param, "grad_dtype"):
            param.grad_dtype = torch.float32
    config = configuration(stage=3, zero={"reduce_bucket_size": numel}, **HOOKS[hook])
    made = initialize(model, {**config, "stepwell": {"engine": engine}})
    losses = train(made, vectors(5, first=10 * rank), squared)
    made.destroy()
    return [losses, [float(array.sum()) for array in found]], []


class Scaled(torch.nn.Module):
    """Parameters of one dimension, which DeepSpeed does not quantize."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.factor, self.bias = (torch.nn.Parameter(torch.randn(32)) for _ in range(2))

    def forward(self, x):
        return x * self.factor + self.bias


def quantized(engine, rank):
    """As `hooked`, of `held`, where DeepSpeed reduces each gradient of a bucket by itself."""
    from deepspeed.runtime.comm import coalesced_collectives

    # What quantizes is for GPUs. Nothing here is.
    coalesced_collectives.quantizer_module = "none"
    model, found = Scaled(), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: held(param, found))
    made = initialize(
        model,
        configuration(
            stage=3, zero={"zero_quantized_gradients": True}, stepwell={"engine": engine}
        ),
    )
    losses = train(made, vectors(5, first=10 * rank), squared)
    made.destroy()
    return [losses, [float(array.sum()) for array in found]], []


def late_copies(engine, rank):
    """Losses with persistent weights in fp32 that are copies of their masters in host memory."""
    made = initialize(
        perceptron(),
        configuration(
            stage=3,
            zero={
                "offload_param": {"device": "cpu", "pin_memory": False},
                "stage3_param_persistence_threshold": 100_000,
            },
            stepwell={"engine": engine},
        ),
    )
    losses = train(made, vectors(5, first=10 * rank), squared)
    made.destroy()
    return losses, []


def refused(config, block):
    """Losses after a step that was refused for a NaN."""
    engine = initialize(perceptron(), {**config, "stepwell": block})
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


def resized(config, counts):
    """A run in which the program changes how many micro-batches a step has, as the batch grows."""
    engine = initialize(perceptron(), config)
    losses, first = [], 0
    for count in counts:
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


def interrupted(stage, *, is_interrupted):
    """A run in which Ctrl-C comes when a step is under way and its sums are still there."""
    engine = initialize(
        perceptron(),
        configuration(stage=stage, dtype="bf16", gradient_accumulation_steps=3, **fp32_sums(stage)),
    )
    optimizer = engine.optimizer
    release, step = getattr(*release_of_sums(optimizer)), optimizer.step
    left = [KeyboardInterrupt] if is_interrupted else []

    def interrupted_release():
        if left:
            raise left.pop()
        release()

    def caught_step(*args, **kwargs):
        # So that DeepSpeed's engine counts the step, which is applied.
        try:
            return step(*args, **kwargs)
        except KeyboardInterrupt:
            return None

    setattr(*release_of_sums(optimizer), interrupted_release)
    optimizer.step = caught_step
    losses = train(engine, vectors(9), squared)
    assert not left
    found = losses, partitions(engine)
    engine.destroy()
    return found


def interrupted_twice(stage, where):
    """What the next backward says behind a step that two interrupts have left; losses after that.

    The first comes in the norm, or when the sums of a step that is taken are released; the second
    while the first waits for copies.
    """
    sums = where == "release"
    config = configuration(
        stage=stage,
        dtype="bf16",
        **({"gradient_accumulation_steps": 2, **fp32_sums(stage)} if sums else {}),
    )
    engine = initialize(perceptron(), config)
    optimizer, count = engine.optimizer, 1 + sums
    stepping = partitions_of(optimizer)
    train(engine, vectors(2 * count), squared)

    first = release_of_sums(optimizer) if sums else (stepping.gradients, "norm")
    raise_once(*first, KeyboardInterrupt())
    raise_once(stepping, "end_left_step", KeyboardInterrupt())
    said = ""
    for batches in (vectors(count, first=50), vectors(1, first=60)):
        try:
            train(engine, batches, squared)
        except KeyboardInterrupt:
            continue
        except ValueError as error:
            said = str(error)
    # As the hint says.
    optimizer.zero_grad()
    engine.micro_steps += -engine.micro_steps % count
    losses = train(engine, vectors(count, first=70), squared)
    engine.destroy()
    return said, losses


def undropped(stage):
    """What is said behind a step that was left, and whose gradients could not be dropped."""
    engine = initialize(perceptron(), configuration(dtype="bf16", stage=stage))
    optimizer = engine.optimizer
    stepping, said = partitions_of(optimizer), []

    raise_once(stepping, "prepare", MemoryError("no memory"))
    raise_once(stepping, "drop", OSError("a copy is lost"))
    for batch in vectors(2):
        try:
            train(engine, [batch], squared)
        except (MemoryError, ValueError) as error:
            said.append(str(error))
    # As the hint says.
    optimizer.zero_grad()
    losses = train(engine, vectors(1, first=2), squared)
    engine.destroy()
    return said, losses


def without_memory(stage, *, is_refused, **options):
    """A run in which there is no memory for a step, or that batch does not come."""
    engine = initialize(perceptron(), configuration(dtype="bf16", stage=stage, **options))
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


def handed_over(**options):
    """Of the gradients of a backward under ZeRO-3: whether they may be kept, and are those reduced.

    And the gradients by sub-group and number, and those of the parameters.
    """
    from deepspeed import utils

    engine = initialize(perceptron(), configuration(dtype="bf16", stage=3, **options))
    optimizer, gradients = engine.optimizer, partitions_of(engine.optimizer).gradients
    partition_grads, add = optimizer.partition_grads, gradients.add
    kept, reduced = [], set()

    def memory_of(tensor):
        return tensor.untyped_storage().data_ptr()

    def noted_reduced(params, pieces):
        reduced.update(map(memory_of, [*pieces, *(param.grad for param in params)]))
        partition_grads(params, pieces)
        reduced.clear()

    def noted(fragment, piece, *, is_owned, **options):
        kept.append((is_owned, memory_of(piece) in reduced))
        add(fragment, piece, is_owned=is_owned, **options)

    optimizer.partition_grads, gradients.add = noted_reduced, noted
    (batch,) = vectors(1)
    engine.backward(squared(engine, batch))
    params = list(engine.module.parameters())
    found = {
        "kept": kept,
        "by group": engine.optimizer.get_fp32_grad_partitions(),
        "local": [utils.safe_get_local_grad(param).clone() for param in params],
    }
    engine.destroy()
    return found


def program_gradients(result):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    failed_backwards(result.setdefault("failed", {}))
    for name, options in OUTSIDE.items():
        result[f"outside, {name}"] = [
            outside(configuration(dtype="bf16", stepwell={"engine": engine}, **options))
            for engine in (True, False)
        ]
    for stage in (1, 2, 3):
        accumulating = configuration(stage=stage, dtype="bf16", gradient_accumulation_steps=3)
        result[f"interrupted twice, ZeRO-{stage}, norm"] = interrupted_twice(stage, "norm")
        for name, options in left_out_options(stage).items():
            result[f"left out, ZeRO-{stage}, {name}"] = [
                left_out(configuration(stage=stage, dtype="bf16", **options), extra=extra)
                for extra in (0, 2)
            ]
        config = configuration(stage=stage, dtype="bf16")
        result[f"not dropped, ZeRO-{stage}"] = {
            name: left_out(config, extra=2, drop=drop) for name, drop in NOT_DROPPED.items()
        }
        result[f"cleared, ZeRO-{stage}"] = [
            cleared({**accumulating, "stepwell": {"engine": engine}}) for engine in (True, False)
        ]
        result[f"resized, ZeRO-{stage}"] = {
            (counts, *options): [
                resized(
                    # Nothing is clipped: the last bit of a norm depends on how it was summed.
                    configuration(
                        stage=stage,
                        dtype="bf16",
                        clip=10.0,
                        gradient_accumulation_steps=counts[0],
                        stepwell={"engine": engine},
                        **options,
                    ),
                    counts,
                )
                for engine in (True, False)
            ]
            for counts, options in (
                ((1, 3, 1, 2), {}),
                ((3, 1, 2), {}),
                ((1, 3, 1, 2), fp32_sums(stage)),
            )
        }
        result[f"skipped, ZeRO-{stage}"] = skipped(stage)
        result[f"undropped, ZeRO-{stage}"] = undropped(stage)
        result[f"without memory, ZeRO-{stage}"] = [
            without_memory(stage, is_refused=is_refused, wall_clock_breakdown=is_refused)
            for is_refused in (False, True)
        ]
        result[f"huge, ZeRO-{stage}"] = [
            huge(configuration(stage=stage, clip=0.1), factor) for factor in (1.0, 2.0**80)
        ]
        result[f"huge, bf16, ZeRO-{stage}"] = [
            huge(configuration(stage=stage, dtype="bf16", clip=0.1), factor)
            for factor in (1.0, 2.0**80)
        ]
    # The stage at which DeepSpeed adds them all.
    result["not dropped, DeepSpeed"] = left_out(
        configuration(stage=3, dtype="bf16", stepwell={"engine": False}),
        extra=2,
        drop=NOT_DROPPED["nothing"],
    )
    result["handed over"] = [
        handed_over(zero={"reduce_scatter": is_scattered}) for is_scattered in (False, True)
    ]
    for stage in (1, 2):
        result[f"interrupted, ZeRO-{stage}"] = [
            interrupted(stage, is_interrupted=is_interrupted) for is_interrupted in (False, True)
        ]
        result[f"interrupted twice, ZeRO-{stage}, release"] = interrupted_twice(stage, "release")
        result[f"refused, ZeRO-{stage}"] = [
            refused(configuration(dtype="bf16", stage=stage), {"engine": engine})
            for engine in (True, False)
        ]


def program_gradients_ranks(result):
    """Two ranks, on both of which backwards fail."""
    import os

    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    result["ZeRO-3, late copies"] = [late_copies(engine, rank) for engine in (False, True)]
    for hook in HOOKS:
        for numel in (2048, 10_000):
            result[f"ZeRO-3, {hook.__name__}, {numel}"] = [
                hooked(engine, rank, hook, numel) for engine in (False, True)
            ]
    result["ZeRO-3, shared memory"] = [shared_memory(engine, rank) for engine in (False, True)]
    result["ZeRO-3, quantized"] = [quantized(engine, rank) for engine in (False, True)]
    for stage in (1, 2, 3):
        for name, options in left_out_options(stage).items():
            result[f"left out, ZeRO-{stage}, {name}"] = [
                left_out(configuration(stage=stage, dtype="bf16", **options), extra=extra)
                for extra in (0, 1)
            ]
        for name, options in {
            "": {"zero": {"reduce_bucket_size": 1500}},
            ", accumulated": {"gradient_accumulation_steps": 2},
            ", fp32 sums": {"gradient_accumulation_steps": 2, **fp32_sums(stage)},
        }.items():
            config = configuration(stage=stage, dtype="bf16", **options)
            result[f"ZeRO-{stage}{name}"] = [
                recovered(config, failures, rank=rank, model=uneven) for failures in ((), (0, 4))
            ]
        result[f"huge, ZeRO-{stage}"] = huge(configuration(stage=stage, clip=1.0), 2.0**80)
