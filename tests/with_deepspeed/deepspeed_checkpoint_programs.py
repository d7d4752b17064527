"""The program (see deepspeed_run) of checkpoints and of the tools that read them."""

import subprocess
import sys
from pathlib import Path

from deepspeed_engines import (
    STEPS,
    configuration,
    initialize,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)
from fork_server import PATIENCE

CHECKPOINTS = {
    "AdamW, ZeRO-2": {},
    "fp32, ZeRO-3, sub-groups": {
        "optimizer": "StepwellAdamW",
        "stage": 3,
        "zero": {"sub_group_size": 3000},
    },
    "AdamW, ZeRO-3, parameters": {
        "stage": 3,
        "dtype": "bf16",
        "zero": {
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 100,
        },
    },
    "bf16, ZeRO-2": {"optimizer": "StepwellAdamW", "params": {"moments": "bf16"}},
    "q8, ZeRO-2": {"optimizer": "StepwellAdamW", "params": {"moments": "q8"}},
    "q8, ZeRO-3, sub-groups": {
        "optimizer": "StepwellAdamW",
        "params": {"moments": "q8"},
        "stage": 3,
        "zero": {"sub_group_size": 3000},
    },
    "q8, bf16 masters, ZeRO-2": {
        "optimizer": "StepwellAdamW",
        "params": {"moments": "q8"},
        "dtype": "bf16",
        "precision": {"bf16_master_weights_and_grads": True},
    },
    "fp32, bf16 masters, ZeRO-3": {
        "optimizer": "StepwellAdamW",
        "stage": 3,
        "dtype": "bf16",
        "precision": {"bf16_master_weights_and_grads": True},
    },
    "fp32, fp16 masters, ZeRO-2": {
        "optimizer": "StepwellAdamW",
        "dtype": "fp16",
        "precision": {"fp16_master_weights_and_grads": True, "initial_scale_power": 8},
    },
}
UNIVERSAL = (
    "AdamW, ZeRO-3, parameters",
    "bf16, ZeRO-2",
    "fp32, ZeRO-3, sub-groups",
    "q8, ZeRO-2",
    "q8, ZeRO-3, sub-groups",
)
NOT_UNIVERSAL = ("q8, bf16 masters, ZeRO-2", "fp32, bf16 masters, ZeRO-3")


def program_checkpoints(result, folder):
    """All of them."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    for name in CHECKPOINTS:
        result[name] = checkpointed(name, folder)


def checkpointed(name, folder):
    """A run that is saved, goes on, and is resumed by another engine.

    And what DeepSpeed's tools make of the checkpoint.
    """
    from deepspeed.utils import zero_to_fp32

    options = CHECKPOINTS[name]
    saved = str(Path(folder) / name.replace(", ", "_"))
    config = configuration(**options)
    engine = initialize(perceptron(), config)
    found = {"before": train(engine, vectors(STEPS), squared)}
    found["partitions"] = partitions(engine)
    engine.save_checkpoint(saved)
    found["consolidated"] = consolidated(engine)
    found["zero_to_fp32"] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved)
    found["after"] = train(engine, vectors(STEPS, first=STEPS), squared)
    found["partitions after"] = partitions(engine)
    engine.destroy()

    engine = initialize(perceptron(seed=1), config)
    engine.load_checkpoint(saved)
    if not saved.count("AdamW"):
        found["consolidated, loaded"] = consolidated(engine)
    found["resumed"] = train(engine, vectors(STEPS, first=STEPS), squared)
    found["partitions resumed"] = partitions(engine)
    engine.destroy()
    if name not in UNIVERSAL + NOT_UNIVERSAL:
        return found

    universal = to_universal(saved, in_process=name != "q8, ZeRO-2")
    engine = initialize(
        perceptron(seed=1), configuration(**options, checkpoint={"load_universal": True})
    )
    try:
        engine.load_checkpoint(saved, tag=universal)
    except ValueError as error:
        found["refused"] = str(error)
        return found
    found["universal partitions"] = partitions(engine)
    found["consolidated, universal"] = consolidated(engine)
    found["universal"] = train(engine, vectors(STEPS, first=STEPS), squared)
    found["universal partitions after"] = partitions(engine)
    engine.destroy()
    return found


def consolidated(engine):
    """What `safe_get_full_*` give of every parameter, and what `safe_set_full_*` do."""
    from deepspeed import utils

    values = {}
    for name, param in engine.module.named_parameters():
        values[name] = [
            utils.safe_get_full_fp32_param(param).clone(),
            *(
                utils.safe_get_full_optimizer_state(param, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            ),
        ]
    param = engine.module[0].weight
    try:
        utils.safe_set_full_optimizer_state(
            param, utils.safe_get_full_optimizer_state(param, "exp_avg"), "exp_avg"
        )
    except ValueError as error:
        values["set"] = str(error)
    return values


def to_universal(saved, in_process):
    """Converts the latest checkpoint; returns the tag of the universal one."""
    tag = (Path(saved) / "latest").read_text().strip()
    arguments = [
        "--input_folder",
        f"{saved}/{tag}",
        "--output_folder",
        f"{saved}/universal",
        "--inject_missing_state",
    ]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    if in_process:
        from deepspeed.checkpoint import ds_to_universal

        sys.argv[1:] = arguments
        ds_to_universal.main(ds_to_universal.parse_arguments())
    else:
        # As people do: where nobody has registered Stepwell.
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments]
        subprocess.run(command, check=True, timeout=120 * PATIENCE)
    return "universal"
