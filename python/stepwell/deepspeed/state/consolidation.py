"""Stepwell's state for DeepSpeed's consolidation: `safe_get_full_optimizer_state` and its relatives, universal checkpoints."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch

from stepwell import _state, optim
from stepwell.deepspeed.seams import Attribute
from stepwell.deepspeed.state.decoding import MOMENT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SEAMS"]

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"

# Optimizers that a universal checkpoint is loaded into: meanwhile DeepSpeed hands over fragments,
# not state.
_BEING_LOADED: WeakSet[optim.Adam] = WeakSet()


class _Partition(NamedTuple):
    """A flat partition and the optimizer that steps it."""

    optimizer: optim.Adam
    flat: torch.Tensor

    def moment(self, name: str) -> torch.Tensor | None:
        """A moment in the form of the partition: as it is held, if that is a float type, else decoded. None: no step yet."""
        state = self.optimizer.state.get(self.flat)
        if not state:
            return None
        if name in state:
            moment: torch.Tensor = state[name]
            return moment
        with torch.no_grad():
            return _state.decode(self.flat, state).get(name)

    def check_writable(self, name: str) -> None:
        """Raises ValueError for a moment that is held in codes."""
        if name in MOMENT_NAMES and self.optimizer._moments == "q8":
            raise ValueError(
                f"`{name}` is held in 8-bit codes (moments `q8`), of which parts cannot be set. "
                "hint: moments `fp32` or `bf16` for runs that set optimizer state"
            )


def _linked(original: Callable[..., None]) -> Callable[..., None]:
    """ZeRO-1/2 links each parameter of the model to its fragment of a partition: the fragment learns whose that is."""

    @functools.wraps(original)
    def link(self: Any) -> None:
        original(self)
        if not isinstance(self.optimizer, optim.Adam):
            return
        for params, flat in zip(
            self.bit16_groups, self.single_partition_of_fp32_groups, strict=True
        ):
            for param in params:
                if param._hp_mapping is not None:
                    param._hp_mapping.stepwell_partition = _Partition(self.optimizer, flat)

    return link


def _fragment_got(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def get_optim_state_fragment(self: Any, key: str) -> torch.Tensor:
        partition: _Partition | None = getattr(self, "stepwell_partition", None)
        if partition is None or key not in MOMENT_NAMES or partition.optimizer in _BEING_LOADED:
            return original(self, key)
        moment = partition.moment(key)
        if moment is None:
            raise ValueError(
                f"there is no `{key}` yet. hint: optimizer state is made by the first step"
            )
        address = self.hp_fragment_address
        return moment.narrow(0, address.start, address.numel)

    return get_optim_state_fragment


def _param_set(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_full_hp_param(
        self: Any, value: torch.Tensor, optim_state_key: str | None = None
    ) -> None:
        partition = getattr(self._hp_mapping, "stepwell_partition", None)
        if partition is not None and optim_state_key is not None:
            partition.check_writable(optim_state_key)
        original(self, value, optim_state_key)

    return set_full_hp_param


def _partition_got(
    original: Callable[..., tuple[torch.Tensor, int]],
) -> Callable[..., tuple[torch.Tensor, int]]:
    """ZeRO-3 gets and sets by the same function; who sets keeps the swap buffers."""

    @functools.wraps(original)
    def get_state_partition(
        self: Any, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        if not isinstance(self.optimizer, optim.Adam) or optim_state_key not in MOMENT_NAMES:
            return original(self, param, release_swap_buffers, optim_state_key)
        # For its synchronization, and where the partition is.
        _, index = original(self, param, release_swap_buffers)
        partition = _Partition(self.optimizer, self.fp32_partitioned_groups_flat[index])
        if not release_swap_buffers:
            partition.check_writable(optim_state_key)
        moment = partition.moment(optim_state_key)
        if moment is None:
            raise ValueError(
                f"there is no `{optim_state_key}` yet. hint: optimizer state is made by the first step"
            )
        _, offset, numel = self.grad_position[self.get_param_id(param)]
        return moment.narrow(0, offset, numel), index

    return get_state_partition


def _universal_loaded(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizer = self.optimizer
        if (
            isinstance(optimizer, optim.Adam)
            and self.master_weights_and_grads_dtype != torch.float32
        ):
            raise ValueError(
                f"a universal checkpoint holds neither the float32 master of `{self.master_weights_and_grads_dtype}` weights "
                "nor moments beyond that precision. hint: load the checkpoint that it was made of, or train with float32 "
                "masters (without bf16_master_weights_and_grads, fp16_master_weights_and_grads)"
            )
        if not isinstance(optimizer, optim.Adam):
            original(self, *args, **kwargs)
            return
        _BEING_LOADED.add(optimizer)
        try:
            original(self, *args, **kwargs)
        finally:
            _BEING_LOADED.discard(optimizer)
        _adopt(optimizer)

    return load


@torch.no_grad()
def _adopt(optimizer: optim.Adam) -> None:
    """Brings state that DeepSpeed has written into `optimizer.state` into the optimizer's form.

    It writes plain float32 moments, and one `step` for several partitions.
    """
    for index, (param, state) in enumerate(optimizer.state.items()):
        if state:
            optimizer.state[param] = _state.convert(
                param,
                state,
                optimizer._moments,
                key=_state.key_of(0, index, param),
                current=state,
                label=f"partition {index}",
            )


SEAMS = (
    Attribute(
        "state access, ZeRO-1/2 links",
        _STAGE_1_2,
        "DeepSpeedZeroOptimizer._link_all_hp_params",
        _linked,
        ("self",),
    ),
    Attribute(
        "state access, ZeRO-1/2 getting",
        "deepspeed.utils.tensor_fragment",
        "tensor_fragment.get_optim_state_fragment",
        _fragment_got,
        ("self", "key"),
    ),
    Attribute(
        "state access, ZeRO-1/2 setting",
        "deepspeed.utils.mixed_precision_linkage",
        "set_full_hp_param",
        _param_set,
        ("self", "value", "optim_state_key"),
    ),
    Attribute(
        "state access, ZeRO-3",
        _STAGE_3,
        "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
        _partition_got,
        ("self", "param", "release_swap_buffers", "optim_state_key"),
    ),
    Attribute(
        "universal checkpoints, ZeRO-1/2",
        _STAGE_1_2,
        "DeepSpeedZeroOptimizer._load_universal_checkpoint",
        _universal_loaded,
    ),
    Attribute(
        "universal checkpoints, ZeRO-3",
        _STAGE_3,
        "DeepSpeedZeroOptimizer_Stage3._load_universal_checkpoint",
        _universal_loaded,
    ),
)
