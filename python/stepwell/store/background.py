"""What steps in the background: an engine, and the gate in front of forwards.

- An engine is made when it is first needed, for the parameters that there are by then. It ends when
  the parameters change: it is made for a fixed list. The gate stays.
- From the beginning of a step to `release` the program may not write gradients. So what an error or
  Ctrl-C has left unreleased stays known until something releases it.
- Waits go through the gate where there is one: it knows which weights are under way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from stepwell._sharding import is_dtensor
from stepwell.access.gate import LANDING_BYTES_MAX, Gate
from stepwell.store.deferred import Extents
from stepwell.store.deferred_steps import COMPILED
from stepwell.store.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from stepwell.store.host_side import HostSide

__all__ = ["Background"]

_LOGGER = logging.getLogger(__name__)

_GIVE_MODEL = (
    "hint: OffloadAdamW(model, ...), or model=model beside parameters; nothing to do where no "
    "module has them"
)

# How long the end of the program waits for the call of `step` of another thread.
_OTHER_STEP_S_MAX = 10.0


class Background:
    """The engine and the gate of one optimizer.

    Args:
        host: the host side of the parameters.
        threads: workers that step, as `OffloadAdamW` has it.
        label: what errors call a parameter.
    """

    def __init__(
        self,
        host: HostSide,
        *,
        threads: int | None,
        label: Callable[[torch.Tensor], str],
    ) -> None:
        self._host = host
        self._twins = host.twins
        self._deferred = host.deferred
        self._threads = threads
        self._label = label
        # Of all engines that there will be: one may be made, or closed, by the thread that has it.
        self._lock = threading.RLock()
        self.engine: Engine | None = None
        """None: it was not needed yet, or was closed."""
        self.gate: Gate | None = None
        """None: no model is given, or there is no engine."""
        self._gate: Gate | None = None
        self._has_told = False

    def watch(self, model: torch.nn.Module) -> None:
        """Has forwards of this model wait for the weights that they need."""
        self._gate = Gate(
            model,
            self._host.gated,
            wait_bytes_max=0 if self._deferred is None else LANDING_BYTES_MAX,
        )

    # ---- from the first need to the end ----

    def opened(self) -> Engine:
        """The engine, which is made when it is first needed: by then all groups are there.

        Raises:
            OSError: the device or the memory cannot be had.
        """
        if self.engine is None:
            engine = self._made()
            gate = self._gate
            # What is deferred is applied by each rank for itself; its forwards are collective.
            if self._deferred is not None and any(map(is_dtensor, self._twins)):
                gate = None
            if gate is not None:
                gate.attach(self._host.gated, engine)
            self.engine, self.gate = engine, gate
        return self.engine

    def _made(self) -> Engine:
        """The engine of all parameters that there are."""
        twins, swapped, deferred = self._twins, self._host.swapped, self._deferred
        params, uploaded = list(twins), self._host.uploaded
        engine = Engine(
            self._host.device,
            params,
            Extents.of(params),
            twins=twins,
            uploaded=None if len(uploaded) == len(self._twins) else uploaded,
            threads=self._threads,
            threads_share=self._host.hosted_share,
            deferred=deferred,
            tier=None if swapped is None else swapped.volume.tier(params),
            label=self._label,
            lock=self._lock,
        )
        try:
            self._pin(engine)
        except BaseException:
            # What is pinned already could not be pinned once more.
            engine.close()
            raise
        return engine

    def _pin(self, engine: Engine) -> None:
        twins, swapped = self._twins, self._host.swapped
        params = list(twins)
        # What waits for a drive waits little longer for a copy. Sums come up and go down again in
        # each backward.
        pinned = [param for param in params if swapped is None or param not in swapped]
        engine.pin(twins.byte_ranges(pinned, "weight"))
        engine.pin(twins.byte_ranges(params if self._host.sums_on_host else pinned, "grad"))
        if self._host.weights is not None:
            engine.pin((buffer, 0, buffer.nbytes) for buffer in self._host.weights.buffers)

    @property
    def open_gate(self) -> Gate | None:
        """The gate where forwards wait; None: a step waits for all of its weights."""
        return self.gate if self.gate is not None and self.gate.is_open else None

    @property
    def sees_forwards(self) -> bool:
        """Whether forwards are seen, and so every other look at a weight."""
        return self.open_gate is not None

    def why_unseen(self) -> str:
        """Why forwards are not seen, and what to do."""
        if self._gate is None:
            return f"no model is given. {_GIVE_MODEL}"
        if any(map(is_dtensor, self._twins)):
            return "parameters are DTensors. hint: leave `deferred` out"
        return COMPILED

    def idle(self) -> Engine:
        """The engine, which may take gradients: its step is over, unless updates are deferred.

        Raises:
            OSError: the step failed in the background.
        """
        engine = self.opened()
        if engine.busy and self._deferred is None:
            # Some weight of the last step has not been used.
            self.finish()
        return engine

    def close(self) -> None:
        """Ends the engine and the gate, after the last step. The engine unpins the host sides.

        Raises:
            OSError: the step failed in the background.
        """
        self.synchronize()
        engine, gate, self.engine, self.gate = self.engine, self.gate, None, None
        if gate is not None:
            gate.detach()
        if self._host.weights is not None:
            # The memory that they are fetched from is unpinned.
            self._host.weights.finish_copies()
        if engine is not None:
            engine.close()

    # ---- waits ----

    def lock(self) -> AbstractContextManager[object]:
        """What a thread has that submits a step, or settles what is deferred."""
        return self._lock

    def finish(self) -> None:
        """The last step is complete on the host, and the current stream waits for its weights.

        Raises:
            OSError: the step failed in the background.
        """
        if self.gate is not None:
            self.gate.finish()
        elif self.engine is not None:
            self.engine.finish()

    def settle(self) -> None:
        """Applies all updates that are deferred, as `Engine.settle` does."""
        if self.engine is not None:
            self.engine.settle()

    def synchronize(self) -> None:
        """Waits until the last step is complete, with all updates.

        Raises:
            OSError: the step failed in the background.
        """
        if self.engine is not None:
            guard = None if self.gate is None else self.gate.guard
            step = 0 if guard is None else guard.num_steps
            self.engine.settle()
            self.engine.synchronize()
            if self.gate is not None:
                self.gate.clear(step)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """A context that begins when the last step is complete, and in which none begins.

        Raises:
            ValueError: another thread is in a step, and stays there.
            OSError: the step failed in the background.
        """
        if not self._lock.acquire(timeout=_OTHER_STEP_S_MAX):
            raise ValueError("another thread is in a step, expected it to end")
        try:
            self.synchronize()
            yield
        finally:
            self._lock.release()

    def exposed(
        self, params: Sequence[torch.Tensor], read: Mapping[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Those of `params` whose weights can be reached without a use that the gate sees.

        There is a gate. `read`: as `Gate.exposed` has it.
        """
        assert self.engine is not None and self.gate is not None
        found = self.gate.exposed(params, self.engine.held, read)
        if found:
            # The engine holds the weights of the last step until its uploads have ended.
            self.engine.synchronize()
            found = self.gate.exposed(params, self.engine.held, read)
        return found

    # ---- once a step was submitted, or was not ----

    def release(self) -> None:
        """Once a step has begun: waits until its gradients may be written. Once is enough."""
        if self.engine is not None:
            self.engine.release()

    @property
    def is_released(self) -> bool:
        """Whether the gradients of the last step may be written."""
        return self.engine is None or self.engine.is_released

    def wait_for_weights(self) -> None:
        """Once a step was submitted: waits for the weights that no forward waits for."""
        if self._host.weights is not None:
            self._host.weights.end_step()
        if (gate := self.open_gate) is not None:
            gate.wait_for_uncovered()
            return
        if self._host.weights is not None and not self._host.gated:
            return
        if self._gate is None and self.engine is not None and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "step() waits for all new weights, since no model is given whose forwards could. "
                + _GIVE_MODEL
            )
        self.finish()

    def discard(self) -> None:
        """Once a step was skipped or refused: forgets what was copied for it.

        No later step takes that, and its gradients may be freed.
        """
        if self.engine is not None:
            self.engine.discard()
