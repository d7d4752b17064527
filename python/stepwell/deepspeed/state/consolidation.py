"""Stepwell's state for DeepSpeed's consolidation.

`safe_get_full_optimizer_state` and its relatives, universal checkpoints.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from stepwell import optim
from stepwell.access.descriptive import without_waiting
from stepwell.deepspeed.seams import Attribute
from stepwell.deepspeed.state.decoding import MOMENT_NAMES
from stepwell.deepspeed.state.home import (
    Home,
    attach,
    check_writable,
    home_of,
    loading,
    optimizer_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SEAMS"]

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"


def _linked(original: Callable[..., None]) -> Callable[..., None]:
    """ZeRO-1/2 links each parameter of the model to its fragment of a partition.

    The fragment also learns which partition that is.
    """

    @functools.wraps(original)
    def link(self: Any) -> None:
        # Nothing is read.
        with without_waiting():
            original(self)
        homes = getattr(self, "stepwell_homes", None)
        if homes is None and isinstance(self.optimizer, optim.Adam):
            homes = [Home(self.optimizer, flat) for flat in self.single_partition_of_fp32_groups]
        for params, home in zip(self.bit16_groups, homes or (), strict=bool(homes)):
            attach(home, params, self.optimizer)

    return link


def _moment_of(home: Home, name: str) -> torch.Tensor:
    moment = home.moment(name)
    if moment is None:
        raise ValueError(
            f"there is no `{name}` yet. hint: optimizer state is made by the first step"
        )
    return moment


def _fragment_got(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def get_optim_state_fragment(self: Any, key: str) -> torch.Tensor:
        home = home_of(self)
        if home is None or not home.holds_moments() or key not in MOMENT_NAMES:
            return original(self, key)
        address = self.hp_fragment_address
        return _moment_of(home, key).narrow(0, address.start, address.numel)

    return get_optim_state_fragment


def _param_set(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_full_hp_param(
        self: Any, value: torch.Tensor, optim_state_key: str | None = None
    ) -> None:
        if optim_state_key is not None:
            check_writable(optimizer_of(self), optim_state_key)
        original(self, value, optim_state_key)

    return set_full_hp_param


def _partition_got(
    original: Callable[..., tuple[torch.Tensor, int]],
) -> Callable[..., tuple[torch.Tensor, int]]:
    """ZeRO-3 gets and sets by the same function. Where it sets, it keeps the swap buffers."""

    @functools.wraps(original)
    def get_state_partition(
        self: Any, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        if not isinstance(self.optimizer, optim.Adam) or optim_state_key not in MOMENT_NAMES:
            return original(self, param, release_swap_buffers, optim_state_key)
        # For its synchronization, and where the partition is.
        _, index = original(self, param, release_swap_buffers)
        homes = getattr(self, "stepwell_homes", None)
        home: Home = (
            Home(self.optimizer, self.fp32_partitioned_groups_flat[index])
            if homes is None
            else homes[index]
        )
        if not release_swap_buffers:
            check_writable(self.optimizer, optim_state_key)
        _, offset, numel = self.grad_position[self.get_param_id(param)]
        return _moment_of(home, optim_state_key).narrow(0, offset, numel), index

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
                "a universal checkpoint holds neither the float32 master of "
                f"`{self.master_weights_and_grads_dtype}` weights "
                "nor moments beyond that precision. hint: load the checkpoint that it was made of, "
                "or train with float32 "
                "masters (without bf16_master_weights_and_grads, fp16_master_weights_and_grads)"
            )
        with loading(optimizer):
            original(self, *args, **kwargs)

    return load


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
