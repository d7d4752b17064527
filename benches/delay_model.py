"""What the study of deferred updates trains: byte-level Llamas, on text that is at hand.

The text is Python sources and C++ headers of the installation. What losses are validated on is of
files that no run trains on.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SIZES", "Llama", "Size", "Task", "Text", "batches", "read_texts"]

Task: TypeAlias = Literal["base", "new", "tune"]

TEXT_BYTES_MAX = 48 << 20
VALIDATION_BYTES_MAX = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, what a step takes, and how a GPU is shared."""

    hidden: int
    """Width of the residual stream; heads are 64 wide, or half of it."""
    layers: int
    """Blocks. What is between the two matrices of a block's MLP is four times as wide."""
    sequence_length: int = 512
    """Bytes per sample."""
    batch_size: int = 8
    """Samples per step."""
    base_lr: float
    """Peak learning rate of the run that fine-tuning starts from."""
    base_steps: int
    """Steps of it."""
    steps: int = 1000
    """Steps of every other run."""
    slots: int
    """How many runs share the GPU."""
    seconds_per_step: float
    """On an H200, in a slot, as planned with; of "micro" on one core."""

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(2, self.hidden // 64)


SIZES = {
    "tiny": Size(
        hidden=32,
        layers=2,
        sequence_length=32,
        batch_size=2,
        base_lr=3e-3,
        base_steps=60,
        steps=40,
        slots=2,
        seconds_per_step=0.01,
    ),
    "micro": Size(
        hidden=64,
        layers=2,
        sequence_length=64,
        base_lr=3e-3,
        base_steps=1500,
        slots=1,
        seconds_per_step=0.02,
    ),
    "small": Size(
        hidden=512, layers=8, base_lr=1e-3, base_steps=4000, slots=4, seconds_per_step=0.027
    ),
    "large": Size(
        hidden=1024, layers=20, base_lr=5e-4, base_steps=1500, slots=2, seconds_per_step=0.058
    ),
}


class Block(nn.Module):
    """Attention with rotated positions, and a gated MLP, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Linear(hidden, 4 * hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Of (batch x sequence x hidden)."""
        normed = normalized(x, self.attention_norm)
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (project(normed).view(shape).transpose(1, 2) for project in self.qkv)
        q, k = (torch.addcmul(each * cos, rotated(each), sin) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(x.shape))
        normed = normalized(x, self.mlp_norm)
        mixed: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return mixed


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the root of the mean square of the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The halves of the last dimension turned by a quarter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Llama(nn.Module):
    """A byte-level Llama. Its parameters are in forward order."""

    cos: torch.Tensor
    sin: torch.Tensor
    alphabet: torch.Tensor

    def __init__(self, size: Size, *, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(256, size.hidden))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.Parameter(torch.ones(size.hidden))
        self.head = nn.Linear(size.hidden, 256, bias=False)
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                is_into_stream = name.endswith(("attention_out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * size.layers) if is_into_stream else 0.02
                nn.init.normal_(param, std=std, generator=generator)
        half = size.hidden // size.heads // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(size.sequence_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("alphabet", torch.arange(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of each byte behind the first (int64, batch x (sequence + 1))."""
        # Rows are taken by a product: its backward needs no sort, and has the same bits each time.
        x = torch.eq(tokens[:, :-1, None], self.alphabet).to(self.embedding.dtype) @ self.embedding
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(normalized(x, self.norm))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# ---- text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Bytes on the device (uint8)."""

    training: torch.Tensor
    """What runs train on."""
    validation: torch.Tensor
    """Of other files."""

    @classmethod
    def of(cls, paths: Iterable[Path], device: torch.device) -> Text:
        """Of these files; every 16th is for validation."""
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        room = [TEXT_BYTES_MAX, VALIDATION_BYTES_MAX]
        for index, path in enumerate(sorted(paths)):
            which = int(index % 16 == 7)
            if room[which] > 0 and path.is_file():
                parts[which].append(path.read_bytes()[: room[which]])
                room[which] -= len(parts[which][-1])
        training, validation = (
            torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).to(device)
            for part in parts
        )
        return cls(training, validation)


def read_texts(device: torch.device) -> dict[Task, Text]:
    """Sources of Python's library and of torch; the headers of torch."""
    library, torch_folder = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    packages = ("site-packages", "dist-packages")
    sources = [path for path in library.rglob("*.py") if not set(packages) & set(path.parts)]
    python = Text.of([*sources, *torch_folder.rglob("*.py")], device)
    headers = Text.of((torch_folder / "include").rglob("*.h"), device)
    return {"base": python, "new": python, "tune": headers}


def batches(text: torch.Tensor, size: Size, count: int, seed: int) -> Callable[[int], torch.Tensor]:
    """Samples by the number of their step, from places that follow from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    last = text.numel() - size.sequence_length - 1
    starts = torch.randint(0, last, (count, size.batch_size, 1), generator=generator)
    starts = starts.to(text.device)
    offsets = torch.arange(size.sequence_length + 1, device=text.device)
    return lambda step: text[starts[step] + offsets].long()
