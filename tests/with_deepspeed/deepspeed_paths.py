"""Runs of ZeRO on the offload engine, and on DeepSpeed's own path on Stepwell's op.

The models that tell the two apart.
"""

import contextlib
import math

import torch
from deepspeed_engines import initialize, partitions, perceptron, squared, train, vectors

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
