"""Programs (see deepspeed_run) that train beside torch alone: loss curves, and two ranks."""

import os

import torch
from deepspeed_engines import (
    LR,
    STEPS,
    configuration,
    initialize,
    perceptron,
    squared,
    train,
    trained,
    vectors,
)


def program_curves(result):
    """Loss curves of torch, and of DeepSpeed on Stepwell in many configurations."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()

    def alone(cls):
        model = perceptron()
        optimizer = cls(model.parameters(), lr=LR, weight_decay=0.01)
        losses = []
        for batch in vectors(STEPS):
            loss = squared(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    result["torch"] = alone(torch.optim.AdamW)
    result["torch Adam"] = alone(torch.optim.Adam)
    result["StepwellAdam"] = trained(configuration(optimizer="StepwellAdam"))
    result["Adam, adam_w_mode false"] = trained(
        configuration(optimizer="Adam", params={"adam_w_mode": False})
    )
    result["fused_adam"] = trained(configuration(stage=1, offload=None))
    result["fused_adam without ZeRO"] = train(
        initialize(perceptron(), configuration(stage=0, offload=None)), vectors(STEPS), squared
    )
    # 16-bit models
    masters = {"bf16_master_weights_and_grads": True}
    states = masters | {"bf16_optimizer_states": True}
    result["bf16"] = trained(configuration(dtype="bf16"))
    for stage in (2, 3):
        for name, precision in (("masters", masters), ("states", states)):
            for optimizer in ("AdamW", "StepwellAdamW"):
                config = configuration(
                    stage=stage, dtype="bf16", precision=precision, optimizer=optimizer
                )
                result[f"bf16 {name}, {optimizer}, ZeRO-{stage}"] = trained(config)


def program_two_ranks(result):
    """ZeRO-2 over gloo."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    rank = int(os.environ["RANK"])
    for name, options in (
        ("AdamW", {}),
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
