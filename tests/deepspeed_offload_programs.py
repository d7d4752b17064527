"""Programs (see deepspeed_run) of ZeRO-1 and -2 on the offload engine.

Against DeepSpeed's own path on Stepwell's op.
"""

import contextlib
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import deepspeed_access_programs
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

STEPS = 5


def run(config, *, model=perceptron, steps=STEPS, rank=0, batches=None, **more):
    """What a run ends with: losses, norms, partitions."""
    engine = initialize(model(), config, **more)
    batches = (
        vectors(steps * config.get("gradient_accumulation_steps", 1), rank=rank)
        if batches is None
        else batches
    )
    norms = []
    losses = []
    for batch in batches:
        losses += train(engine, [batch], squared)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    result = {
        "losses": losses,
        "norms": norms,
        "partitions": partitions(engine),
        "class": type(engine.optimizer).__name__,
        "base": type(engine.optimizer.optimizer).__name__,
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return result


def both(config, **options):
    """A run on the engine, and one on DeepSpeed's path."""
    block = config.pop("stepwell", {})
    # Moments of a block change the optimizer's type, on either path.
    return [
        run({**config, "stepwell": {**block, "engine": engine}}, **options)
        for engine in (True, False)
    ]


@contextlib.contextmanager
def autocast():
    """The block `torch_autocast` of a JSON, which DeepSpeed remembers for the process."""
    from deepspeed.runtime import torch_autocast

    yield {"enabled": True, "dtype": "bfloat16"}
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


def wide(seed=0):
    """Large enough that a step in the background takes longer than what follows it."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 512, bias=False)
    )


def uneven(seed=0):
    """Sizes that two ranks do not share evenly."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 33), torch.nn.GELU(), torch.nn.Linear(33, 31))


def with_experts():
    """Half of the batch goes to each of two experts, more or less."""
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(32, 32)
            self.experts = MoE(
                32, torch.nn.Linear(32, 32), num_experts=2, k=1, use_rts=False, min_capacity=0
            )

        def forward(self, x):
            return self.experts(self.first(x))[0]

    torch.manual_seed(0)
    return Experts()


class Forked(torch.nn.Module):
    """Uses its second branch in some forwards only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.first(x) + (self.second(x) if self.count == 1 else 0)


def paths(result):
    """The same configurations on both paths."""
    fp32_sums = {"grad_accum_dtype": "fp32"}
    cases = {
        "ZeRO-2": configuration(dtype="bf16"),
        "ZeRO-1": configuration(dtype="bf16", stage=1),
        "clipped": configuration(dtype="bf16", clip=0.1),
        "fp32": configuration(clip=0.1),
        "Adam": configuration(dtype="bf16", optimizer="Adam", params={"adam_w_mode": False}),
        "overlap_comm": configuration(dtype="bf16", zero={"overlap_comm": True}),
        "accumulated": configuration(dtype="bf16", clip=0.1, gradient_accumulation_steps=3),
        "accumulated on the device": configuration(
            dtype="bf16",
            clip=0.1,
            gradient_accumulation_steps=3,
            stepwell={"accumulate": "device"},
        ),
        "accumulated, ZeRO-1": configuration(dtype="bf16", stage=1, gradient_accumulation_steps=3),
        "fp32 sums": configuration(
            dtype="bf16", gradient_accumulation_steps=3, data_types=fp32_sums
        ),
        "fp32 sums, ZeRO-1": configuration(
            dtype="bf16", stage=1, gradient_accumulation_steps=3, data_types=fp32_sums
        ),
        "aligned": configuration(dtype="bf16", zero={"parameter_alignment": True}),
        "gate step": configuration(dtype="bf16", stepwell={"gate": "step"}),
        "one thread": configuration(dtype="bf16", stepwell={"threads": 1}),
        "StepwellAdam": configuration(dtype="bf16", optimizer="StepwellAdam"),
        "q8": configuration(dtype="bf16", clip=0.1, stepwell={"moments": "q8"}),
        "bf16 moments": configuration(dtype="bf16", stepwell={"moments": "bf16"}),
        "split": configuration(
            dtype="bf16",
            optimizer="StepwellAdamW",
            precision={"bf16_master_weights_and_grads": True},
        ),
        "ZeRO-3": configuration(dtype="bf16", stage=3, zero={"sub_group_size": 3000}),
        "ZeRO-3, fp32": configuration(stage=3),
        "ZeRO-3, accumulated": configuration(dtype="bf16", stage=3, gradient_accumulation_steps=3),
        "ZeRO-3, accumulated on the device": configuration(
            dtype="bf16",
            stage=3,
            gradient_accumulation_steps=3,
            stepwell={"accumulate": "device"},
        ),
        "ZeRO-3, fp32 sums": configuration(
            dtype="bf16", stage=3, gradient_accumulation_steps=3, data_types=fp32_sums
        ),
        "ZeRO-3, q8": configuration(
            dtype="bf16", stage=3, zero={"sub_group_size": 3000}, stepwell={"moments": "q8"}
        ),
        "ZeRO-3, clipped": configuration(dtype="bf16", stage=3, clip=0.1),
    }
    for name, config in cases.items():
        result[name] = both(config)
    with autocast() as block:
        result["autocast"] = both(configuration(torch_autocast=block))
        result["ZeRO-3, autocast"] = both(configuration(stage=3, torch_autocast=block))
    result["experts"] = both(configuration(dtype="bf16"), model=with_experts, steps=3)
    result["waits"] = waited()
    for stage in (2, 3):
        result[f"held, ZeRO-{stage}"] = {place: held(place, stage) for place in ("host", "device")}
    result["wide"] = both(configuration(dtype="bf16", clip=1.0), model=wide, steps=4)
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
        sums = engine.optimizer._partitions._sums.values()
        grads = (param.grad for param in engine.module.parameters())
        counts.append(sum(each.numel() for each in (*sums, *grads) if each is not None))
        engine.step()
    engine.destroy()
    return counts


def waited():
    """Which fragments forwards have waited for in the third step, call by call.

    And whether a read right after a step is of the new weight.
    """
    from stepwell.deepspeed.zero.partitions import Partitions

    calls, wait = [], Partitions.wait

    def counting(self, fragments):
        calls.append([tuple(fragment) for fragment in fragments])
        return wait(self, calls[-1])

    engine = initialize(perceptron(), configuration(dtype="bf16"))
    train(engine, vectors(2), squared)
    Partitions.wait = counting
    train(engine, vectors(1), squared)
    Partitions.wait = wait
    weight = engine.module[0].weight
    read = weight.detach().clone()
    engine.optimizer.synchronize()
    return calls, torch.equal(read, weight)


def with_groups(config):
    import deepspeed

    model = perceptron()
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 1e-3},
    ]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
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
    for dtype in ("bf16", "fp32"):
        result[f"nonfinite, {dtype}"] = poisoned(configuration(dtype=dtype, clip=1.0))
    result["nonfinite, accumulated on the host"] = poisoned(
        configuration(dtype="bf16", gradient_accumulation_steps=2)
    )
    result["nonfinite, accumulated"] = poisoned(
        configuration(
            dtype="bf16", gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}
        )
    )


def grown(config):
    """The exp_avg after each step, and the loss scale before it."""
    engine = initialize(perceptron(), config)
    seen = []
    for batch in vectors(14):
        scale = engine.optimizer.loss_scale
        before = (
            engine.optimizer.overflow,
            [state.get("exp_avg") for _, state in partitions(engine)],
        )
        train(engine, [batch], squared)
        norm = engine.get_global_grad_norm()
        after = [state.get("exp_avg") for _, state in partitions(engine)]
        seen.append(
            {
                "scale": scale,
                "norm": norm,
                "overflow": engine.optimizer.overflow,
                "m": (before[1], after),
            }
        )
    return seen


def weights(engine):
    """The weights, or under ZeRO-3 this rank's pieces of them."""
    return [getattr(param, "ds_tensor", param).clone() for param in engine.module.parameters()]


def poisoned(config):
    """A step with a NaN in one gradient between others."""
    engine = initialize(perceptron(), config)
    accumulation = config.get("gradient_accumulation_steps", 1)
    train(engine, vectors(accumulation), squared)
    before = partitions(engine), weights(engine)
    batches = list(vectors(accumulation, first=10))
    batches[0][0, 0] = math.nan
    train(engine, batches, squared)
    after = partitions(engine), weights(engine)
    norm = float(engine.get_global_grad_norm())
    losses = train(engine, vectors(4 * accumulation, first=20), squared)
    result = {
        "before": before,
        "after": after,
        "norm": norm,
        "skipped": engine.skipped_steps,
        "losses": losses,
        "steps": [int(state["step"]) for _, state in partitions(engine)],
    }
    engine.destroy()
    return result


def access(result):
    """Gradients and state that the program reads and writes, and unusual numbers of backwards.

    The process ends without destroying the engine.
    """
    from deepspeed import utils

    (batch, other) = vectors(2)
    engine = initialize(wide(), configuration(dtype="bf16"))
    reference = wide().bfloat16()
    weight = engine.module[2].weight
    engine.backward(squared(engine, batch))
    squared(reference, batch).backward()
    result["grad"] = utils.safe_get_full_grad(weight).clone(), reference[2].weight.grad.float()
    utils.safe_set_full_grad(weight, torch.ones(weight.shape))
    result["set grad"] = utils.safe_get_full_grad(weight).clone()
    engine.step()
    # At once after a step, which goes on in the background.
    result["exp_avg"] = utils.safe_get_full_optimizer_state(weight, "exp_avg").clone()
    master = utils.safe_get_full_fp32_param(weight)
    result["master"] = master.clone(), [flat for flat, _ in partitions(engine)]
    utils.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg_sq")
    engine.backward(squared(engine, batch) * 0)
    engine.step()
    engine.optimizer.synchronize()
    result["set"] = weight.clone()
    train(engine, [batch], squared)
    result["state_dict"] = engine.module.state_dict()["2.weight"].clone(), partitions(engine)[0][0]
    train(engine, [batch], squared)
    engine.eval()
    with torch.no_grad():
        result["eval"] = [squared(engine, other).item() for _ in range(2)]
    engine.train()
    engine.backward(squared(engine, batch))
    utils.safe_set_full_grad(weight, torch.full(weight.shape, math.nan))
    engine.step()
    result["set nan"] = engine.optimizer.overflow, engine.skipped_steps
    engine.offload_states()
    engine.reload_states()
    result["reloaded"] = train(engine, [batch], squared)
    engine.destroy()

    # A second backward after the one that was announced as the last, and a parameter without a
    # gradient.
    engine = initialize(perceptron(), configuration(dtype="fp32"))
    for each in (batch, other):
        engine.backward(squared(engine, each))
    engine.step()
    result["two backwards"] = partitions(engine)
    engine.destroy()
    model = perceptron()
    for each in (batch, other):
        squared(model, each).backward()
    result["two backwards, sum"] = torch.cat([param.grad.flatten() for param in model.parameters()])

    engine = initialize(Forked(), configuration(dtype="fp32", params={"betas": [0.5, 0.5]}))
    result["forked"] = []
    for _ in range(3):
        train(engine, [batch], squared)
        result["forked"].append(
            utils.safe_get_full_optimizer_state(engine.module.second.weight, "exp_avg").clone()
        )
    engine.destroy()

    engine = initialize(perceptron(), configuration(dtype="bf16", stage=3, clip=1e-3))
    weight = engine.module[0].weight
    engine.backward(squared(engine, batch))
    grad = utils.safe_get_full_grad(weight).clone()
    utils.safe_set_full_grad(weight, 2 * grad)
    result["ZeRO-3 grad"] = (
        grad,
        utils.safe_get_full_grad(weight).clone(),
        utils.safe_get_local_grad(weight).clone(),
    )
    utils.safe_update_full_grad_vectorized([weight], lambda grad, _: torch.full_like(grad, 7.0))
    engine.step()
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    result["ZeRO-3 set"] = moment, engine.get_global_grad_norm(), weight.numel() or weight.ds_numel
    engine.destroy()

    engine = initialize(wide(), configuration(dtype="bf16"))
    train(engine, [batch], squared)
    # Python ends, and a step is running.


def checkpoints(result, folder):
    """Checkpoints of one path, loaded by the other, and by DeepSpeed's tools without Stepwell."""
    for name, options in {"ZeRO-2": {}, "ZeRO-1": {"stage": 1}, "ZeRO-3": {"stage": 3}}.items():
        for engine_saves in (True, False):
            saved = str(Path(folder) / f"{name}_{engine_saves}")
            config = configuration(dtype="bf16", **options)
            engine = initialize(perceptron(), {**config, "stepwell": {"engine": engine_saves}})
            train(engine, vectors(3), squared)
            engine.save_checkpoint(saved)
            after = train(engine, vectors(3, first=3), squared), partitions(engine)
            engine.destroy()
            for engine_loads in (True, False):
                engine = initialize(
                    perceptron(seed=1), {**config, "stepwell": {"engine": engine_loads}}
                )
                engine.load_checkpoint(saved)
                resumed = train(engine, vectors(3, first=3), squared), partitions(engine)
                engine.destroy()
                result[name, engine_saves, engine_loads] = after, resumed
    program = (
        "import sys; sys.modules['stepwell'] = None\n"
        "from deepspeed.utils import zero_to_fp32\n"
        "import torch, glob\n"
        "torch.save(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]), "
        "sys.argv[2])\n"
        "(path,) = glob.glob(sys.argv[1] + '/*/*optim_states.pt')\n"
        "print(sorted(torch.load(path, "
        "weights_only=False)['optimizer_state_dict']['base_optimizer_state']['state'][0]))\n"
    )
    saved, converted = str(Path(folder) / "ZeRO-2_True"), str(Path(folder) / "fp32.pt")
    command = [sys.executable, "-c", program, saved, converted]
    output = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    result["without Stepwell"] = torch.load(converted), output.splitlines()[-1]


def program_offload(result, folder):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for part in (paths, fp16, options):
        part(result.setdefault(part.__name__, {}))
    checkpoints(result.setdefault("checkpoints", {}), folder)
    # The last: it ends while a step is running.
    access(result.setdefault("access", {}))


def program_offload_ranks(result):
    """Two ranks on both paths."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    cases = {
        "ZeRO-2": configuration(dtype="bf16", clip=0.1),
        "ZeRO-1": configuration(dtype="bf16", stage=1, clip=0.1),
        "accumulated": configuration(dtype="bf16", gradient_accumulation_steps=2),
        "accumulated on the device": configuration(
            dtype="bf16", gradient_accumulation_steps=2, stepwell={"accumulate": "device"}
        ),
        "accumulated, ZeRO-1": configuration(dtype="bf16", stage=1, gradient_accumulation_steps=2),
        "fp32 sums": configuration(
            dtype="bf16", gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}
        ),
        "q8": configuration(stepwell={"moments": "q8"}),
        "ZeRO-3": configuration(dtype="bf16", stage=3, gradient_accumulation_steps=2),
        "ZeRO-3, parameters": configuration(
            dtype="bf16",
            stage=3,
            zero={"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 100},
        ),
        "small buckets": configuration(
            dtype="bf16", zero={"reduce_bucket_size": 1000, "round_robin_gradients": True}
        ),
    }
    for name, config in cases.items():
        result[name] = both(config, rank=rank)
    said = _Lines()
    logging.getLogger("DeepSpeed").addHandler(said)
    initialize(perceptron(), configuration(stepwell={"gate": "module"})).destroy()
    result["said"] = [line for line in said.lines if "stepwell" in line]
    with autocast() as block:
        result["autocast"] = both(configuration(torch_autocast=block), rank=rank)
    for stage in (1, 2, 3):
        config = configuration(dtype="bf16", stage=stage)
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
    # DeepSpeed's own path reads other gradients than those that it is asked for.
    result["access, round robin"] = [
        [
            value
            for value in deepspeed_access_programs.read(
                configuration(dtype="bf16", zero={"round_robin_gradients": is_mixed}),
                model=uneven,
                rank=rank,
            )
            # Norms are sums in another order.
            if isinstance(value, torch.Tensor)
        ]
        for is_mixed in (True, False)
    ]
    # On one rank only, by which both have to skip.
    engine = initialize(perceptron(), configuration(dtype="bf16"))
    (batch,) = vectors(1)
    batch[0, 0] = math.nan if rank == 1 else 0.0
    before = partitions(engine)
    train(engine, [batch], squared)
    result["nonfinite"] = before, partitions(engine), engine.skipped_steps
    engine.destroy()


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def options(result):
    """What the block may hold, and what keeps DeepSpeed's own path."""
    import stepwell

    handler, theirs = _Lines(), _Lines()
    logger = logging.getLogger("stepwell.deepspeed")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logging.getLogger("DeepSpeed").addHandler(theirs)
    for name, block in {
        "unknown": {"engin": True},
        "no block": [1],
        "engine": {"engine": 1},
        "moments": {"moments": "fp8"},
        "gate": {"gate": "layer"},
        "accumulate": {"accumulate": "gpu"},
        "threads": {"threads": 0},
        "host_bytes_max": {"host_bytes_max": "1 GB"},
        "too little": {"host_bytes_max": 1000},
    }.items():
        try:
            initialize(perceptron(), configuration(stepwell=block))
        except ValueError as error:
            result[name] = str(error)
    twice = configuration(
        optimizer="StepwellAdamW", params={"moments": "bf16"}, stepwell={"moments": "q8"}
    )
    client = configuration(stepwell={"moments": "q8"})
    del client["optimizer"]
    for name, config in {"twice": twice, "client": client}.items():
        model = perceptron()
        more = {"optimizer": stepwell.AdamW(model.parameters())} if name == "client" else {}
        try:
            initialize(model, config, **more)
        except ValueError as error:
            result[name] = str(error)
    ratio = configuration(dtype="bf16", stage=3, precision={"bf16_master_weights_and_grads": True})
    ratio["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    nvme = configuration()
    nvme["zero_optimization"]["offload_optimizer"] |= {
        "device": "nvme",
        "nvme_path": "/nonexistent",
    }
    several = configuration(
        optimizer="SGD",
        zero_force_ds_cpu_optimizer=False,
        zero_allow_untested_optimizer=True,
        stepwell={"engine": False},
    )
    for name, config in {
        "off": configuration(stepwell={"engine": False}),
        "off, keys": configuration(stepwell={"engine": False, "gate": "step"}),
        "parameters": configuration(stage=3, zero={"offload_param": {"device": "cpu"}}),
        "nvme": nvme,
        "ratio": ratio,
        "no offload": configuration(offload=None),
        "no offload, keys": configuration(offload=None, stepwell={"threads": 1}),
        "torch": configuration(params={"torch_adam": True, "amsgrad": True}),
        "ZeRO-3": configuration(stage=3),
        "ZeRO-3, gate": configuration(stage=3, stepwell={"gate": "module"}),
        "ZeRO-3, q8": configuration(stage=3, stepwell={"moments": "q8"}),
        "ZeRO-2, parameters": configuration(zero={"offload_param": {"device": "cpu"}}),
        "several": several,
    }.items():
        handler.lines.clear()
        theirs.lines.clear()
        found = run(config, steps=1)
        result[f"path, {name}"] = found["class"], found["base"], list(handler.lines)
        result[f"said by DeepSpeed, {name}"] = [
            line.removeprefix("stepwell: ") for line in theirs.lines if "stepwell" in line
        ]
    handler.lines.clear()
    initialize(perceptron(), configuration(stage=0)).destroy()
    result["path, no ZeRO"] = list(handler.lines)
    # Plans are values.
    for name, config in {
        "ZeRO-2": configuration(dtype="bf16"),
        "gate step": configuration(dtype="bf16", stepwell={"gate": "step"}),
        "ZeRO-3": configuration(dtype="bf16", stage=3),
        "no offload": configuration(offload=None),
        "several": several,
    }.items():
        engine = initialize(perceptron(), config)
        result[f"plan, {name}"] = engine.stepwell_plan
        engine.destroy()
    inference = configuration(stage=3, stepwell={"moments": "q8"})
    del inference["optimizer"]
    import deepspeed

    engine = deepspeed.initialize(model=perceptron(), config=inference)[0]
    result["plan, inference"] = engine.stepwell_plan
    # A version of DeepSpeed that calls it in another way.
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kept, DeepSpeedZeroOptimizer.reduce_ipg_grads = (
        DeepSpeedZeroOptimizer.reduce_ipg_grads,
        lambda self, dtype=None: kept(self, dtype),
    )
    idle = {"gate": "step", "threads": 1, "moments": "q8"}
    for name, block in {"other version": {}, "idle keys": idle}.items():
        handler.lines.clear()
        found = run(configuration(stepwell=block), steps=1)
        result[f"path, {name}"] = found["class"], found["base"], list(handler.lines)
    DeepSpeedZeroOptimizer.reduce_ipg_grads = kept
