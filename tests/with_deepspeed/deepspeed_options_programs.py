"""The program (see deepspeed_run) of options: of the block `stepwell`, and of DeepSpeed's JSON."""

import logging

from deepspeed_engines import Lines, configuration, initialize, perceptron
from deepspeed_paths import run


def program_options(result):
    """What the block may hold, and what keeps DeepSpeed's own path."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    handler, theirs = Lines(), Lines()
    logger = logging.getLogger("stepwell.deepspeed")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logging.getLogger("DeepSpeed").addHandler(theirs)
    for name, block in {
        "unknown": {"engin": True},
        "no block": [1],
        "engine": {"engine": 1},
        "moments": {"moments": "fp8"},
        "gate": {"gate": "layer"},
        "accumulate": {"accumulate": "gpu"},
        "threads": {"threads": 0},
        "host_bytes_max": {"host_bytes_max": "1 GB"},
        "too little": {"host_bytes_max": 1000},
    }.items():
        try:
            initialize(perceptron(), configuration(stepwell=block))
        except ValueError as error:
            result[name] = str(error)
    twice = configuration(
        optimizer="StepwellAdamW", params={"moments": "bf16"}, stepwell={"moments": "q8"}
    )
    client = configuration(stepwell={"moments": "q8"})
    del client["optimizer"]
    for name, config in {"twice": twice, "client": client}.items():
        model = perceptron()
        more = {"optimizer": stepwell.AdamW(model.parameters())} if name == "client" else {}
        try:
            initialize(model, config, **more)
        except ValueError as error:
            result[name] = str(error)
    ratio = configuration(dtype="bf16", stage=3, precision={"bf16_master_weights_and_grads": True})
    ratio["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    several = configuration(
        optimizer="SGD",
        zero_force_ds_cpu_optimizer=False,
        zero_allow_untested_optimizer=True,
        stepwell={"engine": False},
    )
    for name, config in {
        "off": configuration(stepwell={"engine": False}),
        "off, keys": configuration(stepwell={"engine": False, "gate": "step"}),
        "parameters": configuration(stage=3, zero={"offload_param": {"device": "cpu"}}),
        "ratio": ratio,
        "no offload": configuration(offload=None),
        "no offload, keys": configuration(offload=None, stepwell={"threads": 1}),
        "torch": configuration(params={"torch_adam": True, "amsgrad": True}),
        "ZeRO-3": configuration(stage=3),
        "ZeRO-3, gate": configuration(stage=3, stepwell={"gate": "module"}),
        "ZeRO-3, q8": configuration(stage=3, stepwell={"moments": "q8"}),
        "ZeRO-2, parameters": configuration(zero={"offload_param": {"device": "cpu"}}),
        "nvme, no folder": configuration(offload="nvme"),
        "several": several,
    }.items():
        handler.lines.clear()
        theirs.lines.clear()
        found = run(config, steps=1)
        result[f"path, {name}"] = found["class"], found["base"], list(handler.lines)
        result[f"said by DeepSpeed, {name}"] = [
            line.removeprefix("stepwell: ") for line in theirs.lines if "stepwell" in line
        ]
    handler.lines.clear()
    initialize(perceptron(), configuration(stage=0)).destroy()
    result["path, no ZeRO"] = list(handler.lines)
    # Plans are values.
    for name, config in {
        "ZeRO-2": configuration(dtype="bf16"),
        "gate step": configuration(dtype="bf16", stepwell={"gate": "step"}),
        "ZeRO-3": configuration(dtype="bf16", stage=3),
        "no offload": configuration(offload=None),
        "several": several,
    }.items():
        engine = initialize(perceptron(), config)
        result[f"plan, {name}"] = engine.stepwell_plan
        engine.destroy()
    inference = configuration(stage=3, stepwell={"moments": "q8"})
    del inference["optimizer"]
    import deepspeed

    engine = deepspeed.initialize(model=perceptron(), config=inference)[0]
    result["plan, inference"] = engine.stepwell_plan
    # A version of DeepSpeed that calls it in another way.
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kept, DeepSpeedZeroOptimizer.reduce_ipg_grads = (
        DeepSpeedZeroOptimizer.reduce_ipg_grads,
        lambda self, dtype=None: kept(self, dtype),
    )
    idle = {"gate": "step", "threads": 1, "moments": "q8"}
    for name, block in {"other version": {}, "idle keys": idle}.items():
        handler.lines.clear()
        found = run(configuration(stepwell=block), steps=1)
        result[f"path, {name}"] = found["class"], found["base"], list(handler.lines)
    DeepSpeedZeroOptimizer.reduce_ipg_grads = kept
