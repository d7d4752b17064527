"""Dense decoders by the `config.json` of transformers: which tensors they have.

The configuration alone is read: no torch, no transformers. A test holds the counts of all families
against those of the models themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "Decoder", "Tensor", "decoder_of"]

Tensor = tuple[int, int]
"""Rows and elements of a row; of a vector one element each."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a family has beside the tensors that all have.

    Names of keys of the configuration say which decide; a bool is what the family has always, or
    where the key is not given.
    """

    is_gated: bool = True
    """Whether the block behind attention has a gate; else two matrices."""
    is_gate_fused: bool = False
    """Whether gate and up are one matrix."""
    is_qkv_fused: bool = False
    """Whether queries, keys and values are one matrix."""
    qkv_bias: tuple[str, bool] = ("", False)
    out_bias: tuple[str, bool] = ("", False)
    mlp_bias: tuple[str, bool] = ("", False)
    qk_norm: str = ""
    """Norms of queries and keys: of a "head" each, or of the "whole"."""
    num_norms: int = 2
    """Norms of a layer that are as wide as it."""
    has_norm_bias: bool = False
    has_final_norm: bool = True
    has_head_bias: bool = False
    has_positions: bool = False
    """Whether positions have an embedding."""
    is_tied: bool = False
    """Whether embedding and head are one matrix, where the configuration does not say."""
    head_dim: int | None = None
    """Where the configuration does not say; None: hidden size / heads."""
    kv_heads: int | None = None
    """Likewise; None: as many as heads."""
    has_equal_heads: bool = False
    """Whether keys and values have the heads of queries, which share the hidden size."""


_ATTENTION: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", False))
_LLAMA = _Family(**_ATTENTION, mlp_bias=("mlp_bias", False))
_BIASED: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("use_bias", True))

FAMILIES: dict[str, _Family] = {
    "arcee": _Family(**_ATTENTION, mlp_bias=("mlp_bias", False), is_gated=False),
    "gemma": _Family(**_ATTENTION, is_tied=True, head_dim=256, kv_heads=16),
    "gemma2": _Family(**_ATTENTION, num_norms=4, is_tied=True, head_dim=256, kv_heads=4),
    "gemma3_text": _Family(
        **_ATTENTION,
        num_norms=4,
        qk_norm="head",
        is_tied=True,
        head_dim=256,
        kv_heads=4,
    ),
    "gpt2": _Family(
        is_gated=False,
        is_qkv_fused=True,
        qkv_bias=("", True),
        out_bias=("", True),
        mlp_bias=("", True),
        has_norm_bias=True,
        has_positions=True,
        is_tied=True,
        has_equal_heads=True,
    ),
    "gpt_neox": _Family(
        is_gated=False,
        is_qkv_fused=True,
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=("", True),
        has_norm_bias=True,
        has_equal_heads=True,
    ),
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _Family(kv_heads=8),
    "olmo": _Family(**_ATTENTION, num_norms=0, has_final_norm=False),
    "olmo2": _Family(**_ATTENTION, qk_norm="whole"),
    "phi": _Family(
        is_gated=False,
        qkv_bias=("", True),
        out_bias=("", True),
        mlp_bias=("", True),
        num_norms=1,
        has_norm_bias=True,
        has_head_bias=True,
    ),
    "phi3": _Family(is_qkv_fused=True, is_gate_fused=True),
    "qwen2": _Family(qkv_bias=("", True), kv_heads=32),
    "qwen3": _Family(**_ATTENTION, qk_norm="head", head_dim=128, kv_heads=32),
    "smollm3": _Family(**_ATTENTION, mlp_bias=("mlp_bias", False), is_tied=True, kv_heads=4),
    "stablelm": _Family(qkv_bias=("use_qkv_bias", False), has_norm_bias=True, kv_heads=32),
    "starcoder2": _Family(**_BIASED, is_gated=False, has_norm_bias=True, is_tied=True, kv_heads=2),
}
"""By `model_type`."""

# The keys of GPT-2, by those of others.
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Decoder:
    """The tensors of a decoder, in the order of its forward."""

    before: list[Tensor]
    """Embeddings."""
    layer: list[Tensor]
    """Of each layer."""
    behind: list[Tensor]
    """Final norm, and a head that is not the embedding."""
    num_layers: int
    hidden: int
    intermediate: int
    attention: int
    """Width of all queries."""
    kv: int
    """Width of all keys, and of all values."""
    vocab: int
    is_tied: bool
    is_gated: bool
    num_norms: int
    has_qk_norm: bool


def decoder_of(config: Mapping[str, Any], name: str) -> Decoder:
    """The decoder that a configuration describes; `name` is what errors call it.

    Raises:
        ValueError: it is of no family that is known, or a size is missing.
    """
    kind = config.get("model_type")
    hint = "hint: MODULE:CALLABLE that builds the model, or its number of parameters as 7B"
    if kind not in FAMILIES:
        raise ValueError(
            f"`model_type` of {name} is `{kind}`, expected one of {', '.join(FAMILIES)}. {hint}"
        )
    family = FAMILIES[kind]

    def size(key: str, default: int | None = None) -> int:
        value = config.get(_GPT2_KEYS.get(key, key) if kind == "gpt2" else key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{key}` of {name} is `{value}`, expected an integer above 0. {hint}")
        return value

    def has(bias: tuple[str, bool]) -> bool:
        key, default = bias
        return bool(config.get(key, default))

    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    heads, vocab = size("num_attention_heads"), size("vocab_size")
    intermediate = size("intermediate_size", 4 * hidden if kind == "gpt2" else None)
    # A configuration that gives null means as many as heads; one that leaves it out, the default.
    is_said = "num_key_value_heads" in config
    kv_heads = size("num_key_value_heads", heads if is_said else (family.kv_heads or heads))
    head_dim = size("head_dim", family.head_dim or hidden // heads)
    if family.has_equal_heads:
        kv_heads, head_dim = heads, hidden // heads
    attention, kv = heads * head_dim, kv_heads * head_dim
    tied = config.get("tie_word_embeddings")
    is_tied = family.is_tied if tied is None else bool(tied)

    def linear(rows: int, columns: int, *, has_bias: bool) -> list[Tensor]:
        return [(rows, columns), *([(rows, 1)] if has_bias else [])]

    def norm(width: int) -> list[Tensor]:
        return [(width, 1)] * (2 if family.has_norm_bias else 1)

    fused = [attention + 2 * kv] if family.is_qkv_fused else [attention, kv, kv]
    layer: list[Tensor] = []
    for rows in fused:
        layer += linear(rows, hidden, has_bias=has(family.qkv_bias))
    if family.qk_norm:
        whole = family.qk_norm == "whole"
        layer += [(attention if whole else head_dim, 1), (kv if whole else head_dim, 1)]
    layer += linear(hidden, attention, has_bias=has(family.out_bias))
    inner = [intermediate] * (2 if family.is_gated else 1)
    if family.is_gate_fused:
        inner = [sum(inner)]
    for rows in inner:
        layer += linear(rows, hidden, has_bias=has(family.mlp_bias))
    layer += linear(hidden, intermediate, has_bias=has(family.mlp_bias))
    layer += norm(hidden) * family.num_norms
    positions = [(size("max_position_embeddings"), hidden)] if family.has_positions else []
    head = [] if is_tied else [(vocab, hidden)]
    return Decoder(
        before=[(vocab, hidden), *positions],
        layer=layer,
        behind=[
            *(norm(hidden) if family.has_final_norm else []),
            *head,
            *([(vocab, 1)] if family.has_head_bias else []),
        ],
        num_layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        attention=attention,
        kv=kv,
        vocab=vocab,
        is_tied=is_tied,
        is_gated=family.is_gated,
        num_norms=family.num_norms,
        has_qk_norm=bool(family.qk_norm),
    )
