"""Programs (see deepspeed_run) that save on some ranks, and load on another number of them."""

from pathlib import Path

import torch
from deepspeed_checkpoint_programs import to_universal
from deepspeed_engines import (
    configuration,
    initialize,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)

STEPS = 3
CASES = {
    "ZeRO-2": {"dtype": "bf16"},
    "ZeRO-2, elastic": {"dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "ZeRO-3": {"dtype": "bf16", "stage": 3},
    "ZeRO-3, parameters": {
        "dtype": "bf16",
        "stage": 3,
        "zero": {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 100},
    },
}


def runs(folder):
    """The case, whether it is on the engine, and where its checkpoint is."""
    for name, options in CASES.items():
        for engine in (True, False):
            saved = str(Path(folder) / f"{name.replace(', ', '_')}_{engine}")
            yield name, engine, saved, {**options, "stepwell": {"engine": engine}}


def program_world_saves(result, folder):
    """What each rank of the first world does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    for name, engine, saved, options in runs(folder):
        ours = initialize(perceptron(), configuration(**options))
        rank = torch.distributed.get_rank()
        result[name, engine] = train(ours, vectors(STEPS, rank=rank), squared)
        ours.save_checkpoint(saved)
        ours.destroy()


def program_world_loads(result, folder):
    """What each rank of the second world does."""
    import stepwell.deepspeed
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    stepwell.deepspeed.register()
    for name, engine, saved, options in runs(folder):
        is_elastic = "elastic" in name
        if not is_elastic:
            options["checkpoint"] = {"load_universal": True}
        ours = initialize(perceptron(seed=1), configuration(**options))
        rank = torch.distributed.get_rank()
        tag = None
        if not is_elastic:
            tag = "universal"
            if rank == 0:
                to_universal(saved, in_process=True)
            torch.distributed.barrier()
        try:
            ours.load_checkpoint(saved, tag=tag)
        except ZeRORuntimeException as error:
            result[name, engine] = type(error).__name__, str(error)
            ours.destroy()
            continue
        loaded = partitions(ours)
        losses = train(ours, vectors(STEPS, first=STEPS, rank=rank), squared)
        result[name, engine] = type(ours.optimizer).__name__, loaded, losses, partitions(ours)
        ours.destroy()
