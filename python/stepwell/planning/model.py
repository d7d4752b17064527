"""What is planned for: the sizes of a model, from whatever says them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell._quantities import count_of
from stepwell.planning.families import Tensor, decoder_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Source: TypeAlias = "str | Path | int | torch.nn.Module | Callable[[], torch.nn.Module]"

__all__ = ["Model", "model_of"]

# Of a model of which nothing but the number of parameters is known: Llama's shape, 128 times as
# wide as deep, with the vocabulary of Llama 3. Logits are then rather too many than too few.
_WIDTH_PER_LAYER = 128
_HEAD_DIM = 128
_VOCAB = 128_256
_PARAMS_MIN = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder that bytes and seconds follow from."""

    name: str
    tensors: tuple[Tensor, ...] = field(repr=False)
    """All parameters that are trained, in the order of the forward: rows, and elements of one."""
    num_layers: int
    hidden: int
    intermediate: int
    attention: int
    """Width of all queries of a layer."""
    kv: int
    """Width of its keys, and of its values."""
    vocab: int
    is_tied: bool
    """Whether the embedding is the head as well."""
    is_gated: bool = True
    """Whether the block behind attention has a gate."""
    num_norms: int = 2
    """Of a layer, as wide as it."""
    has_qk_norm: bool = False
    """Whether queries and keys have norms."""
    num_frozen: int = 0
    """Parameters that are not trained."""
    is_assumed: bool = False
    """Whether only the number of parameters is known, and the rest is Llama's shape."""

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter that is trained."""
        return [rows * columns for rows, columns in self.tensors]

    @property
    def num_params(self) -> int:
        """Parameters that are trained."""
        return sum(self.numels)

    @property
    def num_all(self) -> int:
        """All parameters."""
        return self.num_params + self.num_frozen

    @property
    def head(self) -> int:
        """Parameters of the head, a matrix of the vocabulary."""
        return self.vocab * self.hidden

    @property
    def in_layers(self) -> int:
        """Parameters of all layers."""
        return max(self.num_all - self.head * (1 if self.is_tied else 2), 0)


def model_of(source: Source) -> Model:
    """The sizes of a model.

    Args:
        source: a `config.json` of transformers, or a folder that has one; a number of parameters,
            also as "7B"; a callable that builds the model, or "MODULE:CALLABLE", which is called
            under `torch.device("meta")`; or the model.

    Raises:
        ValueError: it is none of these, or no model that is known.
    """
    if isinstance(source, bool):
        raise _refused(source)
    if isinstance(source, int):
        return _of_count(source)
    if isinstance(source, str):
        if (count := count_of(source)) is not None:
            return _of_count(count)
        if ":" in source and not Path(source).exists():
            return _of_module(_built(_imported(source)), source)
    if isinstance(source, (str, Path)):
        return _of_config(Path(source))
    if hasattr(source, "parameters") and hasattr(source, "named_modules"):
        return _of_module(source, type(source).__name__)
    if callable(source):
        return _of_module(_built(source), getattr(source, "__name__", "the model"))
    raise _refused(source)


def _refused(source: object) -> ValueError:
    return ValueError(
        f"the model is `{source}`, expected a config.json, a folder with one, MODULE:CALLABLE or a "
        "number of parameters, as 7B"
    )


def _of_count(count: int) -> Model:
    if count < _PARAMS_MIN:
        raise ValueError(
            f"the model has `{count}` parameters, expected {_PARAMS_MIN} or more. hint: 7B"
        )
    layers, vocab = 1, _VOCAB
    while _params_of(layers + 1, vocab) <= count:
        layers += 1
    if layers == 1:
        vocab = 1024
        while _params_of(layers + 1, vocab) <= count:
            layers += 1
    hidden = _WIDTH_PER_LAYER * layers
    embedding = (vocab, hidden)
    rest = max(count - 2 * vocab * hidden, layers)
    # 4 matrices of attention and 3 of 8/3 of the width are 12 times the width's square.
    parts = _split(rest, 7 * layers)
    layer_tensors = [(-(-part // hidden), hidden) for part in parts[:-1]]
    taken = sum(rows * hidden for rows, _ in layer_tensors)
    last = count - 2 * vocab * hidden - taken
    return Model(
        name="a model",
        tensors=(embedding, *layer_tensors, (max(last, 1), 1), embedding),
        num_layers=layers,
        hidden=hidden,
        intermediate=hidden * 8 // 3,
        attention=hidden,
        kv=hidden,
        vocab=vocab,
        is_tied=False,
        is_assumed=True,
    )


def _params_of(layers: int, vocab: int) -> int:
    hidden = _WIDTH_PER_LAYER * layers
    return 12 * layers * hidden**2 + 2 * vocab * hidden


def _split(number: int, parts: int) -> list[int]:
    return [number * (at + 1) // parts - number * at // parts for at in range(parts)]


def _of_config(path: Path) -> Model:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = f"`{file}`, which is not there" if path.is_dir() else f"`{path}`"
        raise ValueError(
            f"the model is {what}, expected a config.json, a folder with one, MODULE:CALLABLE or "
            "a number of parameters, as 7B"
        )
    try:
        config = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(
            f"`{file}` cannot be read ({error}), expected the config.json of a model"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"`{file}` has no object, expected the config.json of a model")  # noqa: TRY004
    decoder = decoder_of(config, f"`{file}`")
    return Model(
        name=f"{config['model_type']} of {file.parent.resolve().name}",
        tensors=(*decoder.before, *decoder.layer * decoder.num_layers, *decoder.behind),
        num_layers=decoder.num_layers,
        hidden=decoder.hidden,
        intermediate=decoder.intermediate,
        attention=decoder.attention,
        kv=decoder.kv,
        vocab=decoder.vocab,
        is_tied=decoder.is_tied,
        is_gated=decoder.is_gated,
        num_norms=decoder.num_norms,
        has_qk_norm=decoder.has_qk_norm,
    )


def _imported(text: str) -> Callable[[], torch.nn.Module]:
    name, _, attribute = text.partition(":")
    try:
        found: Any = import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the model is `{text}`, which cannot be imported ({error}), expected MODULE:CALLABLE. "
            "hint: PYTHONPATH=. where the module is in this folder"
        ) from error
    if not callable(found):
        raise ValueError(f"the model is `{text}`, which cannot be called, expected a callable")  # noqa: TRY004
    return found  # type: ignore[no-any-return]


def _built(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    import torch

    with torch.device("meta"):
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(  # noqa: TRY004
            f"the callable gives a `{type(model).__name__}`, expected a torch.nn.Module"
        )
    return model


def _of_module(model: Any, name: str) -> Model:
    """Sizes of the configuration where transformers has left one; else as modules look."""
    import torch

    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    if not trained:
        raise ValueError(f"`{name}` has no parameter that requires a gradient")
    shapes = [(p.shape[0] if p.dim() else 1, p.numel() // max(p.shape[0], 1)) for p in trained
              if p.numel()]  # fmt: skip
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)

    def said(key: str, otherwise: int) -> int:
        value = getattr(config, key, None)
        return value if isinstance(value, int) and value > 0 else otherwise

    widths = Counter(param.numel() for param in params if param.dim() == 1)
    hidden = said("hidden_size", widths.most_common(1)[0][0] if widths else shapes[0][1])
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    heads = said("num_attention_heads", max(hidden // _HEAD_DIM, 1))
    head_dim = said("head_dim", max(hidden // heads, 1))
    vocab = said("vocab_size", max((each.num_embeddings for each in tables), default=1))
    num_heads = sum(tuple(param.shape) == (vocab, hidden) for param in params)
    return Model(
        name=name,
        tensors=tuple(shapes),
        num_layers=said("num_hidden_layers", max(map(len, lists), default=1)),
        hidden=hidden,
        intermediate=said("intermediate_size", 4 * hidden),
        attention=heads * head_dim,
        kv=said("num_key_value_heads", heads) * head_dim,
        vocab=vocab,
        is_tied=num_heads < 2,
        num_frozen=sum(param.numel() for param in params if not param.requires_grad),
    )
