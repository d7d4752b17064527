"""A step of OffloadAdamW: decided on the device, submitted to the background, and what it took.

- One norm of all gradients decides (`_begin_step`): everything that may fail comes before the first
  change. What is submitted is made ready while the device computes it (`submission`). What a
  program may change meanwhile is looked at again behind it.
- However a step ends, what it would have waited for is waited for: after it gradients may be
  written, and weights that no forward waits for are there (`_locked_step`, `_leave_step`).
- A step that is skipped or left by an error has the next one be exact, where updates are deferred.
  The error holds no memory of the step.

Cost: the thread waits for the norm, and for copies of gradients that the device does not have yet.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from stepwell._decision import Facts, Outcome, decide
from stepwell._sharding import greatest, is_dtensor
from stepwell.offload.addresses import Addresses
from stepwell.offload.deferral import DeferralMetrics
from stepwell.offload.gradients import apart_from, memories_of
from stepwell.offload.norm import CLIP_EPS, gradient_norm
from stepwell.offload.sharding import awaited
from stepwell.offload.submission import OffloadSubmission, OnDevice, Prepared, number_of
from stepwell.offload.version_counts import OutdatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stepwell._operand import Update
    from stepwell.offload.collector import Collector
    from stepwell.offload.gradients import Known

__all__ = ["OffloadStep"]

_LOGGER = logging.getLogger(__name__)

# Of clip coefficients, relative: devices of several kinds may round one norm differently.
_CLIP_TOLERANCE = 1e-5

# A step that is overtaken is made ready anew, but not for ever.
_TRIES_MAX = 8


class OffloadStep(OffloadSubmission):
    """The same as far as it steps."""

    _collector: Collector
    grad_norm: float | None
    # What the last step took, as far as the engine does not know it.
    _seconds: dict[str, float]
    _has_warned_of_clipping = False

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
        except BaseException as error:
            # Ctrl-C may have landed behind the submit, and nothing else waits for this.
            try:
                self._leave_step()
            finally:
                _clear_frames(error)
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
                self._agree_on_step(found_inf=False, has_error=True, params=[], updates=[])
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
                    if self._background.is_unreleased:
                        self._background.release()
                    else:
                        if self._engine is not None:
                            self._engine.withdraw()
                        self._background.discard()
                        self._background.settle()
                        self._twins.mark_stale(self._twins)
                    self._background.wait_for_weights()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    # ---- what is decided, and what is submitted ----

    def _begin_step(self) -> bool:
        """Decides on the step and hands it to the background; whether there is one."""
        begin = time.perf_counter()
        if self._collector.sums_on_host and getattr(self, "found_inf", None) is not None:
            raise ValueError(
                "GradScaler cannot see gradients under accumulate='host'. hint: accumulate='device'"
            )
        found_inf = self._scaler_found_inf()
        if found_inf and self._sharding is None and not self._agreeing_meshes():
            return self._is_taken(Facts(found_inf=True), [], None, "")
        is_apart = is_awaited = False
        error: ValueError | None = None
        stepped: list[torch.Tensor] = []
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        updates: list[Update] = []
        on_device = OnDevice([], [], [])
        inverse_scale = 1.0
        norm = 0.0
        number = 0
        prepared: Prepared | None = None
        addresses: Addresses | None = None
        with awaited(self._sharding):
            try:
                inverse_scale = self._inverse_grad_scale()
                stepped = self._stepped()
                # Weights of deferred updates land with the step as well.
                engine = self._engine
                landing = [] if engine is None else engine.pending_params
                memories = memories_of([*stepped, *landing])
                residents = self._residents.ids
                params = [param for param in stepped if id(param) not in residents]
                grads = self._collector.gradients(params, self._background.idle, self._label)
                grads = apart_from(memories, grads)
                updates = self._updates()
                on_device = self._on_device(stepped, memories)
                if self._sharding is not None:
                    self._sharding.check_batches()
            except ValueError as caught:
                error = caught
            if self._sharding is None:
                found_inf, has_error, is_apart, is_awaited = self._agree_on_step(
                    found_inf=found_inf,
                    has_error=error is not None,
                    params=params,
                    updates=updates,
                )
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
                    checksums=lambda weights: self._background.opened().checksums(weights),
                    label=self._label,
                )
        facts = Facts(found_inf=found_inf, has_error=has_error)
        is_first_at_lr_0 = self._is_first_at_lr_0()
        if not has_error and not found_inf:
            with awaited(self._sharding):
                stale = self._stale_of(params)
                number = number_of(updates, on_device.updates)
                self._score(params, grads, number, stale)
                self._host.reread(stale, self.state)
                # Not where other ranks wait for what this one says next, nor where it writes, nor
                # where nothing is stepped.
                is_alone = self._sharding is None and not self._agreeing_meshes()
                is_early = (
                    is_alone and self._host.swapped is None and number > 0 and not is_first_at_lr_0
                )
                prepare = partial(self._prepare, updates, on_device, params, grads)
                all_params, all_grads = on_device.merged(stepped, params, grads)
                addresses = Addresses.of(all_params, all_grads)
                norm, prepared = self._norm_of(all_params, all_grads, prepare if is_early else None)
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
        states = self.__dict__["state"]
        if decide(facts, self._nonfinite) is Outcome.MAKE_STATE:
            states.update((each.param, each.stand_in) for each in on_device.updates)
        steps_any = is_awaited or bool(on_device.updates)
        if not self._is_taken(facts, updates, error, what, is_awaited=steps_any):
            return False
        self._has_left = True
        grad_scale = inverse_scale * self._clip_coefficient(norm)
        assert addresses is not None
        if not len(self._twins):
            addresses.check(self._known, self._label)
            self._submit(prepared or prepare(), grad_scale, number, is_checked=False)
            return True
        engine = self._background.opened()
        with engine.decided():
            # After the norm, which would come down behind them; the step begins with the first that
            # is there.
            self._collector.take_missing(params, grads, engine)
            for tries_left in reversed(range(_TRIES_MAX)):
                addresses.check(self._known, self._label)
                if self._sharding is None and (written := self._stale_of(params)):
                    # By a signal's handler or another thread, since the step was checked.
                    self._drop_written(written)
                    self._host.reread(written, states)
                    prepared = None
                is_checked = self._sharding is None and tries_left > 0
                try:
                    self._submit(prepared or prepare(), grad_scale, number, is_checked=is_checked)
                    break
                except OutdatedError:
                    # Nothing was stepped. What was ready is of before, and so is what was selected.
                    engine.withdraw()
                    self._background.finish()
                    engine.is_settled, prepared = True, None
                    if tries_left == 1:
                        _LOGGER.warning(
                            "weights were written %d times while one step was made ready; what is "
                            "written before it has begun is lost. hint: write weights between "
                            "steps",
                            _TRIES_MAX - 1,
                        )
        return True

    def _norm_of(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        prepare: Callable[[], Prepared] | None,
    ) -> tuple[float, Prepared | None]:
        """The norm of all gradients, and what `prepare` has made while the device computed it.

        Args:
            params: the parameters.
            grads: their gradients.
            prepare: None: nothing is made meanwhile.
        """
        made: list[Prepared] = []

        def meanwhile() -> None:
            if prepare is not None:
                # An error in it leaves the step, which other ranks may take.
                had_left, self._has_left = self._has_left, True
                made.append(prepare())
                self._has_left = had_left

        collector = self._collector
        read = partial(collector.read, meanwhile=meanwhile)
        norm = gradient_norm(params, grads, collector.place, read=read)
        return norm, made[0] if made else None

    def _on_device(self, stepped: Sequence[torch.Tensor], memories: Collection[int]) -> OnDevice:
        """What the device steps of the parameters that have a gradient.

        Args:
            stepped: these.
            memories: `memories_of` all weights that the step writes.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        residents = self._residents
        params = [param for param in stepped if id(param) in residents.ids]
        if not params:
            return OnDevice([], [], [])
        grads = apart_from(memories, residents.gradients(params, self._label))
        by_id = {id(param): grad for param, grad in zip(params, grads, strict=True)}
        updates = residents.updates(self.param_groups, by_id, self.__dict__["state"], self._label)
        return OnDevice(params, grads, updates)

    def _agree_on_step(
        self,
        *,
        found_inf: bool,
        has_error: bool,
        params: Sequence[torch.Tensor],
        updates: Sequence[Update],
    ) -> list[bool]:
        """What any of the ranks that hold pieces of DTensors knows before a step.

        Returns:
            `found_inf`; `has_error`; whether ranks may have different norms, since some have
            parameters of their own; whether one steps what others may not have, and all commit.
        """
        places = {param.device_mesh if is_dtensor(param) else None for param in params}
        swapped = self._host.swapped
        commits = swapped is not None and swapped.commits
        return self._agree(found_inf, has_error, len(places) > 1, commits and len(updates) > 0)

    def _known(self, param: torch.Tensor) -> Known | None:
        """What a parameter was when it was added; None: it never was."""
        return self._twins.get(param) or self._residents.known(param)

    def _stale_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params`, which the host steps, that other code may have written.

        Raises:
            ValueError: one that was written has updates that are deferred, whether it is among
                `params` or not.
        """
        stale, engine = self._twins.stale(), self._engine
        if engine is not None and any(map(engine.is_pending, stale)):
            engine.settle()
        if not stale:
            return []
        known = set(params)
        return [param for param in stale if param in known]

    def _stepped(self) -> list[torch.Tensor]:
        """The parameters that have a gradient, after groups that were edited have been followed."""
        twins, residents = self._twins.ids, self._residents.ids
        params, num_known, is_any_new = [], 0, False
        for group in self.param_groups:
            for param in group["params"]:
                is_known = id(param) in twins or id(param) in residents
                num_known += is_known
                if param.grad is not None:
                    params.append(param)
                    is_any_new |= not is_known
        if num_known < len(twins) + len(residents) or is_any_new:
            self._follow_groups()
        return params

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


def _clear_frames(error: BaseException) -> None:
    """Has an error that left a step, and may be kept by the program, hold nothing of the step.

    Memory of weights that a frame refers to would be taken for shared in every step to come, and
    nothing be deferred any more. Frames of other code stay as they are.
    """
    left, seen = [error], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        left += [each for each in (one.__context__, one.__cause__) if each is not None]
        found = one.__traceback__
        while found is not None:
            if found.tb_frame.f_globals.get("__name__", "").startswith("stepwell."):
                # One that goes on is not cleared.
                with contextlib.suppress(RuntimeError):
                    found.tb_frame.clear()
            found = found.tb_next
