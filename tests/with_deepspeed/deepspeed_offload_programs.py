"""Programs (see deepspeed_run) that train by ZeRO on the offload engine.

Against DeepSpeed's own path on Stepwell's op.
"""

import logging
import math
import os

import deepspeed_access_programs
import torch
from deepspeed_engines import (
    Lines,
    configuration,
    initialize,
    initialize_groups,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)
from deepspeed_paths import STEPS, autocast, both, grown, poisoned, uneven, with_experts
from deepspeed_release import fp32_sums
from insides import device_sums, partitions_of


def paths(result):
    """The same configurations on both paths."""
    cases = {
        "ZeRO-2": configuration(dtype="bf16"),
        "ZeRO-1": configuration(dtype="bf16", stage=1),
        "clipped": configuration(dtype="bf16", clip=0.1),
        "fp32": configuration(clip=0.1),
        "Adam": configuration(dtype="bf16", optimizer="Adam", params={"adam_w_mode": False}),
        "accumulated": configuration(dtype="bf16", clip=0.1, gradient_accumulation_steps=3),
        "accumulated on the device": configuration(
            dtype="bf16",
            clip=0.1,
            gradient_accumulation_steps=3,
            stepwell={"accumulate": "device"},
        ),
        "accumulated, ZeRO-1": configuration(dtype="bf16", stage=1, gradient_accumulation_steps=3),
        "fp32 sums": configuration(dtype="bf16", gradient_accumulation_steps=3, **fp32_sums(2)),
        "fp32 sums, ZeRO-1": configuration(
            dtype="bf16", stage=1, gradient_accumulation_steps=3, **fp32_sums(1)
        ),
        "q8": configuration(dtype="bf16", clip=0.1, stepwell={"moments": "q8"}),
        "ZeRO-3": configuration(dtype="bf16", stage=3, zero={"sub_group_size": 3000}),
        "ZeRO-3, accumulated": configuration(dtype="bf16", stage=3, gradient_accumulation_steps=3),
        "ZeRO-3, accumulated on the device": configuration(
            dtype="bf16",
            stage=3,
            gradient_accumulation_steps=3,
            stepwell={"accumulate": "device"},
        ),
        "ZeRO-3, fp32 sums": configuration(
            dtype="bf16", stage=3, gradient_accumulation_steps=3, **fp32_sums(3)
        ),
        "ZeRO-3, clipped": configuration(dtype="bf16", stage=3, clip=0.1),
    }
    for name, config in cases.items():
        result[name] = both(config)
    with autocast() as block:
        result["autocast"] = both(configuration(torch_autocast=block))
        result["ZeRO-3, autocast"] = both(configuration(stage=3, torch_autocast=block))
    # DeepSpeed 0.19.6 and 0.19.7 compile gates, and there is no compiler.
    with torch.compiler.set_stance("force_eager"):
        result["experts"] = both(configuration(dtype="bf16"), model=with_experts, steps=3)
    result["waits"] = waited()
    for stage in (2, 3):
        result[f"held, ZeRO-{stage}"] = {place: held(place, stage) for place in ("host", "device")}
    groups = configuration(dtype="bf16")
    result["groups"] = [
        with_groups({**groups, "stepwell": {"engine": engine}}) for engine in (True, False)
    ]


def held(place, stage):
    """Elements of gradients that the device holds in a step: after each of its backwards."""
    config = configuration(
        dtype="bf16", stage=stage, gradient_accumulation_steps=3, stepwell={"accumulate": place}
    )
    engine = initialize(perceptron(), config)
    counts = []
    for batch in vectors(3):
        engine.backward(squared(engine, batch))
        sums = device_sums(partitions_of(engine.optimizer))
        grads = (param.grad for param in engine.module.parameters())
        counts.append(sum(each.numel() for each in (*sums, *grads) if each is not None))
        engine.step()
    engine.destroy()
    return counts


def waited():
    """Which elements of groups forwards have waited for in the third step, call by call.

    And whether a read right after a step is of the new weight.
    """
    from stepwell.store.engine import Engine

    calls, wait = [], Engine.wait_for

    def counting(self, windows):
        calls.append([(span, begin, end - begin) for span, begin, end in windows])
        return wait(self, windows)

    engine = initialize(perceptron(), configuration(dtype="bf16"))
    train(engine, vectors(2), squared)
    Engine.wait_for = counting
    train(engine, vectors(1), squared)
    Engine.wait_for = wait
    weight = engine.module[0].weight
    read = weight.detach().clone()
    engine.optimizer.synchronize()
    return calls, torch.equal(read, weight)


def with_groups(config):
    engine = initialize_groups(config)
    return {"losses": train(engine, vectors(STEPS), squared), "partitions": partitions(engine)}


def fp16(result):
    """fp16 with a loss scale that overflows at first and grows.

    And with gradients that are not finite.
    """
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    dynamic = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    result["dynamic"] = both(configuration(dtype="fp16", precision=dynamic, clip=0.1), steps=16)
    growing = dynamic | {"loss_scale_window": 2}
    result["growing"] = grown(configuration(dtype="fp16", precision=growing))
    result["growing, ZeRO-3"] = grown(configuration(dtype="fp16", stage=3, precision=growing))
    result["nonfinite, ZeRO-3"] = poisoned(configuration(dtype="bf16", stage=3, clip=1.0))
    result["nonfinite, bf16"] = poisoned(configuration(dtype="bf16", clip=1.0))
    result["nonfinite, accumulated on the host"] = poisoned(
        configuration(dtype="bf16", gradient_accumulation_steps=2)
    )
    result["nonfinite, accumulated"] = poisoned(
        configuration(dtype="bf16", gradient_accumulation_steps=2, **fp32_sums(2))
    )


def program_offload(result):
    """All that one rank trains."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for part in (paths, fp16):
        part(result.setdefault(part.__name__, {}))


def program_offload_ranks(result):
    """Two ranks on both paths."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    cases = {
        "ZeRO-2": configuration(dtype="bf16", clip=0.1),
        "ZeRO-1": configuration(dtype="bf16", stage=1, clip=0.1),
        "accumulated": configuration(dtype="bf16", gradient_accumulation_steps=2),
        "fp32 sums": configuration(dtype="bf16", gradient_accumulation_steps=2, **fp32_sums(2)),
        "ZeRO-3": configuration(dtype="bf16", stage=3, gradient_accumulation_steps=2),
        "ZeRO-3, parameters": configuration(
            dtype="bf16",
            stage=3,
            zero={"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 100},
        ),
        # Each rank has a second copy of its partitions, from which backwards gather.
        "ZeRO-3, hpz": configuration(
            dtype="bf16",
            stage=3,
            zero={"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100},
        ),
        "small buckets": configuration(
            dtype="bf16", zero={"reduce_bucket_size": 1000, "round_robin_gradients": True}
        ),
    }
    for name, config in cases.items():
        result[name] = both(config, rank=rank)
    said = Lines()
    logging.getLogger("DeepSpeed").addHandler(said)
    initialize(
        perceptron(), configuration(wall_clock_breakdown=True, stepwell={"gate": "module"})
    ).destroy()
    result["said"] = [line for line in said.lines if "stepwell" in line]
    with autocast() as block:
        result["autocast"] = both(configuration(torch_autocast=block), rank=rank)
    for stage in (2, 3):
        # What pads partitions of ZeRO-3 need not be finite on DeepSpeed's own path.
        config = configuration(
            dtype="bf16", stage=stage, precision={"check_grad_overflow": stage < 3}
        )
        result[f"uneven, ZeRO-{stage}"] = both(config, rank=rank, model=uneven)
    accesses = {
        "ZeRO-2": (configuration(dtype="bf16", clip=0.01), uneven),
        "ZeRO-3": (configuration(dtype="bf16", stage=3, clip=0.01), perceptron),
    }
    for name, (config, model) in accesses.items():
        result[f"access, {name}"] = [
            deepspeed_access_programs.read(
                {**config, "stepwell": {"engine": engine}}, model=model, rank=rank
            )
            + deepspeed_access_programs.set_gradients(
                {**config, "gradient_clipping": 0.0, "stepwell": {"engine": engine}},
                model=model,
                rank=rank,
            )
            for engine in (True, False)
        ]
    # On one rank only, by which both have to skip.
    engine = initialize(perceptron(), configuration(dtype="bf16"))
    (batch,) = vectors(1)
    batch[0, 0] = math.nan if rank == 1 else 0.0
    before = partitions(engine)
    train(engine, [batch], squared)
    result["nonfinite"] = before, partitions(engine), engine.skipped_steps
    engine.destroy()
