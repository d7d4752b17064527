"""The program (see deepspeed_run) of ZeRO-3 with `offload_param` on the offload engine.

Against DeepSpeed's own path on Stepwell's op.
"""

import gc
import json
import weakref
from pathlib import Path

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
from deepspeed_paths import grown, poisoned, wide
from insides import partitions_of

STEPS = 4


def offloaded(*, persistent=0, pinned=False, zero=None, **options):
    """A configuration of ZeRO-3 with `offload_param`.

    Args:
        persistent: parameters of at most so many elements stay on the device.
    """
    options = {"dtype": "bf16"} | options
    return configuration(
        stage=3,
        zero={
            "offload_param": {"device": "cpu", "pin_memory": pinned},
            "stage3_param_persistence_threshold": persistent,
            **(zero or {}),
        },
        **options,
    )


def piece_of(param):
    """This rank's part of a weight under ZeRO-3.

    DeepSpeed never writes what is behind the last element of a weight that does not divide by the
    ranks: it is left out.
    """
    import deepspeed

    part = param.ds_tensor
    left = param.ds_numel - deepspeed.comm.get_rank() * part.numel()
    return part.reshape(-1)[: max(0, left)].clone()


def weights(engine):
    """Under ZeRO-3 this rank's pieces of the weights, and the weights that a module sees."""
    import deepspeed

    params = list(engine.module.parameters())
    pieces = [piece_of(param) for param in params if hasattr(param, "ds_tensor")]
    for param in params:
        # Of several DeepSpeed before 0.19.8 waits for the last one only, where gloo gathers.
        with deepspeed.zero.GatheredParameters([param]):
            pieces.append(param.detach().clone())
    return pieces


def loss_of(model, x):
    from deepspeed.accelerator import get_accelerator

    return squared(model, x.to(get_accelerator().current_device_name()))


def run(config, *, model=perceptron, steps=STEPS, make=initialize):
    """What a run ends with: losses, norms, weights, partitions."""
    engine = make(model(), config)
    losses, norms = [], []
    for batch in vectors(steps * config.get("gradient_accumulation_steps", 1)):
        losses += train(engine, [batch], loss_of)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    result = {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine),
        "partitions": partitions(engine),
        "class": type(engine.optimizer).__name__,
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return result


def both(config, **options):
    """A run on the engine, and one on DeepSpeed's path."""
    block = config.pop("stepwell", {})
    return [
        run({**config, "stepwell": {**block, "engine": engine}}, **options)
        for engine in (True, False)
    ]


class Adapted(torch.nn.Module):
    """Frozen weights with a small trainable part beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = perceptron().requires_grad_(False)
        self.down = torch.nn.Linear(32, 4, bias=False)
        self.up = torch.nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_groups(model, config):
    import deepspeed

    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def partitioned_at_birth(config):
    """A model made under `zero.Init`, as `from_pretrained` makes it."""
    import deepspeed

    def model():
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            return perceptron()

    return model


def paths(result):
    """The same configurations on both paths."""
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    dynamic = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    cases = {
        "bf16": offloaded(),
        "sub-groups": offloaded(zero={"sub_group_size": 3000}),
        "persistent biases": offloaded(persistent=100),
        "all persistent": offloaded(persistent=100000),
        "clipped": offloaded(clip=0.1),
        "fp16": offloaded(dtype="fp16", precision=dynamic),
        "fp32": offloaded(dtype="fp32", persistent=100),
        "accumulated": offloaded(gradient_accumulation_steps=3),
        "fp32 sums": offloaded(
            gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}
        ),
        "pinned": offloaded(pinned=True),
        "bf16 moments": offloaded(stepwell={"moments": "bf16"}),
        "q8": offloaded(zero={"sub_group_size": 3000}, stepwell={"moments": "q8"}),
        "bf16 masters": offloaded(
            optimizer="StepwellAdamW", precision={"bf16_master_weights_and_grads": True}
        ),
    }
    for name, config in cases.items():
        result[name] = both(config, steps=16 if name == "fp16" else STEPS)
    result["groups"] = both(offloaded(), make=with_groups)
    result["frozen"] = both(offloaded(), model=Adapted)
    born = offloaded()
    result["zero.Init"] = both(born, model=partitioned_at_birth({**born}))


def checkpoints(result, folder):
    """Checkpoints of one path, loaded by the other, and 16-bit weights for other programs."""
    config = offloaded(persistent=100, zero={"stage3_gather_16bit_weights_on_model_save": True})
    for engine_saves in (True, False):
        saved = str(Path(folder) / f"saved_{engine_saves}")
        engine = initialize(perceptron(), {**config, "stepwell": {"engine": engine_saves}})
        train(engine, vectors(3), squared)
        engine.save_checkpoint(saved)
        engine.save_16bit_model(saved)
        result["16 bits", engine_saves] = torch.load(f"{saved}/pytorch_model.bin"), weights(engine)
        after = train(engine, vectors(3, first=3), squared), partitions(engine), weights(engine)
        engine.destroy()
        for engine_loads in (True, False):
            block = {"stepwell": {"engine": engine_loads}}
            engine = initialize(perceptron(seed=1), {**config, **block})
            engine.load_checkpoint(saved)
            losses = train(engine, vectors(3, first=3), squared)
            result[engine_saves, engine_loads] = (
                after,
                (losses, partitions(engine), weights(engine)),
            )
            engine.destroy()


def interrupted(dtype, *, is_interrupted):
    """What a second step ends with that Ctrl-C meets once it is submitted, or not."""
    from stepwell.deepspeed.zero.partitions import Partitions

    def interrupt(self):
        raise KeyboardInterrupt

    engine = initialize(perceptron(), offloaded(dtype=dtype, persistent=100))
    train(engine, vectors(1), squared)
    forget = Partitions.forget
    if is_interrupted:
        Partitions.forget = interrupt
    try:
        train(engine, vectors(1, first=1), squared)
    except KeyboardInterrupt:
        is_interrupted = False
    Partitions.forget = forget
    assert not is_interrupted
    found = weights(engine), partitions(engine)
    engine.destroy()
    return found


def num_pinned(config, *, given):
    """How many tensors DeepSpeed pins while it makes an engine of a JSON that is given so."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    count, pin_memory = 0, accelerator.pin_memory

    def counting(*args, **keywords):
        nonlocal count
        count += 1
        return pin_memory(*args, **keywords)

    accelerator.pin_memory = counting
    engine = initialize(perceptron(), given(config))
    accelerator.pin_memory = pin_memory
    asked = engine.zero_offload_param().pin_memory
    engine.destroy()
    return count, asked


def pins(result, folder):
    """What is pinned tensor by tensor, of a JSON that is a dict, and of one that is a file."""

    def written(config):
        path = Path(folder) / "pinned.json"
        path.write_text(json.dumps(config))
        return str(path)

    config = offloaded(pinned=True)
    result["dict"] = num_pinned(config, given=dict)
    result["file"] = num_pinned(config, given=written)
    result["theirs"] = num_pinned({**config, "stepwell": {"engine": False}}, given=dict)


def memory(result):
    """What is announced, what is there, and what is left after `destroy`."""
    import stepwell.deepspeed.zero.host_memory as module

    announced, original = [], module.announce

    def announce(*args, **keywords):
        announced.append(keywords)
        return original(*args, **keywords)

    module.announce = announce
    engine = initialize(perceptron(), offloaded(persistent=100))
    module.announce = original
    train(engine, vectors(1), squared)
    zero = engine.optimizer
    state = [zero.optimizer.state[flat] for flat in zero.fp32_partitioned_groups_flat]
    stepping = partitions_of(zero)
    twins = stepping.twins
    held = [
        *zero.fp32_partitioned_groups_flat,
        *stepping.gradients.grads,
        *twins,
        *(each[name] for each in state for name in ("exp_avg", "exp_avg_sq")),
    ]
    result["memory"] = {
        "announced": [each["state"] + each["crossing"] for each in announced],
        "held": sum(tensor.nbytes for tensor in held),
        "numel": sum(flat.numel() for flat in zero.fp32_partitioned_groups_flat),
        "flat buffer": zero.grad_partitions_flat_buffer.nbytes,
        "is in place": all(
            twin.data_ptr() == weight.data_ptr()
            for twin, weight in zip(twins, zero.fp16_partitioned_groups_flat, strict=True)
        ),
        "uploaded": zero.timing["bytes_uploaded"],
    }
    grads = [weakref.ref(grad) for grad in stepping.gradients.grads]
    del stepping, held, twins, state
    engine.destroy()
    gc.collect()
    result["memory"]["freed"] = [grad() is None for grad in grads]
    # As the engine's end does again.
    engine.destroy()


def touched():
    """Bytes that are touched where an engine is made, in pieces of 1 MiB or more."""
    from stepwell import _core

    sizes, buffer_of = [], _core.Buffer
    _core.Buffer = lambda nbytes: sizes.append(nbytes) or buffer_of(nbytes)
    try:
        engine = initialize(torch.nn.Linear(1024, 512), offloaded())
    finally:
        _core.Buffer = buffer_of
    engine.destroy()
    return [size for size in sizes if size >= 1 << 20]


def program_offload_param(result, folder):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    paths(result.setdefault("paths", {}))
    result["poisoned"] = poisoned(offloaded(clip=1.0, persistent=100))
    growing = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2}
    result["growing"] = grown(offloaded(dtype="fp16", precision=growing))
    checkpoints(result.setdefault("checkpoints", {}), folder)
    for dtype in ("bf16", "fp32"):
        result["interrupted", dtype] = [
            interrupted(dtype, is_interrupted=each) for each in (True, False)
        ]
    memory(result)
    result["touched"] = touched()
    pins(result.setdefault("pins", {}), folder)


def program_offload_device(result):
    """All stages on the accelerator of this machine, on both paths."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    growing = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2}
    sums = {"grad_accum_dtype": "fp32"}
    cases = {
        "ZeRO-1": configuration(dtype="bf16", stage=1),
        "ZeRO-2": configuration(dtype="bf16"),
        "ZeRO-2, accumulated": configuration(dtype="bf16", gradient_accumulation_steps=3),
        "ZeRO-2, not pinned": configuration(dtype="bf16", gradient_accumulation_steps=2),
        "ZeRO-3": configuration(dtype="bf16", stage=3),
        "ZeRO-3, not pinned": configuration(dtype="bf16", stage=3),
        "ZeRO-3, fp32 sums": configuration(
            dtype="bf16", stage=3, gradient_accumulation_steps=3, data_types=sums
        ),
        "parameters": offloaded(pinned=True),
        "parameters, sub-groups": offloaded(zero={"sub_group_size": 100000, "overlap_comm": True}),
        "parameters, persistent biases": offloaded(persistent=5000, pinned=True),
        "parameters, accumulated": offloaded(gradient_accumulation_steps=3),
        "parameters, fp16": offloaded(dtype="fp16", precision=growing, persistent=5000),
        "parameters, fp32": offloaded(dtype="fp32", pinned=True),
        "parameters, q8": offloaded(stepwell={"moments": "q8"}),
    }
    for name in ("ZeRO-2, not pinned", "ZeRO-3, not pinned"):
        cases[name]["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    for name, config in cases.items():
        result[name] = both(config, model=wide, steps=12)
