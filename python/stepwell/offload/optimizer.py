"""AdamW for parameters on an accelerator, with master and moments in host memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state
from stepwell._decision import Facts, Nonfinite
from stepwell._sharding import is_dtensor, local
from stepwell.offload.collector import Collector, DeviceCollector, HostCollector
from stepwell.offload.deferral import DeferralMetrics
from stepwell.offload.deferred_steps import DeferredSteps
from stepwell.offload.engine import Engine
from stepwell.offload.forwards import Forwards
from stepwell.offload.gate import LANDING_BYTES_MAX, Gate
from stepwell.offload.gradients import OnGrad
from stepwell.offload.guard import clear_grads
from stepwell.offload.host_side import HostSide
from stepwell.offload.module_tree import remove
from stepwell.offload.norm import CLIP_EPS, gradient_norm
from stepwell.offload.options import Accumulate, GateMode, check_options
from stepwell.offload.rank_engine import RankEngine
from stepwell.offload.sharding import Shard, Sharding, awaited, open_sharding
from stepwell.offload.state_dicts import OffloadStateDicts
from stepwell.offload.swapped import Swapped
from stepwell.optim import Moments

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.optim.optimizer import ParamsT

    from stepwell._operand import Update
    from stepwell.offload.deferred import Deferred
    from stepwell.offload.volume import Volume

__all__ = ["OffloadAdamW"]

_LOGGER = logging.getLogger(__name__)


class OffloadAdamW(OffloadStateDicts):
    """AdamW over parameters on an accelerator.

    Gradients come to host memory, new weights go back, the rest stays there.

    `step()` computes the norm of all gradients on the device, decides there and then (clip
    coefficient, finite check), and leaves the rest to the background: gradients are copied to the
    host, stepped chunk by chunk in the order of the parameters, and every new weight is on its way
    back as soon as it is ready. It returns when the device has been given all copies, so that
    gradients may be written again. The next forward waits module by module for its own weights
    (`gate="module"`), with the same result, bit for bit, as if `step()` had waited for all.

    Every other access to a parameter waits for it as well (`parameter.norm()`, an average of
    weights, `copy.deepcopy(model)`, another optimizer, a write), and so does `state`.
    While its weight is under way, the class of a parameter is a subclass of torch.nn.Parameter.
    Not seen, so that `synchronize()` has to come before it, or `gate="step"`: raw pointers; code in
    C++ that kept a parameter from before the step; CUDA graphs that were captured without their
    module; tensors of `state` that were taken before the step; other processes.
    Under torch.compile and torch.jit, and for a parameter whose memory others hold too (a view,
    `.data` or an array that is kept), `step()` waits as with `gate="step"`. Of DTensor parameters
    (FSDP2) gathers and all other uses of a shard wait for it, each on its own rank.

    What is written to a parameter between two steps (`load_state_dict`, `copy_`, `parameter.data =
    ...`) is stepped from then on. So is a write through `parameter.data` (`parameter.data.clamp_`,
    `parameter.data += ...`) before the first step, and with `gate="module"` between a step, also a
    skipped one, and the next forward; and to a parameter that the next step leaves out (it is
    frozen, say), but while updates of it are deferred. At another time, and to a DTensor, it
    changes no version and is not seen: call `reread_parameters()` after it.

    Host memory beside the parameters, in bytes each: for bfloat16 parameters 14 with fp32 moments,
    8.1 with q8; for float32 parameters 16 and 10.1. It is announced in the log of `stepwell` before
    it is taken.

    Args:
        params: parameters on one accelerator, (name, parameter) pairs (`model.named_parameters()`)
            or parameter groups, in the order in which the forward uses them. Frozen parameters take
            no memory. On the CPU everything works as well.
        lr: learning rate; a number or a tensor of one element.
        betas: decay of the moments per step.
        eps: added to the root of the second moment.
        weight_decay: `lr * weight_decay * parameter` is taken off the parameter.
        clip_norm: the norm of all gradients is clipped to it, as by torch.nn.utils.clip_grad_norm_
            but without a pass over the gradients. A norm of NaN clips nothing. None: no clipping.
        moments: how `exp_avg` and `exp_avg_sq` are held: "fp32" (8 bytes per parameter), "bf16" (4)
            or "q8" (2.1).
        gate: what waits for the new weights: "module", the forward of each module for its own;
            "step", `step()` for all.
        accumulate: where the gradients of several backwards are summed. "device": in
            `parameter.grad`, which crosses the bus once. "host": in host memory; in every backward
            the sums come up and go down again, and the gradients are freed on the device. The sums
            are the same.
            "host" works in one process (neither DDP nor DTensor) and without a GradScaler, and
            only `clip_norm` clips: in place of a gradient that was moved, `parameter.grad` reads as
            NaN and refuses to be scaled.
        accumulation_steps: after how many backwards `step()` is called. If given, gradients come to
            the host during the last of them; if not, in `step()`, unless `no_sync()` is used. The
            result is the same. Only for parameters of one process, and FSDP2's from the second step
            on: those of DDP are final after the backward only. Of FSDP2 it counts the backwards
            that reduce gradients, one where `set_requires_gradient_sync(False)` leaves out others.
        nonfinite: what a NaN or an infinity in any gradient does: "skip" the step, count it in
            `skipped_steps` and warn in the log of `stepwell`; "raise" a ValueError; or "propagate"
            as in torch. The default is not that of `AdamW`: 16-bit gradients of a long run on an
            accelerator overflow now and then, and one of them is not to end it. With DTensor
            parameters all ranks decide together.
        maximize: whether to go up the gradient.
        seed: of the stochastic rounding. Equal seeds give equal bits.
        threads: workers that step; None: one per physical core of this process, but one, which
            launches work on the device; but one and an eighth where ranks share the host.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        deferred: which updates are applied later, in the background of the steps to come, so that
            no step waits for host memory; None: none is. Forwards in training then read weights
            that lack some updates (see `Deferred`); evaluation, state dicts and every other access
            between a step and the next forward do not: what is deferred is applied first. It needs
            forwards that can be seen (`gate="module"`, neither torch.compile nor DTensor): without,
            a warning says so and steps are exact.
        tier: drives for the state that does not fit into `host_bytes_max`; None: all is in host
            memory. With `deferred` it has durability "none", and no channels are selected. With
            `shard`, and with DTensor parameters, making the optimizer is a call of all ranks that
            waits for the others, and each has a volume of its own. `state` and state dicts are then
            read from the drives into memory, as a snapshot. Parameters that are added later have
            their state in host memory.
        shard: whether ranks that hold the same parameters (DistributedDataParallel) share the step:
            True, or the process group of these ranks. Each keeps the state of its rows of every
            parameter and steps those, and gets the new weights of the others, with the same bits as
            without. `state` and `state_dict()` are then those of this rank:
            torch.distributed.checkpoint saves and loads them at any number of ranks, and
            `full_state_dict()` has the whole. So it has to be asked for: a program that saves
            `state_dict()` on one rank would have a part only. Weights and gradients are checked to
            be equal on all ranks. With `tier` each rank has a volume of its own, and all of them
            resume at one step. False: each rank keeps and steps all of its parameters. Not with
            `deferred`, `accumulate="host"` or DTensor parameters.
        foreach: accepted for torch's sake, without effect: there is one implementation.
        fused: likewise.

    Attributes:
        grad_norm: the norm of all gradients of the last step before clipping; None before the
            first.

    Raises:
        ValueError: an option or a parameter that no step could work with, or more memory than there
            is.
        OSError: the device or the memory cannot be had.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        moments: Moments = "fp32",
        gate: GateMode = "module",
        accumulate: Accumulate = "device",
        accumulation_steps: int | None = None,
        nonfinite: Nonfinite = "skip",
        maximize: bool = False,
        seed: int = 0,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        deferred: Deferred | None = None,
        tier: Volume | None = None,
        shard: Shard = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_options(
            gate=gate,
            accumulate=accumulate,
            accumulation_steps=accumulation_steps,
            deferred=deferred,
            tier=tier,
        )
        self._sharding: Sharding | None = open_sharding(
            shard,
            deferred=deferred is not None,
            accumulate=accumulate,
            durability=None if tier is None else tier.durability,
        )
        self.clip_norm = clip_norm
        self.grad_norm: float | None = None
        self._deferred_steps: DeferredSteps | None = None
        if deferred is not None:
            self._deferred_steps = DeferredSteps(deferred, moments)
        self._stepping_on = None
        self._gate_mode: GateMode = gate
        self._accumulate: Accumulate = accumulate
        self._threads = threads
        swapped = None if tier is None else Swapped(tier, moments, threads, self._sharding)
        shares = None if self._sharding is None else self._sharding.shares
        self._host = HostSide(moments, host_bytes_max, self._deferred, swapped, shares)
        self._swapping = [[]]
        self._twins = self._host.twins
        self._collector: Collector = (
            HostCollector(self._host)
            if accumulate == "host"
            else DeviceCollector(self._host, accumulation_steps)
        )
        # What removes the hooks of a parameter.
        self._hooked: dict[torch.Tensor, weakref.finalize[Any, OffloadAdamW]] = {}
        self._engine = None
        self._gate: Gate | None = None
        # Of deferred updates, once state was loaded, until there is a gate.
        self._forwards: Forwards | None = None
        self._seconds: dict[str, float] = {}
        # Between a submit and the release of its gradients.
        self._is_unreleased = False
        # Ranks with volumes make them together.
        with contextlib.nullcontext() if tier is None else awaited(self._sharding):
            super().__init__(
                params,
                lr,
                betas,
                eps,
                weight_decay,
                moments=moments,
                nonfinite=nonfinite,
                maximize=maximize,
                seed=seed,
                foreach=foreach,
                fused=fused,
            )
            with torch.no_grad():
                self._host.open(self, self._states, self._names())

    def _names(self) -> dict[torch.Tensor, str]:
        names = [
            zip(each["params"], each.get("param_names", ()), strict=False)
            for each in self.param_groups
        ]
        return dict(itertools.chain.from_iterable(names))

    @property
    def _deferred(self) -> Deferred | None:
        """Which updates are deferred, at a given interval; None: none is."""
        return None if self._deferred_steps is None else self._deferred_steps.deferred

    @property
    def clip_norm(self) -> float | None:
        """What the norm of all gradients is clipped to; None: no clipping.

        May be changed between steps.
        """
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(
                f"`clip_norm` is `{clip_norm}`, expected a positive number. "
                "hint: None for no clipping"
            )
        self._clip_norm = clip_norm

    # ---- parameters ----

    def _admit(self, params: list[torch.Tensor]) -> None:
        self._let_go()
        new = [param for param in params if param.requires_grad and param not in self._twins]
        if new:
            labels = dict(self._labelled())
            self._host.check(new, labels)
            self._collector.check(new, labels)
            if self._sharding is not None:
                self._sharding.admit(new, labels)
            has_engine = self._engine is not None
            with self._host.announce(new, self._states, has_engine=has_engine):
                # It is made for a fixed list of parameters.
                self._close_engine()
                self._collector.prepare(local(new[0]).device)
                self._host.admit(new, self._states)
        self._hook()

    def _let_go(self) -> None:
        """Frees the host memory of parameters that are in no group any more.

        All but their state, as in torch's optimizers.
        """
        living = {param for group in self.param_groups for param in group["params"]}
        if params := [param for param in self._twins if param not in living]:
            # It has pinned the memory.
            self._close_engine()
            self._host.let_go(params, self._states)
            self._collector.let_go(params)
            for param in params:
                self._bound.pop(param, None)
                if remove_hooks := self._hooked.pop(param, None):
                    remove_hooks()
        if self._sharding is not None:
            # Of frozen ones too, which have no twin. State that is left is of these rows: one that
            # comes back goes on with it.
            shares, states = self._sharding.shares, self._states
            left = [param for param in shares if param not in living and not states.get(param)]
            shares.remove(left)

    def _follow_groups(self) -> None:
        """Makes ready for what has come since groups were added, and lets go of what has gone.

        What has come is thawed parameters, and those put into `param_groups`.

        Raises:
            ValueError: one of them could not be stepped.
        """
        params = (param for group in self.param_groups for param in group["params"])
        self._admit(list(dict.fromkeys(params)))
        self._meshes = None

    # ---- the engine ----

    def _opened_engine(self) -> Engine:
        """The engine, which is made when it is first needed: by then all groups are there."""
        if self._engine is None:
            device, twins, swapped = self._host.device, self._twins, self._host.swapped
            engine: Engine
            confirm = None
            if self._sharding is None:
                engine = Engine(
                    device,
                    twins,
                    twins,
                    self._threads,
                    self._deferred,
                    swapped,
                    sums_on_host=self._accumulate == "host",
                )
            else:
                engine = ranked = RankEngine(
                    self._sharding, device, twins, twins, self._threads, swapped
                )
                confirm = ranked.confirm
            gate = None
            if self._is_gated:
                gate = Gate(
                    self._twins,
                    engine,
                    self._release,
                    engine.settle,
                    confirm=confirm,
                    has_pending=engine.has_pending,
                    wait_bytes_max=0 if self._deferred is None else LANDING_BYTES_MAX,
                    called=() if self._forwards is None else self._forwards.end(),
                )
            self._engine, self._gate, self._forwards = engine, gate, None
        return self._engine

    @property
    def _is_gated(self) -> bool:
        """Whether forwards wait, where they can be seen."""
        # What is deferred is applied by each rank for itself; its forwards are collective.
        is_sharded = any(is_dtensor(param) for param in self._twins)
        return self._gate_mode == "module" and not (is_sharded and self._deferred is not None)

    def _note_forwards(self) -> None:
        """Until there is a gate: has it know the forwards before the step that makes it.

        Where updates are deferred. So a run that is resumed in a new process sees the same looks at
        weights as the run that went on.
        """
        if self._deferred is not None and self._gate is None and self._is_gated:
            called = () if self._forwards is None else self._forwards.end()
            self._forwards = Forwards(self._twins, called)

    def _idle_engine(self) -> Engine:
        """The engine, which does not work on a step, or takes gradients meanwhile."""
        engine = self._opened_engine()
        if engine.busy and self._deferred is None:
            # Some weight of the last step has not been used.
            self._finish()
        return engine

    def _close_engine(self) -> None:
        self.synchronize()
        # The engine unpins the host sides.
        self._collector.wait()
        gate, self._gate, self._engine = self._gate, None, None
        if gate is not None and self._deferred is not None:
            self._forwards = Forwards(self._twins, gate.called)
        # What the engine has copied is gone with it.
        self._collector.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Waits only for copies of gradients that no step has taken."""
        if self._accumulate == "device":
            # Ctrl-C may have ended the step before it did.
            self._release()
        self._forget_gradients()
        if set_to_none:
            clear_grads(param for group in self.param_groups for param in group["params"])
        else:
            super().zero_grad(set_to_none)
        self._collector.clear()

    def _finish(self) -> None:
        if self._gate is not None:
            self._gate.finish()
        elif self._engine is not None:
            self._engine.finish()

    def synchronize(self) -> None:
        """Waits until the last step is complete: then any code may read and write parameters.

        Raises:
            OSError: the step failed in the background.
        """
        if self._engine is not None:
            step = 0 if self._gate is None else self._gate.guard.num_steps
            self._engine.settle()
            self._engine.synchronize()
            self._is_unreleased = False
            if self._gate is not None:
                self._gate.clear(step)

    def drain(self) -> None:
        """Applies all updates that are deferred: parameters and state are those of the last step.

        Evaluation, state dicts and other accesses do so by themselves. Without `deferred` it does
        nothing.

        Raises:
            ValueError: a parameter was written, after the last forward, while updates of it were
                deferred. All is applied, and the write is lost.
            OSError: the step failed in the background.
        """
        if self._engine is not None:
            self._engine.settle()

    def reread_parameters(self) -> None:
        """Takes the parameters as they are on the device, however they were written.

        The next step copies them to the host.
        """
        self.synchronize()
        self._twins.forget(self._twins)

    @property
    def committed_steps(self) -> int | None:
        """How many steps of this optimizer are on its volume, to be gone on from after a crash.

        With those of the runs that it has resumed. None: it has no volume that commits.
        """
        swapped = self._host.swapped
        if swapped is None or swapped.core is None or not swapped.commits:
            return None
        return swapped.core.step or 0

    @property
    def timing(self) -> dict[str, float]:
        """What the last step took, in seconds, and the bytes that crossed the bus.

        - `norm`: waiting for the backward, and the norm of its gradients.
        - `prepare`: until the background had the step.
        - `release`: until the device had all copies of gradients, which may be written from then
          on.
        - `step`: its first chunk to its last; within it `gradients`: waiting for them.
        - `gate`: forwards that have waited for its weights.
        - `background`: waiting for the step before, which is to be over.
        - `bytes_downloaded`, `bytes_uploaded`.
        - `oldest_age`: how many steps ago the oldest gradient was computed that is deferred.
        - `bytes_read`, `bytes_written`: with a volume, what its drives have moved since it was
          made.
        - `bytes_gathered`: with `shard`, of weights that came from other ranks.
        - `selected_share`: with `deferred.fraction`, which share of the squared norms the selected
          channels had when they were chosen.
        - `selected_bytes`: likewise, device memory for their state.
        """
        if self._engine is None:
            return {}
        timing = {**self._seconds, "gate": self._engine.seconds_waited, **self._engine.timing()}
        if self._engine.selector is not None:
            timing["selected_share"] = self._engine.selector.share
            timing["selected_bytes"] = self._engine.selected_bytes
        bytes_downloaded = self._collector.bytes_downloaded
        if bytes_downloaded is not None:
            timing["bytes_downloaded"] = bytes_downloaded
        if self._host.swapped is not None and self._host.swapped.core is not None:
            timing["bytes_read"], timing["bytes_written"] = self._host.swapped.core.bytes_moved
        return timing

    @property
    def deferral(self) -> DeferralMetrics | None:
        """Deferred updates in the last step; None without `deferred`, and before the first step."""
        if self._deferred is None or self._engine is None:
            return None
        return DeferralMetrics.of(self._deferred.turns, self.timing)

    # ---- gradients ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in it are not the last before `step()`: their gradients stay on the device.

        Outside of it, from its first use on, every backward is taken for the last.
        """
        context = self._collector.no_sync()
        self._hook()
        return context

    def _hook(self) -> None:
        """Has autograd call `_on_grad` when it is done with a gradient, if the collector wants it.

        A frozen parameter takes no hook. It gets one in the first `no_sync` after it thaws.
        """
        if self._collector.wants_hooks:
            for param in self._twins:
                if param not in self._hooked and param.requires_grad and _calls_hooks(param):
                    # torch has no types for hooks.
                    hook = OnGrad(self._on_grad)
                    handles = [param.register_post_accumulate_grad_hook(hook)]  # type: ignore[no-untyped-call]
                    handles += self._collector.watch(param)
                    self._hooked[param] = weakref.finalize(self, remove, handles)

    def _on_grad(self, param: torch.Tensor) -> None:
        """The gradient of `param` is accumulated, maybe for the last time before the step."""
        # FSDP2 calls hooks where it has reduced a gradient, with the stream current that it did so
        # on. Copies and checksums come after that. FSDP2 has the training stream come after what is
        # on this one at the end of the backward, and so the norm and the second checksums. Nothing
        # has to be recorded for the allocator: the engine holds the memory until it is copied, and
        # the collector until the step has waited for its norm.
        #
        # Not before the first step: an engine is not made in a backward, where modules have
        # unsharded parameters, so that none would be found that holds a sharded one.
        if is_dtensor(param) and (self._gate is None or not self._gate.guard.is_reduced(param)):
            return
        if self._collector.is_replaced(param):
            # The model has cleared the gradients.
            self._forget_gradients()
        self._collector.on_grad(param, self._idle_engine, self._label)

    def _forget_gradients(self) -> None:
        """The gradients are cleared: their backwards do not count, their copies are let go."""
        # First: Ctrl-C in the wait does not make the engine remember them.
        if self._collector.reset():
            self._abandon()

    # ---- the step ----

    def _step(self) -> None:
        # A look at a weight on another thread may settle what is deferred.
        with contextlib.nullcontext() if self._engine is None else self._engine.lock:
            self._locked_step()

    def _locked_step(self) -> None:
        begin = time.perf_counter()
        self._finish_last()
        background = time.perf_counter() - begin
        self._tune(begin)
        self._release()
        begin = time.perf_counter()
        self._stepping_on = threading.get_ident()
        try:
            is_begun = self._begin_step()
            if is_begun:
                self._seconds["prepare"] = time.perf_counter() - begin - self._seconds["norm"]
                begin = time.perf_counter()
                self._release()
                self._seconds["release"] = time.perf_counter() - begin
                self._wait_for_weights()
        except BaseException:
            # Ctrl-C may have landed behind the submit, and nothing else waits for this.
            self._leave_step()
            raise
        finally:
            self._stepping_on = None
            self._collector.reset()
        self._seconds["background"] = background
        if not is_begun:
            self._abandon()
            # No forward is ahead that lands weights, so no access would be seen.
            self.drain()
            self._excuse_next()
            self._twins.mark_stale(self._twins)

    def _finish_last(self) -> None:
        """Waits until the last step is complete, and committed where steps are.

        Ranks that share parameters begin the next one together. So they hear of a drive that has
        failed here, and their volumes are one step ahead at most.
        """
        try:
            self._finish()
        except OSError:
            if self._host.swapped is not None and self._sharding is None:
                self._agree(True)
            raise

    def _excuse_next(self) -> None:
        """The next step is exact for what this one was, not for a look at a weight."""
        if self._deferred_steps is not None:
            self._deferred_steps.excuse()

    def _tune(self, begin: float) -> None:
        """Has the interval follow what the last step took, which is over."""
        steps, engine = self._deferred_steps, self._engine
        if steps is None or steps.chosen_interval is None or engine is None:
            return
        interval = steps.measure(
            begin, self.timing, is_settled=engine.is_settled, has_pending=engine.has_pending()
        )
        if interval is not None:
            self._set_interval(interval)

    def _set_interval(self, interval: int) -> None:
        """Makes the engine anew for another interval, with all updates applied."""
        steps = self._deferred_steps
        if steps is None or interval == steps.chosen_interval:
            return
        before = steps.chosen_interval
        try:
            self._host.defer(steps.at_interval(interval), self._states)
        except ValueError as error:
            steps.limit_interval()
            _LOGGER.warning("deferred updates keep interval=%s: %s", before, error)
            return
        _LOGGER.info("deferred updates have interval=%d from now on, after %s", interval, before)
        self._close_engine()
        steps.set_interval(interval)

    def _leave_step(self) -> None:
        """After an error or Ctrl-C in a step: waits for what the step would have waited for.

        Another failure meanwhile is not raised here. The next call meets it again; the program
        hears of the error that ended the step. Ctrl-C is raised when the waits have ended. They
        cannot be left out: the program may write gradients that are still being copied.
        """
        self._excuse_next()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with contextlib.suppress(OSError, ValueError):
                    if self._is_unreleased:
                        self._release()
                    else:
                        if self._engine is not None:
                            self._engine.withdraw()
                        self._abandon()
                        self.drain()
                        self._twins.mark_stale(self._twins)
                    self._wait_for_weights()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    def _release(self) -> None:
        """Once a step was submitted: waits until its gradients may be written. Once is enough."""
        if self._is_unreleased:
            assert self._engine is not None
            self._engine.release()
            self._is_unreleased = False

    def _wait_for_weights(self) -> None:
        """Once a step was submitted: waits for the weights that no forward waits for."""
        if self._gate is not None and self._gate.is_open:
            self._gate.wait_for_uncovered()
        else:
            self._finish()

    def _abandon(self) -> None:
        """Once a step was skipped or refused: forgets what was copied for it.

        No later step takes that, and its gradients may be freed.
        """
        if self._engine is not None:
            self._engine.discard()

    def _begin_step(self) -> bool:
        """Decides on the step and hands it to the background; whether there is one."""
        begin = time.perf_counter()
        if self._accumulate == "host" and getattr(self, "found_inf", None) is not None:
            raise ValueError(
                "GradScaler cannot see gradients under accumulate='host'. hint: accumulate='device'"
            )
        found_inf = self._scaler_found_inf()
        if found_inf and self._sharding is None:
            return self._is_taken(Facts(found_inf=True), [], None, "")
        error: ValueError | None = None
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        updates: list[Update] = []
        inverse_scale = 1.0
        norm = 0.0
        with awaited(self._sharding):
            try:
                inverse_scale = self._inverse_grad_scale()
                params = self._stepped()
                grads = self._collector.gradients(params, self._idle_engine, self._label)
                updates = self._updates()
                if self._sharding is not None:
                    self._sharding.check_batches()
            except ValueError as caught:
                error = caught
            if self._sharding is None:
                (has_error,) = self._agree(error is not None)
            else:
                found_inf, has_error = self._sharding.agree(
                    params,
                    updates,
                    clip_norm=self.clip_norm,
                    nonfinite=self._nonfinite,
                    has_error=error is not None,
                    found_inf=found_inf,
                    is_rounded=self._moments != "fp32",
                    is_written=error is None and bool(self._twins.stale(params)),
                    checksums=lambda weights: self._opened_engine().checksums(weights),
                    label=self._label,
                )
        facts = Facts(found_inf=found_inf, has_error=has_error)
        if not has_error and not found_inf:
            with awaited(self._sharding):
                self._refuse_lost_writes()
                self._score(params, grads, updates)
                self._host.reread(params, self.state)
                collector = self._collector
                norm = gradient_norm(params, grads, collector.place, read=collector.read)
                norm *= inverse_scale
                if self._sharding is not None:
                    self._sharding.peers.check_norm(norm)
            self.grad_norm = norm
            self._seconds = {"norm": time.perf_counter() - begin}
            facts = Facts(
                is_nonfinite=not math.isfinite(norm),
                is_nonzero=norm != 0,
                is_first_at_lr_0=self._is_first_at_lr_0(),
            )
        what = f"the norm of the gradients is `{norm}`"
        if math.isnan(norm):
            what += self._collector.explain_nan()
        if not self._is_taken(facts, updates, error, what):
            return False
        self._has_left = True
        with self._opened_engine().decided():
            # After the norm, which would come down behind them; the step begins with the first that
            # is there.
            engine = self._opened_engine()
            self._collector.take_missing(params, grads, engine)
            selects = engine.selector is not None
            on_device = dict(zip(params, grads, strict=True)) if selects else None
            self._apply(updates, inverse_scale * self._clip_coefficient(norm), on_device)
        return True

    def _score(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        updates: Sequence[Update],
    ) -> None:
        """Scores channels of which some may be selected; the norm that comes next is waited for.

        Before parameters that were written are read again: it looks for these.

        Args:
            params: the parameters of the step.
            grads: their gradients.
            updates: their updates.
        """
        steps = self._deferred_steps
        if steps is None or not updates:
            return
        engine = self._opened_engine()
        selector = engine.selector
        if selector is None:
            return
        # By the bits: what is marked stale depends on what was seen, which a resumed run has not.
        is_written = any(
            selector.holds([one]) and self._twins.differs(one) for one in self._twins.stale(params)
        )
        if selector.needs_exact or is_written:
            # Of what was written the device has copies. An exact step drops them.
            engine.is_settled = True
        if self._is_deferred(engine, updates):
            selector.score(params, grads, engine.next_group())
        elif steps.is_followed_by_deferred(_number_of(updates), is_seen=self._is_seen()):
            selector.score(params, grads, None)
        else:
            selector.score([], [], None)

    def _refuse_lost_writes(self) -> None:
        """Raises ValueError where a parameter was written that updates are deferred of."""
        engine = self._engine
        if engine is not None and self._twins.stale(engine.pending_params):
            engine.settle()

    def _at_once(
        self, engine: Engine, updates: Sequence[Update], exposed: Collection[torch.Tensor]
    ) -> set[torch.Tensor] | None:
        """The parameters that a deferred step updates at once; None: the step is exact."""
        steps, gate = self._deferred_steps, self._gate
        if steps is None or gate is None:
            return None
        steps.note(_number_of(updates), is_seen=self._is_seen(), is_settled=engine.is_settled)
        if not self._is_deferred(engine, updates):
            return None
        # The step waits for the weights of these, since no forward is known to.
        return set(gate.not_covered([update.param for update in updates], exposed))

    def _is_seen(self) -> bool:
        """Whether forwards are seen, and so every other look at a weight."""
        gate = self._gate
        return gate is not None and gate.is_open and not gate.guard.was_compiled

    def _is_deferred(self, engine: Engine, updates: Sequence[Update]) -> bool:
        """Whether the step with these updates is deferred."""
        return self._deferred_steps is not None and self._deferred_steps.is_deferred(
            _number_of(updates), is_seen=self._is_seen(), is_settled=engine.is_settled
        )

    def _stepped(self) -> list[torch.Tensor]:
        """The parameters that have a gradient, after groups that were edited have been followed."""
        params, num_known = [], 0
        for group in self.param_groups:
            for param in group["params"]:
                is_known = param in self._twins
                num_known += is_known
                if param.grad is not None:
                    params.append((param, is_known))
        if num_known < len(self._twins) or not all(is_known for _, is_known in params):
            self._follow_groups()
        return [param for param, _ in params]

    def _clip_coefficient(self, norm: float) -> float:
        if self.clip_norm is None:
            return 1.0
        # In this order NaN gives 1: the core takes no scale that is not finite.
        return min(1.0, self.clip_norm / (norm + CLIP_EPS))

    def _apply(
        self,
        updates: list[Update],
        grad_scale: float,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        for update in updates:
            if update.operand.is_moved and update.operand.state is not None:
                # The step goes on in the background, and works on the state itself.
                _state.make_dense(update.operand.param, update.operand.state, self._moments)
        swapping = self._host.write_through(updates, self._states)
        bound_updates = self._bind(updates)
        params = [update.param for update in updates]
        engine = self._opened_engine()
        gate = self._gate if self._gate is not None and self._gate.is_open else None
        # Ctrl-C may land in all that is Python. So this comes before the submit, and does no harm
        # without it: host and device hold the same weights, and there is nothing to wait for.
        # Forwards wait by themselves once the step runs.
        #
        # Weights of deferred updates land with this step, also those of parameters without update.
        others = list(set(engine.pending_params).difference(params))
        landing = [*params, *others]
        before = [
            partial(self._twins.mark_stale, self._left_out(landing)),
            partial(self._twins.note, landing),
            partial(self._host.fingerprints.mark_outdated, params),
        ]
        shared: set[torch.Tensor] = set()
        if gate is not None:
            shared.update(self._exposed(gate, landing))
            before.append(partial(gate.open, landing, shared))
        at_once = None if shared.intersection(others) else self._at_once(engine, updates, shared)
        if at_once is not None:
            # What they name in memory is on the volume after this step, and so is what comes next.
            at_once.update(param for param, _, _ in swapping)
        selected = []
        if engine.selector is not None:
            selected = engine.selector.choose(at_once)
            engine.selector.drop(at_once or ())
        submitted = [
            *engine.submission(bound_updates, grad_scale, at_once, grads, selected),
            partial(setattr, self, "_is_unreleased", True),
            partial(self._swapping.__setitem__, 0, swapping),
        ]
        if others:
            torch.autograd.graph.increment_version(others)
        self._commit(bound_updates, [*before, *submitted])
        self._host.fingerprints.mark_verified(params)
        self._host.drop_fresh(params)
        if gate is not None and gate.uncovered:
            # The step itself waits for them, so that the guard sees no access. Those of the first
            # step of a new run: it has seen no forward. Not where memory is shared: writes to it
            # are not seen anyway.
            self._twins.mark_stale(param for param in gate.uncovered if param not in shared)

    def _left_out(self, params: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have a twin and are not among `params`."""
        if len(params) == len(self._twins):
            return []
        known = set(params)
        return [param for param in self._twins if param not in known]

    def _exposed(self, gate: Gate, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` whose weights can be reached without an access that the gate sees."""
        engine = self._opened_engine()
        found = gate.exposed(params, engine.held)
        if found:
            # The engine holds the weights of the last step until its uploads have ended.
            engine.synchronize()
            found = gate.exposed(params, engine.held)
        return found


def _calls_hooks(param: torch.Tensor) -> bool:
    """Whether hooks of `param` may be of use.

    Not where its shards are offloaded by FSDP2, which waits for the gradients that have a hook.
    """
    return not is_dtensor(param) or param.device.type == param.device_mesh.device_type


def _number_of(updates: Sequence[Update]) -> int:
    """Which update it is, from 1, of the parameter that has seen most."""
    return max(update.step for update in updates)
