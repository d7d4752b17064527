"""The program (see deepspeed_run) of Stepwell's hooks on several ranks, whose fetches gather.

Each model trains with them and with DeepSpeed's, on batches of each rank's own.
"""

import deepspeed_fetch_programs as alone
import torch
from deepspeed_engines import initialize, vectors
from deepspeed_fetch_programs import (
    STEPS,
    TIGHT,
    AdaptedAgain,
    Model,
    Reaching,
    Scaled,
    Tied,
    loss_of,
    offloaded,
    write,
)
from deepspeed_offload_param_programs import weights

MODELS = (AdaptedAgain, Reaching)


class Uneven(Model):
    """Whose parameters do not divide by the ranks; one has another dtype."""

    def __init__(self):
        super().__init__()
        self.layers[1] = torch.nn.Sequential(torch.nn.Linear(32, 7), torch.nn.Linear(7, 32))


class Normed(Model):
    """Whose first weights are persistent, and whose layers are of several sizes."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*sizes) for sizes in ((32, 32), (32, 4), (4, 32)) * 3
        )

    def forward(self, x):
        return super().forward(self.norm(x))


class Parting(Model):
    """The ranks may call its layers in different orders."""

    order = (0, 1, 2)

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


def both(model, rank, *, is_on_device=False, **options):
    """With Stepwell's hooks and with DeepSpeed's."""
    found = []
    for fetch in ("stepwell", "deepspeed"):
        config = offloaded(stepwell={"fetch": fetch}, **options)
        if is_on_device:
            del config["zero_optimization"]["offload_param"]
        found.append(alone.trained(model, config, rank=rank))
    return found


def one_by_one(rank):
    """A run on process groups whose backend coalesces no gathers, and one where it does."""
    import pytest

    def missing(*_):
        # As torch says it of such a backend.
        raise RuntimeError("Backend mine does not support all_gather_single_coalesced")

    group = torch.distributed.ProcessGroup
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "allgather_into_tensor_coalesced", missing)
        found = alone.trained(Uneven, offloaded(zero=TIGHT), rank=rank)
    return found, alone.trained(Uneven, offloaded(zero=TIGHT), rank=rank)


def written(rank):
    """Weights are written that were gathered ahead, and of which this rank may have no element.

    DeepSpeed's hooks refuse to partition what is gathered ahead: nothing is, with theirs.
    """
    ahead = TIGHT | {"stage3_max_live_parameters": 10_000}
    found = []
    for fetch, zero in (("stepwell", ahead), ("deepspeed", None)):
        config = offloaded(stepwell={"fetch": fetch}, zero=zero)
        found.append(alone.trained(Scaled, config, between=write, rank=rank))
    return found


def looked_at(rank):
    """With and without a look of one rank at what a persistent part of the model makes."""
    config = offloaded(
        persistent=100,
        zero={"stage3_prefetch_bucket_size": 600, "stage3_max_reuse_distance": 0},
    )

    def look(engine, step):
        if step in (1, 3) and rank == 0:
            with torch.no_grad():
                engine.module.norm(torch.ones(2, 32, dtype=torch.bfloat16))

    return [alone.trained(Normed, config, between=each, rank=rank) for each in (look, None)]


def parted(rank):
    """What a step says behind a forward in which the ranks have parted, and what comes after."""
    engine = initialize(Parting(), offloaded(zero=TIGHT))
    batches = list(vectors(STEPS, rank=rank))
    before, said = weights(engine), None
    engine.module.order = (1, 0, 2) if rank else (0, 1, 2)
    engine.backward(loss_of(engine, batches[0]))
    try:
        engine.step()
    except RuntimeError as error:
        said = str(error)
    is_same = all(map(torch.equal, weights(engine), before))
    engine.module.order = (0, 1, 2)
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return {"said": said, "is_same": is_same, "losses": losses}


def program_fetch_ranks(result):
    """All that one of two ranks does."""
    import stepwell.deepspeed
    from deepspeed import comm

    stepwell.deepspeed.register()
    comm.init_distributed(dist_backend="gloo", verbose=False)
    rank = comm.get_rank()
    for model in MODELS:
        result[model.__name__] = both(model, rank, zero=TIGHT)
    result["Tied"] = both(Tied, rank, gradient_accumulation_steps=2)
    result["Uneven, on the device"] = both(Uneven, rank, is_on_device=True, persistent=100)
    result["one by one"] = one_by_one(rank)
    result["written"] = written(rank)
    result["looked at"] = looked_at(rank)
    result["parted"] = parted(rank)
