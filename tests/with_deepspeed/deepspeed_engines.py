"""DeepSpeed engines for tests.

Configurations, tiny models, training, and what the optimizer holds.
"""

import functools
import gc
import logging

import torch

STEPS = 8
LR = 1e-2


class Lines(logging.Handler):
    """What a logger says."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def configuration(
    *,
    stage=2,
    offload="cpu",
    dtype="fp32",
    optimizer="AdamW",
    params=None,
    zero=None,
    precision=None,
    batch=4,
    clip=0.0,
    **more,
):
    """A DeepSpeed JSON."""
    zero_optimization = {"stage": stage, **(zero or {})}
    if offload:
        zero_optimization["offload_optimizer"] = {"device": offload}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {
            "type": optimizer,
            "params": {"lr": LR, "weight_decay": 0.01} | (params or {}),
        },
        "zero_optimization": zero_optimization,
        "gradient_clipping": clip,
        **more,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | (precision or {})
    return config


def perceptron(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def initialize(model, config, **more):
    import cpuinfo
    import deepspeed

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        # DeepSpeedCPUAdam asks each time, which runs programs.
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        # ZeRO-3 collects garbage for each engine. What has been imported is left out.
        gc.collect()
        gc.freeze()

    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, **more
    )[0]


def initialize_groups(config):
    """An engine whose biases have options of their own."""
    import deepspeed

    model = perceptron()
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def vectors(count, first=0, rank=0):
    """Batches of the perceptron: number `i` is the same whichever is asked for first."""
    for index in range(first, first + count):
        yield torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * rank + index))


def squared(model, x):
    x = x.to(next(iter(model.parameters())).dtype)
    return (model(x).float() - 1).square().mean()


def train(engine, batches, loss_of, before_step=None):
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        if before_step is not None:
            before_step()
        engine.step()
        losses.append(loss.item())
    return losses


def partitions(engine):
    """The flat partitions that the optimizer steps, with their state."""
    zero = engine.optimizer
    flats = (
        getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
    )
    return [(flat.detach().clone(), copied(zero.optimizer.state[flat])) for flat in flats]


def copied(state):
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def trained(config, *, model=perceptron, count=STEPS, loss_of=squared, batches=None, **more):
    """Losses, and the partitions of the engine at the end."""
    engine = initialize(model(), config, **more)
    losses = train(engine, vectors(count) if batches is None else batches, loss_of)
    result = {
        "losses": losses,
        "partitions": partitions(engine),
        "optimizer": type(engine.optimizer.optimizer).__name__,
    }
    engine.destroy()
    return result
