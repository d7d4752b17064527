"""Hooks of modules that have their weights on the device while they are used.

They stand in the place of those of DeepSpeed's `DeepSpeedZeRoOffload`, at the same modules, and
find the same parameters: those of a module, those of a leaf as a whole, and external ones.
DeepSpeed adds two nodes to autograd's graph for each module, each of which costs more than the
module's own launch. Here they are hooks on nodes that are there:

- The backward of a module begins when a node of its outputs is about to run. Where an output is a
  view, that is a node of its base: a view that is written in place loses its own.
- It ends when the gradients of all its inputs are complete. A module of which no input requires
  a gradient ends with the whole backward. An input that is a leaf gets one node, a view.

A module without parameters costs 1 microsecond in its forward and nothing in its backward.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import (
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.runtime.zero.utils import apply_to_tensors_only, is_zero_param
from deepspeed.utils import z3_leaf_module

from stepwell.deepspeed.zero.fetcher import Fetcher, is_in_backward, params_of
from stepwell.deepspeed.zero.gather_lane import CudaGatherLane, HostGatherLane
from stepwell.deepspeed.zero.weight_lane import CudaWeightLane, HostWeightLane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.deepspeed.zero.weight_lane import WeightLane

__all__ = ["ModuleHooks"]


class _Entered(NamedTuple):
    """A module whose forward has begun."""

    module: torch.nn.Module
    depth: int
    """Of DeepSpeed's stack of modules, before."""
    params: Sequence[Any]
    call: _Call | None
    """None: nothing has a backward."""


class _Call:
    """A call of a module that has parameters, for its backward."""

    __slots__ = ("_fetcher", "_module", "_num_inputs", "_num_inputs_left")

    def __init__(self, fetcher: Fetcher, module: torch.nn.Module) -> None:
        self._fetcher = fetcher
        self._module = module
        self._num_inputs = self._num_inputs_left = 0

    def look_at_input(self, value: Any) -> Any:
        """Has the backward end when the gradient of `value` is complete; returns what to use."""
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return value
            self._num_inputs += 1
            # Gradients of leaves are accumulated first of all, also before those of parameters,
            # which need the parameters' shapes.
            watched = value.view_as(value) if value.grad_fn is None else value
            node: Any = watched.grad_fn
            node.register_prehook(self._end_input)
            return watched
        if isinstance(value, (tuple, list, dict)):
            return apply_to_tensors_only(self.look_at_input, value)
        return value

    def look_at_output(self, value: torch.Tensor) -> torch.Tensor:
        """Has the backward begin when that of `value` does."""
        if value.requires_grad:
            base = value._base
            node = value.grad_fn if base is None or base.grad_fn is None else base.grad_fn
            if node is not None:
                node.register_prehook(self._begin)
        return value

    def _begin(self, _: Any) -> None:
        # A graph may have several backwards.
        if self._fetcher.enter_backward(self._module, params_of(self._module), self):
            self._num_inputs_left = self._num_inputs

    def _end_input(self, _: Any) -> None:
        self._num_inputs_left -= 1
        if self._num_inputs_left == 0:
            self._fetcher.leave_backward(self._module, self)


class ModuleHooks(DeepSpeedZeRoOffload):  # type: ignore[misc]  # DeepSpeed has no types
    """See the module. Takes what its base class takes."""

    fwd_pre_hook: Any

    def setup_zero_stage3_hooks(self) -> None:
        """Called by DeepSpeed's constructor."""
        device = torch.device(get_accelerator().current_device_name())
        self.param_coordinator = Fetcher(
            self._lane(device),
            prefetch_numel_max=self._prefetch_bucket_sz,
            reuse_numel_max=self._max_reuse_distance_in_numel,
            live_numel_max=self._max_available_parameters_in_numel,
        )
        self._ids = itertools.count()
        # Forwards that have begun, the outermost first. One that raises leaves its module here.
        self._entered: list[_Entered] = []
        # Before that which has the forward of the model itself begin.
        start_hook = self.module.register_forward_pre_hook(self._start)
        super().setup_zero_stage3_hooks()
        # DeepSpeed's would be compiled with the model.
        self.fwd_pre_hook.remove()
        self.fwd_pre_hook = start_hook

    def _lane(self, device: torch.device) -> WeightLane:
        # The group that parameters are partitioned over: with sequences in parts not the data's.
        group = next(param.ds_process_group for param in self.module.parameters())
        is_on_gpu = device.type == "cuda"
        if dist.get_world_size(group) == 1:
            return CudaWeightLane(device) if is_on_gpu else HostWeightLane()
        return CudaGatherLane(device, group) if is_on_gpu else HostGatherLane(group)

    def partition_all_parameters(self) -> None:
        """Frees all weights."""
        self.param_coordinator.release_and_reset_all(self.module)

    def _register_deepspeed_module(self, module: torch.nn.Module, count: Any = None) -> None:
        """Registers the hooks of a module and of those within it.

        Programs that have removed them call it once more.
        """
        known: Any = module
        known.ds_id = next(self._ids)
        known.ds_recompute_parameters = set()
        if z3_leaf_module(module):
            for param in module.parameters():
                param.ds_z3_leaf_module = module  # type: ignore[attr-defined]
        else:
            for child in module.children():
                self._register_deepspeed_module(child)
        self.forward_hooks += [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]

    def _start(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _uncompiled(self._begin_pass)
        else:
            self._begin_pass()

    def _begin_pass(self) -> None:
        """A forward of the whole model begins.

        Activation checkpoints of the whole model have forwards in the backward.
        """
        self.param_coordinator.reset_step()
        if not is_in_backward():
            self._forget_entered()

    def _forget_entered(self) -> None:
        """Forwards that have not ended have raised."""
        if self._entered:
            del parameter_offload.FWD_MODULE_STACK[self._entered[0].depth :]
            self._entered.clear()

    def _before(self, module: torch.nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling():
            return _uncompiled(self._begin, module, args)
        return self._begin(module, args)

    def _after(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            _uncompiled(self._end, module, output)
        else:
            self._end(module, output)

    def _begin(self, module: torch.nn.Module, args: Any) -> Any:
        stack = parameter_offload.FWD_MODULE_STACK
        depth = len(stack)
        stack.append(module)
        params, call = params_of(module), None
        if params:
            fetcher = self.param_coordinator
            if torch.is_grad_enabled():
                call = _Call(fetcher, module)
                args = tuple(map(call.look_at_input, args))
            fetcher.enter(module, params, module.ds_id)
        self._entered.append(_Entered(module, depth, params, call))
        return args

    def _end(self, module: torch.nn.Module, output: Any) -> None:
        entered = self._pop(module)
        if entered is None:
            # Its hooks were registered while it ran.
            return
        self._find_external(module, output)
        if entered.params:
            self.param_coordinator.leave(module, entered.params, module.ds_id)
        if entered.call is None:
            return
        if type(output) is torch.Tensor:
            entered.call.look_at_output(output)
        else:
            apply_to_tensors_only(entered.call.look_at_output, output, warning_msg_fn=_unknown)

    def _pop(self, module: torch.nn.Module) -> _Entered | None:
        """The forward of a module that ends. Forwards within it that have not ended have raised.

        Activation checkpoints end a forward so, once they have what they need.
        """
        for index in range(len(self._entered) - 1, -1, -1):
            if self._entered[index].module is module:
                found = self._entered[index]
                del self._entered[index:], parameter_offload.FWD_MODULE_STACK[found.depth :]
                return found
        return None

    def _find_external(self, module: torch.nn.Module, output: Any) -> None:
        """Parameters that a module returns are used by the module that has called it."""
        stack: list[Any] = parameter_offload.FWD_MODULE_STACK
        item: Any
        for item in (output,) if isinstance(output, torch.Tensor) else _items(output):
            if not (is_zero_param(item) or hasattr(item, "ds_param_alias")):
                continue
            param: Any = item if hasattr(item, "ds_id") else item.ds_param_alias
            if not any(id(param) in each._external_params for each in stack):
                param.is_external_param = True
                register_external_parameter(stack[-1], param)
                # The outer module fetches it from now on.
                if id(param) in module.__dict__["_external_params"]:
                    unregister_external_parameter(module, param)
                param.all_gather()

    def destroy(self) -> None:
        """Frees all weights, removes the hooks, and lets go of the module."""
        super().destroy()
        self._forget_entered()
        stack = parameter_offload.FWD_MODULE_STACK
        # DeepSpeed leaves it there, and a parameter keeps the optimizer with all its state.
        if self.module in stack:
            stack.remove(self.module)


def _items(output: Any) -> Sequence[Any]:
    """What DeepSpeed looks at in the output of a module, for parameters."""
    if isinstance(output, (list, tuple)):
        return output
    items = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    return [
        value
        for name, value in items.items()
        if not name.startswith("__") and isinstance(value, torch.Tensor)
    ]


def _unknown(value: Any) -> str:
    return (
        f"a module returns a `{type(value).__name__}`, in which tensors are not found, so ZeRO-3 "
        "does not see its backward. hint: return tensors, tuples, lists or dicts"
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(hook: Any, *args: Any) -> Any:
    return hook(*args)
