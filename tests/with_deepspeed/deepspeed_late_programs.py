"""Programs (see deepspeed_run) whose steps are late: ZeRO-3 with `offload_param`, and two ranks.

A step does not begin before something waits for it. So what does not wait reads old weights.
"""

import contextlib
import gc
import io
import threading

import torch
from deepspeed_engines import configuration, initialize, perceptron, squared, train, vectors
from deepspeed_offload_param_programs import offloaded, weights
from insides import (
    core_of_partitions,
    make_partitions_late,
    partitions_of,
    protection_of_writes,
    writes_under_way,
)
from late_engine import GATHERS, SECONDS_MAX, late_ranks

STEPS = 3


def make_late(engine):
    return make_partitions_late(partitions_of(engine.optimizer))


def trained_late(config, *, is_late=True, steps=STEPS):
    """An engine after some steps, of which the last has not begun, and what makes it late."""
    engine = initialize(perceptron(), config)
    count = config.get("gradient_accumulation_steps", 1)
    # Without a step before it a gate knows no forward.
    train(engine, vectors(count), squared)
    late = make_late(engine) if is_late else None
    losses = train(engine, vectors(steps * count, first=count), squared)
    return engine, late, losses


def moments(engine, param, key):
    from deepspeed.utils import safe_get_full_optimizer_state

    return safe_get_full_optimizer_state(param, key)


def consolidated(engine):
    return engine._zero3_consolidated_16bit_state_dict()["2.weight"]


def evaluated(engine):
    engine.eval()
    with torch.no_grad():
        return engine(next(vectors(1, first=90)).bfloat16())


def readers():
    """Every way to what a step writes in host memory, by name: functions of an engine."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    def weight(engine):
        return engine.module[2].weight

    def gathered(engine):
        with deepspeed.zero.GatheredParameters([weight(engine)]):
            return weight(engine).detach().clone()

    def masters(engine):
        return engine.optimizer.fp32_partitioned_groups_flat[0]

    return {
        "forward": lambda engine: squared(engine, next(vectors(1, first=90))),
        "evaluation": evaluated,
        "gathered": gathered,
        "partition": lambda engine: weight(engine).ds_tensor.clone(),
        "flat": lambda engine: engine.optimizer.fp16_partitioned_groups_flat[0].clone(),
        "numpy": lambda engine: torch.from_numpy(masters(engine).detach().numpy().copy()),
        "data": lambda engine: masters(engine).data.clone(),
        "master": lambda engine: safe_get_full_fp32_param(weight(engine)),
        "moment": lambda engine: moments(engine, weight(engine), "exp_avg"),
        "state": lambda engine: engine.optimizer.optimizer.state[masters(engine)]["exp_avg_sq"] + 0,
        "state dict": lambda engine: engine.optimizer.state_dict()["fp32_flat_groups"][0].clone(),
        "16 bits": consolidated,
        "persistent": lambda engine: engine.module[2].bias.detach().clone(),
        "persistent data": lambda engine: engine.module[2].bias.data.clone(),
    }


def read(result, name, config, **options):
    """What each reader finds after a late step."""
    result[name] = {}
    for reader, function in readers().items():
        engine, late, _ = trained_late(config, **options)
        was_late = late is not None and late.is_late
        found = function(engine)
        result[name][reader] = found.detach().clone(), was_late
        if late is not None and late.is_late:
            # It has read what is old.
            partitions_of(engine.optimizer).finish()
        engine.destroy()


def waits(result):
    """For which parts a forward waits, module by module."""
    engine, late, _ = trained_late(offloaded())
    late.keep_busy = True
    found = []
    positions = engine.optimizer.grad_position
    for name, module in engine.module.named_children():
        if not list(module.parameters()):
            continue
        module.register_forward_hook(lambda *_, name=name: found.append((name, list(late.waits))))
    squared(engine, next(vectors(1, first=90)))
    result["waits"] = found
    late.keep_busy = False
    result["fragments"] = {
        name: tuple(positions[engine.optimizer.get_param_id(param)])
        for name, param in engine.module.named_parameters()
    }
    engine.destroy()


def written(result):
    """Weights and masters that a program sets after a late step, and the step after it."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    for is_late in (True, False):
        engine, _, _ = trained_late(offloaded(persistent=100), is_late=is_late)
        weight, bias = engine.module[2].weight, engine.module[2].bias
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.5)
        safe_set_full_fp32_param(weight, torch.full((32, 64), 0.25))
        bias.data.fill_(2.0)
        found = [bias.detach().clone(), weight.ds_tensor.clone()]
        losses = train(engine, vectors(2, first=50), squared)
        result["written", is_late] = losses, found + weights(engine)
        engine.destroy()


def exposed(result):
    """Views that a program keeps: the step waits by itself."""
    engine, late, _ = trained_late(offloaded())
    kept = engine.module[2].weight.ds_tensor.data
    train(engine, vectors(1, first=60), squared)
    result["exposed"] = late.is_late, kept.clone(), engine.module[2].weight.ds_tensor.clone()
    del kept
    gc.collect()
    train(engine, vectors(1, first=61), squared)
    result["exposed no more"] = late.is_late
    engine.destroy()


def not_begun(result):
    """Persistent weights behind a step that was left when all of it was ready."""
    import deepspeed

    def bias():
        with deepspeed.zero.GatheredParameters([engine.module[2].bias]):
            return engine.module[2].bias.detach().clone()

    engine, _, _ = trained_late(offloaded(persistent=100), is_late=False)
    partitions = partitions_of(engine.optimizer)
    before, submit = bias(), partitions.submit

    def leave(*_, **__):
        raise LeftError("no step")

    partitions.submit = leave
    with contextlib.suppress(LeftError):
        train(engine, vectors(1, first=60), squared)
    partitions.submit = submit
    result["not begun"] = before, bias()
    train(engine, vectors(1, first=61), squared)
    result["begun"] = before, bias()
    engine.destroy()


def moved():
    """Losses with states that went to host memory and back, and without."""
    found = []
    for is_moved in (True, False):
        engine = initialize(perceptron(), configuration(stage=3, dtype="bf16"))
        losses = train(engine, vectors(2), squared)
        if is_moved:
            engine.offload_states()
            assert engine.optimizer.fp16_partitioned_groups_flat == []
            engine.reload_states()
        losses += train(engine, vectors(2, first=2), squared)
        found.append((losses, weights(engine)))
        engine.destroy()
    return found


def gates(result):
    """Whether the step is late with each configuration, and what it ends with."""
    cases = {
        "sub-groups": offloaded(zero={"sub_group_size": 3000}),
        "persistent": offloaded(persistent=100),
        "all persistent": offloaded(persistent=100000),
        "accumulated": offloaded(gradient_accumulation_steps=2),
        # The weights are copied from their masters at the end of the step.
        "fp32": offloaded(dtype="fp32"),
        "gate of the step": offloaded(stepwell={"gate": "step"}),
        "breakdown": offloaded(wall_clock_breakdown=True),
    }
    for name, config in cases.items():
        for is_late in (True, False):
            engine, late, losses = trained_late(config, is_late=is_late, steps=4)
            was_late = late is not None and late.is_late
            result[name, is_late] = was_late, losses, weights(engine)
            engine.destroy()


def saved_state(engine):
    """What a program finds that loads what it has saved."""
    file = io.BytesIO()
    torch.save(engine.optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def written_once(engine):
    """A weight behind a step that was written before it: the master wins."""
    weight = engine.module[2].weight
    with torch.no_grad():
        weight.zero_()
    train(engine, vectors(1, 9), squared)
    return weight + 0


def refreshed(engine):
    """The masters where the program has them taken from the weights."""
    engine.optimizer.refresh_fp32_params()
    return engine.optimizer.single_partition_of_fp32_groups[0] + 0


def evaluated_after(engine, call):
    call()
    return evaluated(engine)


# Under ZeRO-2 on one rank, by name: what a program takes before a step, and reads after it.
ON_ONE_RANK = {
    "weight": (None, lambda engine, _: engine.module[2].weight + 0),
    "data": (None, lambda engine, _: engine.module[2].weight.data.clone()),
    "evaluation": (None, lambda engine, _: evaluated(engine)),
    "masters": (None, lambda engine, _: engine.optimizer.single_partition_of_fp32_groups[0] + 0),
    "state": (None, lambda engine, _: next(iter(engine.optimizer.state.values()))["exp_avg"] + 0),
    "written": (None, lambda engine, _: written_once(engine)),
    "refreshed": (None, lambda engine, _: refreshed(engine)),
    "states that moved": (
        None,
        lambda engine, _: evaluated_after(
            engine, lambda: (engine.offload_states(), engine.reload_states())
        ),
    ),
    "destroyed": (
        lambda engine: list(engine.module.parameters()),
        lambda engine, kept: (engine.destroy(), kept[2].detach().clone())[1],
    ),
    "loaded": (
        saved_state,
        lambda engine, kept: (
            engine.optimizer.load_state_dict([kept]),
            engine.optimizer.single_partition_of_fp32_groups[0] + 0,
        )[1],
    ),
    # What no access is seen of: the step waits by itself.
    "kept weight": (lambda engine: engine.module[2].weight.data.view(-1), lambda _, kept: kept),
    "kept master": (
        lambda engine: engine.optimizer.single_partition_of_fp32_groups[0].detach(),
        lambda _, kept: kept,
    ),
}


def on_one_rank(name, *, is_late):
    """Whether the step was late, and what is read after it."""
    engine = initialize(perceptron(), configuration(dtype="bf16"))
    train(engine, vectors(1), squared)
    late = make_late(engine) if is_late else None
    take, read_of = ON_ONE_RANK[name]
    kept = None if take is None else take(engine)
    train(engine, vectors(2, 1), squared)
    was_late = late is not None and late.is_late
    found = read_of(engine, kept).detach().clone()
    if name != "destroyed":
        engine.destroy()
    return was_late, found


def program_late(result):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    config = offloaded(persistent=100)
    read(result, "late", config)
    read(result, "in time", config, is_late=False)
    gates(result.setdefault("gates", {}))
    waits(result)
    written(result)
    exposed(result)
    not_begun(result)
    result["on one rank"] = {
        name: [on_one_rank(name, is_late=is_late) for is_late in (True, False)]
        for name in ON_ONE_RANK
    }
    result["moved"] = moved()


# ---- several ranks ----

RANKS = {
    "offload_param": lambda gate: offloaded(
        persistent=100, zero={"sub_group_size": 3000}, stepwell={"gate": gate}
    ),
    "nothing persistent": lambda gate: offloaded(stepwell={"gate": gate}),
    "ZeRO-3": lambda gate: on_device(gate),
    "ZeRO-2": lambda gate: configuration(dtype="bf16", stepwell={"gate": gate}),
    "ZeRO-2, round robin": lambda gate: configuration(
        dtype="bf16",
        zero={"round_robin_gradients": True},
        gradient_accumulation_steps=2,
        stepwell={"gate": gate},
    ),
}


def on_device(gate):
    persistent = {"stage3_param_persistence_threshold": 100, "sub_group_size": 3000}
    return configuration(stage=3, dtype="bf16", zero=persistent, stepwell={"gate": gate})


def deep():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)),
        torch.nn.Linear(32, 32),
    )


# Those that are not collective. One rank reads alone.
ALONE = {
    "partition": lambda weight, _, __: weight.ds_tensor.clone(),
    "flat": lambda _, __, zero: zero.fp16_partitioned_groups_flat[0].clone(),
    "persistent": lambda _, bias, __: bias.detach().clone(),
    "persistent data": lambda _, bias, __: bias.data.clone(),
    "master": lambda _, __, zero: zero.fp32_partitioned_groups_flat[0].detach().clone(),
    "state": lambda _, __, zero: next(iter(zero.optimizer.state.values()))["exp_avg"].clone(),
    "written": lambda _, bias, __: bias.data.mul_(1.0).clone(),
}


PERSISTENT = ("persistent", "persistent data", "written")


def evaluated_alone(weight, bias, zero):
    net = zero.module_of_test
    net.eval()
    with torch.no_grad():
        found = net(next(vectors(1, first=90)).to(weight.dtype))
    net.train()
    return found


# Below ZeRO-3 a forward is not collective.
BELOW = {
    "weight": lambda weight, _, __: weight.detach().clone(),
    "data": lambda weight, _, __: weight.data.clone(),
    "evaluation": evaluated_alone,
    "state dict": lambda _, __, zero: zero.module_of_test.state_dict()["4.weight"].clone(),
    "master": lambda _, __, zero: zero.single_partition_of_fp32_groups[0].detach().clone(),
    "state": lambda _, __, zero: next(iter(zero.optimizer.state.values()))["exp_avg"].clone(),
    "written": lambda weight, _, __: weight.data.mul_(1.0).clone(),
}


def rank_run(result, name, gate):
    """Losses and weights of a run that looks at something behind each step."""
    import deepspeed

    config = RANKS[name](gate)
    count = config.get("gradient_accumulation_steps", 1)
    others = threading.enumerate()
    engine = initialize(deep(), config)
    rank, zero = torch.distributed.get_rank(), engine.optimizer
    late = core_of_partitions(partitions_of(zero)) if gate == "module" else None
    weight, bias = engine.module[2][0].weight, engine.module[2][0].bias
    zero.module_of_test = engine.module
    looks = dict(ALONE if config["zero_optimization"]["stage"] == 3 else BELOW)
    if not bias.numel():
        # What is not persistent is empty where nothing gathers it.
        looks = {look: looks[look] for look in looks if look not in PERSISTENT}
    losses, found = [], []
    for step, look in enumerate([None, None, *looks, "gathered", None]):
        losses += train(engine, vectors(count, first=step * count, rank=rank), squared)
        # Without a step before it a gate knows no forward.
        is_late = late is not None and late.is_late
        found.append(step == 0 or gate == "step" or is_late)
        if look == "gathered":
            with deepspeed.zero.GatheredParameters([weight]):
                found.append(weight.detach().clone())
        elif look is not None and rank == step % 2:
            found.append(looks[look](weight, bias, zero))
            found.append(late is None or not late.is_late)
    result[name, gate] = losses, found, weights(engine)
    own = [each for each in threading.enumerate() if each not in others and each.name == GATHERS]
    engine.destroy()
    if config["zero_optimization"]["stage"] == 3:
        for thread in own:
            # It would hold the engine's memory.
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()


def program_late_ranks(result):
    """What each of two ranks does."""
    import pytest
    import stepwell.deepspeed
    from stepwell.deepspeed.zero import gathers

    stepwell.deepspeed.register()
    for name in RANKS:
        with pytest.MonkeyPatch.context() as patched, late_ranks(patched):
            patched.setattr(gathers, "_BUCKET_LEN", 700)
            rank_run(result, name, "module")
        rank_run(result, name, "step")
    result["left"] = {name: left(name) for name in ("ZeRO-2", "ZeRO-3")}
    result["left alone"] = left_alone("nothing persistent", "module")
    result["left, gate of the step"] = left_alone("ZeRO-2", "step")
    result["refused"] = {name: refused(RANKS[name]("module")) for name in ("ZeRO-2", "ZeRO-3")}
    result["refused"]["ZenFlow"] = refused(configuration(dtype="bf16", zero={"zenflow": ZENFLOW}))


class LeftError(Exception):
    pass


def left(name):
    """What a run says in which ranks raise before they submit a step: all, twice, and then one."""
    import pytest
    from stepwell.deepspeed.zero.operands import Operands

    engine, rank = initialize(deep(), RANKS[name]("module")), torch.distributed.get_rank()
    bias = engine.module[2][0].bias

    def leave(*_):
        raise LeftError("no memory")

    of, protect = (Operands, "of", leave), (*protection_of_writes(), leave)
    found = []
    cases = [((), of), ((0, 1), of), ((0, 1), protect), ((), of), ((1,), of)]
    for step, (raising, place) in enumerate(cases):
        with pytest.MonkeyPatch.context() as patched:
            if rank in raising:
                patched.setattr(*place)
            try:
                found += train(engine, vectors(1, first=step, rank=rank), squared)
                bias.sum()
            except (LeftError, OSError) as error:
                found.append(f"{type(error).__name__}: {error}")
            if place is protect:
                # Nothing is left with the class that waits.
                assert not writes_under_way(partitions_of(engine.optimizer))
    with pytest.raises(OSError, match="hint"):
        partitions_of(engine.optimizer).finish()
    return found


ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 4,
    "update_interval": 2,
    "overlap_step": True,
}


def refused(config):
    """What a run says in which ranks cannot step before the norm, by turns and both; and weights.

    With those of a run without these steps.
    """
    import pytest

    found, runs = [], []
    for refusing in ((), (1,), (0,), (0, 1)):
        torch.manual_seed(0)
        engine, rank = initialize(deep(), config), torch.distributed.get_rank()
        train(engine, vectors(2, rank=rank), squared)
        if refusing:
            gradients = partitions_of(engine.optimizer).gradients
            with pytest.MonkeyPatch.context() as patched:
                if rank in refusing:

                    def refuse(*_):
                        raise ValueError("refused")

                    patched.setattr(gradients, "norm", refuse)
                try:
                    train(engine, vectors(1, first=7, rank=rank), squared)
                except (ValueError, OSError) as error:
                    found.append(f"{type(error).__name__}: {error}")
        train(engine, vectors(2, first=2, rank=rank), squared)
        if hasattr(engine.optimizer, "drain"):
            engine.optimizer.drain()
        runs.append(weights(engine))
        engine.destroy()
    return found, runs


def left_alone(name, gate):
    """As `left`, where nothing is gathered behind a step: it says so, or the next one."""
    import pytest
    from stepwell.deepspeed.zero.operands import Operands

    engine = initialize(deep(), RANKS[name](gate))
    rank = torch.distributed.get_rank()

    def leave(*_):
        raise LeftError("no memory")

    found = []
    for step, raising in enumerate([(), (0, 1), (), (1,), (), ()]):
        with pytest.MonkeyPatch.context() as patched:
            if rank in raising:
                patched.setattr(Operands, "of", leave)
            try:
                found += train(engine, vectors(1, first=step, rank=rank), squared)
            except (LeftError, OSError) as error:
                found.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return found
