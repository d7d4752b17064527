"""The small model that `demo` trains: a byte-level Llama, and its text."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import LlamaForCausalLM

__all__ = ["ByteText", "LlamaShape", "read_text"]

_VOCABULARY = 256  # a token is a byte
_TEXT_BYTES_MAX = 16 << 20


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The size of a model and of what it is fed."""

    hidden_size: int = 256
    """Width of the residual stream; heads are 64 wide."""
    num_hidden_layers: int = 4
    """Transformer blocks."""
    sequence_length: int = 128
    """Tokens per sample."""
    batch_size: int = 4
    """Samples per step."""

    def build(self, *, seed: int) -> LlamaForCausalLM:
        """A model in float32 whose weights follow from `seed`.

        Raises:
            ImportError: transformers is not installed.
        """
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise ImportError(
                "transformers is not installed. hint: pip install 'stepwell[demo]'"
            ) from error
        torch.manual_seed(seed)
        heads = max(self.hidden_size // 64, 1)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=_VOCABULARY,
                hidden_size=self.hidden_size,
                intermediate_size=self.hidden_size * 11 // 4,
                num_hidden_layers=self.num_hidden_layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=self.sequence_length,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )


@dataclass(frozen=True)
class ByteText:
    """Text as bytes, in memory."""

    data: torch.Tensor
    """uint8, one dimension."""
    source: str
    """Where it is from, for people."""

    def batches(self, shape: LlamaShape, *, seed: int) -> Iterator[torch.Tensor]:
        """Endless samples (int64, batch x sequence) from places that follow from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        last = self.data.numel() - shape.sequence_length
        offsets = torch.arange(shape.sequence_length)
        while True:
            starts = torch.randint(0, last + 1, (shape.batch_size, 1), generator=generator)
            yield self.data[starts + offsets].long()


def read_text(path: Path | None, *, bytes_min: int) -> ByteText:
    """The text of a file, or the sources of Python's standard library; 16 MiB of it at most.

    Args:
        path: the file; None for the standard library.
        bytes_min: how much is needed.

    Raises:
        ValueError: there is less text than `bytes_min`.
        OSError: the file cannot be read.
    """
    if path is not None:
        with path.open("rb") as file:
            data, source = file.read(_TEXT_BYTES_MAX), str(path)
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        parts = []
        for file_path in sorted(library.glob("*.py")):
            parts.append(file_path.read_bytes())
        data, source = (
            b"".join(parts)[:_TEXT_BYTES_MAX],
            f"the standard library of Python, {len(parts)} files",
        )
    if len(data) < bytes_min:
        raise ValueError(
            f"`{source}` has `{len(data)}` bytes, expected at least {bytes_min}. hint: --text FILE"
        )
    return ByteText(torch.frombuffer(bytearray(data), dtype=torch.uint8), source)
