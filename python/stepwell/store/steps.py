"""A step before and behind the decision on it: its norm, what of it is deferred, how it begins.

Where updates are deferred, `deferred_steps` says which steps are. It does so before the norm, whose
wait scores of channels share. They are chosen when the step begins, which may have become exact.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from stepwell._sharding import is_dtensor, piece_of
from stepwell._streams import current_stream
from stepwell.access.writes import wait_for
from stepwell.store.deferred_steps import DeferralMetrics, DeferredSteps, StepKind
from stepwell.store.engine import Submitted
from stepwell.store.host_collector import HostCollector
from stepwell.store.norm import gradient_norm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepwell import _core, _state
    from stepwell.store.background import Background
    from stepwell.store.gradients import DeviceCollector
    from stepwell.store.host_side import HostSide
    from stepwell.store.spans import Looked

__all__ = ["Steps"]


class Steps:
    """Begins the steps of one optimizer beside the engine of `background`.

    Args:
        host: the host side of the parameters; it knows which updates are deferred.
        collector: brings gradients there.
        background: the engine, and the gate in front of forwards.
    """

    def __init__(
        self,
        host: HostSide,
        collector: DeviceCollector | HostCollector,
        background: Background,
    ) -> None:
        self._host, self._collector, self._background = host, collector, background
        deferred = host.deferred
        self._chooser: DeferredSteps | None = None
        if deferred is not None:
            why = background.why_unseen
            self._chooser = DeferredSteps(deferred.warmup_steps, why=why)
        # What was decided of the coming step.
        self._kind = StepKind.EXACT

    # ---- a step that is not taken ----

    def skip(self) -> None:
        """The step that was looked at is not taken. The next one is exact for that."""
        self._background.discard()
        # No forward is ahead that lands weights, so no access would be seen.
        self._background.settle()
        self._excuse_next()

    def leave(self) -> None:
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
                    if self._background.is_released:
                        self._background.discard()
                        self._background.settle()
                    else:
                        self._background.release()
                    self._background.wait_for_weights()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    def _excuse_next(self) -> None:
        """The next step is exact for what this one was, not for a look at a weight."""
        if self._chooser is not None:
            self._chooser.excuse()

    # ---- a step that is decided on ----

    def decide(self, looked: Looked) -> None:
        """Decides whether the step is deferred, and scores channels of which some may be selected.

        The norm that comes next is waited for.
        """
        self._kind = StepKind.EXACT
        engine, number = self._background.engine, looked.number
        if self._chooser is None or number == 0 or engine is None:
            return
        selector = engine.selector
        if selector is not None and selector.needs_exact:
            engine.make_exact()
        is_seen = self._background.sees_forwards
        kind = self._chooser.decide(number, is_seen=is_seen, is_settled=engine.is_settled)
        self._kind = kind
        if selector is None:
            return
        if kind is StepKind.DEFERRED:
            selector.score(*looked.hosted, engine.next_group())
        elif kind.selects:
            selector.score(*looked.hosted, None)
        else:
            selector.score([], [], None)

    def norm_and_written(self, looked: Looked) -> tuple[float, list[torch.Tensor]]:
        """The norm of the gradients, and the parameters whose weights the program has written."""
        contents = self._background.opened().contents if len(self._host.twins) else None
        if contents is None:
            return self._norm(looked, None)[0], []
        # Another optimizer may have these weights under way.
        wait_for(self._host.uploaded)
        norm, is_written = self._norm(looked, contents.look())
        return norm, contents.differing() if is_written else []

    def _norm(self, looked: Looked, flag: torch.Tensor | None) -> tuple[float, bool]:
        """The norm of the gradients, and the value of `flag`, for one wait of the thread."""
        is_set = False

        def read(scalar: torch.Tensor) -> float:
            nonlocal is_set
            value, is_set = self._collector.read(scalar, flag)
            return value

        place, norms = self._host.device, None
        if isinstance(self._collector, HostCollector):
            place = torch.device("cpu")
            norms = self._collector.norms(looked.params, looked.grads)
        return gradient_norm(looked.params, looked.grads, place, read=read, norms=norms), is_set

    def take_up(
        self,
        written: Sequence[torch.Tensor],
        looked: Looked,
        states: Mapping[torch.Tensor, _state.State],
    ) -> None:
        """Has the step go on from what the program has written.

        Args:
            written: what `Contents` has found.
            looked: the gradients of the step.
            states: the states of parameters.

        Raises:
            ValueError: a parameter that was written has updates that are deferred. They are
                applied, and the write is lost.
        """
        engine = self._background.opened()
        pending = set(map(id, engine.pending_params))
        if any(id(param) in pending for param in written):
            engine.settle()
        if engine.selector is not None and engine.selector.holds(written):
            # The device has copies of their channels, which an exact step drops.
            engine.make_exact()
            self.decide(looked)
            if self._host.device.type == "cuda":
                torch.cuda.synchronize(self._host.device)
        stepped = set(map(id, looked.params))
        taken_up = [param for param in written if id(param) in stepped]
        self._host.reread(taken_up, states)
        assert engine.contents is not None
        engine.contents.accept(taken_up)

    def submit(
        self,
        looked: Looked,
        hypers: Sequence[_core.Hyper],
        states: Mapping[torch.Tensor, _state.State],
    ) -> None:
        """Has a step begin: all of it, by one call of the core.

        Args:
            looked: its gradients.
            hypers: of each group.
            states: those that the optimizer has.

        Raises:
            ValueError: what was looked at has moved, or cannot be stepped; nothing was changed.
            OSError: the device has failed.
        """
        engine, gate = self._background.opened(), self._background.open_gate
        params, grads = looked.hosted
        twins = self._host.twins
        # Of those that are their own host sides the gradients, which are read where they are.
        read = dict(zip(params, grads, strict=True)) if twins.are_params else {}
        # After the norm, which would come down behind them; the step begins with the first that
        # is there.
        if read:
            _wait_for_reads(params)
        elif missing := self._collector.missing(looked.params, looked.grads):
            engine.take_looked_at(missing)
        self._host.prepare_commit(params, states)
        # Weights of deferred updates land with this step, also those of parameters without
        # update.
        landing = engine.store.landing
        gated = [param for param in landing if not self._host.is_away(param)]
        shared = [] if gate is None else self._background.exposed(gated, read)
        at_once, num_settled = None, engine.store.num_settled
        kind = self._kind.now(is_settled=engine.is_settled)
        others = landing[len(params) :]
        if gate is None or {*map(id, shared)} & {*map(id, others)}:
            # No forward is known to wait for what would land.
            kind = StepKind.EXACT
        elif kind is StepKind.DEFERRED:
            # The step waits for the weights of these, since no forward is known to. And what
            # they name in memory is on the volume after this step, and so is what comes next.
            at_once = set(gate.not_covered(params, shared))
            at_once.update(param for param, _, _ in looked.swapping)
        verified = [p for p in params if twins.are_params or twins[p].is_unverified]
        stream = current_stream(self._host.device)
        coming = Submitted(stream, looked.swapping, params, verified)
        protections = [] if gate is None else [gate.opening(gated, shared, read)]
        if self._host.weights is not None:
            stepped = ((p, twins[p].weight) for p in params if self._host.is_away(p))
            protections.append(self._host.weights.protection(stepped))
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
            owners=[piece_of(each).untyped_storage() for pair in read.items() for each in pair],
            protections=[each for each in protections if each is not None],
        )
        if self._chooser is not None:
            self._chooser.note(kind)

    def timing(self) -> dict[str, float]:
        """What the engine and the bus took for the last step, as `OffloadAdamW.timing` has it.

        Empty before the first one.
        """
        engine, swapped = self._background.engine, self._host.swapped
        if engine is None:
            return {}
        timing = {"gate": engine.seconds_waited, **engine.timing()}
        if engine.selector is not None:
            timing["selected_share"] = engine.selector.share
            timing["selected_bytes"] = engine.selected_bytes
        if isinstance(self._collector, HostCollector):
            timing["bytes_downloaded"] = self._collector.nbytes
        if swapped is not None:
            timing.update(swapped.volume.bytes_moved())
        return timing

    def deferral(self, timing: Mapping[str, float]) -> DeferralMetrics | None:
        """Deferred updates in the last step; None where none are, and before the first step.

        `timing`: what the step took, as `OffloadAdamW.timing` has it.
        """
        if self._host.deferred is None or self._background.engine is None:
            return None
        return DeferralMetrics.of(self._host.deferred.interval, timing)


def _wait_for_reads(params: Sequence[torch.Tensor]) -> None:
    """Waits until what FSDP2 has launched has read shards in host memory, which a step writes."""
    for kind in {param.device_mesh.device_type for param in params if is_dtensor(param)} - {"cpu"}:
        torch.get_device_module(kind).synchronize()
