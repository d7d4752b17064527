"""Programs (see deepspeed_run) of torch's Adam and AdamW under ZeRO with CPU offload.

On the offload engine, on DeepSpeed's own path, and beside DeepSpeedCPUAdam on the engine.
"""

import warnings
from pathlib import Path

import torch
from deepspeed_engines import LR, configuration, initialize, partitions, perceptron, train, vectors
from deepspeed_engines import squared as loss_of
from deepspeed_paths import run

DECAY = 0.01


class Own(torch.optim.AdamW):
    """A subclass: it might step in another way."""


def adamw(params, cls=torch.optim.AdamW, lr=LR, **options):
    return cls(params, lr=lr, weight_decay=DECAY, **options)


def config_of(engine=True, *, is_forced=False, **options):
    config = configuration(stepwell={"engine": engine}, **options)
    del config["optimizer"]
    return config | ({} if is_forced else {"zero_force_ds_cpu_optimizer": False})


def stepped(engine, *, make=adamw, model=perceptron, schedule=None, **options):
    """A run with a client optimizer, on the engine or not."""
    network = model()
    optimizer = make(network.parameters())
    groups = list(optimizer.param_groups)
    scheduler = None if schedule is None else schedule(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(
            config_of(engine, **options),
            model=lambda: network,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
    same = [one is other for one, other in zip(groups, optimizer.param_groups, strict=True)]
    return result | {
        "same groups": all(same),
        "lrs": [group["lr"] for group in optimizer.param_groups],
        "warnings": [str(each.message) for each in caught if "lr_scheduler" in str(each.message)],
        # Steps of the optimizer's that torch would have state of, and nothing else.
        "keys": [set(state) for state in optimizer.state.values()],
    }


def two_groups(params):
    weights, biases = [], []
    for param in params:
        (weights if param.ndim > 1 else biases).append(param)
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": LR / 10}]
    return adamw(groups)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def paths(result):
    cases = {
        "ZeRO-1": {"dtype": "bf16", "stage": 1},
        "ZeRO-2": {"dtype": "bf16", "clip": 0.1},
        "ZeRO-3": {"dtype": "bf16", "stage": 3, "zero": {"sub_group_size": 3000}},
        "fp32": {},
        "Adam": {"make": lambda params: adamw(params, torch.optim.Adam)},
        "maximize": {"make": lambda params: adamw(params, maximize=True)},
        "groups": {"make": two_groups},
        "schedule": {"schedule": halving},
    }
    for name, options in cases.items():
        result[name] = [stepped(engine, **options) for engine in (True, False)]
    result["fused"] = stepped(True, make=lambda params: adamw(params, fused=True))
    result["lr is a tensor"] = stepped(True, make=lambda params: adamw(params, lr=torch.tensor(LR)))
    # As the JSON says it.
    params = {"weight_decay": DECAY, "torch_adam": True}
    result["torch_adam"] = [
        run(configuration(params=dict(params), stepwell={"engine": engine}))
        for engine in (True, False)
    ]
    coded = configuration(params=dict(params), stepwell={"moments": "q8"})
    result["torch_adam, q8"] = run(coded)["base"]


def forced(result):
    """What DeepSpeed says of a client optimizer where the JSON lets it force its own."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    def with_amsgrad(params):
        return adamw(params, amsgrad=True)

    for name, (make, on_engine) in {
        "forced": (adamw, True),
        "forced, callable": (adamw, True),
        "forced, off": (adamw, False),
        "forced, callable, off": (adamw, False),
        "forced, amsgrad": (with_amsgrad, True),
        "forced, another": (torch.optim.Adagrad, True),
    }.items():
        model = perceptron()
        given = make if "callable" in name else make(model.parameters())
        try:
            engine = initialize(model, config_of(on_engine, is_forced=True), optimizer=given)
        except ZeRORuntimeException as error:
            result[name] = f"{type(error).__name__}: {error}"
            continue
        train(engine, vectors(2), loss_of)
        result[name] = type(engine.optimizer).__name__, type(engine.optimizer.optimizer).__name__
        if given is not adamw:
            result["identity"] = engine.optimizer.optimizer is given
        engine.destroy()


def checkpoints(result, folder):
    """Saved and loaded by either path, and by the engine with DeepSpeedCPUAdam."""

    def started(name, seed):
        model = perceptron(seed=seed)
        if name == "DeepSpeedCPUAdam":
            config = configuration(dtype="bf16", params={"weight_decay": DECAY})
            return initialize(model, config)
        config = config_of(name == "engine", dtype="bf16")
        return initialize(model, config, optimizer=adamw(model.parameters()))

    names = ("engine", "DeepSpeed", "DeepSpeedCPUAdam")
    for saves in names:
        saved = str(Path(folder) / saves)
        engine = started(saves, 0)
        train(engine, vectors(2), loss_of)
        engine.save_checkpoint(saved)
        after = train(engine, vectors(2, first=2), loss_of), partitions(engine)
        engine.destroy()
        for loads in names:
            if "engine" not in (saves, loads):
                continue
            engine = started(loads, 1)
            engine.load_checkpoint(saved)
            resumed = train(engine, vectors(2, first=2), loss_of), partitions(engine)
            engine.destroy()
            result[saves, loads] = after, resumed


def program_torch_adam(result, folder):
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for part in (paths, forced):
        part(result.setdefault(part.__name__, {}))
    checkpoints(result.setdefault("checkpoints", {}), folder)
