"""`"optimizer": {"type": "StepwellAdamW"}` in a DeepSpeed JSON.

Stepwell's own optimizers under ZeRO, with their codecs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from stepwell import optim
from stepwell._binding import Rounding
from stepwell._hyper import hyper_of
from stepwell.deepspeed.options import options_of
from stepwell.deepspeed.seams import Attribute, Member
from stepwell.deepspeed.state.decoding import DecodingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import StateDict

__all__ = ["SEAMS", "StepwellAdam", "StepwellAdamW"]

_ENGINE = "deepspeed.runtime.engine"


class _UnderZeRO(optim.Adam):
    """What ZeRO needs beyond `stepwell.Adam`.

    ZeRO makes the optimizer over the parameters of the model, wherever they are, and then has it
    step flat partitions in host memory instead, a few at a time, by exchanging `param_groups`.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters are checked when they are stepped."""
        for key in ("moments", "nonfinite"):
            if key in param_group:
                raise ValueError(
                    f"`{key}` is set for a parameter group, expected for the optimizer as a whole"
                )
        torch.optim.Optimizer.add_param_group(self, param_group)
        try:
            hyper_of(self.param_groups[-1], f"group {len(self.param_groups) - 1}")
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def fp32_optimizer_states(self) -> bool:
        """What DeepSpeed asks its own optimizer for: whether the moments are float32."""
        return self._moments == "fp32"

    def _rounding(self, ordinal: int, group: dict[str, Any], param: torch.Tensor) -> Rounding:
        # ZeRO shows one partition at a time, each of them as the first parameter: their roundings
        # must differ all the same, and from those of other ranks, by a number that is the same when
        # the run is resumed.
        ordinal = self._ordinals.setdefault(param, len(self._ordinals))
        return Rounding(self.param_groups[0]["seed"], ordinal + (self._rank << 32))

    @functools.cached_property
    def _ordinals(self) -> dict[torch.Tensor, int]:
        return {}

    @functools.cached_property
    def _rank(self) -> int:
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if is_distributed else 0

    def state_dict(self) -> StateDict:
        """The state dict.

        DeepSpeed's tools can read coded moments in it by their plain names.
        """
        packed = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        state = {
            key: DecodingState(value, params[key].numel()) if "exp_avg_codes" in value else value
            for key, value in packed["state"].items()
        }
        return {**packed, "state": state}


class StepwellAdamW(_UnderZeRO, optim.AdamW):
    """`stepwell.AdamW` under ZeRO. `params` of the DeepSpeed JSON are its keywords."""


class StepwellAdam(_UnderZeRO, optim.Adam):
    """`stepwell.Adam` (weight decay in the gradient) under ZeRO.

    `params` of the DeepSpeed JSON are its keywords.
    """


_TYPES = {cls.__name__.lower(): cls for cls in (StepwellAdamW, StepwellAdam)}
_ADAMS = ("adam", "adamw")
_KEYWORDS = ("lr", "betas", "eps", "weight_decay", "maximize", "moments", "nonfinite", "seed")


def _type_of(name: object) -> type[_UnderZeRO] | None:
    return _TYPES.get(name.lower()) if isinstance(name, str) else None


def _type_with_moments(engine: Any) -> type[_UnderZeRO] | None:
    """The type that holds moments as the block `stepwell` says, where DeepSpeed's Adam does not.

    None: it is not needed.
    """
    if options_of(engine).moments in (None, "fp32") or engine.optimizer_name() not in _ADAMS:
        return None
    # DeepSpeed's `Adam` is AdamW unless it is told otherwise.
    is_decoupled = engine.optimizer_name() == "adamw" or (engine.optimizer_params() or {}).get(
        "adam_w_mode", True
    )
    return StepwellAdamW if is_decoupled else StepwellAdam


def _supported(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_supported(self: Any, optimizer_name: str) -> bool:
        return _type_of(optimizer_name) is not None or original(self, optimizer_name)

    return is_supported


def _keywords(engine: Any, name: str) -> dict[str, Any]:
    """The optimizer's keywords, by `params` and the block `stepwell` of the DeepSpeed JSON."""
    keywords = dict(engine.optimizer_params() or {})
    moments = options_of(engine).moments
    if engine.optimizer_name() in _ADAMS:
        # Which is in the type already; and how torch's would loop over its parameters.
        for key in ("adam_w_mode", "torch_adam", "foreach"):
            keywords.pop(key, None)
    if "max_grad_norm" in keywords:
        raise ValueError(
            f"`max_grad_norm` is in the params of optimizer `{name}`. hint: gradient_clipping of "
            "the DeepSpeed JSON"
        )
    unknown = sorted(keywords.keys() - set(_KEYWORDS))
    if unknown:
        raise ValueError(
            f"`{', '.join(unknown)}` in the params of optimizer `{name}`, expected "
            f"{', '.join(_KEYWORDS)}. "
            "hint: AdamW or Adam is the type's choice: StepwellAdamW, StepwellAdam"
        )
    if moments is not None and keywords.setdefault("moments", moments) != moments:
        raise ValueError(
            f"`moments` is `{keywords['moments']}` in the params of optimizer `{name}`, but "
            f"`{moments}` in the block `stepwell`. "
            "hint: leave out one of them"
        )
    if engine.bf16_optimizer_states() and keywords.setdefault("moments", "bf16") == "fp32":
        raise ValueError(
            "`moments` is `fp32`, but bf16.bf16_optimizer_states is set. hint: leave out one of "
            "them; of `bf16` and `q8` "
            "either is rounded stochastically"
        )
    return keywords


def _configured(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def configure(self: Any, model_parameters: Any) -> Any:
        cls = _type_of(self.optimizer_name()) or _type_with_moments(self)
        if cls is None:
            return original(self, model_parameters)
        return cls(model_parameters, **_keywords(self, cls.__name__))

    return configure


class _AnyOf:
    """Equal to each of some types: what `type(optimizer) == DeepSpeedCPUAdam` is compared with."""

    def __init__(self, *types: type) -> None:
        self._types = types

    def __eq__(self, other: object) -> bool:
        return other in self._types

    def __hash__(self) -> int:
        return hash(self._types)


def _also_ours(original: type) -> _AnyOf:
    return _AnyOf(original, StepwellAdamW, StepwellAdam, optim.AdamW, optim.Adam)


SEAMS = (
    Attribute(
        "optimizer type, name",
        _ENGINE,
        "DeepSpeedEngine._is_supported_optimizer",
        _supported,
        ("self", "optimizer_name"),
    ),
    Attribute(
        "optimizer type, making",
        _ENGINE,
        "DeepSpeedEngine._configure_basic_optimizer",
        _configured,
        ("self", "model_parameters"),
    ),
    Member(
        "optimizers of ZeRO",
        "deepspeed.runtime.zero.utils",
        "ZERO_SUPPORTED_OPTIMIZERS",
        (StepwellAdamW, StepwellAdam, optim.AdamW, optim.Adam),
    ),
    Attribute(
        "16-bit masters, ZeRO-1/2",
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedCPUAdam",
        _also_ours,
    ),
    Attribute(
        "16-bit masters, ZeRO-3", "deepspeed.runtime.zero.stage3", "DeepSpeedCPUAdam", _also_ours
    ),
)
