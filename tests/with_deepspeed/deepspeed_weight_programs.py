"""Programs (see deepspeed_run) that read and write weights between a step and the next forward."""

import copy
import io
import math

import torch
from deepspeed_engines import configuration, initialize, partitions, train, vectors

ROUNDS = 2


def wide(seed=0):
    """A step in the background takes longer than what follows it."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024, bias=False)
    )


def loss_of(engine, x):
    return (engine(x.bfloat16()).float() - 1).square().mean()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(params):
    averages = [torch.ones_like(param, requires_grad=False) for param in params]
    torch._foreach_lerp_(averages, params, 0.25)
    return averages


READS = {
    "clone": lambda engine, params: [param.detach().clone() for param in params],
    "data": lambda engine, params: [param.data.clone() for param in params],
    "norms": lambda engine, params: torch._foreach_norm(params),
    "average": lambda engine, params: averaged(params),
    "one": lambda engine, params: [2 * params[2]],
    "deepcopy": lambda engine, params: list(copy.deepcopy(engine.module).state_dict().values()),
    "save": lambda engine, params: list(saved(engine.module.state_dict()).values()),
    "state_dict": lambda engine, params: [
        value.clone() for value in engine.module.state_dict().values()
    ],
    "numpy": lambda engine, params: [
        torch.from_numpy(param.detach().float().numpy().copy()) for param in params
    ],
    "list": lambda engine, params: [torch.tensor(param[-1].tolist()) for param in params],
}


def reads(block):
    """What each kind of read gets right after a step, and what it gets when all has settled."""
    engine = initialize(wide(), configuration(dtype="bf16", stepwell=block))
    params = list(engine.module.parameters())
    train(engine, vectors(1), loss_of)
    found = {}
    for number, (name, read) in enumerate(READS.items()):
        train(engine, vectors(1, first=1 + number), loss_of)
        now = [each.clone() for each in read(engine, params)]
        if hasattr(engine.optimizer, "synchronize"):
            engine.optimizer.synchronize()
        found[name] = now, [each.clone() for each in read(engine, params)]
    engine.destroy()
    return found


def regularised(block):
    """Losses with a term that is computed before the forward."""
    engine = initialize(wide(), configuration(dtype="bf16", clip=1.0, stepwell=block))
    terms = []
    for batch in vectors(4):
        term = sum(param.float().square().sum() for param in engine.module.parameters())
        engine.backward(loss_of(engine, batch) + 1e-3 * term)
        engine.step()
        terms.append(term.item())
    found = terms, partitions(engine)
    engine.destroy()
    return found


def written(block, write):
    """Losses where a weight is written after each step: the master wins in the next."""
    engine = initialize(wide(), configuration(dtype="bf16", stepwell=block))
    weight = engine.module[2].weight
    found = []
    for batch in vectors(4):
        found += train(engine, [batch], loss_of)
        with torch.no_grad():
            write(weight)
        found.append(weight.float().norm().item())
    masters = partitions(engine)
    engine.destroy()
    return found, masters


def view_kept(block):
    """What a view of a weight that was taken before a step shows after it."""
    engine = initialize(wide(), configuration(dtype="bf16", stepwell=block))
    train(engine, vectors(2), loss_of)
    view = engine.module[2].weight.data.view(-1)
    found = []
    for batch in vectors(ROUNDS, first=2):
        train(engine, [batch], loss_of)
        now = view.clone()
        found.append((now, engine.module[2].weight.detach().flatten().clone()))
    engine.destroy()
    return found


def refreshed(block):
    """The masters after the weights, written by hand, were taken for them right after a step."""
    engine = initialize(wide(), configuration(dtype="bf16", stepwell=block))
    train(engine, vectors(2), loss_of)
    engine.optimizer.refresh_fp32_params()
    first = [flat.clone() for flat, _ in partitions(engine)]
    train(engine, vectors(1, first=2), loss_of)
    engine.optimizer.update_lp_params()
    second = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    return first, second


def defaults(stage, block):
    """Losses and state of a run during which torch's default dtype is another."""
    config = configuration(dtype="bf16", stage=stage, clip=0.1, stepwell=block)
    engine = initialize(wide(), config)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        losses = train(engine, vectors(4), loss_of)
        norm = engine.get_global_grad_norm()
    finally:
        torch.set_default_dtype(kept)
    found = losses, float(norm), norm.dtype, partitions(engine)
    engine.destroy()
    return found


def program_weights(result):
    """All accesses, on the engine and on DeepSpeed's own path."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    ours, theirs = {"engine": True, "threads": 1}, {"engine": False}
    result["reads"] = reads(ours), reads(theirs)
    result["regularised"] = regularised(ours), regularised(theirs)
    for name, write in {
        "zero_": torch.Tensor.zero_,
        "copy_": lambda weight: weight.copy_(torch.ones(weight.shape)),
        "data": lambda weight: weight.data.mul_(0.5),
    }.items():
        result[f"written, {name}"] = written(ours, write), written(theirs, write)
    result["view"] = view_kept(ours), view_kept(theirs)
    result["refreshed"] = refreshed(ours), refreshed(theirs)
    assert math.isfinite(result["regularised"][0][0][0])


def program_defaults(result):
    """torch's default dtype, which DeepSpeed itself changes under `zero.Init`."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for stage, moments in ((2, "q8"), (3, "fp32")):
        block = {"moments": moments}
        result[stage, moments] = [
            defaults(stage, {**block, "engine": engine}) for engine in (True, False)
        ]
