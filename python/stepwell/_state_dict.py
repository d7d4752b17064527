"""State dicts of Adam: as torch's optimizers have them, and what is loaded from other optimizers.

A state dict says all that the next step follows from, so that a resumed run is the run that was
interrupted. Loading changes all or nothing.
"""

from __future__ import annotations

import abc
from collections import defaultdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from stepwell import _core, _state
from stepwell._hyper import hyper_of
from stepwell._notices import tell
from stepwell._tensors import check_param, ordinary_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim.optimizer import StateDict

    from stepwell._decision import Nonfinite

__all__ = ["StateDicts"]

# How a step is executed elsewhere, not what it computes: of a loaded group these are left behind.
_EXECUTION_KEYS = ("foreach", "fused", "capturable", "differentiable")


class StateDicts(Optimizer):
    """An optimizer of the family of Adam, as far as it is saved and loaded."""

    _moments: str
    _nonfinite: Nonfinite

    @abc.abstractmethod
    def _labelled(self) -> Iterable[tuple[torch.Tensor, str]]:
        """Every parameter, with what errors call it."""

    @abc.abstractmethod
    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory that stands for `param` in a step."""

    @abc.abstractmethod
    def _look_anew(self) -> None:
        """Has the next step look at every parameter, and at all state, as if it were the first."""

    def state_dict(self) -> StateDict:
        """The state dict, as torch's optimizers have it; its tensors are those of the optimizer.

        With moments="fp32", torch.optim.AdamW and DeepSpeedCPUAdam load it; see
        `decoded_state_dict` for the others.
        """
        result = super().state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        with torch.no_grad():
            for index, state in result["state"].items():
                if isinstance(index, int) and index < len(params):
                    result["state"][index] = _state.packed(self._host_side(params[index]), state)
        for group in result["param_groups"]:
            # DeepSpeed copies all keys of a universal checkpoint's groups into living ones.
            group["state_format"] = _core.STATE_FORMAT
        return result

    def decoded_state_dict(self) -> StateDict:
        """The state dict with plain Adam moments, whatever `moments` is.

        For other optimizers and for tools.

        Per parameter: `step` (an int), `exp_avg` and `exp_avg_sq` (float32, shape of the
        parameter). float32 moments are those of the optimizer, as in `state_dict`; others are
        decoded copies. torch.optim.AdamW and DeepSpeedCPUAdam load it, and every version of this
        class. Masters of 16-bit parameters are left out, since those optimizers keep none.
        """
        packed = self.state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        decoded = {}
        with torch.no_grad():
            for index, state in packed["state"].items():
                if isinstance(index, int) and state:
                    step = _state.step_of(state, partial("parameter {}".format, index))
                    decoded[index] = {
                        "step": step,
                        **_state.decode(self._host_side(params[index]), state),
                    }
        groups = [
            {key: value for key, value in group.items() if key != "state_format"}
            for group in packed["param_groups"]
        ]
        return {**packed, "state": decoded, "param_groups": groups}

    @_disable_dynamo
    @ordinary_tensors
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, of torch.optim.Adam(W) or of DeepSpeedCPUAdam.

        Moments are converted to this optimizer's codec; what is held in the same form is copied bit
        for bit, so that a resumed run is the run that was interrupted. `foreach`, `fused`,
        `capturable` and `differentiable` stay as they are. The dict's tensors are copied, except
        those that are this optimizer's own.

        Args:
            state_dict: an optimizer state dict over the same parameters.

        Raises:
            ValueError: it does not fit; nothing was changed.
        """
        handle = self.register_load_state_dict_pre_hook(_shield)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments, "_nonfinite": self._nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls this on an empty object to unpickle it, and on a living one at the end of
        # `load_state_dict`; programs call it on a living one, with what they replace.
        if self.__dict__:
            groups = state.get("param_groups", self.param_groups)
            if groups is not self.param_groups:
                self._complete(groups)
            if "state" in state:
                state = {**state, "state": self._convert(state["state"], groups)}
        super().__setstate__(state)
        self._look_anew()

    def _complete(self, groups: list[dict[str, Any]]) -> None:
        """Gives loaded groups what another optimizer's do not say, and checks them."""
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"`param_groups` has `{len(groups)}` groups, expected {len(self.param_groups)}, as "
                "the optimizer has. hint: add_param_group()"
            )
        for index, (group, live) in enumerate(zip(groups, self.param_groups, strict=True)):
            if group.get("state_format", _core.STATE_FORMAT) != _core.STATE_FORMAT:
                raise ValueError(
                    f"`state_format` of the loaded state dict is `{group['state_format']}`, "
                    f"expected `{_core.STATE_FORMAT}`: another "
                    "version of stepwell saved it. hint: load it with that version, and save "
                    "`decoded_state_dict()`"
                )
            group.update(
                {key: live[key] for key in _EXECUTION_KEYS}, state_format=_core.STATE_FORMAT
            )
            for key, value in live.items():
                group.setdefault(key, value)
            hyper_of(group, f"loaded group {index}")

    def _convert(self, loaded: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
        """Loaded state in this optimizer's form."""
        labels = dict(self._labelled())
        params = ((param, group["seed"]) for group in groups for param in group["params"])
        converted = defaultdict(
            dict,
            {key: _unshielded(value) for key, value in loaded.items() if key not in labels},
        )
        held: set[str] = set()
        for index, (param, seed) in enumerate(params):
            source = _unshielded(loaded.get(param, {}))
            if source:
                held.add(_state.moments_of(source) or "other")
                key = _state.key_of(seed, index, param)
                label = labels.get(param, "a parameter")
                converted[param] = self._converted(param, source, key, label)
        if held:
            steps = max(_state.step_of(state, lambda: "loaded") for state in converted.values())
            others = sorted(held - {self._moments})
            changed = f"; its {', '.join(others)} moments become {self._moments}" if others else ""
            tell(f"{type(self).__name__} goes on from step {steps} of a state dict{changed}")
        return converted

    def _converted(
        self, param: torch.Tensor, loaded: _state.State, key: int, label: str
    ) -> _state.State:
        """Loaded state of a parameter in this optimizer's form; `key` decorrelates its rounding."""
        host_side = self._host_side(param)
        if param.requires_grad:
            # A frozen one may be anywhere, and of any dtype.
            check_param(host_side, label)
        return _state.convert(
            host_side,
            loaded,
            self._moments,
            key=key,
            current=self.state.get(param, {}),
            label=label,
        )


class _Shielded:
    """State on its way through `Optimizer.load_state_dict`.

    That casts every bare tensor to the dtype of its parameter.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _shield(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose state torch passes on as it is; a pre-hook of `load_state_dict`."""
    return {
        **state_dict,
        "state": {key: _Shielded(value) for key, value in state_dict["state"].items()},
    }


def _unshielded(value: Any) -> Any:
    """What `_shield` has wrapped."""
    return value.value if isinstance(value, _Shielded) else value
