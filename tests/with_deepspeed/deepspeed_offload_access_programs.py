"""The program (see deepspeed_run) of checkpoints of either path, and of unusual backwards."""

import subprocess
import sys
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
from deepspeed_paths import Forked, wide


def program_offload_access(result, folder):
    """Checkpoints, and unusual numbers of backwards."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    checkpoints(result.setdefault("checkpoints", {}), folder)
    # The last: it ends while a step is running.
    access(result.setdefault("access", {}))


def access(result):
    """Unusual numbers of backwards. The process ends without destroying the engine."""
    from deepspeed import utils

    (batch, other) = vectors(2)

    # A second backward after the one that was announced as the last.
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
