"""DeepSpeed's ZeRO-3 optimizer with its offloaded state on the offload engine.

Imports DeepSpeed's, and is imported late.

What its structure allows: a gradient crosses the bus once, in the dtype that it is reduced in, not
three times; unscaling, clip, Adam and the new 16-bit weights are one pass over all sub-groups;
weights go up while later ones are stepped. On several ranks it goes on behind the next forward, and
what gathers a partition on the device waits for that partition (`access.writes`). On one rank
`step()` waits for the end of it: DeepSpeed computes with the partitions.

With `offload_param` partitions of the weights are in DeepSpeed's host memory, from where what a
module needs is brought to the device. The pass writes them there: 2 bytes per parameter less on the
bus and in host memory. It goes on behind the next forward. What it writes (weights, masters,
moments) waits where it is used, each for its own part (`access.writes`), on any number of ranks.

- Reductions are DeepSpeed's. What one leaves on this rank is copied at once (`zero.gradients`).
- Weights are on the device while modules use them by `zero.fetching`, where that does not fit
  by DeepSpeed's hooks.
- A gather reads a partition after the thread has waited for it, so its copy to the device begins
  after the workers' writes. DeepSpeed waits for each gather before it uses it, and for those left
  when a step begins; `weights.fetcher` waits for all of its copies and gathers then. So all have
  ended when the next step writes.
- Persistent parameters come by themselves behind the step (`zero.persistent_gate`).
- Several ranks gather ahead alike. Between a step and its backward it is little: the thread would
  wait for later parts of the step. DeepSpeed's hooks gather more, and so wait longer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import is_autocast_initialized
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer_Stage3

from stepwell import _core
from stepwell._tensors import tensor_on
from stepwell.deepspeed.options import with_unpinned_weights
from stepwell.deepspeed.zero.backward import Backward
from stepwell.deepspeed.zero.gradients import Gradients
from stepwell.deepspeed.zero.host_memory import TouchedMemory
from stepwell.deepspeed.zero.offloaded import Offloaded
from stepwell.deepspeed.zero.operands import Operands, global_norm, gradient_scale
from stepwell.deepspeed.zero.partition import Fragment, Partition
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.deepspeed.zero.persistent_gate import PersistentGate
from stepwell.deepspeed.zero.timers import stop_all
from stepwell.ranks.agreement import Agreement
from stepwell.ranks.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from stepwell.deepspeed.plan import Plan
    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.deepspeed.zero.persistent import Upload
    from stepwell.weights.fetcher import Fetcher

__all__ = ["OffloadZeroOptimizerStage3"]

# What lies in device memory under CPU offload.
_ON_DEVICE = (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.contiguous_grad_buffer)


# DeepSpeed has no types.
class OffloadZeroOptimizerStage3(Offloaded, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """See the module. Takes what its base class takes, and the `plan` that chose it."""

    # None: DeepSpeed's hooks have weights on the device.
    _fetcher: Fetcher | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        *args: Any,
        plan: Plan,
        offload_optimizer_config: Any,
        offload_param_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self._plan = plan
        self._backward = Backward()
        self._operands = Operands(init_optimizer, dist.get_rank())
        # The engine pins what crosses the bus. What DeepSpeed makes for gradients is not touched
        # then, and takes no memory.
        # The state may be on a volume, of which DeepSpeed's swapper knows nothing. None of it is on
        # the device, whatever its `ratio` says.
        update = {"pin_memory": False, "device": OffloadDeviceEnum.cpu}
        config = offload_optimizer_config.model_copy(update=update)
        # Of the weights in host memory, which the engine pins when they are together.
        self._weight_buffers: list[_core.Buffer] = []
        if offload_param_config is not None and all(
            param.requires_grad for param in module.parameters()
        ):
            offload_param_config = offload_param_config.model_copy(update={"pin_memory": False})
            kwargs["ds_config"] = with_unpinned_weights(kwargs["ds_config"])
        super().__init__(
            module,
            init_optimizer,
            *args,
            offload_optimizer_config=config,
            offload_param_config=offload_param_config,
            **{**kwargs, "offload_ratio": 1.0},
        )
        self.device: Any = OffloadDeviceEnum.cpu
        # Its device is asked for.
        self.grad_partitions_flat_buffer = torch.empty(
            0, dtype=self.gradient_accumulation_dtype, device="cpu"
        )
        if self._plan.is_resumed:
            self._operands.resume(self._partitions.resumed, self.fp32_partitioned_groups_flat)
            self._release_and_gather()
        if self._fetcher is not None:
            self._fetcher.has_step_ended = self._partitions.has_ended
        fragments = self._persistent_fragments() if self._is_gated else {}
        peers: Peers | None = None
        if fragments and not self._is_alone:
            instead = '"stepwell": {"gate": "step"}'
            peers = Peers(self.dp_process_group, self._partitions.device, instead=instead)
        self._persistent = PersistentGate(fragments, self._partitions, peers)
        self._agreement = Agreement(
            self.dp_process_group,
            self._partitions.device,
            gatherer=self._persistent.gatherer,
            order=None if self._fetcher is None else self._fetcher.gather_order,
            forget_order=None if self._fetcher is None else self._fetcher.forget_order,
        )

    def watch(self, module: torch.nn.Module) -> None:
        """Forwards of `module` are those that use the parameters."""
        self._persistent.watch(module)

    def initialize_ds_offload(self, **kwargs: Any) -> Any:
        """Called by DeepSpeed's constructor; makes what fetches weights for modules.

        DeepSpeed partitions the weights here. Its bucket for gradients, which comes later, is
        touched as far as it is used.
        """
        with TouchedMemory():
            if self._plan.fetch == "stepwell":
                # Here: the optimizer runs also where DeepSpeed's classes for it are others.
                from stepwell.deepspeed.zero.fetching import ModuleHooks

                hooks = ModuleHooks(**kwargs)
                self._fetcher = hooks.fetcher
                return hooks
            return super().initialize_ds_offload(**kwargs)

    @property
    def _is_gated(self) -> bool:
        return bool(self._plan.gate == "module")

    @property
    def _is_alone(self) -> bool:
        return bool(dist.get_world_size(group=self.dp_process_group) == 1)

    def _persistent_fragments(self) -> dict[Any, Fragment]:
        """What this rank steps in host memory of persistent parameters, in a common order.

        Their new weights come by themselves. None where DeepSpeed gathers all.
        """
        # They have secondary partitions, or are gathered in another dtype.
        if not self._is_alone and (self.zero_hpz_partition_size > 1 or is_autocast_initialized()):
            return {}
        stepped = {
            param: self._fragment(param)
            for param in self.persistent_parameters
            if self.get_param_id(param) in self.grad_position
        }
        return dict(sorted(stepped.items(), key=itemgetter(1)))

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Called by DeepSpeed's constructor; takes memory for the weights of each group.

        `initialize_optimizer_states` pins it, in a tenth of the time that torch takes.
        """
        for group in self.trainable_param_groups:
            numel = sum(param.partition_numel() for param in group["params"])
            buffer = _core.Buffer(max(numel, 1) * self.dtype.itemsize)
            self._weight_buffers.append(buffer)
            self.param_groups_fp16_flat_cpu_memory.append(tensor_on(buffer).view(self.dtype))

    def _create_fp32_partitions(self) -> None:
        """Called by DeepSpeed's constructor; makes the masters, in host memory without data.

        `initialize_optimizer_states` makes these of the weights, so they are not copied twice.
        """
        dtype = self.master_weights_and_grads_dtype
        for _ in self.fp16_partitioned_groups_flat:
            master = torch.empty(0, dtype=dtype, device="cpu", requires_grad=True)
            self.fp32_partitioned_groups_flat.append(master)
        for group in self.optimizer.param_groups:
            # Here DeepSpeed's own step has one sub-group at a time.
            group["params"] = []

    def initialize_optimizer_states(self) -> None:
        """Called by DeepSpeed's constructor.

        Makes the masters in host memory of the weights, and no fp32 gradients there.
        """
        masters, weights = self.fp32_partitioned_groups_flat, self.fp16_partitioned_groups_flat
        partitions = [
            self._partition(master, weight) for master, weight in zip(masters, weights, strict=True)
        ]
        options = self._plan.options
        params = [
            [(self.param_names.get(param), tuple(param.ds_shape)) for param in group]
            for group in self.fp16_groups
        ]
        self._name_volume(params)
        self._partitions = Partitions(
            partitions,
            swapped=self._operands.swapped,
            device=torch.device(get_accelerator().current_device_name()),
            threads=options.threads,
            host_bytes_max=options.host_bytes_max,
            is_pinned=self._plan.is_pinned,
            adds_on_host=options.accumulate == "host",
        )
        assert isinstance(self._partitions.gradients, Gradients)
        self._gradients = self._partitions.gradients
        # DeepSpeed gathers on a stream of its own.
        self._partitions.are_weights_read_elsewhere = not self.offload_param
        for buffer in self._weight_buffers:
            self._partitions.pin(buffer)
        self._weight_buffers.clear()
        self.stepwell_homes = self._homes(masters)
        # Where DeepSpeed makes a flat buffer of gradients next, without memory.
        self.device = torch.device("meta")

    def _release_and_gather(self) -> None:
        """The weights of partitions are others: nothing is left that was gathered of them."""
        for group in range(len(self.fp16_groups)):
            self._unflatten_partitioned_parameters(group)
        self._partition_all_parameters()
        for param in self.persistent_parameters:
            param.all_gather([param])

    def _partition(self, master: torch.Tensor, weight: torch.Tensor) -> Partition:
        dtype = self.gradient_accumulation_dtype
        moments_bytes = self._operands.moments_bytes(weight.to("meta", master.dtype))
        return Partition(master, weight, dtype, moments_bytes, is_offloaded=self.offload_param)

    # ---- the backward ----

    def backward_prologue(self) -> None:
        """Autograd has reached the outputs of a forward."""
        if self._fetcher is not None:
            self._fetcher.is_behind_step = False
        self._backward.begin(self._backward_active_depth)
        self._partitions.let_go()
        super().backward_prologue()

    def backward_epilogue(self) -> None:
        """The end of a backward."""
        super().backward_epilogue()
        # Of all forwards that it began at.
        self._backward_active_depth: int = min(self._backward_active_depth, 1)
        self._backward.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DeepSpeed's, which drops earlier micro-batches.

        Those of a step are dropped by the next backward, where no step comes in between.
        After a backward that raised it drops all gradients since the last step.
        """
        if self._backward.is_left(self._backward_active_depth):
            self._drop_gradients()
            stop_all(self.timers)
            return
        self._backward.note_cleared()
        self._gradients.drop_sums()
        super().zero_grad(set_to_none)

    def _drop_gradients(self) -> None:
        """Drops all gradients since the last step, also those that wait for a reduction."""
        self._partitions.drop()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
        for bucket in self.ipg_buckets.values():
            bucket.clear_params()
        # DeepSpeed would record a stream for each, which a device without streams refuses.
        for params in self.fp16_groups:
            for param in params:
                param.grad = None
        super().zero_grad(set_to_none=True)
        for param_id in self.params_already_reduced:
            self.params_already_reduced[param_id] = False
        # Weights that the backward had gathered.
        self.parameter_offload.release_backward_leftovers()
        self._partition_all_parameters()
        self._backward_active_depth = 0
        # Last: what an interrupt has left is told by the next backward or step.
        self._backward.reset()

    # ---- gradients ----

    def _fragment(self, param: Any) -> Fragment:
        return Fragment(*self.grad_position[self.get_param_id(param)])

    def partition_grads(
        self, params_to_release: Sequence[Any], grad_partitions: Sequence[torch.Tensor]
    ) -> None:
        """This rank's pieces of some gradients are reduced."""
        if self._backward.pop_cleared() and self._partitions.gradients.is_any_complete:
            self._partitions.drop()
        # Beyond the end of a parameter that does not divide by the ranks there is nothing.
        fragments = [
            self._fragment(param)
            if param.partition_numel() * self._get_param_partition_rank(param) < param.ds_numel
            else None
            for param in params_to_release
        ]
        is_last = self.is_gradient_accumulation_boundary()
        self._gradients.collect_all(fragments, grad_partitions, is_last=is_last)
        accelerator = get_accelerator()
        stream = None if accelerator.is_synchronized_device() else accelerator.current_stream()
        for param in params_to_release:
            if stream is not None and param.grad is not None:
                param.grad.record_stream(stream)
            param.grad = None

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        fragment = self._fragment(param)
        return self._gradients.gradient(fragment), fragment.group

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Sets this rank's piece of a gradient; the clip coefficient is of what was set."""
        if not param.requires_grad:
            return
        fragment = self._fragment(param)
        begin = fragment.numel * self._get_param_partition_rank(param)
        piece = value.detach().flatten()[begin : begin + fragment.numel]
        # The last piece of a parameter may be shorter.
        padded = torch.nn.functional.pad(piece, (0, fragment.numel - piece.numel()))
        self._gradients.set_gradient(fragment, padded)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Sets this rank's piece of a gradient.

        Raises:
            ValueError: `value` has another number of elements.
        """
        if not param.requires_grad:
            return
        fragment = self._fragment(param)
        if value.numel() != fragment.numel:
            raise ValueError(
                f"`value` has `{value.numel()}` elements, expected {fragment.numel}: the piece of "
                "the parameter that this rank has. hint: safe_set_full_grad sets the whole"
            )
        self._gradients.set_gradient(fragment, value.detach().flatten())

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: Sequence[Any]
    ) -> None:
        """Sets the gradients of parameters by what they are."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(
                    update_func(self.get_fp32_grad_for_param(param), param), param
                )

    # ---- the step ----

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps all partitions, or skips the step if a gradient is not finite."""
        # Not told: the others are still in the backward that this rank has left.
        self._backward.check(self._backward_active_depth)
        if self._persistent.gatherer is not None:
            # A rank whose last step has failed tells the others now, and all raise.
            self._partitions.finish()
        settle = self._partitions.end_left_step
        with self._backward.stepping(settle, self._drop_gradients, self.timers):
            scale = float(self.loss_scale)
            with self._agreement.awaited():
                self._pre_step()
                self._partition_all_parameters()
                if self._operands.swapped is not None and not self._is_alone:
                    # No rank writes a step before all have committed the last one.
                    self._partitions.finish()
                norm = self._partitions.gradients.norm(self._agreement.add_up)
            self.overflow = not math.isfinite(norm)
            self._update_scale(self.overflow)
            if self.overflow:
                self._global_grad_norm: Any = math.inf
                self._drop_gradients()
                return
            with self._agreement.decided():
                self._global_grad_norm = global_norm(norm, scale)
                self.timers(OPTIMIZER_STEP_TIMER).start()
                self._apply(gradient_scale(norm, scale, self.clip_grad))
        self.timers(OPTIMIZER_STEP_TIMER).stop()
        self._gather_persistent()
        self._post_step({OPTIMIZER_STEP_TIMER})

    def _gather_persistent(self) -> None:
        """Without an accelerator, gathers persistent parameters before DeepSpeed does, one by one.

        Of several DeepSpeed before 0.19.8 waits for the last alone, and gloo may end with another.
        """
        if self._partitions.device.type == "cpu":
            for param in self.persistent_parameters:
                param.all_gather([param])

    def _apply(self, grad_scale: float) -> None:
        partitions = self._partitions
        partitions.end_last_step()
        for group in range(len(self.fp16_groups)):
            self._unflatten_partitioned_parameters(group)
        masters, weights = self.fp32_partitioned_groups_flat, self.fp16_partitioned_groups_flat
        indices = self.sub_group_to_group_id
        operands = {
            group: self._operands.of(indices[group], group, master)
            for group, master in enumerate(masters)
        }
        # While the last step is the last.
        uploads = self._persistent.uploads(weights, masters)
        prepared = partitions.prepare(operands, weights)
        # Before the submit, behind which Ctrl-C may land; without one it does no harm.
        is_protected = self._is_gated and self._protect(operands, uploads)
        self._persistent.open(uploads, is_protected=is_protected)
        if self._fetcher is not None:
            self._fetcher.is_behind_step = True
        begun = self._operands.begun(operands.values())
        begun.append(self._agreement.taking)
        begun += self._persistent.submission(uploads)
        partitions.submit(prepared, grad_scale=grad_scale, begun=begun)
        self._operands.note_step()
        partitions.forget()
        if not is_protected:
            partitions.finish()
        self._persistent.end_step(is_protected=is_protected)

    # ---- waiting ----

    def _protect(self, operands: Mapping[int, Operand], uploads: dict[Any, Upload]) -> bool:
        """Whether every use of what the step writes is going to wait."""
        parts: dict[torch.Tensor, list[Fragment]] = defaultdict(list)
        holders = [upload.source for upload in uploads.values()]
        for group, operand in operands.items():
            flat = self.fp16_partitioned_groups_flat[group]
            whole = Fragment(group, 0, operand.master.numel())
            memory = self.param_groups_fp16_flat_cpu_memory
            for tensor in (flat, *memory, *self._operands.written(group, operand)):
                if isinstance(tensor, torch.Tensor):
                    parts[tensor].append(whole)
            for param in self.fp16_groups[group]:
                parts[param.ds_tensor].append(self._fragment(param))
        return self._partitions.protect(parts, holders)

    def offload_states(self, include: Collection[Any] | None = None, **kwargs: Any) -> None:
        """As DeepSpeed's, of what is not in host memory already."""
        self._partitions.finish()
        self._persistent.finish()
        self._partitions.synchronize()
        wanted = [kind for kind in _ON_DEVICE if include is None or kind in include]
        super().offload_states(include=wanted, **kwargs)

    def destroy(self) -> None:
        """Ends the use of the device, and frees the host memory of gradients and uploads."""
        self._persistent.end()
        self._agreement.end()
        self._partitions.end()
        super().destroy()
