"""The program (see deepspeed_run) of ZeRO-3 with `offload_param` on the offload engine.

Against DeepSpeed's own path on Stepwell's op.
"""

import gc
import weakref

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


def run(config, *, model=perceptron, steps=STEPS):
    """What a run ends with: losses, norms, weights, partitions."""
    engine = initialize(model(), config)
    losses, norms = [], []
    for batch in vectors(steps * config.get("gradient_accumulation_steps", 1)):
        losses += train(engine, [batch], squared)
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
        "all persistent": offloaded(persistent=100000),
        "clipped": offloaded(clip=0.1),
        "fp16": offloaded(dtype="fp16", precision=dynamic),
        "fp32": offloaded(dtype="fp32", persistent=100),
        "accumulated": offloaded(gradient_accumulation_steps=3),
        "fp32 sums": offloaded(
            gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}
        ),
        "q8": offloaded(zero={"sub_group_size": 3000}, stepwell={"moments": "q8"}),
    }
    for name, config in cases.items():
        result[name] = both(config, steps=16 if name == "fp16" else STEPS)
    result["frozen"] = both(offloaded(), model=Adapted)
    born = offloaded()
    result["zero.Init"] = both(born, model=partitioned_at_birth({**born}))


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


def saved_16_bits(folder):
    """Weights that are saved for other programs right after a step, and those of the engine."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = initialize(perceptron(), offloaded(persistent=100, zero=zero))
    train(engine, vectors(3), squared)
    engine.save_16bit_model(folder)
    found = torch.load(f"{folder}/pytorch_model.bin"), weights(engine)
    engine.destroy()
    return found


def awaited():
    """Which persistent weights are under way as each layer begins its forward behind a step."""
    from stepwell.access.writes import is_under_way

    engine = initialize(perceptron(), offloaded(persistent=100000))
    train(engine, vectors(2), squared)
    layers = {name: engine.module[int(name)] for name in ("0", "2")}
    found = {}

    def note(name):
        found[name] = [key for key, layer in layers.items() if is_under_way(layer.weight)]

    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: note(name))
    squared(engine, *vectors(1))
    engine.destroy()
    return found


def program_offload_param(result, folder):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    paths(result.setdefault("paths", {}))
    memory(result)
    result["touched"] = touched()
    result["awaited"] = awaited()
    result["16 bits"] = saved_16_bits(folder)
