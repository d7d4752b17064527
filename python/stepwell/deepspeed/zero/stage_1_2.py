"""DeepSpeed's ZeRO-1 and -2 optimizer with its offloaded state on the offload engine.

This module imports DeepSpeed's optimizer, and is imported late.

Everything that other code reads stays DeepSpeed's: the fp32 partitions and the optimizer's state,
and with them checkpoints of all kinds and `safe_get_full_*`; the order of reductions; loss scaling;
what is logged. How gradients travel is said in `zero.gradients`, and a step in `zero.partitions`.
Three things are gone: fp32 gradients on the host; the passes that unscale, clip and cast them; and
the host's waits for every parameter's norm and overflow.

- On one rank nothing is reduced, so nothing goes through reduction buckets, and a backward ends
  when it is launched. Forwards wait for their own weights only, and so does every other access to a
  parameter from Python.
- On several, reductions are DeepSpeed's. Weights are gathered behind the step, bucket by bucket
  (`zero.gathers`): by all ranks, whether a rank waits for them in a forward, at an access or in
  `step()`.
- A step is skipped as a whole, or taken as a whole. Gradients are unscaled by the scale that they
  were made with.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
    DeepSpeedZeroOptimizer,
)

from stepwell.access.descriptive import without_waiting
from stepwell.deepspeed.release import has_fp32_sums
from stepwell.deepspeed.state.home import Home
from stepwell.deepspeed.zero.backward import Backward
from stepwell.deepspeed.zero.flat_gate import FlatGate
from stepwell.deepspeed.zero.gathers import GatheredWeights
from stepwell.deepspeed.zero.offloaded import Offloaded
from stepwell.deepspeed.zero.operands import Operands, global_norm, gradient_scale
from stepwell.deepspeed.zero.partition import Fragment, Partition, without_data
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.deepspeed.zero.timers import stop_all
from stepwell.ranks.agreement import Agreement
from stepwell.ranks.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from stepwell.access.guard import Uploads
    from stepwell.deepspeed.plan import Plan
    from stepwell.deepspeed.zero.operands import Operand

__all__ = ["OffloadZeroOptimizer"]

_HAS_FP32_SUMS = has_fp32_sums()
# What lies in device memory under CPU offload.
_ON_DEVICE = (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads)


# DeepSpeed has no types.
class OffloadZeroOptimizer(Offloaded, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """See the module. Takes what its base class takes, and the `plan` that chose it."""

    def __init__(
        self,
        init_optimizer: Any,
        *args: Any,
        plan: Plan,
        offload_optimizer_config: Any,
        **kwargs: Any,
    ) -> None:
        self._masters: list[torch.Tensor] = []
        self.stepwell_homes: list[Home] = []
        """Of the partitions, by group; none while DeepSpeed's constructor makes them."""
        self._plan = plan
        self._operands = Operands(init_optimizer, dist.get_rank())
        self._gate: FlatGate | None = None
        # Of several ranks that gather behind the step, and not at its end.
        self._gathers: GatheredWeights | None = None
        self._backward = Backward()
        # Whether every use of what the last step writes waits.
        self._is_guarded = False
        # The engine pins what crosses the bus, and nothing else has to be.
        config = offload_optimizer_config.model_copy(update={"pin_memory": False, "device": "cpu"})
        super().__init__(init_optimizer, *args, offload_optimizer_config=config, **kwargs)
        device = self._partitions.device
        peers: Peers | None = None
        if not self._is_alone:
            # What is deferred is gathered with a later step.
            gathers = self._plan.gate == "module" and self._plan.zenflow is None
            instead = '"stepwell": {"engine": false}'
            peers = Peers(self.dp_process_group, device if gathers else None, instead=instead)
            if gathers:
                self._gathers = GatheredWeights(self._partitions, peers, self.bit16_groups)
        self._agreement = Agreement(
            self.dp_process_group,
            device,
            gatherer=None if self._gathers is None else self._gathers.gatherer,
            peers=peers,
        )

    # ---- data ----

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """The masters, after the last step is complete."""
        return [home.master() for home in self.stepwell_homes] or self._masters

    @single_partition_of_fp32_groups.setter
    def single_partition_of_fp32_groups(self, masters: list[torch.Tensor]) -> None:
        self._masters = masters

    @property
    def device(self) -> Any:
        """Where the masters are; `meta` while DeepSpeed's constructor makes them.

        So it neither copies the weights nor takes memory: `initialize_optimizer_states` does.
        """
        return self._device if self._is_made() else torch.device("meta")

    @device.setter
    def device(self, device: Any) -> None:
        self._device = device

    @property
    def state(self) -> Any:
        """The state of the base optimizer, after the last step is complete."""
        self.synchronize()
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.synchronize()
        self.optimizer.state = value

    def _weights(self) -> list[torch.Tensor]:
        """This rank's part of the weights of each group."""
        ranks = [dist.get_rank(group=group) for group in self.real_dp_process_group]
        return [
            pieces[rank]
            for pieces, rank in zip(self.parallel_partitioned_bit16_groups, ranks, strict=True)
        ]

    def _fragment(self, param: torch.Tensor) -> Fragment:
        group, _, begin, numel = self.grad_position[self.get_param_id(param)]
        return Fragment(group, begin, numel)

    def initialize_optimizer_states(self) -> None:
        """Called at the end of DeepSpeed's constructor.

        Makes the masters from the weights, and no fp32 gradients.
        """
        self.param_buffer_of_bit16_for_cpu_offload_groups: list[torch.Tensor] = []
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None
        self._is_alone = dist.get_world_size(group=self.dp_process_group) == 1
        sums_apart = [self._sums_apart(group) for group in range(len(self._masters))]
        # Sums in fp32 are added up where reductions end, those of sequence parallelism are more
        # than averages, and some reductions round also where they add nothing up.
        self._is_unreduced = (
            self._is_alone
            and self.sequence_parallel_size == 1
            and not any(sums_apart)
            and self.communication_data_type in (self.dtype, torch.float32)
            and self.gradient_predivide_factor == 1.0
        )
        if self._is_unreduced:
            # DeepSpeed makes a bucket for each backward. With `overlap_comm` it waits for the whole
            # device at the end of each, and so for gradients that cross the bus.
            self.reduce_bucket_size = 1
            if self.partition_gradients:
                self.overlap_comm = False
        shapes, self._masters = self._masters, [without_data(each) for each in self._masters]
        for group, master in zip(self.optimizer.param_groups, self._masters, strict=True):
            group["params"] = [master]
        partitions = [
            Partition(
                master,
                weight,
                self.gradient_accumulation_dtype
                if is_apart or self.use_grad_accum_attribute
                else weight.dtype,
                self._operands.moments_bytes(shape),
            )
            for master, shape, weight, is_apart in zip(
                self._masters, shapes, self._weights(), sums_apart, strict=True
            )
        ]
        params = [
            [(self.param_names.get(param), tuple(param.shape)) for param in group]
            for group in self.round_robin_bit16_groups
        ]
        self._name_volume(params)
        self._partitions = self._open_partitions(partitions)
        self.stepwell_homes = self._homes(self._masters)
        if self._plan.is_resumed:
            self._operands.resume(self._partitions.resumed, self._masters)
            self._gather_weights()

    def _open_partitions(self, partitions: list[Partition]) -> Partitions:
        options = self._plan.options
        return Partitions(
            partitions,
            device=partitions[0].weight.device,
            fragments=self._fragments_alone(),
            order=self._order(),
            swapped=self._operands.swapped,
            threads=options.threads,
            host_bytes_max=options.host_bytes_max,
            is_pinned=self._plan.is_pinned,
            # Under ZeRO-1 gradients are summed where autograd has them. Sums in fp32 are
            # DeepSpeed's.
            adds_on_host=self.partition_gradients and options.accumulate == "host",
        )

    def _order(self) -> list[int]:
        """In which order groups are stepped.

        Small ones first: biases and norms are of every layer, and the first would wait for the
        last.
        """
        sizes = [weight.numel() for weight in self._weights()]
        return sorted(range(len(sizes)), key=sizes.__getitem__)

    def _fragments_alone(self) -> dict[torch.Tensor, Fragment]:
        """What forwards wait for of each parameter: on one rank, which has all of it."""
        if not self._is_alone:
            return {}
        return {param: self._fragment(param) for param in self._all_params()}

    def _get_offload_gradient_dict(self) -> None:
        # Fragments get and set gradients by their home.
        pass

    # ---- the backward ----

    def backward_prologue(self) -> None:
        """Autograd has reached the outputs of a forward."""
        self._backward.begin(self._backward_active_depth)
        self._partitions.let_go()
        super().backward_prologue()

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """The end of a backward."""
        super().backward_epilogue(*args, **kwargs)
        # Of all forwards that it began at.
        self._backward_active_depth: int = min(self._backward_active_depth, 1)
        self._backward.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DeepSpeed's; after a backward that raised, drops all gradients since the last step.

        Those of a step are dropped by the next backward, where they are complete and no step comes
        in between. DeepSpeed adds some of them to the next ones.
        """
        if self._backward.is_left(self._backward_active_depth):
            self._drop_gradients()
            stop_all(self.timers)
        else:
            self._backward.note_cleared()
            self._clear_gradients(set_to_none)

    def _clear_gradients(self, set_to_none: bool = True) -> None:
        # Gradients have nothing to wait for.
        with without_waiting():
            super().zero_grad(set_to_none)

    # ---- gradients ----

    def _sums_apart(self, group: int) -> bool:
        """Whether DeepSpeed sums the gradients of a group in fp32, in memory of its own.

        Releases without that round such sums, and do not get here (`Case.rounds_fp32_sums`).
        """
        return _HAS_FP32_SUMS and bool(self._use_compact_grad_partition_buffer(group))

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any, i: int) -> None:
        """The gradient of a parameter is there.

        On one rank it goes into no bucket: no copy of it, and no memory of the device for buckets.
        """
        if self._backward.pop_cleared() and self._partitions.gradients.is_any_complete:
            self._forget_gradients()
        if not self._is_unreduced:
            if not _HAS_FP32_SUMS and self.overlap_comm:
                self._keep(param)
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif param.numel() > 0 and getattr(param, "ds_grad_is_ready", True):
            self.copy_grads_in_partition(param, i)

    def _keep(self, param: Any) -> None:
        """Has a gradient outlast its reduction.

        Releases without fp32 sums free one that is larger than a bucket when that is launched.
        """
        grad = self.get_param_gradient_attribute(param)
        # None where a module computes its gradient piece by piece.
        if grad is not None and grad.is_cuda:
            grad.record_stream(self.reduction_stream)

    def copy_grads_in_partition(self, param: Any, group_idx: int | None = None) -> None:
        """The gradient of a parameter that this rank steps, or of a part of it, is reduced."""
        param_id = self.get_param_id(param)
        group, source, _, numel = self.grad_position[param_id]
        fragment = self._fragment(param)
        is_last = self.is_gradient_accumulation_boundary()
        if self._sums_apart(group):
            rank = dist.get_rank(group=self.real_dp_process_group[group])
            total = self._get_compact_grad_partition_slice(group, rank, param_id, numel)
            self._partitions.gradients.add(fragment, total, is_owned=True, is_total=True)
            if is_last:
                self._partitions.gradients.send(fragment)
        else:
            grad = self.get_param_gradient_attribute(param).detach().reshape(-1)
            # Reduced gradients lie in buckets.
            self._partitions.gradients.collect(
                fragment,
                grad.narrow(0, source, numel),
                is_owned=self._is_unreduced,
                is_last=is_last,
            )
        self.clear_grad_attribute(param)

    # ---- the step ----

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps all partitions in the background, or skips the step if a gradient is not finite."""
        # Not told: the others are still in the backward that this rank has left.
        self._backward.check(self._backward_active_depth)
        if self._gathers is not None:
            # A rank whose last step has failed tells the others now, and all raise. None writes a
            # step before all have committed the last one.
            self.synchronize()
        self._agreement.check()
        settle = self._partitions.end_left_step
        with self._backward.stepping(settle, self._drop_gradients, self.timers):
            self.timers(OPTIMIZER_GRADIENTS_TIMER).start()
            norm = self._norm()
            self.timers(OPTIMIZER_GRADIENTS_TIMER).stop()
            scale = float(self.loss_scale)
            is_checked = self.dtype != torch.bfloat16 or self.check_grad_overflow
            self.overflow = not math.isfinite(norm) and (
                is_checked or self._operands.skips_nonfinite()
            )
            self._update_scale(self.overflow)
            if self.overflow:
                self._global_grad_norm: Any = math.inf
                self._skip()
                return
            with self._agreement.decided():
                self._global_grad_norm = global_norm(norm, scale)
                self._apply(gradient_scale(norm, scale, self.clip_grad))
            # An interrupt here drops them as well: what is left would be added to the next.
            self._release_sums()
        self.timers(OPTIMIZER_ALLGATHER_TIMER).start()
        if self._gathers is None:
            self._gather_weights()
        self.timers(OPTIMIZER_ALLGATHER_TIMER).stop()
        self.timers.log(OPTIMIZER_TIMERS)

    def _norm(self) -> float:
        """The norm of all gradients since the last step, of all ranks. None has a step running."""
        with self._agreement.awaited():
            self._check_used()
            return self._partitions.gradients.norm(self._add_up)

    def _gather_weights(self) -> None:
        """Every rank gets the weights of all partitions: a collective."""
        if not self._is_alone:
            all_gather_dp_groups(
                groups_flat=self.bit16_groups_flat,
                partitioned_param_groups=self.parallel_partitioned_bit16_groups,
                dp_process_group=self.real_dp_process_group,
                start_alignment_factor=self.nccl_start_alignment_factor,
                allgather_bucket_size=self.allgather_bucket_size,
            )

    def scaled_global_norm(self, norm_type: float = 2) -> torch.Tensor:
        """The norm of the gradients since the last step, times the loss scale: a scalar.

        Infinite if one of them is not finite; 0 before the last backward of an accumulation.

        Raises:
            ValueError: for another norm than that of the squares.
        """
        if norm_type != 2:
            raise ValueError(f"`norm_type` is `{norm_type}`, expected 2")
        if not self.is_gradient_accumulation_boundary():
            return global_norm(0.0, 1.0)
        if self._gathers is not None:
            # A rank that is gone is an error here, and not told.
            self.synchronize()
        return global_norm(self._norm(), 1.0)

    def _check_used(self) -> None:
        """Raises AssertionError, as DeepSpeed, where every parameter should have a gradient."""
        if self.ignore_unused_parameters:
            return
        has_gradient = self._partitions.gradients.has_gradient
        params = itertools.chain.from_iterable(self.params_in_partition)
        unused = [param for param in params if not has_gradient(self._fragment(param))]
        if unused:
            names = ", ".join(f"`{self.param_names.get(param, '?')}`" for param in unused[:4])
            raise AssertionError(
                f"{len(unused)} parameters got no gradient: {names}; nothing was changed. hint: "
                "zero_optimization.ignore_unused_parameters true, or a loss of all parameters"
            )

    def _add_up(self, squares: torch.Tensor) -> float:
        """The sum of this rank's squared norm and those of the others."""
        if self.local_overflow:
            # Found in a gradient that was set.
            squares.fill_(math.inf)
        return self._agreement.add_up(squares)

    def _skip(self) -> None:
        self._drop_gradients()
        for timer in (OPTIMIZER_STEP_TIMER, OPTIMIZER_ALLGATHER_TIMER):
            self.timers(timer).start()
            self.timers(timer).stop()

    def _drop_gradients(self) -> None:
        """Drops all gradients since the last step, also those that wait for a reduction."""
        self._forget_gradients()
        self._clear_gradients()
        for bucket in self.ipg_buckets.values():
            bucket.clear()
        self.extra_large_param_to_reduce.clear()
        for params in self.previous_reduced_grads.values():
            params.clear()
        self.params_already_reduced[:] = [False] * len(self.params_already_reduced)
        self._release_ipg_buffers()
        self._backward_active_depth = 0
        # Last: what an interrupt has left is told by the next backward or step.
        self._backward.reset()

    def _forget_gradients(self) -> None:
        """Drops all gradients since the last step that are reduced."""
        self._partitions.drop()
        self._release_sums()

    def _release_sums(self) -> None:
        self.local_overflow = False
        for group in range(len(self._masters)):
            self._release_preflattened_grad_buffers(group)
            self.averaged_gradients[group] = None

    def _apply(self, grad_scale: float) -> None:
        partitions = self._partitions
        self.timers(OPTIMIZER_STEP_TIMER).start()
        partitions.end_last_step()
        operands = {
            group: self._operands.of(group, group, master)
            for group, master in enumerate(self._masters)
            if self._is_stepped(master)
        }
        prepared = partitions.prepare(operands, self._weights())
        # Before the submit, behind which Ctrl-C may land; without one it does no harm.
        at_once = self._guard(operands)
        begun = self._operands.begun(operands.values())
        begun.append(self._agreement.taking)
        if self._gathers is not None:
            weights = self.parallel_partitioned_bit16_groups
            begun += self._gathers.submission(partitions.order, weights)
        partitions.submit(prepared, grad_scale=grad_scale, at_once=at_once, begun=begun)
        self._operands.note_step()
        partitions.forget()
        self._wait_for_weights()
        if self._operands.swapped is None:
            # Of a volume fragments get moments by their home.
            self._lazy_init_hp_params_optimizer_state()
        self.timers(OPTIMIZER_STEP_TIMER).stop()

    def _is_stepped(self, master: torch.Tensor) -> bool:
        """Whether a partition takes part in steps: also an empty one, whose updates are counted."""
        return True

    def _guard(self, operands: Mapping[int, Operand]) -> Collection[Fragment] | None:
        """Has uses wait for what the coming step writes, before it is submitted.

        Returns what a deferred step updates at once; None: it is exact.
        """
        opening = None if self._gate is None else self._gate.opening_all()
        self._partitions.begin_with(opening)
        is_open = opening is not None
        self._is_guarded = is_open and self._protect(operands)
        return None

    def _wait_for_weights(self) -> None:
        """Once the step was submitted: waits for what no use would wait for."""
        if self._gate is not None and self._is_guarded:
            self._gate.wait_for_uncovered()
        else:
            self.synchronize()

    # ---- waiting ----

    def watch(self, module: torch.nn.Module) -> None:
        """Forwards of `module` are those that use the parameters, and wait for them."""
        if self._plan.gate == "module":
            self._watch(module, self._gathers or self._partitions)

    def _watch(self, module: torch.nn.Module, uploads: Uploads, wait_bytes_max: int = 0) -> None:
        # No weight is read by what DeepSpeed's optimizer holds, but in methods that wait.
        flats = self.bit16_groups_flat
        self._gate = FlatGate(
            module, self.bit16_groups, flats, uploads, wait_bytes_max=wait_bytes_max
        )

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.bit16_groups for param in group]

    def _protect(self, operands: Mapping[int, Operand]) -> bool:
        """Whether every use of masters and of their state is going to wait.

        Args:
            operands: of each group.
        """
        parts: dict[torch.Tensor, list[Fragment]] = {}
        for group, operand in operands.items():
            whole = [Fragment(group, 0, operand.master.numel())]
            written = self._operands.written(group, operand)
            parts.update((tensor, whole) for tensor in written if tensor.numel())
        # DeepSpeed's fragments of both, which its accessors use after a wait.
        holders: list[torch.Tensor] = []
        for param in self._all_params():
            if (mapping := getattr(param, "_hp_mapping", None)) is not None:
                holders += [mapping.hp_fragment, *(mapping.optim_fragment or {}).values()]
        return self._partitions.protect(parts, holders)

    def synchronize(self) -> None:
        """Waits until the last step is complete in host memory.

        The current stream waits for the weights.
        """
        if self._gate is not None:
            self._gate.finish()
        elif self._is_made():
            self._partitions.finish()

    def _is_made(self) -> bool:
        # DeepSpeed's constructor reads its data before it calls `initialize_optimizer_states`.
        return hasattr(self, "_partitions")

    def offload_states(self, include: Collection[Any] | None = None, **kwargs: Any) -> None:
        """As DeepSpeed's, of what is not in host memory already."""
        self.synchronize()
        self._partitions.synchronize()
        wanted = [kind for kind in _ON_DEVICE if include is None or kind in include]
        super().offload_states(include=wanted, **kwargs)

    def destroy(self) -> None:
        """Ends the use of the device, and frees the host memory of gradients and uploads."""
        if self._is_made():
            self.synchronize()
            self._partitions.end()
        # The thread that gathers ends with the partitions.
        self._gate = self._gathers = None
        self._agreement.end()
        super().destroy()
