"""AdamW for parameters on an accelerator, with master and moments in host memory.

Read from top to bottom: options, parameters, state and state dicts, what is called between steps,
gradients as autograd has them, and the step: looked at, decided on, begun by one call.

- Everything that may fail comes before the first change. One norm of all gradients decides
  (`_begin_step`). What a program does to weights in the wait for it may be lost.
- However a step ends, what it would have waited for is waited for: after it gradients may be
  written, and weights that no forward waits for are there (`_locked_step`, `Steps.leave`).
- A step that is skipped or left by an error has the next one be exact, where updates are deferred.

Cost of a step: the thread waits for the norm, and for copies of gradients that the device does not
have yet.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _core, _state
from stepwell._decision import Facts, Nonfinite
from stepwell._hyper import hyper_of
from stepwell._notices import tell
from stepwell._option_names import named_options
from stepwell._sharding import is_dtensor
from stepwell.access.guard import clear_grads
from stepwell.offload.admission import Admission
from stepwell.offload.clipping import Clipping
from stepwell.offload.options import Memory, Options
from stepwell.offload.parts import Parts
from stepwell.offload.start_line import start_line
from stepwell.offload.volume_pointer import check_pointer, is_pointer, pointer_to
from stepwell.optim import AdamW, Moments
from stepwell.store.host_collector import WHY_NAN
from stepwell.store.spans import Looked
from stepwell.store.state_in_memory import StateInMemory
from stepwell.weights.activations import Activations

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch.optim.optimizer import ParamsT, StateDict

    from stepwell.store.deferred import Deferred
    from stepwell.store.deferred_steps import DeferralMetrics
    from stepwell.store.volume import Volume

__all__ = ["OffloadAdamW"]


@named_options("`OffloadAdamW`")
class OffloadAdamW(AdamW):
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
    use of one waits for all, and so does `state`. While its weight is under way, the class of a
    parameter is a subclass of torch.nn.Parameter. Not seen, so that `synchronize()` has to come
    before it, are raw pointers, code in C++ that takes a parameter past torch's functions, and what
    else docs/what_stepwell_sees.md lists. Where uses cannot be seen `step()` waits, and for a
    parameter whose memory others hold too (a view, `.data` or an array that is kept).

    What is written to a parameter between two steps is stepped from then on, however it was
    written: a step compares the contents with what it has uploaded last. While updates of it are
    deferred, a write that only the contents show is refused with an error: `drain()` before it.

    Host memory beside the parameters, in bytes each: for bfloat16 parameters 14 with fp32 moments,
    8.1 with q8; for float32 parameters 16 and 10.1. It is announced in the log of `stepwell` before
    it is taken. Shards that FSDP2 keeps in host memory (`CPUOffloadPolicy`) are stepped where they
    are, and their gradients are read where they are: 10 and 4.1 bytes, for float32 8 and 2.1.

    Args:
        params: the model, whose parameters are on one accelerator; or some of them, (name,
            parameter) pairs (`model.named_parameters()`) or parameter groups, in the order in which
            the forward uses them. Frozen parameters take no memory, until they thaw. On the CPU
            everything works as well.
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
        weights: where weights are between their uses. "device": on the accelerator. "host": in
            host memory, for models whose 16-bit weights do not fit. Modules fetch them for their
            forward and for their backward, and gradients go to host memory as they are made. What
            has room by `device_bytes_max` stays on the device, which makes steps faster. The
            model is given; what it has on the CPU goes to memory of the optimizer's, parameter by
            parameter, and its buffers go to `device`. An optimizer that is made anew for the model
            takes over, and the one before steps no more. Not with deferred updates, DTensor
            parameters, or several processes.
        activations: where what autograd saves in forwards of the model (inputs of checkpointed
            layers, foremost) is until the backward uses it. "device": there. "host": in pinned host
            memory; it leaves as it is saved, and comes back ahead of its use, with the same bits.
            What is below 1 MiB stays. The model is given, and forwards do not use torch.func.grad.
        device: with `weights="host"`, where modules compute. None: where the parameters are.
        accumulate: where the gradients of several backwards are summed. None: on the device; with
            `weights="host"` in host memory. "device": in
            `parameter.grad`, which crosses the bus once. "host": in host memory; in every backward
            the sums come up and go down again, and the gradients are freed on the device. The sums
            are the same.
            "host" works in one process (neither DDP nor DTensor), and only `clip_norm` clips: in
            place of a gradient that was moved, `parameter.grad` reads as NaN and refuses to be
            scaled. So a GradScaler works without `unscale_()`.
        accumulation_steps: after how many backwards `step()` is called, so that gradients come to
            the host during the last of them. None: in `step()`, unless `no_sync()` is used. The
            result is the same. Only for parameters of one process, and FSDP2's from the second step
            on: those of DDP are final after the backward only. Of FSDP2 it counts the backwards
            that reduce gradients, one where `set_requires_gradient_sync(False)` leaves out others.
        nonfinite: what a NaN or an infinity in any gradient does: "skip" the step, count it in
            `skipped_steps` and warn in the log of `stepwell` (the 50th in a row raises); "raise" a
            ValueError; or "propagate" as in torch. The default is not that of `AdamW`: 16-bit
            gradients of a long run on an accelerator overflow now and then, and one of them is not
            to end it. With DTensor parameters all ranks decide together.
        maximize: whether to go up the gradient.
        seed: of the stochastic rounding. Equal seeds give equal bits.
        threads: how many workers of this process may step, at most; all optimizers share them.
            There is one per physical core of this process, or as `STEPWELL_THREADS` says. None: all
            but one, whose core launches work on the device; but one and an eighth where ranks share
            the host. Four fifths of these where updates are deferred.
        host_bytes_max: the most host memory that may be taken, in bytes or as "40GB", but for
            activations; None: what is free.
        device_bytes_max: the most device memory that state may take, in bytes or as "8GB": 12 bytes
            per parameter, from the first step on; with `weights="host"` the most that is taken in
            all. The first parameters whose state fits are stepped on the device, in fp32 whatever
            `moments` is, and take no host memory. No step waits for them, and none of their updates
            is deferred. Bits are those of steps in host memory with fp32 moments, and state dicts
            are alike. Not with `accumulate="host"`, a volume that commits, or DTensor parameters.
            With `weights="host"` all is what modules fetch, some of it ahead of their use, and
            gradients on their way (at most 1.4 GiB). In what is left weights stay, from both ends
            of the model inwards (embeddings and heads first, whose fetch nothing hides), and once
            all weights do, state. Where the device has less, fewer stay. What a module uses comes
            in any case. 0: none stays, and what is fetched has 2 elements for each of the largest
            block, and 400 million more.
        deferred: which updates are applied later, in the background of the steps to come, so that
            no step waits for host memory; None: none is. Forwards in training then read weights
            that lack some updates (see `Deferred`); evaluation, state dicts and every other access
            between a step and the next forward do not: what is deferred is applied first. It needs
            forwards that can be seen (the model is given, no DTensor, nothing but modules compiled
            by torch.compile): without, a warning says so and steps are exact.
        tier: drives for the state that does not fit into `host_bytes_max`; None: all is in host
            memory. With `deferred` it has durability "none", and no channels are selected. With
            DTensor parameters making the optimizer is a call of all ranks that waits for the
            others, and each has a volume of its own; all of them resume at one step. `state` and
            state dicts are then read from the drives into memory, as a snapshot. Parameters that
            are added later have their state in host memory.
        foreach: accepted for torch's sake, without effect: there is one implementation.
        fused: likewise.

    Attributes:
        grad_norm: the norm of all gradients of the last step before clipping; None before the
            first.
        saves_volume: whether state dicts have what a volume has that commits. If not, they commit
            the last step, and say which it is: no second copy of the state is made. They load into
            an optimizer that resumes the volume.

    Raises:
        ValueError: an option or a parameter that no step could work with, or more memory than there
            is.
        OSError: the device or the memory cannot be had.
    """

    saves_volume = True

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
        weights: Memory = "device",
        activations: Memory = "device",
        device: torch.device | str | None = None,
        accumulate: Memory | None = None,
        accumulation_steps: int | None = None,
        nonfinite: Nonfinite = "skip",
        maximize: bool = False,
        seed: int = 0,
        threads: int | None = None,
        host_bytes_max: int | str | None = None,
        device_bytes_max: int | str = 0,
        deferred: Deferred | None = None,
        tier: Volume | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            if model is not None:
                raise ValueError(
                    f"`params` is a `{type(params).__name__}` and `model` is given, expected one "
                    "of the two. hint: OffloadAdamW(model, ...)"
                )
            model = params
            params = list(model.named_parameters())
        options = Options.of(
            moments=moments,
            weights=weights,
            activations=activations,
            device=device,
            accumulate=accumulate,
            accumulation_steps=accumulation_steps,
            deferred=deferred,
            tier=tier,
            host_bytes_max=host_bytes_max,
            device_bytes_max=device_bytes_max,
            threads=threads,
            has_model=model is not None,
        )
        self._clipping = Clipping(clip_norm)
        self.grad_norm: float | None = None
        parts = Parts.of(self, options, model)
        self._host, self._residents = parts.host, parts.residents
        self._background, self._collector = parts.background, parts.collector
        self._steps, self._spans, self._keeper = parts.steps, parts.spans, parts.keeper
        self._twins = self._host.twins
        self._admission = Admission(parts, moments, model)
        # What the last step took, as far as the engine does not know it.
        self._seconds: dict[str, float] = {}
        try:
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
                self._watch(model)
            if activations == "host" and model is not None:
                watched = Activations(model, next(model.parameters()).device)
                weakref.finalize(self, watched.end)
            if self._host.weights is not None and len(self._twins):
                # From then on what modules fetch is pinned.
                self._background.opened()
        except BaseException:
            if self._host.weights is not None:
                # Nothing else would find them.
                self._host.weights.let_go()
            raise
        tell(start_line(self._host, self._residents, self._states, moments))

    def _watch(self, model: torch.nn.Module) -> None:
        """Has forwards of the model wait for weights, or fetch them."""
        weights = self._host.weights
        if weights is not None:
            weights.watch(model)
        if weights is None or len(weights.staying):
            self._background.watch(model)

    def _names(self) -> dict[torch.Tensor, str]:
        names = [
            zip(each["params"], each.get("param_names", ()), strict=False)
            for each in self.param_groups
        ]
        return dict(itertools.chain.from_iterable(names))

    # ---- parameters ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Where the other groups have names, those of the model stand for missing ones.

        Raises:
            ValueError: an option or a parameter of the group that no step could work with; the
                group is not added.
        """
        super().add_param_group(self._admission.named(param_group, self.param_groups))

    def _admit(self, params: list[torch.Tensor]) -> None:
        # An engine that ends takes with it what it knows of its last step.
        self._keeper.note_submitted()
        for param in self._admission.let_go(set(self._in_order())):
            self._new_states.pop(param, None)
        self._admission.admit(params, self._labelled)

    def _in_order(self) -> list[torch.Tensor]:
        """All parameters, as a state dict counts them."""
        return [param for group in self.param_groups for param in group["params"]]

    def _follow_groups(self) -> None:
        """Makes ready for what has come since groups were added, and lets go of what has gone.

        What has come is thawed parameters, and those put into `param_groups`.

        Raises:
            ValueError: one of them could not be stepped.
        """
        self._admit(list(dict.fromkeys(self._in_order())))
        self._meshes = None

    # ---- state ----

    @property
    def state(self) -> defaultdict[torch.Tensor, _state.State]:
        """State by parameter, as torch's optimizers have it, after the last step is complete."""
        return self._keeper.as_seen()

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, _state.State]) -> None:
        with self._background.lock():
            if "state" in self.__dict__:
                # What is deferred is applied to that before it.
                self._keeper.settled()
            self.__dict__["state"] = state.copy() if isinstance(state, StateInMemory) else state

    @property
    def _states(self) -> defaultdict[torch.Tensor, _state.State]:
        return self._keeper.settled()

    @property
    def _store(self) -> _core.Store:
        return self._spans.store

    def _look_anew(self) -> None:
        self._new_states = {}
        self._meshes = None
        self._spans.unbind()

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        return self._twins.weight(param) if param in self._twins else param

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        is_summed = self._host.sums_on_host and param in self._twins
        return self._twins.grad(param) if is_summed else param.grad

    # ---- state dicts ----

    def _converted(
        self, param: torch.Tensor, loaded: _state.State, key: int, label: str
    ) -> _state.State:
        if param in self._residents:
            return self._residents.converted(param, loaded, label)
        return super()._converted(param, loaded, key, label)

    def state_dict(self) -> StateDict:
        """As `stepwell.AdamW.state_dict`, after the last step is complete.

        Its tensors are in host memory. See `saves_volume`.
        """
        swapped = self._host.swapped
        if swapped is not None and swapped.volume.commits and not self.saves_volume:
            self.commit()
            return pointer_to(swapped.volume, self.param_groups)
        self.synchronize()
        self._host.take_fingerprints(self._twins, self._states)
        state_dict = super().state_dict()
        states = state_dict.get("state", {})
        for index, param in enumerate(self._in_order()):
            if state := states.get(index):
                states[index] = self._keeper.in_state_dict(param, state)
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As `stepwell.AdamW.load_state_dict`; also one that points to the volume (`saves_volume`).

        Raises:
            ValueError: it does not fit, or is of a step that the volume is not at; nothing was
                changed.
        """
        swapped = self._host.swapped
        if not is_pointer(state_dict):
            super().load_state_dict(state_dict)
            return
        check_pointer(state_dict, None if swapped is None else swapped.volume)
        groups = [dict(group) for group in state_dict["param_groups"]]
        self._complete(groups)
        for live, group in zip(self.param_groups, groups, strict=True):
            live.update({key: group[key] for key in group.keys() - {"params", "param_names"}})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # After the last step is complete, whether by `load_state_dict` or by a program.
        self.synchronize()
        self._follow_groups()
        self._host.take_fingerprints(self._twins, self._states)
        self._host.note_load(has_state=bool(state.get("state")))
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OffloadAdamW holds a device and cannot be copied or pickled. "
            "hint: use its state_dict()"
        )

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

    @property
    def committed_steps(self) -> int | None:
        """How many steps of this optimizer are on its volume, to be gone on from after a crash.

        With those of the runs that it has resumed. None: it has no volume that commits.
        """
        swapped = self._host.swapped
        return None if swapped is None else swapped.volume.committed_steps

    def commit(self) -> None:
        """Commits the last step to the volume, where `Volume.commit_interval` has not.

        A run that is resumed after a crash goes on from it. Collective where ranks step together.

        Raises:
            ValueError: there is no volume that commits.
            OSError: the step failed in the background, or the commit did; or another rank's.
        """
        swapped = self._host.swapped
        if swapped is None or not swapped.volume.commits:
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
        self._admission.hook()
        return context

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Waits only for copies of gradients that no step has taken."""
        with self._collector.clearing():
            if set_to_none:
                clear_grads(self._in_order())
            else:
                super().zero_grad(set_to_none)

    # ---- the step ----

    @property
    def clip_norm(self) -> float | None:
        """What the norm of all gradients is clipped to; None: no clipping.

        May be changed between steps.
        """
        return self._clipping.norm_max

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        self._clipping.norm_max = clip_norm

    def _step(self) -> None:
        # A look at a weight on another thread may settle what is deferred.
        with self._background.lock():
            self._locked_step()

    def _locked_step(self) -> None:
        begin = time.perf_counter()
        self._finish_last()
        background = time.perf_counter() - begin
        self._background.release()
        begin = time.perf_counter()
        try:
            with self._keeper.stepping():
                is_begun = self._begin_step()
                if is_begun:
                    self._seconds["prepare"] = time.perf_counter() - begin - self._seconds["norm"]
                    begin = time.perf_counter()
                    self._background.release()
                    self._seconds["release"] = time.perf_counter() - begin
                    self._background.wait_for_weights()
        except BaseException:
            # Ctrl-C may have landed behind the submit, and nothing else waits for this.
            self._steps.leave()
            raise
        finally:
            self._collector.reset()
        self._seconds["background"] = background
        if not is_begun:
            self._steps.skip()

    def _finish_last(self) -> None:
        """Waits until the last step is complete, and committed where steps are.

        Ranks with DTensor parameters begin the next one together. So they hear of a drive that has
        failed here, and their volumes are one step apart at most.
        """
        try:
            self._background.finish()
            if self._host.swapped is not None:
                self._host.swapped.volume.check()
        except OSError:
            if self._host.swapped is not None:
                self._agree_on_step(found_inf=False, has_error=True)
            raise

    # ---- what is decided, and what is begun ----

    def _looked(self) -> Looked:
        """The gradients of the coming step, and all that it works with, checked in full.

        Raises:
            ValueError: the step cannot be done.
        """
        groups = self.param_groups
        self._hypers = [hyper_of(group, f"group {at}") for at, group in enumerate(groups)]
        self._new_states = {}
        self._keeper.note_submitted()
        states, follow = self._keeper.own, self._follow_groups
        return self._spans.look(groups, states, self._new_states, self._labelled, follow)

    def _begin_step(self) -> bool:
        """Decides on the step and has it begin; whether there is one."""
        begin = time.perf_counter()
        if self._host.weights is not None:
            self._host.weights.begin_step()
        found_inf = self._scaler_found_inf()
        if found_inf and not self._agreeing_meshes():
            return self._is_taken(Facts(found_inf=True), None, "", has_updates=False)
        error: ValueError | None = None
        looked = Looked([], [], [], [], [], [])
        inverse_scale, norm = 1.0, 0.0
        # What the program has written since the last step.
        written: list[torch.Tensor] = []
        try:
            inverse_scale = self._inverse_grad_scale()
            looked = self._looked()
        except ValueError as caught:
            error = caught
        found_inf, has_error, is_apart, is_awaited = self._agree_on_step(
            found_inf=found_inf, has_error=error is not None, params=looked.params
        )
        facts = Facts(found_inf=found_inf, has_error=has_error)
        is_first_at_lr_0 = self._is_first_at_lr_0()
        if not has_error and not found_inf:
            self._steps.decide(looked)
            norm, written = self._steps.norm_and_written(looked)
            norm *= inverse_scale
            self.grad_norm = norm
            self._seconds = {"norm": time.perf_counter() - begin}
            is_nonfinite, is_nonzero = not math.isfinite(norm), norm != 0
            if is_apart:
                is_nonfinite, is_nonzero = self._agree(is_nonfinite, is_nonzero)
                self._clipping.compare(norm, self._agreeing_meshes())
            facts = Facts(
                is_nonfinite=is_nonfinite,
                is_nonzero=is_nonzero,
                is_first_at_lr_0=is_first_at_lr_0,
            )
        what = f"the norm of the gradients is `{norm}`"
        if math.isnan(norm):
            what += WHY_NAN if self._host.sums_on_host else ""
        elif facts.is_nonfinite and math.isfinite(norm):
            what = "a gradient of another rank is not finite"
        has_updates = is_awaited or bool(looked.params)
        try:
            is_taken = self._is_taken(facts, error, what, has_updates=has_updates)
        finally:
            # Or it would refer to itself by this frame, and hold gradients.
            del error
        if not is_taken:
            return False
        self._store.has_left = True
        if written:
            # What is new in this step is verified by it.
            known = {p: s for p, s in self._states.items() if p not in self._new_states}
            self._steps.take_up(written, looked, known)
        self._submit(looked, inverse_scale * self._clipping.coefficient(norm))
        return True

    def _agree_on_step(
        self, *, found_inf: bool, has_error: bool, params: Sequence[torch.Tensor] = ()
    ) -> Sequence[bool]:
        """What any of the ranks that step together knows before a step.

        Returns:
            `found_inf`; `has_error`; whether ranks may have different norms, since some have
            parameters of their own; whether one steps what others may not have, and all commit.
        """
        places = {param.device_mesh if is_dtensor(param) else None for param in params}
        swapped = self._host.swapped
        commits = swapped is not None and swapped.volume.commits
        return self._agree(found_inf, has_error, len(places) > 1, commits and bool(params))

    def _submit(self, looked: Looked, grad_scale: float) -> None:
        """Has a step begin that was decided on."""
        hypers = [hyper.core(grad_scale) for hyper in self._hypers]
        stream = self._residents.begin()
        # State with no update counted is as none.
        self._put_new_states()
        states = self._keeper.own
        if len(self._twins):
            self._steps.submit(looked, hypers, states)
            return
        self._store.submit(hypers, buffers=[], stream=stream, record=None)

    def _put_new_states(self) -> None:
        self._host.drop_fresh(self._new_states)
        super()._put_new_states()

    # ---- what it took ----

    @property
    def timing(self) -> dict[str, float]:
        """What the last step took, in seconds, and the bytes that crossed the bus.

        - `norm`: waiting for the backward, and the norm of its gradients. A step in which no other
          rank and no volume has a part is made ready within this time.
        - `prepare`: from there until the background had the step.
        - `release`: until the device had all copies of gradients, which may be written from then
          on.
        - `step`: its first chunk to its last; within it `gradients`: waiting for them.
        - `gate`: forwards that have waited for its weights.
        - `background`: waiting for the step before, which is to be over.
        - `bytes_downloaded`, `bytes_uploaded`.
        - `oldest_age`: how many steps ago the oldest gradient was computed that is deferred.
        - `bytes_read`, `bytes_written`: with a volume, what its drives have moved since it was
          made.
        - `selected_share`: with `deferred.fraction`, which share of the squared norms the selected
          channels had when they were chosen.
        - `selected_bytes`: likewise, device memory for their state.
        - `resident_bytes`: with `device_bytes_max`, device memory for the state of the parameters
          that are stepped there.
        """
        timing = self._steps.timing()
        if len(self._residents):
            timing["resident_bytes"] = self._residents.state_nbytes
        return {**self._seconds, **timing} if timing else {}

    @property
    def deferral(self) -> DeferralMetrics | None:
        """Deferred updates in the last step; None without `deferred`, and before the first step."""
        return self._steps.deferral(self.timing)
