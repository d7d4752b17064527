"""Programs (see deepspeed_run) that train: loss curves, fp16, two ranks, refusals."""

import os

import torch
from deepspeed_engines import (
    LR,
    STEPS,
    configuration,
    initialize,
    llama,
    next_token_loss,
    partitions,
    perceptron,
    squared,
    tokens,
    train,
    trained,
    vectors,
)


def program_curves(result):
    """Loss curves of torch, and of DeepSpeed on Stepwell in many configurations."""
    import stepwell
    import stepwell.deepspeed

    stepwell.deepspeed.register()

    def with_torch(make, cls=torch.optim.AdamW, clip=0.0, **keywords):
        model = make()
        optimizer = cls(model.parameters(), lr=LR, weight_decay=0.01, **keywords)
        losses = []
        batches, loss_of = (
            (tokens(STEPS), next_token_loss) if make is llama else (vectors(STEPS), squared)
        )
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
        result[f"llama ZeRO-{stage}"] = trained(
            config, model=llama, loss_of=next_token_loss, batches=tokens(STEPS)
        )
        result[f"ZeRO-{stage}"] = trained(configuration(stage=stage))
        ours = configuration(stage=stage, optimizer="StepwellAdamW")
        result[f"StepwellAdamW ZeRO-{stage}"] = trained(ours)
    clipped = configuration(clip=0.1)
    result["llama, clipped"] = trained(
        clipped, model=llama, loss_of=next_token_loss, batches=tokens(STEPS)
    )
    result["StepwellAdam"] = trained(configuration(optimizer="StepwellAdam"))
    result["Adam, adam_w_mode false"] = trained(
        configuration(optimizer="Adam", params={"adam_w_mode": False})
    )
    result["fused_adam"] = trained(configuration(stage=1, offload=None))
    result["fused_adam without ZeRO"] = train(
        initialize(perceptron(), configuration(stage=0, offload=None)), vectors(STEPS), squared
    )
    for moments in ("bf16", "q8"):
        result[f"moments {moments}"] = trained(
            configuration(optimizer="StepwellAdamW", params={"moments": moments})
        )
    client = perceptron()
    config = configuration()
    del config["optimizer"]
    result["client"] = trained(
        config,
        model=lambda: client,
        optimizer=stepwell.AdamW(client.parameters(), lr=LR, weight_decay=0.01),
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
    result["two groups"] = {
        "losses": train(engine, vectors(STEPS), squared),
        "partitions": partitions(engine),
    }

    # 16-bit models
    masters = {"bf16_master_weights_and_grads": True}
    states = masters | {"bf16_optimizer_states": True}
    result["bf16"] = trained(configuration(dtype="bf16"))
    result["bf16 ZeRO-3"] = trained(configuration(dtype="bf16", stage=3))
    for stage in (2, 3):
        for name, precision in (("masters", masters), ("states", states)):
            for optimizer in ("AdamW", "StepwellAdamW"):
                config = configuration(
                    stage=stage, dtype="bf16", precision=precision, optimizer=optimizer
                )
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
            config = configuration(
                stage=stage, dtype="fp16", optimizer=optimizer, precision=precision
            )
            engine = initialize(perceptron(), config)
            before = partitions(engine)
            steps = []
            for batch in vectors(20):
                scale = engine.optimizer.loss_scale
                loss = train(engine, [batch], squared)[0]
                after = partitions(engine)
                changed = any(
                    not torch.equal(new[0], old[0]) for new, old in zip(after, before, strict=True)
                )
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
    result["set in codes"] = set_in_codes(vectors(1, rank=rank))
    # The gradients of both ranks' batches averaged are those of one batch of all.
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for batches in zip(*(vectors(STEPS, rank=each) for each in range(2)), strict=True):
        squared(model, torch.cat(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    result["torch"] = torch.cat([p.detach().flatten() for p in model.parameters()])


def set_in_codes(batches):
    """What setting a moment of each parameter says where moments are codes."""
    from deepspeed.utils import safe_set_full_optimizer_state

    config = configuration(optimizer="StepwellAdamW", params={"moments": "q8"})
    engine = initialize(perceptron(), config)
    train(engine, batches, squared)
    said = []
    for param in engine.module.parameters():
        try:
            safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg")
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    engine.destroy()
    return said


def program_refusals(result):
    """DeepSpeed configurations under which StepwellAdamW could not step; what is raised."""
    import stepwell
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    cases = {
        "zenflow": configuration(
            optimizer="StepwellAdamW",
            zero={
                "zenflow": {
                    "topk_ratio": 0.1,
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                }
            },
            stepwell={"zenflow": False},
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
    cases["nvme"]["zero_optimization"]["offload_optimizer"] |= {
        "device": "nvme",
        "nvme_path": "/proc/none",
    }
    cases["ratio"]["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    client = configuration(stage=3)
    del client["optimizer"]
    client["zero_optimization"]["offload_optimizer"] |= {
        "device": "nvme",
        "nvme_path": "/proc/none",
    }
    cases["client"] = client
    for name, config in cases.items():
        model = perceptron()
        more = {"optimizer": stepwell.AdamW(model.parameters())} if name == "client" else {}
        try:
            initialize(model, config, **more)
        except (ValueError, AssertionError, RuntimeError) as error:
            result[name] = f"{type(error).__name__}: {error}"
