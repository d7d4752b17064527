"""The runs of `codec.py`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from stepwell import AdamW, _core, _state
from stepwell._tensors import view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepwell.cli._llama import ByteText, LlamaShape
    from stepwell.optim import Moments

__all__ = ["CODECS", "compare", "final_loss", "train"]

CODECS: tuple[Moments, ...] = ("bf16", "q8")
"""The codecs that are compared with fp32."""

_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
_FINAL_STEPS = 50


def final_loss(losses: Sequence[float]) -> float:
    """The mean loss of the last 50 steps."""
    last = losses[-_FINAL_STEPS:]
    return sum(last) / len(last)


def train(
    shape: LlamaShape,
    text: ByteText,
    moments: Moments,
    *,
    seed: int,
    steps: int,
    on_step: Callable[[str], None],
    after: Callable[[int, list[torch.nn.Parameter], AdamW], None] | None = None,
) -> list[float]:
    """Trains a float32 model and returns the loss of every step.

    Args:
        shape: of the model, whose weights are the same in every run.
        text: what it is trained on.
        moments: how the optimizer holds them.
        seed: of the choice of samples.
        steps: how many.
        on_step: called after every step, with a name of the run.
        after: called after every step, with its number, the parameters and the optimizer; gradients
            are still there.
    """
    model = shape.build(seed=0)
    params = list(model.parameters())
    optimizer = AdamW(
        params, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, moments=moments
    )
    losses = []
    for step, batch in enumerate(islice(text.batches(shape, seed=seed), steps), start=1):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
        if after is not None:
            after(step, params, optimizer)
        on_step(f"{moments}, seed {seed}")
    return losses


def compare(
    shape: LlamaShape,
    text: ByteText,
    *,
    seed: int,
    steps: int,
    at: Sequence[int],
    on_step: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[float]]:
    """Trains with fp32 moments, and compares its updates with those of the codecs at some steps.

    Returns:
        For each codec, way and step the `update_error` (relative, L2) and the `worst_error` (of the
        largest update); and the losses of the run.
    """
    shadows: dict[Moments, AdamW] = {}
    errors: list[dict[str, Any]] = []

    def after(step: int, params: list[torch.nn.Parameter], optimizer: AdamW) -> None:
        if not shadows:
            for moments in CODECS:
                copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
                shadows[moments] = AdamW(
                    copies,
                    lr=_LR,
                    betas=_BETAS,
                    eps=_EPS,
                    weight_decay=_WEIGHT_DECAY,
                    moments=moments,
                )
        for shadow in shadows.values():
            copies = shadow.param_groups[0]["params"]
            for copy, param in zip(copies, params, strict=True):
                copy.grad = param.grad
            shadow.step()
        if step not in at:
            return
        exact = _update([optimizer.state[param] for param in params], step)
        for moments, shadow in shadows.items():
            once = [
                _coded(param, optimizer.state[param], moments, step=step, key=key)
                for key, param in enumerate(params)
            ]
            tracked = [
                _state.decode(copy, shadow.state[copy]) for copy in shadow.param_groups[0]["params"]
            ]
            for how, states in (("once", once), ("tracked", tracked)):
                error = _update(states, step) - exact
                errors.append(
                    {
                        "moments": moments,
                        "how": how,
                        "step": step,
                        "update_error": (error.norm() / exact.norm()).item(),
                        "worst_error": (error.abs().max() / exact.abs().max()).item(),
                    }
                )

    losses = train(shape, text, "fp32", seed=seed, steps=steps, on_step=on_step, after=after)
    return sorted(errors, key=lambda error: (error["moments"], error["how"], error["step"])), losses


def _update(states: list[dict[str, torch.Tensor]], step: int) -> torch.Tensor:
    """m_hat / (sqrt(v_hat) + eps) of all parameters, in double precision."""
    updates = []
    for state in states:
        exp_avg = state["exp_avg"].double().flatten() / (1 - _BETAS[0] ** step)
        exp_avg_sq = state["exp_avg_sq"].double().flatten() / (1 - _BETAS[1] ** step)
        updates.append(exp_avg / (exp_avg_sq.sqrt() + _EPS))
    return torch.cat(updates)


def _coded(
    param: torch.Tensor, state: dict[str, torch.Tensor], moments: Moments, *, step: int, key: int
) -> dict[str, torch.Tensor]:
    """The moments of `state`, there and back."""
    coded = _state.new(param, moments)
    runs = {name: coded[name] for name in _state.part_names(param, moments)}
    adam_tensor = _state.adam_tensor(param.detach(), runs, key=key)
    _core.write_state(
        adam_tensor, step=step, exp_avg=view(state["exp_avg"]), exp_avg_sq=view(state["exp_avg_sq"])
    )
    return _state.decode(param, coded)
