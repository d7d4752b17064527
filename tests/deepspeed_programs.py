"""What the tests of DeepSpeed run in processes of their own: `python deepspeed_programs.py PROGRAM RESULT_FILE [OPTIONS]`.

Importing DeepSpeed takes seconds, so a program makes many runs and saves what the tests look at (`torch.save`).
"""

import json
import os
import sys
from pathlib import Path

import torch

STEPS = 8
LR = 1e-2


# ---- in the test process -----------------------------------------------------------------------------------------------


def run(program, tmp_path, *, timeout, ranks=1, environment=None, **options):
    """Runs a program in `ranks` processes. Returns what it saved; with several ranks, what each did.

    An exception in the program is an AssertionError here, with what the program printed; so is anything that it compiled.
    """
    import socket
    import subprocess

    tmp_path.mkdir(parents=True, exist_ok=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    extensions = tmp_path / "extensions"
    extensions.mkdir(exist_ok=True)
    processes = []
    for rank in range(ranks):
        # Without a way to a compiler, and with nothing built before.
        variables = {
            **os.environ,
            "PATH": str(tmp_path / "no_programs"),
            "TORCH_EXTENSIONS_DIR": str(extensions),
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        result, output = tmp_path / f"{program}.{rank}.pt", tmp_path / f"{program}.{rank}.txt"
        # A file, not a pipe: a process that a program leaves behind would keep a pipe open.
        with output.open("w") as stdout:
            command = [sys.executable, __file__, program, str(result), json.dumps(options)]
            processes.append(
                (
                    subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout),
                    result,
                    output,
                )
            )
    try:
        codes = [process.wait(timeout) for process, *_ in processes]
    finally:
        for process, *_ in processes:
            process.kill()
            process.wait()
    printed = "\n".join(output.read_text() for *_, output in processes)
    assert codes == [0] * ranks, printed[-8000:]
    assert list(extensions.iterdir()) == [], f"something was compiled: {list(extensions.iterdir())}"
    results = [torch.load(result, weights_only=False) for _, result, _ in processes]
    return results[0] if ranks == 1 else results


# ---- in the program's process ------------------------------------------------------------------------------------------


def configuration(
    *,
    stage=2,
    offload="cpu",
    dtype="fp32",
    optimizer="AdamW",
    params=None,
    zero=None,
    precision=None,
    batch=4,
    clip=0.0,
    **more,
):
    """A DeepSpeed JSON."""
    zero_optimization = {"stage": stage, **(zero or {})}
    if offload:
        zero_optimization["offload_optimizer"] = {"device": offload}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": optimizer, "params": {"lr": LR, "weight_decay": 0.01} | (params or {})},
        "zero_optimization": zero_optimization,
        "gradient_clipping": clip,
        **more,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | (precision or {})
    return config


def perceptron(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def initialize(model, config, **more):
    import deepspeed

    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config, **more)[0]


def vectors(count, first=0, rank=0):
    """Batches of the perceptron: number `i` is the same whichever is asked for first."""
    for index in range(first, first + count):
        yield torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * rank + index))


def squared(model, x):
    x = x.to(next(iter(model.parameters())).dtype)
    return (model(x).float() - 1).square().mean()


def tokens(count):
    # A text with something to learn: each token follows from the one before, but for noise.
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        first = torch.randint(64, (4, 1), generator=generator)
        yield (first + 3 * torch.arange(16) + torch.randint(2, (4, 16), generator=generator)) % 64


def next_token_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def train(engine, batches, loss_of, before_step=None):
    losses = []
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        if before_step is not None:
            before_step()
        engine.step()
        losses.append(loss.item())
    return losses


def partitions(engine):
    """The flat partitions that the optimizer steps, with their state."""
    zero = engine.optimizer
    flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
    return [(flat.detach().clone(), copied(zero.optimizer.state[flat])) for flat in flats]


def copied(state):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def trained(config, *, model=perceptron, count=STEPS, loss_of=squared, batches=None, **more):
    """Losses, and the partitions of the engine at the end."""
    engine = initialize(model(), config, **more)
    losses = train(engine, vectors(count) if batches is None else batches, loss_of)
    result = {
        "losses": losses,
        "partitions": partitions(engine),
        "optimizer": type(engine.optimizer.optimizer).__name__,
    }
    engine.destroy()
    return result


def program_curves(result):
    """Loss curves of torch, and of DeepSpeed on Stepwell in many configurations."""
    import stepwell
    import stepwell.deepspeed

    stepwell.deepspeed.register()

    def with_torch(make, cls=torch.optim.AdamW, clip=0.0, **keywords):
        model = make()
        optimizer = cls(model.parameters(), lr=LR, weight_decay=0.01, **keywords)
        losses = []
        batches, loss_of = (tokens(STEPS), next_token_loss) if make is llama else (vectors(STEPS), squared)
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    result["torch llama"] = with_torch(llama)
    result["torch llama, clipped"] = with_torch(llama, clip=0.1)
    result["torch"] = with_torch(perceptron)
    result["torch Adam"] = with_torch(perceptron, torch.optim.Adam)
    result["stepwell"] = with_torch(perceptron, stepwell.AdamW)

    for stage in (1, 2, 3):
        config = configuration(stage=stage)
        result[f"llama ZeRO-{stage}"] = trained(config, model=llama, loss_of=next_token_loss, batches=tokens(STEPS))
        result[f"ZeRO-{stage}"] = trained(configuration(stage=stage))
        ours = configuration(stage=stage, optimizer="StepwellAdamW")
        result[f"StepwellAdamW ZeRO-{stage}"] = trained(ours)
    clipped = configuration(clip=0.1)
    result["llama, clipped"] = trained(clipped, model=llama, loss_of=next_token_loss, batches=tokens(STEPS))
    result["StepwellAdam"] = trained(configuration(optimizer="StepwellAdam"))
    result["Adam, adam_w_mode false"] = trained(configuration(optimizer="Adam", params={"adam_w_mode": False}))
    result["fused_adam"] = trained(configuration(stage=1, offload=None))
    result["fused_adam without ZeRO"] = train(
        initialize(perceptron(), configuration(stage=0, offload=None)), vectors(STEPS), squared
    )
    for moments in ("bf16", "q8"):
        result[f"moments {moments}"] = trained(configuration(optimizer="StepwellAdamW", params={"moments": moments}))
    client = perceptron()
    config = configuration()
    del config["optimizer"]
    result["client"] = trained(
        config, model=lambda: client, optimizer=stepwell.AdamW(client.parameters(), lr=LR, weight_decay=0.01)
    )
    sub_groups = configuration(stage=3, zero={"sub_group_size": 3000})
    result["sub-groups"] = trained(sub_groups)
    two_groups = configuration(optimizer="StepwellAdamW", params={"moments": "q8"})
    model = perceptron()
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0},
    ]
    import deepspeed

    engine = deepspeed.initialize(model=model, model_parameters=groups, config=two_groups)[0]
    result["two groups"] = {"losses": train(engine, vectors(STEPS), squared), "partitions": partitions(engine)}

    # 16-bit models
    masters = {"bf16_master_weights_and_grads": True}
    states = masters | {"bf16_optimizer_states": True}
    result["bf16"] = trained(configuration(dtype="bf16"))
    result["bf16 ZeRO-3"] = trained(configuration(dtype="bf16", stage=3))
    for stage in (2, 3):
        for name, precision in (("masters", masters), ("states", states)):
            for optimizer in ("AdamW", "StepwellAdamW"):
                config = configuration(stage=stage, dtype="bf16", precision=precision, optimizer=optimizer)
                result[f"bf16 {name}, {optimizer}, ZeRO-{stage}"] = trained(config)


def program_fp16(result):
    """fp16 with a loss scale that overflows at first."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    import deepspeed

    # torch computes in fp16 on any CPU; DeepSpeed asks for instructions that make it fast.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    dynamic = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    for optimizer in ("AdamW", "StepwellAdamW"):
        for stage, masters in ((2, False), (3, False), (2, True)):
            precision = dynamic | ({"fp16_master_weights_and_grads": True} if masters else {})
            config = configuration(stage=stage, dtype="fp16", optimizer=optimizer, precision=precision)
            engine = initialize(perceptron(), config)
            before = partitions(engine)
            steps = []
            for batch in vectors(20):
                scale = engine.optimizer.loss_scale
                loss = train(engine, [batch], squared)[0]
                after = partitions(engine)
                changed = any(not torch.equal(new[0], old[0]) for new, old in zip(after, before, strict=True))
                counts = [int(state.get("step", 0)) for _, state in after]
                steps.append(
                    {
                        "scale": scale,
                        "loss": loss,
                        "overflow": engine.optimizer.overflow,
                        "changed": changed,
                        "counts": counts,
                    }
                )
                before = after
            result[f"{optimizer}, ZeRO-{stage}, masters {masters}"] = steps
            engine.destroy()


def program_zenflow(result, overlap):
    """DeepSpeed's ZenFlow."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    zenflow = {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 4,
        "update_interval": 2,
        "full_warm_up_rounds": 2,
        "overlap_step": overlap,
    }
    engine = initialize(perceptron(), configuration(dtype="bf16", zero={"zenflow": zenflow}))
    result["losses"] = train(engine, vectors(24), squared)
    result["optimizer"] = type(engine.optimizer.optimizer).__name__
    process = getattr(engine.optimizer, "process", None)
    if process is not None:
        result["pid"] = process.pid
        result["was_alive"] = process.is_alive()
        process.terminate()
        process.join(30)
        result["is_alive"] = process.is_alive()


def program_two_ranks(result):
    """ZeRO-2 over gloo."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    for name, options in (
        ("AdamW", {}),
        ("fp32", {"optimizer": "StepwellAdamW"}),
        ("q8", {"optimizer": "StepwellAdamW", "params": {"moments": "q8"}}),
    ):
        result[name] = trained(configuration(**options), batches=list(vectors(STEPS, rank=rank)))
    # The gradients of both ranks' batches averaged are those of one batch of all.
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for batches in zip(*(vectors(STEPS, rank=each) for each in range(2)), strict=True):
        squared(model, torch.cat(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    result["torch"] = torch.cat([p.detach().flatten() for p in model.parameters()])


def program_refusals(result):
    """DeepSpeed configurations under which StepwellAdamW could not step; what is raised."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    cases = {
        "zenflow": configuration(
            optimizer="StepwellAdamW",
            zero={
                "zenflow": {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 2}
            },
        ),
        "super_offload": configuration(optimizer="StepwellAdamW", stage=3),
        "nvme": configuration(optimizer="StepwellAdamW", stage=3),
        "ratio": configuration(optimizer="StepwellAdamW", stage=3),
        "elastic": configuration(optimizer="StepwellAdamW", zero={"elastic_checkpoint": True}),
        "unknown": configuration(optimizer="StepwellAdamW", params={"adam_w_mode": True}),
        "moments": configuration(optimizer="StepwellAdamW", params={"moments": "fp8"}),
        "max_grad_norm": configuration(optimizer="StepwellAdamW", params={"max_grad_norm": 1.0}),
        "states": configuration(
            optimizer="StepwellAdamW",
            params={"moments": "fp32"},
            dtype="bf16",
            precision={"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        ),
    }
    cases["super_offload"]["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    cases["nvme"]["zero_optimization"]["offload_optimizer"] |= {"device": "nvme", "nvme_path": "/nonexistent"}
    cases["ratio"]["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    for name, config in cases.items():
        try:
            initialize(perceptron(), config)
        except (ValueError, AssertionError, RuntimeError) as error:
            result[name] = f"{type(error).__name__}: {error}"


def program_register(result, when):
    """Seams before and after `register`, called before or after the import of DeepSpeed."""
    import pickle

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

    result["targets"] = [
        pickle.loads(pickle.dumps(target)).__module__
        for target in (zenflow_utils.zenflow_optimizer_process, superoffload_utils.superoffload_optimizer_worker)
    ]

    # On another accelerator its own fused_adam stays.
    from deepspeed.ops.op_builder.builder import OpBuilder

    del OpBuilder._loaded_ops["fused_adam"]
    get_accelerator()._name = "cuda"
    stepwell.deepspeed.register()
    result["fused_adam on cuda"] = "fused_adam" in OpBuilder._loaded_ops
    result["report on cuda"] = stepwell.deepspeed.seam_report()


def program_unregistered(result):
    """What DeepSpeed does here by itself."""
    import deepspeed

    try:
        deepspeed.ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(3))])
    except RuntimeError as error:
        result["error"] = f"{error}; {error.__cause__}"


def program_changed_seam(result):
    """A DeepSpeed whose function takes other parameters, and lacks another."""
    import deepspeed
    import stepwell.deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    def step_subgroup(self, closure=None, subgroup_id=0):
        """Another order."""

    deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam.step_subgroup = step_subgroup
    del deepspeed.runtime.engine.DeepSpeedEngine._configure_basic_optimizer
    try:
        stepwell.deepspeed.register()
    except ImportError as error:
        result["error"] = str(error)
    result["ops"] = list(OpBuilder._loaded_ops)
    result["report"] = stepwell.deepspeed.seam_report()


def program_optimizer(result):
    """DeepSpeedCPUAdam by itself, and its steps that fail."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    import deepspeed

    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [torch.nn.Parameter(torch.randn(100, generator=generator).to(dtype)) for dtype in dtypes]
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(params, lr=LR, weight_decay=0)

    def set_gradients():
        for param in params:
            param.grad = torch.randn(100, generator=generator).to(param.dtype)

    def everything():
        return [tensor.clone() for p in params for tensor in (p.detach(), *list(optimizer.state[p].values())[1:])]

    set_gradients()
    optimizer.step()
    result["steps"] = [[optimizer.state[param]["step"] for param in params]]
    result["values"] = [everything()]
    for spoil in ("nan", "strides", "shape"):
        set_gradients()
        state = optimizer.state[params[2]]
        kept = state["exp_avg"]
        if spoil == "nan":
            params[2].grad[50] = float("nan")
        elif spoil == "strides":
            state["exp_avg"] = torch.zeros(200, dtype=kept.dtype)[::2]
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
    stepwell.deepspeed.register(nonfinite="propagate")
    params[0].grad[3] = float("inf")
    optimizer.step()
    result["propagated"] = bool(params[0].isnan()[3])


def program_native(result):
    """DeepSpeed's own op and Stepwell, in the same configurations. Compiles, or takes what was compiled before."""
    import deepspeed
    from stepwell.deepspeed import cpu_adam, register

    # Only cpu_adam is to be compiled.
    deepspeed.comm.torch.build_shm_op = lambda: None
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
    register()
    assert deepspeed.ops.op_builder.CPUAdamBuilder().load() is cpu_adam
    result["stepwell"] = {name: trained(config) for name, config in configs.items()}


CHECKPOINTS = {
    "AdamW, ZeRO-1": {"stage": 1},
    "AdamW, ZeRO-2": {},
    "AdamW, ZeRO-3": {"stage": 3},
    "fp32, ZeRO-2": {"optimizer": "StepwellAdamW"},
    "fp32, ZeRO-3, sub-groups": {"optimizer": "StepwellAdamW", "stage": 3, "zero": {"sub_group_size": 3000}},
    "bf16, ZeRO-2": {"optimizer": "StepwellAdamW", "params": {"moments": "bf16"}},
    "bf16, ZeRO-3": {"optimizer": "StepwellAdamW", "params": {"moments": "bf16"}, "stage": 3, "dtype": "bf16"},
    "q8, ZeRO-1": {"optimizer": "StepwellAdamW", "params": {"moments": "q8"}, "stage": 1},
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
UNIVERSAL = ("bf16, ZeRO-2", "fp32, ZeRO-3, sub-groups", "q8, ZeRO-2", "q8, ZeRO-3, sub-groups")
NOT_UNIVERSAL = ("q8, bf16 masters, ZeRO-2", "fp32, bf16 masters, ZeRO-3")


def program_checkpoints(result, folder):
    """Runs that are saved, go on, and are resumed by another engine; what DeepSpeed's tools make of the checkpoints."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    import deepspeed
    from deepspeed.utils import zero_to_fp32

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    for name, options in CHECKPOINTS.items():
        saved = str(Path(folder) / name.replace(", ", "_"))
        config = configuration(**options)
        engine = initialize(perceptron(), config)
        found = result[name] = {"before": train(engine, vectors(STEPS), squared)}
        found["partitions"] = partitions(engine)
        engine.save_checkpoint(saved)
        found["consolidated"] = consolidated(engine)
        found["zero_to_fp32"] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved)
        found["after"], found["grad"] = trained_further(engine)
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
            continue

        universal = to_universal(saved, in_process=name != "q8, ZeRO-2")
        engine = initialize(perceptron(seed=1), configuration(**options, checkpoint={"load_universal": True}))
        try:
            engine.load_checkpoint(saved, tag=universal)
        except ValueError as error:
            found["refused"] = str(error)
            continue
        found["universal partitions"] = partitions(engine)
        found["universal"] = train(engine, vectors(STEPS, first=STEPS), squared)
        found["universal partitions after"] = partitions(engine)
        engine.destroy()


def trained_further(engine):
    """Losses, and the first gradient that `safe_get_full_grad` gives."""
    from deepspeed.utils import safe_get_full_grad

    grads = []
    weight = engine.module[0].weight
    losses = train(
        engine, vectors(STEPS, first=STEPS), squared, lambda: grads.append(safe_get_full_grad(weight).clone())
    )
    return losses, grads[0]


def consolidated(engine):
    """What `safe_get_full_*` give of every parameter, and what `safe_set_full_*` do."""
    from deepspeed import utils

    values = {}
    for name, param in engine.module.named_parameters():
        values[name] = [
            utils.safe_get_full_fp32_param(param).clone(),
            *(utils.safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")),
        ]
    param = engine.module[0].weight
    try:
        utils.safe_set_full_optimizer_state(param, utils.safe_get_full_optimizer_state(param, "exp_avg"), "exp_avg")
    except ValueError as error:
        values["set"] = str(error)
    return values


def to_universal(saved, in_process):
    """Converts the latest checkpoint; returns the tag of the universal one."""
    import subprocess

    tag = (Path(saved) / "latest").read_text().strip()
    arguments = ["--input_folder", f"{saved}/{tag}", "--output_folder", f"{saved}/universal", "--inject_missing_state"]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    if in_process:
        from deepspeed.checkpoint import ds_to_universal

        sys.argv[1:] = arguments
        ds_to_universal.main(ds_to_universal.parse_arguments())
    else:
        # As people do: where nobody has registered Stepwell.
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments]
        subprocess.run(command, check=True, timeout=120)
    return "universal"


def program_superoffload(result):
    """SuperOffload's optimizer process and what its ZeRO optimizer asks of it, without the GPU that the rest of it needs."""
    import time

    import stepwell.deepspeed

    stepwell.deepspeed.register()
    from deepspeed.runtime.superoffload.superoffload_utils import (
        EventTypes,
        ResultKeys,
        SuperOffloadCPUOptimizer,
        TaskKeys,
    )

    options = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    worker = SuperOffloadCPUOptimizer(optimizer_config=[options, options], max_grad_numel=5000, pin_memory=False)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(numel, generator=generator) * 0.05 for numel in (5000, 3000)]
    own = [torch.nn.Parameter(param.clone()) for param in params]
    reference = torch.optim.AdamW(own, **options)

    def ask(index, grad, rollback=False):
        worker.async_step(index, index, params[index], grad, rollback=rollback, lr=LR)
        deadline = time.monotonic() + 60
        while (answer := worker.get_result(EventTypes.ROLLBACK if rollback else EventTypes.ADAM_STEP)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert answer[TaskKeys.SUB_GROUP_ID] == index
        params[index].copy_(answer[ResultKeys.UPDATED_PARAM])

    def gradients():
        return [torch.randn(param.shape, generator=generator) for param in params]

    def step(grads):
        for index, grad in enumerate(grads):
            ask(index, grad)
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad.clone()
        reference.step()

    step(gradients())
    step(gradients())
    result["before"] = [param.clone() for param in params]
    # An overflow: both were stepped during backward, and both are told to roll back.
    overflowing = gradients()
    overflowing[1][17] = float("inf")
    for index, grad in enumerate(overflowing):
        ask(index, grad)
    result["overflow"] = [param.clone() for param in params]
    for index, grad in enumerate(overflowing):
        ask(index, grad, rollback=True)
    result["after"] = [param.clone() for param in params]
    for _ in range(3):
        step(gradients())
    result["end"] = [param.clone() for param in params]
    result["reference"] = [param.detach().clone() for param in own]
    worker.close()
    result["is_alive"] = worker.cpuadam_process.is_alive()


def main():
    program, path, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    result = {}
    globals()[f"program_{program}"](result, **options)
    torch.save(result, path)


# Spawned processes import this file again.
if __name__ == "__main__":
    main()
