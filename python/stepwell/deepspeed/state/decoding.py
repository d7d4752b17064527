"""Coded moments under their plain names, for tools that read a checkpoint of DeepSpeed's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MOMENT_NAMES", "DecodingState"]

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class DecodingState(dict[str, Any]):
    """The state of a parameter with `q8` moments, as it is saved.

    Looking up `exp_avg` or `exp_avg_sq` decodes it (float32, flat), so that DeepSpeed's
    `ds_to_universal` finds what it looks for. They are neither stored nor listed. Loading such a
    file takes Stepwell to be installed.
    """

    def __init__(self, state: Mapping[str, Any], numel: int) -> None:
        super().__init__(state)
        self.numel = numel

    def __missing__(self, name: str) -> torch.Tensor:
        if name not in MOMENT_NAMES:
            raise KeyError(name)
        decoded: torch.Tensor = _state.decode(
            torch.empty(self.numel, dtype=torch.float32, device="cpu"), self
        )[name]
        return decoded

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.numel)


# Checkpoints name the class: by a name that stays where files move.
DecodingState.__module__ = "stepwell.deepspeed"
