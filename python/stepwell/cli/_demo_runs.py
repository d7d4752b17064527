"""The two training runs of `stepwell demo`: DeepSpeed with Stepwell, and torch alone.

Both have the same model, data and steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from stepwell.cli._processes import launched
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stepwell.cli._llama import ByteText, LlamaShape
    from stepwell.optim import Moments

__all__ = ["Curve", "Workload", "with_deepspeed", "with_torch"]

_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_CLIP = 1.0
_WARM_UP_STEPS = 2  # memory is touched for the first time in them


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What both runs have in common."""

    shape: LlamaShape
    """The model, and what it is fed."""
    text: ByteText
    """What it is trained on."""
    steps: int
    """Optimizer steps."""
    seed: int
    """Of the weights and of the choice of samples."""

    @property
    def device(self) -> torch.device:
        """Where the model is; optimizer state is in host memory."""
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def batches(self) -> Iterator[torch.Tensor]:
        """The samples of all steps, on the device."""
        for batch in islice(self.text.batches(self.shape, seed=self.seed), self.steps):
            yield batch.to(self.device)


@dataclass(kw_only=True)
class Curve:
    """What one run gave."""

    name: str
    """Of the run."""
    losses: list[float] = field(default_factory=list)
    """Of each step, before it."""
    optimizer_seconds: list[float] = field(default_factory=list)
    """From the gradient to the new 16-bit weight."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the whole step."""
    state_bytes: int = 0
    """Of master and moments."""
    num_params: int = 0
    """Elements of the model."""

    def report(self) -> dict[str, Any]:
        """All of it, with medians, as plain values."""
        return {
            "name": self.name,
            "optimizer_seconds_median": statistics.median(
                self.optimizer_seconds[_WARM_UP_STEPS:] or self.optimizer_seconds
            ),
            "step_seconds_median": statistics.median(
                self.step_seconds[_WARM_UP_STEPS:] or self.step_seconds
            ),
            "state_bytes_per_param": self.state_bytes / self.num_params,
            "losses": self.losses,
            "optimizer_seconds": self.optimizer_seconds,
        }


def _train(
    workload: Workload,
    name: str,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], object],
    step: Callable[[], object],
    on_step: Callable[[float], None],
) -> Curve:
    def now() -> float:
        if workload.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    curve = Curve(name=name)
    for batch in workload.batches():
        started = now()
        loss = forward(batch)
        backward(loss)
        before = now()
        step()
        ended = now()
        curve.losses.append(loss.detach().item())
        curve.optimizer_seconds.append(ended - before)
        curve.step_seconds.append(ended - started)
        on_step(curve.losses[-1])
    return curve


def _nbytes(params: Iterable[torch.Tensor], state: dict[Any, dict[str, Any]]) -> int:
    """Bytes of the masters and of all state that counts per element."""
    tensors = [*params, *(value for each in state.values() for value in each.values())]
    return sum(
        tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    )


def with_deepspeed(workload: Workload, moments: Moments, on_step: Callable[[float], None]) -> Curve:
    """DeepSpeed, ZeRO-2 with the optimizer offloaded to the CPU, on Stepwell.

    `on_step` gets each loss.

    Raises:
        ImportError: DeepSpeed is not installed, or not one that Stepwell knows.
    """
    from stepwell import deepspeed as seams

    seams.register()
    with quiet_deepspeed():
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = workload.shape.build(seed=workload.seed)
    config = {
        "train_micro_batch_size_per_gpu": workload.shape.batch_size,
        "bf16": {"enabled": True},
        "gradient_clipping": _CLIP,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": workload.device.type == "cuda"},
        },
        "optimizer": {
            "type": "StepwellAdamW",
            "params": {
                "lr": _LR,
                "betas": _BETAS,
                "eps": _EPS,
                "weight_decay": _WEIGHT_DECAY,
                "moments": moments,
            },
        },
        "steps_per_print": 1 << 30,
    }
    with _single_rank():
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        curve = _train(
            workload,
            f"DeepSpeed on Stepwell, {moments}",
            lambda batch: engine(input_ids=batch, labels=batch).loss,
            engine.backward,
            engine.step,
            on_step,
        )
        optimizer = engine.optimizer.optimizer
        masters = [param for group in optimizer.param_groups for param in group["params"]]
        curve.state_bytes = _nbytes(masters, optimizer.state)
        curve.num_params = sum(param.numel() for param in model.parameters())
        engine.destroy()
    return curve


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """A process group of this process alone, and the environment that DeepSpeed takes it from."""
    before = dict(os.environ)
    os.environ |= launched(1)[0]
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ |= before


def with_torch(workload: Workload, on_step: Callable[[float], None]) -> Curve:
    """A bfloat16 model with torch's fused AdamW over float32 masters in host memory.

    Gradients are clipped as in the other run. `on_step` gets each loss.
    """
    model = workload.shape.build(seed=workload.seed).to(workload.device)
    weights = list(model.parameters())
    for weight in weights:
        weight.data = weight.data.bfloat16()  # buffers stay in float32, as they do under DeepSpeed
    masters = [
        weight.detach().to(device="cpu", dtype=torch.float32, copy=True) for weight in weights
    ]
    optimizer = torch.optim.AdamW(
        masters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    @torch.no_grad()
    def step() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.to(device="cpu", dtype=torch.float32)
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, _CLIP)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)

    curve = _train(
        workload,
        "torch fused AdamW",
        lambda batch: model(input_ids=batch, labels=batch).loss,
        torch.Tensor.backward,
        step,
        on_step,
    )
    curve.state_bytes = _nbytes(masters, optimizer.state)
    curve.num_params = sum(weight.numel() for weight in weights)
    return curve
