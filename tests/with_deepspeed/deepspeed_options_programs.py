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
    try:
        initialize(perceptron(), configuration(stepwell={"host_bytes_max": 1000}))
    except ValueError as error:
        result["too little"] = str(error)
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
    ratio = configuration(dtype="bf16", stage=3)
    ratio["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    for name, config in {
        "off": configuration(stepwell={"engine": False}),
        "ratio": ratio,
        "no offload, keys": configuration(offload=None, stepwell={"threads": 1}),
        "torch": configuration(params={"torch_adam": True, "amsgrad": True}),
        "ZeRO-3, gate": configuration(stage=3, stepwell={"gate": "module"}),
        "ZeRO-3, q8": configuration(stage=3, stepwell={"moments": "q8"}),
        "nvme, no folder": configuration(offload="nvme"),
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
    inference = configuration(stage=3, stepwell={"moments": "q8"})
    del inference["optimizer"]
    import deepspeed

    engine = deepspeed.initialize(model=perceptron(), config=inference)[0]
    result["inference"] = engine.stepwell_plan
