"""What is trained in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["Dtype", "Workload"]

Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The samples of a step, and how they are computed.

    Raises:
        ValueError: a number is below 1.
    """

    tokens: int = 4096
    """Of a sample."""
    micro_batch: int = 1
    """Samples of a forward, on each GPU."""
    accumulation: int = 1
    """Forwards of a step."""
    gpus: int = 1
    checkpointing: bool = True
    """Whether layers compute their activations again in the backward."""
    loss_tokens: int | None = None
    """Tokens whose logits are there at once, where the loss is computed in parts, each of which is
    a checkpoint. None: those of the micro-batch."""
    dtype: Dtype = "bfloat16"
    """Of the parameters."""

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_batch", "accumulation", "gpus", "loss_tokens"):
            value = getattr(self, name)
            if value is None and name == "loss_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` is `{value}`, expected an integer, 1 or more")
        if self.dtype not in get_args(Dtype):
            raise ValueError(
                f"`dtype` is `{self.dtype}`, expected one of {', '.join(get_args(Dtype))}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return 4 if self.dtype == "float32" else 2

    @property
    def tokens_of_forward(self) -> int:
        """Tokens of a micro-batch of one GPU."""
        return self.tokens * self.micro_batch

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a step, of all GPUs."""
        return self.tokens_of_forward * self.accumulation * self.gpus
