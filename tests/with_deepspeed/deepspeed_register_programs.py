"""Programs (see deepspeed_run) of `register`: seams, DeepSpeed's own optimizer, its own op."""

import importlib
import pickle
import sys

import torch
from deepspeed_engines import (
    LR,
    Lines,
    configuration,
    initialize,
    perceptron,
    squared,
    train,
    trained,
    vectors,
)
from deepspeed_paths import run


def program_register(result, when):
    """Seams before and after `register`, called before or after the import of DeepSpeed."""
    import stepwell.deepspeed

    if when == "before":
        stepwell.deepspeed.register()
        stepwell.deepspeed.register()
        result["imported"] = "deepspeed" in sys.modules
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    result["loader"] = type(deepspeed.__loader__).__name__
    if when == "after":
        result["unfilled"] = stepwell.deepspeed.seam_report()
        stepwell.deepspeed.register()
    result["report"] = stepwell.deepspeed.seam_report()
    step = deepspeed.ops.adam.DeepSpeedCPUAdam.step
    stepwell.deepspeed.register()
    result["wrapped once"] = deepspeed.ops.adam.DeepSpeedCPUAdam.step is step and not hasattr(
        step.stepwell_original, "stepwell_original"
    )
    result["ops"] = [
        builder.load().__name__
        for builder in (
            CPUAdamBuilder(),
            get_accelerator().create_op_builder("CPUAdamBuilder"),
            get_accelerator().create_op_builder("FusedAdamBuilder"),
        )
    ]
    from deepspeed.runtime.superoffload import superoffload_utils
    from deepspeed.runtime.zenflow import zenflow_utils

    # Spawned processes find them by their names.
    result["targets"] = [
        pickle.loads(pickle.dumps(target)) is target
        for target in (
            zenflow_utils.zenflow_optimizer_process,
            superoffload_utils.superoffload_optimizer_worker,
        )
    ]

    # Its constructor does not ask for the vendor of the CPU; a question afterwards is answered.
    # DeepSpeed's releases before 0.19.8 have imported py-cpuinfo already.
    known = sys.modules.get("cpuinfo")
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3))])
    result["vendor"] = optimizer.cpu_vendor, sys.modules.get("cpuinfo") is known
    import cpuinfo

    deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3))])
    result["cpuinfo"] = sys.modules["cpuinfo"] is cpuinfo and hasattr(cpuinfo, "get_cpu_info_json")

    # On another accelerator its own fused_adam stays.
    from deepspeed.ops.op_builder.builder import OpBuilder

    del OpBuilder._loaded_ops["fused_adam"]
    get_accelerator()._name = "cuda"
    stepwell.deepspeed.register()
    result["fused_adam on cuda"] = "fused_adam" in OpBuilder._loaded_ops
    result["report on cuda"] = stepwell.deepspeed.seam_report()


def program_missing_seam(result):
    """A DeepSpeed whose ZenFlow is another, and then one that lacks what every feature needs."""
    import deepspeed
    import stepwell.deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.zenflow import zenflow_utils
    from deepspeed.utils import logger

    def step_subgroup(self, closure=None, subgroup_id=0):
        """Another order."""

    del zenflow_utils.zenflow_optimizer_process
    cls = deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam
    theirs = cls.step_subgroup
    cls.step_subgroup = step_subgroup
    try:
        stepwell.deepspeed.register()
    except ImportError as error:
        result["error"] = str(error)
    result["ops"] = list(OpBuilder._loaded_ops)
    result["report"] = stepwell.deepspeed.seam_report()
    cls.step_subgroup = theirs
    handler = Lines()
    logger.addHandler(handler)
    for _ in range(2):
        stepwell.deepspeed.register()
    result["warnings"] = handler.lines
    result["report without ZenFlow"] = stepwell.deepspeed.seam_report()
    logger.removeHandler(handler)
    changed_sources(result)


def changed_sources(result):
    """Methods of DeepSpeed that are not those that were tested."""
    import os

    from deepspeed.runtime import engine as engines
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import logger

    handler = Lines()
    logger.addHandler(handler)

    def changed(name, cls, method, stage):
        """A run where a method of DeepSpeed does the same by another source, and what is said."""
        theirs = getattr(cls, method)

        def other(self, *args, **kwargs):
            return theirs(self, *args, **kwargs)

        handler.lines.clear()
        setattr(cls, method, other)
        config = configuration(dtype="bf16", stage=stage)
        result[name] = [run(config, steps=2)["class"]], list(handler.lines)
        os.environ["STEPWELL_UNTESTED_DEEPSPEED"] = "1"
        result[name][0].append(run(config, steps=2)["class"])
        del os.environ["STEPWELL_UNTESTED_DEEPSPEED"]
        setattr(cls, method, theirs)

    changed("overridden", DeepSpeedZeroOptimizer, "step", 2)
    changed("calling", engines.DeepSpeedEngine, "_backward_epilogue", 1)
    result["unchanged"] = run(configuration(dtype="bf16"), steps=1)["class"]
    logger.removeHandler(handler)


def program_optimizer(result):
    """DeepSpeedCPUAdam by itself, its steps that fail, and its state in our optimizer and back."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    import deepspeed

    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [
        torch.nn.Parameter(torch.randn(100, generator=generator).to(dtype)) for dtype in dtypes
    ]
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(params, lr=LR, weight_decay=0)

    def set_gradients():
        for param in params:
            param.grad = torch.randn(100, generator=generator).to(param.dtype)

    def everything():
        return [
            tensor.clone()
            for p in params
            for tensor in (p.detach(), *list(optimizer.state[p].values())[1:])
        ]

    set_gradients()
    optimizer.step()
    result["steps"] = [[optimizer.state[param]["step"] for param in params]]
    result["values"] = [everything()]
    for spoil in ("nan", "shape"):
        set_gradients()
        state = optimizer.state[params[2]]
        kept = state["exp_avg"]
        if spoil == "nan":
            params[2].grad[50] = float("nan")
        else:
            state["exp_avg"] = torch.zeros(99, dtype=kept.dtype)
        try:
            optimizer.step()
        except ValueError as error:
            result[spoil] = str(error)
        state["exp_avg"] = kept
        result["steps"].append([optimizer.state[param]["step"] for param in params])
        result["values"].append(everything())
    set_gradients()
    result["loss"] = optimizer.step(lambda: 42.0)
    result["steps"].append([optimizer.state[param]["step"] for param in params])

    fused_params = [torch.nn.Parameter(torch.ones(10)) for _ in range(2)]
    fused = deepspeed.ops.adam.FusedAdam(fused_params, lr=LR)
    for count, value in ((1, 1.0), (1, float("inf")), (2, 1.0)):
        for param in fused_params:
            param.grad = torch.ones(10)
        fused_params[0].grad[0] = value
        before = [param.detach().clone() for param in fused_params]
        try:
            fused.step()
        except ValueError as error:
            result["fused"] = str(error)
            assert all(
                torch.equal(param, kept) for param, kept in zip(fused_params, before, strict=True)
            )
        assert fused.state[fused_params[1]]["step"] == count

    stepwell.deepspeed.register(nonfinite="propagate")
    params[0].grad[3] = float("inf")
    optimizer.step()
    result["propagated"] = bool(params[0].isnan()[3])

    stepwell.deepspeed.register(nonfinite="raise")
    from optim_deepspeed_exchange import exchange_all

    exchange_all()


def program_native(result):
    """DeepSpeed's own op and Stepwell, in the same configurations.

    It compiles the op, or takes what was compiled before.
    """
    import deepspeed
    from stepwell.deepspeed import register
    from stepwell.deepspeed.native import cpu_adam

    # Only cpu_adam is to be compiled.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    configs = {
        f"{dtype}, ZeRO-{stage}": configuration(stage=stage, dtype=dtype, precision=precision)
        for dtype, stage, precision in (
            ("fp32", 1, None),
            ("fp32", 2, None),
            ("fp32", 3, None),
            ("bf16", 2, None),
            ("bf16", 2, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
        )
    }
    result["native"] = {name: trained(config) for name, config in configs.items()}
    native_op = deepspeed.ops.op_builder.CPUAdamBuilder().load()
    assert native_op is not cpu_adam
    from optim_deepspeed_exchange import exchange_all

    exchange_all()
    register()
    assert deepspeed.ops.op_builder.CPUAdamBuilder().load() is cpu_adam
    result["stepwell"] = {name: trained(config) for name, config in configs.items()}


# ---- DeepSpeed's ZenFlow ----


class OnTheCpu:
    """torch, as DeepSpeed's ZenFlow under ZeRO-3 finds it, which makes tensors on `cuda`."""

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("tensor", "zeros"):
            return found
        return lambda *args, device=None, **options: found(
            *args, device="cpu" if device == "cuda" else device, **options
        )


def zenflow_configuration(stage, **more):
    zenflow = {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 4,
        "update_interval": 2,
        "full_warm_up_rounds": 2,
        **more,
    }
    # Below ZeRO-3 it would run on the offload engine.
    block = {"stepwell": {"zenflow": False}} if stage < 3 else {}
    return configuration(dtype="bf16", stage=stage, zero={"zenflow": zenflow}, **block)


def program_deepspeeds_zenflow(result, stage, overlap):
    """ZenFlow on DeepSpeed's own op, and what has Stepwell's beside it."""
    import deepspeed
    import stepwell.deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.runtime.zenflow import engine_stage3
    from deepspeed.utils import logger
    from stepwell.deepspeed.native import compiled_adam

    engine_stage3.torch = OnTheCpu()
    stepwell.deepspeed.register()
    handler = Lines()
    logger.addHandler(handler)
    engine = initialize(perceptron(), zenflow_configuration(stage, overlap_step=overlap))
    result["losses"] = train(engine, vectors(24), squared)
    result["warnings"] = [line for line in handler.lines if "stepwell: " in line]
    optimizer = engine.optimizer.optimizer
    result["optimizer"] = type(optimizer).__name__, optimizer.ds_opt_adam.__file__
    process = getattr(engine.optimizer, "process", None)
    if process is not None:
        result["pid"] = process.pid
        result["was_alive"] = process.is_alive()
        process.terminate()
        process.join(30)
        result["is_alive"] = process.is_alive()
    other = deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3))])
    result["other"] = other.ds_opt_adam.__name__
    # In a spawned process that has registered Stepwell.
    ops = []
    compiled_adam.used_by(lambda: ops.append(CPUAdamBuilder().load()))()
    result["of a process"] = ops[0] is optimizer.ds_opt_adam


def program_without_compiler(result):
    """What asks for DeepSpeed's own op, and what does not."""
    import stepwell.deepspeed
    from stepwell.deepspeed.native import compiled_adam

    stepwell.deepspeed.register()
    for block in ({}, {"stepwell": {"engine": False}}):
        for stage in (1, 2, 3):
            trained(configuration(stage=stage, **block), count=1)
    trained(configuration(stage=1, offload=None), count=1)
    result["asked"] = compiled_adam.load.cache_info().misses
    try:
        initialize(perceptron(), zenflow_configuration(3))
    except RuntimeError as error:
        result["error"] = str(error)
    # What was found in its place stays.
    trained(configuration(stage=2, stepwell={"engine": False}), count=1)
