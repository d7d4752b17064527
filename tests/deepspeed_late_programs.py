"""Programs (see deepspeed_run) of ZeRO-3 with `offload_param` whose steps are late.

A step does not begin before something waits for it. So what does not wait reads old weights.
"""

import functools
import gc

import torch
from deepspeed_engines import configuration, initialize, perceptron, squared, train, vectors
from deepspeed_offload_param_programs import offloaded, weights

STEPS = 3


class LateEngine:
    """Begins a step when it is first waited for.

    Args:
        engine: the OffloadEngine that takes the steps.
    """

    def __init__(self, engine):
        self._engine = engine
        self._submission = None
        self.keep_busy = False
        """Whether it is busy for ever."""
        self.waits = []
        """The calls that have waited since the last step was submitted."""

    def submit(self, *args, **keywords):
        self._submission = functools.partial(self._engine.submit, *args, **keywords)
        self.waits = []

    @property
    def is_late(self):
        return self._submission is not None

    @property
    def busy(self):
        return self.keep_busy or self.is_late or self._engine.busy

    def release(self, **keywords):
        if not self.is_late:
            self._engine.release(**keywords)

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        return functools.partial(self._waiting, name, found) if callable(found) else found

    def _waiting(self, name, method, *args, **keywords):
        if self.is_late:
            submit, self._submission = self._submission, None
            submit()
            self._engine.release(stream=0)
        self.waits.append((name, *args))
        return method(*args, **keywords)


def large(seed=0):
    """Large enough that the state lies on huge pages."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 64, bias=False)
    )


def make_late(engine):
    partitions = engine.optimizer._partitions
    partitions._engine = LateEngine(partitions._engine)
    return partitions._engine


def trained_late(config, *, model=perceptron, is_late=True, steps=STEPS):
    """An engine after some steps, of which the last has not begun, and what makes it late."""
    engine = initialize(model(), config)
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
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

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
        "memory": lambda engine: engine.optimizer.param_groups_fp16_flat_cpu_memory[0] + 0,
        "numpy": lambda engine: torch.from_numpy(masters(engine).detach().numpy().copy()),
        "data": lambda engine: masters(engine).data.clone(),
        "master": lambda engine: safe_get_full_fp32_param(weight(engine)),
        "local master": lambda engine: safe_get_local_fp32_param(weight(engine)).clone(),
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
            engine.optimizer._partitions.finish()
        engine.destroy()


def stale(result, name, config):
    """The same where nothing waits."""
    from stepwell.offload.writes import Writes

    protect, Writes.protect = Writes.protect, lambda self, parts: None
    read(result, name, config)
    Writes.protect = protect


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


def prefetches(result):
    """What DeepSpeed's own fetches are told of how much may be prefetched."""
    config = offloaded()
    config["stepwell"] = {**config.get("stepwell", {}), "fetch": "deepspeed"}
    engine, late, _ = trained_late(config)
    squared(engine, next(vectors(1, first=90)))
    coordinator = engine.optimizer._get_param_coordinator()
    size = coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz
    # What DeepSpeed asks: whether there is one, and which is less.
    result["prefetch"] = [size > 0, int(min(int(1e12), size))]
    late.keep_busy = True
    result["prefetch"] += [size > 0]
    late.keep_busy = False
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


def moved(stage_options):
    """Losses with states that went to host memory and back, and without."""
    found = []
    for is_moved in (True, False):
        engine = initialize(perceptron(), configuration(stage=3, dtype="bf16", **stage_options))
        losses = train(engine, vectors(2), squared)
        if is_moved:
            try:
                engine.offload_states()
            except AssertionError as error:
                engine.destroy()
                return str(error)
            assert engine.optimizer.fp16_partitioned_groups_flat == []
            engine.reload_states()
        losses += train(engine, vectors(2, first=2), squared)
        found.append((losses, weights(engine)))
        engine.destroy()
    return found


def gates(result):
    """Whether the step is late with each configuration, and what it ends with."""
    cases = {
        "bf16": offloaded(),
        "large": offloaded(persistent=5000, zero={"sub_group_size": 200_000}),
        "large, q8": offloaded(stepwell={"moments": "q8"}),
        "sub-groups": offloaded(zero={"sub_group_size": 3000}),
        "persistent": offloaded(persistent=100),
        "all persistent": offloaded(persistent=100000),
        "accumulated": offloaded(gradient_accumulation_steps=2),
        "q8": offloaded(stepwell={"moments": "q8"}),
        "clipped": offloaded(clip=0.1),
        "fp16": offloaded(dtype="fp16", precision={"loss_scale": 128.0}),
        "torch's": offloaded(params={"torch_adam": True}),
        # The weights are copied from their masters at the end of the step.
        "fp32": offloaded(dtype="fp32"),
        "gate of the step": offloaded(stepwell={"gate": "step"}),
        "breakdown": offloaded(wall_clock_breakdown=True),
    }
    for name, config in cases.items():
        for is_late in (True, False):
            model = large if name.startswith("large") else perceptron
            engine, late, losses = trained_late(config, model=model, is_late=is_late, steps=4)
            was_late = late is not None and late.is_late
            result[name, is_late] = was_late, losses, weights(engine)
            engine.destroy()


def program_late(result):
    """All that one rank does."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    config = offloaded(persistent=100)
    read(result, "late", config)
    read(result, "in time", config, is_late=False)
    # Persistent parameters wait by a gate.
    stale(result, "stale", offloaded())
    gates(result.setdefault("gates", {}))
    waits(result)
    prefetches(result)
    written(result)
    exposed(result)
    result["moved"] = moved({})
    in_host_memory = {"offload_param": {"device": "cpu"}}
    result["not moved"] = [
        moved({"zero": in_host_memory, "stepwell": {"engine": engine}}) for engine in (True, False)
    ]


def program_late_ranks(result):
    """What each of two ranks does."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for persistent in (0, 100):
        for is_late in (True, False):
            config = offloaded(persistent=persistent, zero={"sub_group_size": 3000})
            engine, late, losses = trained_late(config, is_late=is_late)
            was_late = late is not None and late.is_late
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                found = [param.detach().clone() for param in engine.module.parameters()]
            result[persistent, is_late] = was_late, losses, found
            engine.destroy()
