"""ZeRO-3's weights are on the device while modules use them: `stepwell.weights`, for DeepSpeed.

Hooks are at the modules where DeepSpeed's are, find the same parameters, and follow its settings.
Parameters keep its states, so accessors, checkpoints and programs that gather see no difference:
`ds_status` is `AVAILABLE` or `NOT_AVAILABLE`, and only then a parameter is empty.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.runtime.zero.utils import apply_to_tensors_only, is_zero_param
from deepspeed.utils import z3_leaf_module

from stepwell.weights.calls import Calls
from stepwell.weights.fetcher import Fetcher
from stepwell.weights.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Coordinator", "ModuleHooks"]

# A member of an enumeration takes longer to look up than a state does to compare.
_THERE, _ABSENT = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
_IN_FLIGHT = ZeroParamStatus.INFLIGHT


class _ZeroWeight:
    """A `Weight`: a parameter that DeepSpeed has partitioned."""

    # Other code changes them. In C: hooks ask for each at each use.
    state: Any = property(attrgetter("param.ds_status"))
    source: Any = property(attrgetter("param.ds_tensor"))

    def __init__(self, param: Any) -> None:
        self.param = param
        self.key: int = param.ds_id
        self.numel: int = param.ds_numel
        self.shape: torch.Size = param.ds_shape
        self.part_numel: int = param.partition_numel()
        # The same object: DeepSpeed frees no parameter that is used.
        self.users: set[Any] = param.ds_active_sub_modules
        self.is_persistent: bool = param.ds_persist
        self.stays: bool = param.ds_persist or param.is_external_param

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return source.to(device, non_blocking=True)

    def discard(self) -> None:
        """It is with the fetcher alone."""

    def put(self, whole: torch.Tensor) -> None:
        if self.param.ds_status is _IN_FLIGHT:
            raise RuntimeError(
                f"parameter `{self.key}` is being gathered by `all_gather(async_op=True)`, "
                "whose end a module's forward cannot wait for. hint: wait for its handle"
            )
        self.param.data = whole
        self.param.ds_status = _THERE

    def rest(self) -> None:
        """Its masters are what is stepped: no write to it counts."""

    resume = rest

    def drop(self) -> None:
        # First: after Ctrl-C it is fetched anew.
        self.param.ds_status = _ABSENT
        self.param.data = self.param.data.new_empty(0)


class Coordinator:
    """In the place of DeepSpeed's `PartitionedParameterCoordinator`. Keeps the weights of a model.

    Args:
        fetcher: has weights on the device.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        # By the ids of their parameters, which they keep.
        self._weights: dict[int, _ZeroWeight] = {}

    def weight(self, param: Any) -> _ZeroWeight:
        """The weight of a parameter, which is made once."""
        weight = self._weights.get(id(param))
        if weight is None:
            weight = self._weights[id(param)] = _ZeroWeight(param)
        return weight

    def weights_of(self, module: torch.nn.Module) -> Sequence[_ZeroWeight]:
        """The weights of a module, each once: its own, of a leaf all in it, and external ones."""
        known, weights = module.__dict__, self._weights
        own: Any = module.parameters() if known.get("_z3_leaf") else module._parameters.values()
        found = [weights.get(id(p)) or self.weight(p) for p in own if p is not None]
        if external := known.get("_external_params"):
            found += map(self.weight, external.values())
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def release_and_reset_all(self, module: torch.nn.Module) -> None:
        """Frees the weights of a module and of those within it, whatever uses them."""
        self._fetcher.free_all(list(map(self.weight, module.parameters())))

    def release_backward_leftovers(self) -> None:
        """A backward has ended."""
        self._fetcher.end_backward()


class ModuleHooks(DeepSpeedZeRoOffload):  # type: ignore[misc]  # DeepSpeed has no types
    """In the place of its base class. Takes what that takes."""

    fwd_pre_hook: Any

    def setup_zero_stage3_hooks(self) -> None:
        """Called by DeepSpeed's constructor."""
        device = torch.device(get_accelerator().current_device_name())
        # The group that parameters are partitioned over: with sequences in parts not the data's.
        group = next(param.ds_process_group for param in self.module.parameters())
        self.fetcher = Fetcher(
            Lane(device, group if dist.get_world_size(group) > 1 else None),
            there=_THERE,
            absent=_ABSENT,
            prefetch_numel_max=self._prefetch_bucket_sz,
            reuse_numel_max=self._max_reuse_distance_in_numel,
            live_numel_max=self._max_available_parameters_in_numel,
        )
        self.param_coordinator = Coordinator(self.fetcher)
        self._calls = Calls(
            self.fetcher,
            self.param_coordinator.weights_of,
            stack=parameter_offload.FWD_MODULE_STACK,
            map_tensors=functools.partial(apply_to_tensors_only, warning_msg_fn=_unknown),
            on_output=self._find_external,
        )
        # Before that which has the forward of the model itself begin.
        start_hook = self._calls.watch_passes(self.module)
        super().setup_zero_stage3_hooks()
        # DeepSpeed's would be compiled with the model.
        self.fwd_pre_hook.remove()
        self.fwd_pre_hook = start_hook

    def partition_all_parameters(self) -> None:
        """Frees all weights."""
        self.param_coordinator.release_and_reset_all(self.module)

    def _register_deepspeed_module(self, module: torch.nn.Module, count: Any = None) -> None:
        """Registers the hooks of a module and of those within it.

        Programs that have removed them call it once more.
        """
        if z3_leaf_module(module):
            for param in module.parameters():
                param.ds_z3_leaf_module = module  # type: ignore[attr-defined]
        else:
            for child in module.children():
                self._register_deepspeed_module(child)
        self.forward_hooks += self._calls.watch(module)

    def _find_external(self, module: torch.nn.Module, output: Any) -> None:
        """Parameters that a module returns are used by the module that has called it."""
        stack: list[Any] = parameter_offload.FWD_MODULE_STACK
        item: Any
        for item in (output,) if isinstance(output, torch.Tensor) else _items(output):
            if not (is_zero_param(item) or hasattr(item, "ds_param_alias")):
                continue
            param: Any = item if hasattr(item, "ds_id") else item.ds_param_alias
            if not any(id(param) in each._external_params for each in stack):
                param.is_external_param = self.param_coordinator.weight(param).stays = True
                register_external_parameter(stack[-1], param)
                # The outer module fetches it from now on.
                if id(param) in module.__dict__["_external_params"]:
                    unregister_external_parameter(module, param)
                param.all_gather()

    def destroy(self) -> None:
        """Removes the hooks, and lets go of the module."""
        super().destroy()
        self._calls.forget()
        stack = parameter_offload.FWD_MODULE_STACK
        # DeepSpeed leaves it there, and a parameter keeps the optimizer with all its state.
        if self.module in stack:
            stack.remove(self.module)


def _items(output: Any) -> Sequence[Any]:
    """What DeepSpeed looks at in the output of a module, for parameters."""
    if isinstance(output, (list, tuple)):
        return output
    items = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    return [v for k, v in items.items() if not k.startswith("__") and isinstance(v, torch.Tensor)]


def _unknown(value: Any) -> str:
    return (
        f"a module returns a `{type(value).__name__}`, in which tensors are not found, so ZeRO-3 "
        "does not see its backward. hint: return tensors, tuples, lists or dicts"
    )
