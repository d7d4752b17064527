"""The programs (see deepspeed_run) of ZeRO with its optimizer state on a volume.

Against the same runs with the state in host memory.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from deepspeed_checkpoint_programs import to_universal
from deepspeed_engines import (
    configuration,
    initialize,
    partitions,
    squared,
    train,
)
from deepspeed_release import fp32_sums
from insides import core_of_partitions, partitions_of

STEPS = 3
WIDTH = 64
# ZeRO-1 has the volume of ZeRO-2: it is among the paths.
STAGES = (2, 3)
# What the volume takes at least, with no room for the state of a chunk beside it.
BUFFERS_BYTES = 1_800_000


def model(seed=0):
    """Of three chunks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 1024), torch.nn.GELU(), torch.nn.Linear(1024, WIDTH)
    )


NUMEL = sum(param.numel() for param in model().parameters())


def vectors(count, first=0, rank=0):
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        yield torch.randn(4, WIDTH, generator=generator)


def host_bytes(bytes_beside=4):
    """Host memory in which there is no room for state."""
    return NUMEL * bytes_beside + BUFFERS_BYTES


def on_volume(config, folder, *, host_bytes_max=None, nvme=None, **volume):
    """`config` with its state on a volume, which commits each step unless it says otherwise."""
    zero = dict(config["zero_optimization"])
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder), **(nvme or {})}
    block = {**config.get("stepwell", {}), "host_bytes_max": host_bytes_max or host_bytes()}
    if volume.get("durability") != "none":
        volume.setdefault("commit_interval", 1)
    block["volume"] = volume
    return {**config, "zero_optimization": zero, "stepwell": block}


def run(config, *, steps=STEPS, rank=0, before_step=None, **more):
    """What a run ends with, and where its state was."""
    engine = initialize(model(), config, **more)
    losses, norms = [], []
    for batch in vectors(steps * config.get("gradient_accumulation_steps", 1), rank=rank):
        losses += train(engine, [batch], squared)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    timing = engine.optimizer.timing
    result = {
        "losses": losses,
        "norms": norms,
        "pinned": core_of_partitions(partitions_of(engine.optimizer)).pinned_nbytes / NUMEL,
        "moved": (timing.get("bytes_read", 0), timing.get("bytes_written", 0)),
        "partitions": partitions(engine),
        "class": type(engine.optimizer).__name__,
        "base": type(engine.optimizer.optimizer).__name__,
        "skipped": engine.skipped_steps,
        "tier": engine.stepwell_plan.tier,
        "warning": engine.stepwell_plan.warning,
    }
    engine.destroy()
    return result


def both(config, folder, *, steps=STEPS, rank=0, **options):
    """A run with the state on a volume, and one with it in host memory."""
    folder.mkdir(parents=True)
    runs = [
        run(each, steps=steps, rank=rank) for each in (on_volume(config, folder, **options), config)
    ]
    runs[0]["left"] = sorted(path.name for path in folder.iterdir())
    return runs


def paths(result, folder):
    """The same configurations with their state here and there."""
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    for stage in (1, 2, 3):
        name = f"stage {stage}"
        result[name] = both(configuration(stage=stage, dtype="bf16"), folder / name)
    # There is one buffer less.
    none = {"durability": "none", "host_bytes_max": host_bytes() - BUFFERS_BYTES // 2}
    result["none"] = both(configuration(stage=3, dtype="bf16"), folder / "none", **none)
    dynamic = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    cases = {
        "fp16": configuration(stage=3, dtype="fp16", precision=dynamic),
        "sub-groups": configuration(stage=3, dtype="bf16", zero={"sub_group_size": 66_000}),
        "offload_param": configuration(
            stage=3, dtype="bf16", zero={"offload_param": {"device": "cpu"}}
        ),
        "q8": configuration(stage=3, dtype="bf16", stepwell={"moments": "q8"}),
        "accumulated": configuration(stage=2, dtype="bf16", gradient_accumulation_steps=2),
    }
    for name, config in cases.items():
        steps = 12 if name == "fp16" else STEPS
        result[name] = both(config, folder / name, steps=steps)
    wide = {
        "fp32": configuration(stage=3),
        # For which DeepSpeed has another optimizer, that offloads nothing.
        "sums in fp32": configuration(
            stage=1,
            dtype="bf16",
            gradient_accumulation_steps=2,
            **fp32_sums(1),
        ),
    }
    for name, config in wide.items():
        result[name] = both(config, folder / name, host_bytes_max=host_bytes(8))


def bf16(stage, **more):
    return configuration(stage=stage, dtype="bf16", **more)


def engine_of(config, seed=0):
    return initialize(model(seed), config)


def ended(engine):
    found = partitions(engine)
    engine.destroy()
    return found


def accesses(config):
    """What accessors get between steps, and a run that goes on from what they have set."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    engine = engine_of(config)
    params = list(engine.module.parameters())
    got = [safe_get_full_fp32_param(params[0]).clone()]
    losses = train(engine, vectors(2), squared)
    for param in params:
        got.append(safe_get_full_fp32_param(param).clone())
        got += [safe_get_full_optimizer_state(param, key).clone() for key in MOMENTS]
    losses += train(engine, vectors(1, 2), squared)
    safe_set_full_fp32_param(params[2], 2 * safe_get_full_fp32_param(params[2]))
    safe_set_full_optimizer_state(params[0], torch.ones_like(got[0]), "exp_avg")
    losses += train(engine, vectors(2, 3), squared)
    got.append(safe_get_full_fp32_param(params[2]).clone())
    return {"got": got, "losses": losses, "partitions": ended(engine)}


MOMENTS = ("exp_avg", "exp_avg_sq")


def bytes_read(engine):
    """By all steps so far."""
    partitions_of(engine.optimizer).finish()
    return engine.optimizer.timing["bytes_read"]


def checkpoints(result, folder, stage):
    """Saved in the middle of a run, and loaded: here, there, and the other way round."""
    at = folder / f"stage {stage}"
    at.mkdir(parents=True)
    in_memory = bf16(stage)
    configs = {
        "volume": on_volume(in_memory, at),
        "memory": in_memory,
        "DeepSpeed": {**in_memory, "stepwell": {"engine": False}},
    }
    saved = {}
    for name in ("volume", "memory"):
        engine = engine_of(configs[name])
        train(engine, vectors(2), squared)
        engine.save_checkpoint(str(at / "saved" / name))
        # What is looked at is not in the way of the steps after.
        result["saved", name] = partitions(engine)
        train(engine, vectors(2, 2), squared)
        saved[name] = ended(engine)
    result["straight"] = saved["volume"], saved["memory"]
    for source, target in (
        ("volume", "volume"),
        ("volume", "memory"),
        ("volume", "DeepSpeed"),
        ("memory", "volume"),
    ):
        engine = engine_of(configs[target], seed=1)
        path, _ = engine.load_checkpoint(str(at / "saved" / source))
        assert path is not None
        train(engine, vectors(2, 2), squared)
        result[f"{source} to {target}"] = ended(engine)


def consolidated(folder, stage):
    """The weights that DeepSpeed's script makes of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return [
        get_fp32_state_dict_from_zero_checkpoint(str(folder / f"stage {stage}" / "saved" / name))
        for name in ("volume", "memory")
    ]


def universal(folder, stage):
    """A universal checkpoint, made of one of a volume, is loaded into a run with a volume."""
    at = folder / f"stage {stage}"
    saved = str(at / "saved" / "volume")
    tag = to_universal(saved, in_process=True)
    engine = engine_of(on_volume(bf16(stage, checkpoint={"load_universal": True}), at), seed=1)
    engine.load_checkpoint(saved, tag=tag)
    return {"loaded": partitions(engine), **gone_on(engine)}


def gone_on(engine, rank=0):
    """The third and the fourth step of a run, and what the fourth has read from the volume."""
    losses = train(engine, vectors(1, 2, rank=rank), squared)
    before = bytes_read(engine)
    losses += train(engine, vectors(1, 3, rank=rank), squared)
    return {
        "losses": losses,
        "read": bytes_read(engine) - before,
        "partitions": ended(engine),
    }


def resumed(result, folder, stage):
    """A run that ends after two steps, and one that goes on from its volume."""
    at = folder / f"resumed {stage}"
    at.mkdir(parents=True)
    config = bf16(stage)
    result["straight"] = run(config, steps=4)["partitions"]
    result["committed elsewhere"] = [
        committed_of(each) for each in (config, on_volume(config, at, durability="none"))
    ]
    engine = engine_of(on_volume(config, at, name="run"))
    steps = [engine.optimizer.committed_steps]
    train(engine, vectors(2), squared)
    steps.append(engine.optimizer.committed_steps)
    ended_with = [param.detach().clone() for param in whole(engine)]
    result["in use"] = error_of(lambda: engine_of(on_volume(config, at, name="run", resume=True)))
    engine.destroy()
    result["left"] = sorted(path.name for path in at.iterdir())
    engine = engine_of(on_volume(config, at, name="run", resume=True), seed=1)
    begins_with = [param.detach().clone() for param in whole(engine)]
    result["begins as it ended"] = list(map(torch.equal, begins_with, ended_with))
    result["committed"] = [*steps, engine.optimizer.committed_steps]
    train(engine, vectors(2, 2), squared)
    result["resumed"] = ended(engine)
    other = {**on_volume(config, at, name="run", resume=True)}
    result["another model"] = error_of(lambda: initialize(model()[0], other))
    engine = engine_of(on_volume(config, at, name="other", resume=True))
    result["not there"] = engine.optimizer.committed_steps
    engine.destroy()


def committed_of(config):
    """How many steps an engine says that its volume has committed after one."""
    engine = engine_of(config)
    train(engine, vectors(1), squared)
    found = engine.optimizer.committed_steps
    engine.destroy()
    return found


def whole(engine):
    """The weights as modules see them."""
    import deepspeed

    params = list(engine.module.parameters())
    if not hasattr(params[0], "ds_id"):
        return params
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def error_of(make):
    try:
        make()
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def ignored_keys(folder):
    folder.mkdir(parents=True)
    nvme = {"buffer_count": 7, "pipeline_read": True}
    config = bf16(3, aio={"thread_count": 2})
    return run(on_volume(config, folder, nvme=nvme), steps=1)["warning"]


def killed(at, steps):
    """Trains in a process that is killed in its last step."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    engine = engine_of(on_volume(bf16(2), at, name="killed"))
    train(engine, vectors(steps), squared)
    # Where the gate is the module's, the step is running.
    os.kill(os.getpid(), signal.SIGKILL)


def resumed_after_kill(at, steps):
    """What the volume of a killed process goes on to, and the same without a kill."""
    config = bf16(2)
    engine = engine_of(on_volume(config, at, name="killed", resume=True), seed=1)
    done = engine.optimizer.committed_steps
    train(engine, vectors(steps - done, done), squared)
    return {"done": done, "resumed": ended(engine), "straight": run(config, steps=steps)}


def program_nvme(result, *, folder):
    at = Path(folder) / "killed"
    at.mkdir(parents=True)
    # DeepSpeed is not imported yet.
    killed(at, steps=3)
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    folder = Path(folder)
    result["killed"] = resumed_after_kill(folder / "killed", steps=5)
    paths(result.setdefault("paths", {}), folder / "paths")
    for stage in STAGES:
        config = bf16(stage)
        at = folder / f"accesses {stage}"
        at.mkdir(parents=True)
        result["accesses", stage] = [accesses(on_volume(config, at)), accesses(config)]
        checkpoints(result.setdefault(("checkpoints", stage), {}), folder / "checkpoints", stage)
        result["consolidated", stage] = consolidated(folder / "checkpoints", stage)
        result["universal", stage] = universal(folder / "checkpoints", stage)
        resumed(result.setdefault(("resumed", stage), {}), folder, stage)
    result["ignored keys"] = ignored_keys(folder / "ignored")


def program_nvme_ranks(result, *, folder):
    """Two ranks on the same drives."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.init_distributed("gloo")
    for stage in STAGES:
        at = Path(folder) / f"stage {stage}"
        at.mkdir(parents=True, exist_ok=True)
        rank = torch.distributed.get_rank()
        saved_by_ranks(result.setdefault(("saved", stage), {}), at, bf16(stage), rank)
        on_ranks(result.setdefault(stage, {}), at, bf16(stage), rank)


def saved_by_ranks(result, at, config, rank):
    """A run that is saved after two of four steps, and others that are resumed from there."""
    swapped, folder = on_volume(config, at), str(at / "saved")
    result["in memory"] = run(config, steps=4, rank=rank)
    engine = engine_of(swapped)
    train(engine, vectors(2, rank=rank), squared)
    engine.save_checkpoint(folder)
    result["saved"] = partitions(engine)
    result["straight"] = gone_on(engine, rank)
    engine = engine_of(swapped, seed=1)
    engine.load_checkpoint(folder)
    result["loaded"] = partitions(engine)
    result["resumed", "anew"] = gone_on(engine, rank)
    # By an engine whose volume has other records, and without a look at what was loaded.
    engine = engine_of(swapped, seed=1)
    train(engine, vectors(3, 40, rank=rank), squared)
    engine.load_checkpoint(folder)
    result["resumed", "again"] = gone_on(engine, rank)


def on_ranks(result, at, config, rank):
    result["both"] = [run(each, rank=rank) for each in (on_volume(config, at), config)]
    again = on_volume(config, at, name="run", resume=True)
    engine = engine_of(on_volume(config, at, name="run"))
    train(engine, vectors(1, rank=rank), squared)
    (own,) = at.glob(f"run-{rank}.*")
    result["name"] = own.name
    # It waits for the commit.
    assert engine.optimizer.committed_steps == 1
    train(engine, vectors(1, 1, rank=rank), squared)
    engine.destroy()
    keep_as(own, "second")
    engine = engine_of(again, seed=1)
    train(engine, vectors(1, 2, rank=rank), squared)
    result["resumed"] = ended(engine)
    keep_as(own, "third")

    # As two ranks leave them that are killed while one has committed, and the other has not.
    for behind in range(2):
        put_back(own, "second" if rank == behind else "third")
        engine = engine_of(again, seed=1)
        done = engine.optimizer.committed_steps
        train(engine, vectors(1, done, rank=rank), squared)
        result["gone back", behind] = done, ended(engine)

    own.unlink()
    engine = engine_of(on_volume(config, at, name="run"))
    more = vectors(1, rank=rank)
    result["waits"] = waits_before_norms(engine, lambda: train(engine, more, squared))
    assert engine.optimizer.committed_steps == 2
    if rank == 1:
        os.truncate(own, 1 << 16)
    result["fails"] = [
        error_of(lambda: train(engine, vectors(2, 1, rank=rank), squared)) for _ in range(2)
    ]


def waits_before_norms(engine, train):
    """What each step waits for, last, before the ranks sum up its norm: of the step before."""
    optimizer = engine.optimizer
    stepping = partitions_of(optimizer)
    called = []
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in (
            (stepping.gradients, "norm"),
            (stepping, "finish"),
            (optimizer, "synchronize"),
            (optimizer, "step"),
        ):
            if (call := getattr(owner, name, None)) is not None:

                def noted(*args, name=name, call=call):
                    called.append(name)
                    return call(*args)

                patched.setattr(owner, name, noted)
        train()
        optimizer.step()
    return [called[at - 1] for at in range(len(called)) if called[at] == "norm"]


def keep_as(own, name):
    shutil.copy(own, own.parent / f"{name}-{own.name}")


def put_back(own, name):
    shutil.copy(own.parent / f"{name}-{own.name}", own)
