"""AdamW for parameters on an accelerator, with master and moments in host memory."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state
from stepwell._decision import Nonfinite
from stepwell._sharding import is_dtensor, local
from stepwell.access.gate import remove
from stepwell.access.guard import clear_grads
from stepwell.offload.background import Background
from stepwell.offload.collector import Collector, DeviceCollector, HostCollector
from stepwell.offload.deferred_steps import DeferredSteps
from stepwell.offload.gradients import OnGrad
from stepwell.offload.host_side import HostSide
from stepwell.offload.options import Accumulate, check_options
from stepwell.offload.residents import Residents
from stepwell.offload.sharding import Shard, Sharding, awaited, open_sharding
from stepwell.offload.step import OffloadStep
from stepwell.offload.swapped import Swapped
from stepwell.optim import Moments

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.optim.optimizer import ParamsT

    from stepwell.offload.deferred import Deferred
    from stepwell.offload.volume import Volume

__all__ = ["OffloadAdamW"]


class OffloadAdamW(OffloadStep):
    """AdamW over parameters on an accelerator.

    Gradients come to host memory, new weights go back, the rest stays there.

    `step()` computes the norm of all gradients on the device, decides there and then (clip
    coefficient, finite check), and leaves the rest to the background: gradients are copied to the
    host, stepped chunk by chunk in the order of the parameters, and every new weight is on its way
    back as soon as it is ready. It returns when the device has been given all copies, so that
    gradients may be written again. The next forward of the model waits module by module for its own
    weights, with the same result, bit for bit, as if `step()` had waited for all. So it does where
    no model is given.

    Within such a forward any other use of a parameter waits for it. Outside of forwards the first
    use of one waits for all (`parameter.norm()`, an average of weights, `copy.deepcopy(model)`,
    another optimizer, a write), and so does `state`. While its weight is under way, the class of a
    parameter is a subclass of torch.nn.Parameter. Not seen, so that `synchronize()` has to come
    before it: raw pointers; code in C++ that takes a parameter past torch's functions
    (`torch.tensor(parameter)`, TorchScript, torch.func); CUDA graphs that were captured without
    their module; tensors of `state` that were taken before the step; other processes.
    A module that torch.compile has compiled waits for all weights within it. Where other code is
    compiled (docs/plain_pytorch.md), under torch.jit, and for a parameter whose memory others hold
    too (a view, `.data` or an array that is kept), `step()` waits. Of DTensor parameters (FSDP2)
    gathers and all other uses of a shard wait for it, each on its own rank.

    What is written to a parameter between two steps (`load_state_dict`, `copy_`, `parameter.data =
    ...`) is stepped from then on. So is a write through `parameter.data` (`parameter.data.clamp_`,
    `parameter.data += ...`) before the first step, and between a step, also a skipped one, and the
    next forward; and to a parameter that the next step leaves out (it is frozen, say), but while
    updates of it are deferred. At another time, and to a DTensor, it changes no version and is not
    seen: call `reread_parameters()` after it.

    Host memory beside the parameters, in bytes each: for bfloat16 parameters 14 with fp32 moments,
    8.1 with q8; for float32 parameters 16 and 10.1. It is announced in the log of `stepwell` before
    it is taken.

    Args:
        params: the model, of which the parameters that require a gradient are stepped, all on one
            accelerator; or such parameters, (name, parameter) pairs (`model.named_parameters()`) or
            parameter groups, in the order in which the forward uses them. Frozen parameters take no
            memory. On the CPU everything works as well.
        lr: learning rate; a number or a tensor of one element.
        betas: decay of the moments per step.
        eps: added to the root of the second moment.
        weight_decay: `lr * weight_decay * parameter` is taken off the parameter.
        clip_norm: the norm of all gradients is clipped to it, as by torch.nn.utils.clip_grad_norm_
            but without a pass over the gradients. A norm of NaN clips nothing. None: no clipping.
        moments: how `exp_avg` and `exp_avg_sq` are held: "fp32" (8 bytes per parameter), "bf16" (4)
            or "q8" (2.1).
        model: beside parameters, the model whose forwards use them, and wait for their new weights;
            of several, the one that is called (that of DistributedDataParallel). None: `step()`
            waits for all new weights itself.
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
        threads: how many workers of this process may step, at most; all optimizers share them.
            There is one per physical core of this process, or as `STEPWELL_THREADS` says. None: all
            but one, whose core launches work on the device; but one and an eighth where ranks share
            the host. Four fifths of these where updates are deferred.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        device_bytes_max: the most device memory that state may take, 12 bytes per parameter, from
            the first step on. The first parameters whose state fits are stepped on the device, in
            fp32 whatever `moments` is, and take no host memory. No step waits for them, and none of
            their updates is deferred. Bits are those of steps in host memory with fp32 moments, and
            state dicts are alike. Not with `shard`, `accumulate="host"`, a volume that commits, or
            DTensor parameters.
        deferred: which updates are applied later, in the background of the steps to come, so that
            no step waits for host memory; None: none is. Forwards in training then read weights
            that lack some updates (see `Deferred`); evaluation, state dicts and every other access
            between a step and the next forward do not: what is deferred is applied first. It needs
            forwards that can be seen (the model is given, no DTensor, nothing but modules compiled
            by torch.compile): without, a warning says so and steps are exact.
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
        gate: of earlier releases; warns, without effect.

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
        params: torch.nn.Module | ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: torch.nn.Module | None = None,
        clip_norm: float | None = None,
        moments: Moments = "fp32",
        accumulate: Accumulate = "device",
        accumulation_steps: int | None = None,
        nonfinite: Nonfinite = "skip",
        maximize: bool = False,
        seed: int = 0,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        device_bytes_max: int = 0,
        deferred: Deferred | None = None,
        tier: Volume | None = None,
        shard: Shard = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        gate: str | None = None,
    ) -> None:
        if gate is not None:
            warnings.warn(
                f"`gate` is `{gate}`, and has no effect any more: forwards of the model that is "
                "given wait, and step() where none is. hint: OffloadAdamW(model, ...)",
                DeprecationWarning,
                stacklevel=2,
            )
        if isinstance(params, torch.nn.Module):
            if model is not None:
                raise ValueError(
                    f"`params` is a `{type(params).__name__}` and `model` is given, expected one "
                    "of the two. hint: OffloadAdamW(model, ...)"
                )
            model = params
            params = [each for each in model.named_parameters() if each[1].requires_grad]
        check_options(
            accumulate=accumulate,
            accumulation_steps=accumulation_steps,
            deferred=deferred,
            tier=tier,
            device_bytes_max=device_bytes_max,
            is_sharded=shard is not False,
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
            self._deferred_steps = DeferredSteps(deferred.warmup_steps)
        self._stepping_on = None
        swapped = None if tier is None else Swapped(tier, moments, threads, self._sharding)
        shares = None if self._sharding is None else self._sharding.shares
        self._residents = Residents(device_bytes_max)
        self._host = HostSide(moments, host_bytes_max, deferred, swapped, shares, self._residents)
        self._twins = self._host.twins
        self._collector: Collector = (
            HostCollector(self._host)
            if accumulate == "host"
            else DeviceCollector(self._host, accumulation_steps)
        )
        # What removes the hooks of a parameter, by its id. Its twin holds it.
        self._hooked: dict[int, weakref.finalize[Any, OffloadAdamW]] = {}
        self._background = Background(
            self._host,
            self._collector,
            self._sharding,
            threads=threads,
        )
        self._seconds: dict[str, float] = {}
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
                between_steps = self._background.between_steps
                self._host.open(self, self._states, self._names(), between_steps)
        if model is not None:
            self._background.watch(model)
            if self._sharding is not None:
                self._sharding.watch(model)

    def _names(self) -> dict[torch.Tensor, str]:
        names = [
            zip(each["params"], each.get("param_names", ()), strict=False)
            for each in self.param_groups
        ]
        return dict(itertools.chain.from_iterable(names))

    # ---- parameters ----

    def _admit(self, params: list[torch.Tensor]) -> None:
        # An engine that ends takes with it what it knows of its last step.
        self._note_submitted()
        self._let_go()
        new = [param for param in params if param.requires_grad and not self._is_known(param)]
        if new:
            with self._host.awaited(new):
                self._admit_new(new)
        self._hook()

    def _is_known(self, param: torch.Tensor) -> bool:
        """Whether it was admitted."""
        return param in self._twins or param in self._residents

    def _admit_new(self, new: list[torch.Tensor]) -> None:
        labels = dict(self._labelled())
        self._host.check(new, labels)
        self._collector.check(new, labels)
        if self._sharding is not None:
            self._sharding.admit(new, labels)
        residents = self._residents.choose(new, labels)
        try:
            self._residents.add(residents)
            self._admit_to_host([param for param in new if param not in self._residents])
        except BaseException:
            self._residents.remove(residents)
            raise
        self._host.device = local(new[0]).device

    def _admit_to_host(self, new: list[torch.Tensor]) -> None:
        if not new:
            return
        has_engine = self._engine is not None
        with self._host.announce(new, self._states, has_engine=has_engine):
            # It is made for a fixed list of parameters.
            self._background.close()
            self._collector.prepare(local(new[0]).device)
            self._host.admit(new, self._states)

    def _let_go(self) -> None:
        """Frees the host memory of parameters that are in no group any more.

        All but their state, as in torch's optimizers.
        """
        living = {param for group in self.param_groups for param in group["params"]}
        if leaving := [param for param in self._residents if param not in living]:
            states = self._states
            self._residents.read(states, leaving)
            self._residents.remove(leaving)
            for param in leaving:
                if state := states.get(param):
                    # They may come back to host memory, which refuses what is no state.
                    with contextlib.suppress(ValueError):
                        weight = param.detach().cpu()
                        states[param] = _state.convert(
                            weight, state, self._moments, key=0, current=state, label="a parameter"
                        )
        if params := [param for param in self._twins if param not in living]:
            # It has pinned the memory.
            self._background.close()
            # Before the twins, which hold the parameters whose ids these are: Ctrl-C may come.
            for param in params:
                if remove_hooks := self._hooked.pop(id(param), None):
                    remove_hooks()
            self._host.let_go(params, self._states)
            self._collector.let_go(params)
            for param in params:
                self._new_states.pop(param, None)
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

    # ---- between steps ----

    def synchronize(self) -> None:
        """Waits until the last step is complete: then any code may read and write parameters.

        Raises:
            OSError: the step failed in the background.
        """
        self._background.synchronize()
        self._residents.synchronize()

    def drain(self) -> None:
        """Applies all updates that are deferred: parameters and state are those of the last step.

        Evaluation, state dicts and other accesses do so by themselves. Without `deferred` it does
        nothing.

        Raises:
            ValueError: a parameter was written, after the last forward, while updates of it were
                deferred. All is applied, and the write is lost.
            OSError: the step failed in the background.
        """
        self._background.settle()

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

    def commit(self) -> None:
        """Commits the last step to the volume, where `Volume.commit_interval` has not.

        A run that is resumed after a crash goes on from it. Collective where ranks step together.

        Raises:
            ValueError: there is no volume that commits.
            OSError: the step failed in the background, or the commit did; or another rank's.
        """
        swapped = self._host.swapped
        if swapped is None or not swapped.commits:
            raise ValueError(
                "commit() is called and there is no volume that commits, expected "
                "tier=Volume(..., durability='commit')"
            )
        with self._background.lock():
            self._host.commit(lambda: self._states, self.synchronize)

    # ---- gradients ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in it are not the last before `step()`: their gradients stay on the device.

        Outside of it, from its first use on, every backward is taken for the last.
        """
        context = self._collector.no_sync()
        self._hook()
        return context

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Waits only for copies of gradients that no step has taken."""
        if not self._collector.sums_on_host:
            # Ctrl-C may have ended the step before it did.
            self._background.release()
        self._forget_gradients()
        if set_to_none:
            clear_grads(param for group in self.param_groups for param in group["params"])
        else:
            super().zero_grad(set_to_none)
        self._collector.clear()

    def _hook(self) -> None:
        """Has autograd call `_on_grad` when it is done with a gradient, if the collector wants it.

        A frozen parameter takes no hook. It gets one in the first `no_sync` after it thaws.
        """
        if self._collector.wants_hooks:
            for param in self._twins:
                if id(param) not in self._hooked and param.requires_grad and _calls_hooks(param):
                    # torch has no types for hooks.
                    hook = OnGrad(self, type(self)._on_grad)
                    handles = [param.register_post_accumulate_grad_hook(hook)]  # type: ignore[no-untyped-call]
                    handles += self._collector.watch(param)
                    self._hooked[id(param)] = weakref.finalize(self, remove, handles)

    def _on_grad(self, param: torch.Tensor) -> None:
        """The gradient of `param` is accumulated, maybe for the last time before the step."""
        if id(param) not in self._hooked:
            # What a hook of the program's has returned; torch raises behind all hooks.
            return
        # FSDP2 calls hooks where it has reduced a gradient, with the stream current that it did so
        # on. Copies and checksums come after that. FSDP2 has the training stream come after what is
        # on this one at the end of the backward, and so the norm and the second checksums. Nothing
        # has to be recorded for the allocator: the engine holds the memory until it is copied, and
        # the collector until the step has waited for its norm.
        #
        # Not before the first step: an engine is not made in a backward, where modules have
        # unsharded parameters, so that none would be found that holds a sharded one.
        guard = None if self._gate is None else self._gate.guard
        if is_dtensor(param) and (guard is None or not guard.is_reduced(param)):
            return
        if self._collector.is_replaced(param):
            # The model has cleared the gradients.
            self._forget_gradients()
        self._collector.on_grad(param, self._background.idle, self._label)

    def _forget_gradients(self) -> None:
        """The gradients are cleared: their backwards do not count, their copies are let go."""
        # First: Ctrl-C in the wait does not make the engine remember them.
        if self._collector.reset():
            self._background.discard()


def _calls_hooks(param: torch.Tensor) -> bool:
    """Whether hooks of `param` may be of use.

    Not where its shards are offloaded by FSDP2, which waits for the gradients that have a hook.
    """
    return not is_dtensor(param) or param.device.type == param.device_mesh.device_type
