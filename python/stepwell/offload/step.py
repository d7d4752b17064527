"""A step of OffloadAdamW: looked at, decided on the device, begun by one call, and what it took.

- Everything that may fail comes before the first change. One norm of all gradients decides
  (`_begin_step`). What a program does to weights in the wait for it may be lost.
- However a step ends, what it would have waited for is waited for: after it gradients may be
  written, and weights that no forward waits for are there (`_locked_step`, `_leave_step`).
- A step that is skipped or left by an error has the next one be exact, where updates are deferred.

Cost: the thread waits for the norm, and for copies of gradients that the device does not have yet.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core, _state
from stepwell._binding import bind
from stepwell._decision import Facts, Outcome, decide
from stepwell._hyper import hyper_of
from stepwell._sharding import PLAIN, greatest, is_dtensor
from stepwell.offload.deferral import DeferralMetrics
from stepwell.offload.gradients import apart_from, check_in_place, memories_of, piece_of
from stepwell.offload.norm import CLIP_EPS, gradient_norm
from stepwell.offload.sharding import UpdateFacts, awaited
from stepwell.offload.state_dicts import OffloadStateDicts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepwell.offload.collector import Collector
    from stepwell.offload.deferred_steps import DeferredSteps
    from stepwell.offload.engine import Engine
    from stepwell.offload.residents import ResidentUpdate

__all__ = ["OffloadStep"]

_LOGGER = logging.getLogger(__name__)

# Of clip coefficients, relative: devices of several kinds may round one norm differently.
_CLIP_TOLERANCE = 1e-5


class _Looked(NamedTuple):
    """The gradients of a step, all of them checked."""

    groups: list[int]
    """Of each parameter that the host steps its group."""
    params: list[torch.Tensor]
    """These parameters."""
    grads: list[torch.Tensor]
    """Of each the gradient, as it is stepped."""
    numbers: list[int]
    """Of each which update it is, from 1."""
    on_device: list[ResidentUpdate]
    """What the device steps."""

    @property
    def number(self) -> int:
        """Which update it is of the parameter that has seen most; 0: there is none."""
        return max([*self.numbers, *(each.step for each in self.on_device)], default=0)


def _has_grad(param: torch.Tensor) -> bool:
    return param.grad is not None


class OffloadStep(OffloadStateDicts):
    """The same as far as it steps."""

    _collector: Collector
    _deferred_steps: DeferredSteps | None
    grad_norm: float | None
    # What the last step took, as far as the engine does not know it.
    _seconds: dict[str, float]
    _has_warned_of_clipping = False
    # Of the look under way: what the state of a parameter on a volume becomes.
    _swapping: list[tuple[torch.Tensor, _state.State, _state.State]]

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

    # ---- from the call to its end ----

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
        self._stepping_on = threading.get_ident()
        try:
            is_begun = self._begin_step()
            if is_begun:
                self._seconds["prepare"] = time.perf_counter() - begin - self._seconds["norm"]
                begin = time.perf_counter()
                self._background.release()
                self._seconds["release"] = time.perf_counter() - begin
                self._background.wait_for_weights()
        except BaseException:
            # Ctrl-C may have landed behind the submit, and nothing else waits for this.
            self._leave_step()
            raise
        finally:
            self._stepping_on = None
            self._collector.reset()
        self._seconds["background"] = background
        if not is_begun:
            self._background.discard()
            # No forward is ahead that lands weights, so no access would be seen.
            self._background.settle()
            self._excuse_next()
            self._twins.mark_stale(self._twins)

    def _finish_last(self) -> None:
        """Waits until the last step is complete, and committed where steps are.

        Ranks that share parameters begin the next one together. So they hear of a drive that has
        failed here, and their volumes are one step apart at most.
        """
        try:
            self._background.finish()
            if self._host.swapped is not None:
                self._host.swapped.check()
        except OSError:
            if self._host.swapped is not None and self._sharding is None:
                self._agree_on_step(found_inf=False, has_error=True)
            raise

    def _excuse_next(self) -> None:
        """The next step is exact for what this one was, not for a look at a weight."""
        if self._deferred_steps is not None:
            self._deferred_steps.excuse()

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
                    self._background.withdraw()
                    if self._background.is_released:
                        self._background.discard()
                        self._background.settle()
                        self._twins.mark_stale(self._twins)
                    else:
                        self._background.release()
                    self._background.wait_for_weights()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    # ---- what is looked at ----

    @abc.abstractmethod
    def _is_known(self, param: torch.Tensor) -> bool:
        """Whether it was admitted."""

    def _looked(self) -> _Looked:
        """The gradients of the coming step, and all that it works with, checked in full.

        Raises:
            ValueError: the step cannot be done.
        """
        groups = self.param_groups
        self._hypers = [hyper_of(group, f"group {at}") for at, group in enumerate(groups)]
        self._swapping, self._new_states = [], {}
        store, look = self._look_at_groups()
        if not self._is_every_known(look):
            # Groups were edited.
            self._follow_groups()
            store, look = self._look_at_groups()
        if look.has_unknown:
            frozen = next(p for p in self._in_order() if not self._is_known(p) and _has_grad(p))
            check_in_place(frozen, None, self._host.device, self._label)
        on_device = self._on_device()
        grads = list(look.grads)
        moved: Sequence[int] = look.moved
        if self._collector.sums_on_host:
            moved = range(len(grads))
        if moved:
            params = look.params
            found = self._collector.gradients(
                [params[at] for at in moved], self._background.idle, self._label
            )
            self._bind_each(store, look, grads, dict(zip(moved, found, strict=True)))
        weights = [(each.param.data_ptr(), each.param.nbytes) for each in on_device]
        if overlapping := store.overlapping(weights):
            # The step reads some gradients when other weights are there already.
            self._bind_each(store, look, grads, {at: grads[at].clone() for at in overlapping})
        return _Looked(look.groups, look.params, grads, store.numbers(), on_device)

    def _look_at_groups(self) -> tuple[_core.Store, _core.Look]:
        """The store with its look at the parameters of the groups.

        Raises:
            ValueError: one that has a gradient was never admitted: it is frozen.
        """
        groups, store = self.param_groups, self._store
        seeds = [group["seed"] for group in groups]
        if seeds != self._seeds:
            store.unbind()
            self._seeds = seeds
        store.set_apart(list(self._residents))
        states = self.__dict__["state"] if self._is_state_seen else None
        look = store.look([group["params"] for group in groups], states)
        return store, look

    def _is_every_known(self, look: _core.Look) -> bool:
        """Whether the groups have the parameters that were admitted, and no others."""
        return look.num_seen == len(self._twins) + len(self._residents) and not look.has_unknown

    def _bind_each(
        self,
        store: _core.Store,
        look: _core.Look,
        grads: list[torch.Tensor],
        found: Mapping[int, torch.Tensor],
    ) -> None:
        """Gives the store what it has to know anew of the coming step.

        Args:
            store: the store.
            look: its last look.
            grads: the look's gradients; what is stepped instead of one takes its place.
            found: by the position in these lists the gradient that is stepped.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        labels = dict(self._labelled())
        ordinals = {id(param): at for at, param in enumerate(labels)}
        params, own, groups = look.params, look.grads, look.groups
        for at, grad in found.items():
            param = params[at]
            twin = self._twins[param]
            state, is_kept = self._kept_state_to_step(param, labels[param])
            is_own = grad is own[at]
            grads[at] = grad
            bind(
                store,
                at,
                weight=twin.weight,
                grad=piece_of(grad),
                grad_view=twin.grad_view,
                piece=None if type(param) in PLAIN else piece_of(param),
                state=state,
                moments=self._moments,
                rounding=self._rounding(ordinals[id(param)], self.param_groups[groups[at]], param),
                label=partial(labels.__getitem__, param),
                is_kept=is_kept and is_own,
            )

    def _kept_state_to_step(self, param: torch.Tensor, label: str) -> tuple[_state.State, bool]:
        """The state that a step of `param` works with, and whether the next one may go on with it.

        It is put where programs find it when the step is taken.

        Raises:
            ValueError: what the optimizer has does not fit the parameter.
        """
        states, swapped, weight = self._states, self._host.swapped, self._twins.weight(param)
        known = states.get(param) or self._host.fresh_state(param)
        state = _state.new(weight, self._moments) if known is None else known
        state = _state.refreshed(weight, state, self._moments, label)
        is_kept = True
        if swapped is not None and param in swapped:
            swapped.note_places()
            if not swapped.is_place(param, state):
                # What is stepped has copies of them.
                self._host.take_fingerprints([param], {param: state})
                state, placed = self._host.write_through(param, state, label)
                self._swapping.append((param, state, placed))
                is_kept = False
        else:
            # The step goes on in the background, and works on the state itself.
            _state.make_dense(weight, state, self._moments)
        if states.get(param) is not state:
            self._new_states[param] = state
        return state, is_kept

    def _on_device(self) -> list[ResidentUpdate]:
        """What the device steps of the parameters that have a gradient.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        residents = self._residents
        if not len(residents):
            return []
        stepped = [p for p in self._in_order() if id(p) in residents.ids and _has_grad(p)]
        grads = residents.gradients(stepped, self._label)
        grads = apart_from(memories_of([*self._twins, *residents]), grads)
        by_id = {id(param): grad for param, grad in zip(stepped, grads, strict=True)}
        return residents.updates(self.param_groups, by_id, self.__dict__["state"], self._label)

    def _in_norm(self, looked: _Looked) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All parameters and their gradients, in the order of the groups.

        A norm is summed in that order, so its bits do not depend on which are stepped where.
        """
        if not looked.on_device:
            return looked.params, looked.grads
        by_id = {id(p): grad for p, grad in zip(looked.params, looked.grads, strict=True)}
        by_id.update((id(each.param), each.grad) for each in looked.on_device)
        params = [param for param in self._in_order() if id(param) in by_id]
        return params, [by_id[id(param)] for param in params]

    # ---- what is decided, and what is begun ----

    def _begin_step(self) -> bool:
        """Decides on the step and has it begin; whether there is one."""
        begin = time.perf_counter()
        if self._collector.sums_on_host and getattr(self, "found_inf", None) is not None:
            raise ValueError(
                "GradScaler cannot see gradients under accumulate='host'. hint: accumulate='device'"
            )
        found_inf = self._scaler_found_inf()
        if found_inf and self._sharding is None and not self._agreeing_meshes():
            return self._is_taken(Facts(found_inf=True), None, "", has_updates=False)
        error: ValueError | None = None
        looked = _Looked([], [], [], [], [])
        inverse_scale, norm = 1.0, 0.0
        with awaited(self._sharding):
            try:
                inverse_scale = self._inverse_grad_scale()
                looked = self._looked()
                if self._sharding is not None:
                    self._sharding.check_batches()
            except ValueError as caught:
                error = caught
            found_inf, has_error, is_apart, is_awaited = self._agree_on_step(
                found_inf=found_inf, has_error=error is not None, looked=looked
            )
        facts = Facts(found_inf=found_inf, has_error=has_error)
        is_first_at_lr_0 = self._is_first_at_lr_0()
        if not has_error and not found_inf:
            with awaited(self._sharding):
                stale = self._stale_of(looked.params)
                self._score(looked, stale)
                self._host.reread(stale, self._states)
                params, grads = self._in_norm(looked)
                collector = self._collector
                norm = gradient_norm(params, grads, collector.place, read=collector.read)
                norm *= inverse_scale
                if self._sharding is not None:
                    self._sharding.peers.check_norm(norm)
            self.grad_norm = norm
            self._seconds = {"norm": time.perf_counter() - begin}
            is_nonfinite, is_nonzero = not math.isfinite(norm), norm != 0
            if is_apart:
                is_nonfinite, is_nonzero = self._agree(is_nonfinite, is_nonzero)
                self._compare_clipping(norm)
            facts = Facts(
                is_nonfinite=is_nonfinite,
                is_nonzero=is_nonzero,
                is_first_at_lr_0=is_first_at_lr_0,
            )
        what = f"the norm of the gradients is `{norm}`"
        if math.isnan(norm):
            what += self._collector.explain_nan()
        elif facts.is_nonfinite and math.isfinite(norm):
            what = "a gradient of another rank is not finite"
        if decide(facts, self._nonfinite) is Outcome.MAKE_STATE:
            self._new_states.update((each.param, each.stand_in) for each in looked.on_device)
        has_updates = is_awaited or bool(looked.params) or bool(looked.on_device)
        try:
            is_taken = self._is_taken(facts, error, what, has_updates=has_updates)
        finally:
            # Or it would refer to itself by this frame, and hold gradients.
            del error
        if not is_taken:
            return False
        self._store.has_left = True
        has_engine = len(self._twins) > 0
        with self._background.opened().decided() if has_engine else contextlib.nullcontext():
            self._submit(looked, inverse_scale * self._clip_coefficient(norm))
        return True

    def _agree_on_step(
        self, *, found_inf: bool, has_error: bool, looked: _Looked | None = None
    ) -> Sequence[bool]:
        """What any of the ranks that step together knows before a step.

        Returns:
            `found_inf`; `has_error`; whether ranks may have different norms, since some have
            parameters of their own; whether one steps what others may not have, and all commit.

        Raises:
            ValueError: on all ranks: they step different parameters or differently, or weights
                differ.
            OSError: another rank is gone, or has left a step that others have taken.
        """
        params = [] if looked is None else looked.params
        if self._sharding is None:
            places = {param.device_mesh if is_dtensor(param) else None for param in params}
            swapped = self._host.swapped
            commits = swapped is not None and swapped.commits
            return self._agree(found_inf, has_error, len(places) > 1, commits and bool(params))
        updates = []
        if looked is not None and not has_error:
            updates = [
                UpdateFacts(self._hypers[group], number, self._seeds[group])
                for group, number in zip(looked.groups, looked.numbers, strict=True)
            ]
        found = self._sharding.agree(
            params,
            updates,
            clip_norm=self.clip_norm,
            nonfinite=self._nonfinite,
            has_error=has_error,
            found_inf=found_inf,
            is_rounded=self._moments != "fp32",
            is_written=not has_error and bool(self._twins.stale(params)),
            checksums=lambda weights: self._background.opened().checksums(weights),
            label=self._label,
        )
        return [*found, False, False]

    def _stale_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params`, which the host steps, that other code may have written.

        Raises:
            ValueError: one that was written has updates that are deferred, whether it is among
                `params` or not.
        """
        stale, engine = self._twins.stale(), self._engine
        if stale and engine is not None and engine.has_pending():
            pending = set(map(id, engine.pending_params))
            if any(id(param) in pending for param in stale):
                engine.settle()
        if not stale:
            return []
        known = set(map(id, params))
        return [param for param in stale if id(param) in known]

    def _score(self, looked: _Looked, stale: Sequence[torch.Tensor]) -> None:
        """Scores channels of which some may be selected; the norm that comes next is waited for.

        Called before `reread`, behind which weights that were written differ from none of the host.

        Args:
            looked: the gradients of the step.
            stale: those of the parameters that may have been written.
        """
        steps, number = self._deferred_steps, looked.number
        engine = self._engine
        if steps is None or number == 0 or engine is None or engine.selector is None:
            return
        selector = engine.selector
        if selector.needs_exact:
            engine.make_exact()
        # Of channels of weights that were written the device has copies, which an exact step drops.
        # By the bits: what is marked stale depends on what was seen, which a resumed run has not.
        differs = self._twins.differs
        if any(selector.holds([one]) and differs(one) for one in stale):
            engine.make_exact()
        if self._is_deferred(engine, number):
            selector.score(looked.params, looked.grads, engine.next_group())
        elif steps.is_followed_by_deferred(number, is_seen=self._is_seen()):
            selector.score(looked.params, looked.grads, None)
        else:
            selector.score([], [], None)

    def _is_seen(self) -> bool:
        """Whether forwards are seen, and so every other look at a weight."""
        return self._background.open_gate is not None

    def _is_deferred(self, engine: Engine, number: int) -> bool:
        """Whether a step is deferred; `number`: which update it is of the most stepped one."""
        return self._deferred_steps is not None and self._deferred_steps.is_deferred(
            number, is_seen=self._is_seen(), is_settled=engine.is_settled
        )

    def _submit(self, looked: _Looked, grad_scale: float) -> None:
        """Has a step begin that was decided on."""
        hypers = [hyper.core(grad_scale) for hyper in self._hypers]
        residents = self._residents.launch(looked.on_device, grad_scale)
        # State with no update counted is as none.
        states = self.__dict__["state"]
        states.update(self._new_states)
        states.update((each.param, each.stand_in) for each in looked.on_device)
        self._host.drop_fresh(self._new_states)
        self._new_states = {}
        if not len(self._twins):
            self._store.submit(
                hypers,
                buffers=[],
                stream=self._residents.stream,
                record=None,
                residents=residents,
            )
            return
        engine, gate = self._background.opened(), self._background.open_gate
        # After the norm, which would come down behind them; the step begins with the first that
        # is there.
        self._collector.take_missing(looked.params, looked.grads, engine)
        self._host.prepare_commit(looked.params, states)
        # Weights of deferred updates land with this step, also those of parameters without
        # update.
        landing = engine.store.landing
        shared = [] if gate is None else self._background.exposed(landing)
        at_once, number = None, looked.number
        is_seen, is_settled = self._is_seen(), engine.is_settled
        others = landing[len(looked.params) :]
        num_settled, closed = engine.store.num_settled, self._background.gate
        is_deferred = self._is_deferred(engine, number)
        may_defer = closed is not None and not {*map(id, shared)} & {*map(id, others)}
        if may_defer and closed is not None and is_deferred:
            # The step waits for the weights of these, since no forward is known to. And what
            # they name in memory is on the volume after this step, and so is what comes next.
            at_once = set(closed.not_covered(looked.params, shared))
            at_once.update(param for param, _, _ in self._swapping)
        self._note_submitted()
        fingerprints = self._host.fingerprints
        verified = [param for param in looked.params if fingerprints.is_unverified(param)]
        # Ctrl-C may land in all that is Python. So this comes before the submit, and does no
        # harm without it: host and device hold the same weights, and there is nothing to wait
        # for.
        self._twins.mark_stale(self._twins.left_out(landing))
        self._twins.note_storages(landing)
        coming = engine.announce(self._swapping, looked.params, verified)
        options: dict[str, Any] = engine.options(looked.params)
        if gate is not None:
            options["under_way"] = gate.opening(landing, shared)
        selected = []
        if engine.selector is not None:
            selected = engine.selector.choose(at_once)
            engine.selector.drop(at_once or ())
        engine.submit(
            coming,
            hypers,
            at_once=at_once,
            selected=selected,
            num_settled=num_settled,
            residents=residents,
            **options,
        )
        if self._deferred_steps is not None and may_defer:
            self._deferred_steps.note(number, is_seen=is_seen, is_settled=is_settled)
        # The step itself waits for these, so that no look is seen, and no write by `.data`. Not
        # where memory is shared: writes to it are not seen anyway.
        exposed = set(map(id, shared))
        waited = landing if gate is None else gate.uncovered
        self._twins.mark_stale(each for each in waited if id(each) not in exposed)

    def _clip_coefficient(self, norm: float) -> float:
        if self.clip_norm is None:
            return 1.0
        # In this order NaN gives 1: the core takes no scale that is not finite.
        return min(1.0, self.clip_norm / (norm + CLIP_EPS))

    def _compare_clipping(self, norm: float) -> None:
        """Warns once where ranks clip pieces of one parameter differently.

        All ranks that hold pieces have to call it.
        """
        coefficient = self._clip_coefficient(norm)
        most, minus_least = greatest(self._agreeing_meshes(), [coefficient, -coefficient])
        if most + minus_least <= _CLIP_TOLERANCE * most or self._has_warned_of_clipping:
            return
        self._has_warned_of_clipping = True
        _LOGGER.warning(
            "clip_norm scales gradients by %g on one rank and by %g on another, also those of "
            "pieces of one parameter: parameters that are no DTensors have gradients of each "
            "rank's own. hint: reduce these gradients over the ranks before step(); or shard the "
            "parameters as well; or clip_norm=None",
            -minus_least,
            most,
        )

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
        - `bytes_gathered`: with `shard`, of weights that came from other ranks.
        - `selected_share`: with `deferred.fraction`, which share of the squared norms the selected
          channels had when they were chosen.
        - `selected_bytes`: likewise, device memory for their state.
        - `resident_bytes`: with `device_bytes_max`, device memory for the state of the parameters
          that are stepped there.
        """
        resident: dict[str, float] = {}
        if len(self._residents):
            resident["resident_bytes"] = self._residents.state_nbytes
        if self._engine is None:
            return {**self._seconds, **resident} if resident else {}
        timing = {
            **self._seconds,
            "gate": self._engine.seconds_waited,
            **self._engine.timing(),
            **resident,
        }
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
        deferred = self._host.deferred
        if deferred is None or self._engine is None:
            return None
        return DeferralMetrics.of(deferred.interval, self.timing)
