"""One rank of DeepSpeed in the process of the tests, for `zero_in_process*.py`.

DeepSpeed stays in a process that has used it.
"""

import os
import socket

import pytest
from deepspeed_asserts import assert_same_partitions
from deepspeed_engines import initialize, partitions, train, vectors
from deepspeed_engines import squared as loss_of
from deepspeed_paths import uneven

ENGINES = ({"engine": True}, {"engine": False})
ON_DEVICE = {"gradient_accumulation_steps": 2, "stepwell": {"accumulate": "device"}}


@pytest.fixture(autouse=True, scope="session")
def one_rank():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True


def on_both(run, config, *arguments, **options):
    block = config.pop("stepwell", {})
    return [run({**config, "stepwell": {**block, **one}}, *arguments, **options) for one in ENGINES]


def assert_resumed_by_both(config, folder):
    """A run that either path resumes ends as the one that was saved."""
    engine = initialize(uneven(), config)
    train(engine, vectors(2), loss_of)
    engine.save_checkpoint(str(folder))
    losses = train(engine, vectors(2, first=2), loss_of)
    after = partitions(engine)
    engine.destroy()
    for block in ENGINES:
        engine = initialize(uneven(seed=1), {**config, "stepwell": block})
        engine.load_checkpoint(str(folder))
        assert train(engine, vectors(2, first=2), loss_of) == losses
        assert_same_partitions(partitions(engine), after)
        engine.destroy()
