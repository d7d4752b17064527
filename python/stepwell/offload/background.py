"""What steps in the background: an engine, and the gate in front of forwards.

- Both are made when they are first needed, for the parameters that there are by then. They end when
  the parameters change: an engine is made for a fixed list.
- From the beginning of a step to `release` the program may not write gradients. So what an error or
  Ctrl-C has left unreleased stays known until something releases it.
- Waits go through the gate where there is one: it knows which weights are under way.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from stepwell._sharding import is_dtensor
from stepwell.offload.engine import Engine
from stepwell.offload.forwards import Forwards
from stepwell.offload.gate import LANDING_BYTES_MAX, Gate
from stepwell.offload.rank_engine import RankEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from stepwell.offload.collector import Collector
    from stepwell.offload.host_side import HostSide
    from stepwell.offload.options import GateMode
    from stepwell.offload.sharding import Sharding

__all__ = ["Background"]

# How long the end of the program waits for the call of `step` of another thread.
_OTHER_STEP_S_MAX = 10.0


class Background:
    """The engine and the gate of one optimizer.

    Args:
        host: the host side of the parameters.
        collector: brings gradients there.
        sharding: the ranks that share steps; None: none does.
        gate_mode: what waits for new weights, as `OffloadAdamW` has it.
        threads: workers that step, likewise.
    """

    def __init__(
        self,
        host: HostSide,
        collector: Collector,
        sharding: Sharding | None,
        *,
        gate_mode: GateMode,
        threads: int | None,
    ) -> None:
        self._host = host
        self._twins = host.twins
        self._collector = collector
        self._sharding = sharding
        self._deferred = host.deferred
        self._gate_mode = gate_mode
        self._threads = threads
        # Of all engines that there will be: one may be made, or closed, by the thread that has it.
        self._lock = threading.RLock()
        self.engine: Engine | None = None
        """None: it was not needed yet, or was closed."""
        self.gate: Gate | None = None
        """None: there is no engine, or forwards do not wait."""
        # Of deferred updates, once state was loaded or an engine was closed, until there is a gate.
        self._forwards: Forwards | None = None

    # ---- from the first need to the end ----

    def opened(self) -> Engine:
        """The engine, which is made when it is first needed: by then all groups are there.

        Raises:
            OSError: the device or the memory cannot be had.
        """
        if self.engine is None:
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
                    sums_on_host=self._collector.sums_on_host,
                    threads_share=self._host.hosted_share,
                    lock=self._lock,
                )
            else:
                engine = ranked = RankEngine(
                    self._sharding, device, twins, twins, self._threads, swapped, self._lock
                )
                confirm = ranked.confirm
            gate = None
            if self._is_gated:
                gate = Gate(
                    twins,
                    engine,
                    self.release,
                    engine.settle,
                    confirm=confirm,
                    has_pending=engine.has_pending,
                    wait_bytes_max=0 if self._deferred is None else LANDING_BYTES_MAX,
                    called=self._end_forwards(),
                )
            self.engine, self.gate, self._forwards = engine, gate, None
        return self.engine

    @property
    def open_gate(self) -> Gate | None:
        """The gate where forwards wait; None: a step waits for all of its weights."""
        return self.gate if self.gate is not None and self.gate.is_open else None

    @property
    def sees_forwards(self) -> bool:
        """Whether forwards are seen, and so every other look at a weight."""
        gate = self.open_gate
        return gate is not None and not gate.guard.was_compiled

    @property
    def _is_gated(self) -> bool:
        """Whether forwards wait, where they can be seen."""
        # What is deferred is applied by each rank for itself; its forwards are collective.
        is_sharded = any(is_dtensor(param) for param in self._twins)
        return self._gate_mode == "module" and not (is_sharded and self._deferred is not None)

    def note_forwards(self) -> None:
        """Until there is a gate: has it know the forwards before the step that makes it.

        Where updates are deferred. So a run that is resumed in a new process sees the same looks at
        weights as the run that went on.
        """
        if self._deferred is not None and self.gate is None and self._is_gated:
            self._forwards = Forwards(self._twins, self._end_forwards())

    def _end_forwards(self) -> Sequence[torch.nn.Module]:
        """Notes forwards no more. Returns the modules that they have called."""
        return () if self._forwards is None else self._forwards.end()

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
        """Ends the engine and the gate, after the last step.

        Raises:
            OSError: the step failed in the background.
        """
        self.synchronize()
        # The engine unpins the host sides.
        self._collector.wait()
        gate, self.gate, self.engine = self.gate, None, None
        if gate is not None and self._deferred is not None:
            self._forwards = Forwards(self._twins, gate.called)
        # What the engine has copied is gone with it.
        self._collector.reset()

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
            step = 0 if self.gate is None else self.gate.guard.num_steps
            self.engine.settle()
            self.engine.synchronize()
            # Not for a signal's handler that comes while a step is being submitted: the weights of
            # that have yet to come.
            if self.gate is not None and self.engine.wait(()):
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

    def exposed(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` whose weights can be reached without an access that the gate sees.

        There is a gate.
        """
        assert self.engine is not None and self.gate is not None
        found = self.gate.exposed(params, self.engine.held)
        if found:
            # The engine holds the weights of the last step until its uploads have ended.
            self.engine.synchronize()
            found = self.gate.exposed(params, self.engine.held)
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

    def withdraw(self) -> None:
        """A step that was to begin will not, if it has not."""
        if self.engine is not None:
            self.engine.withdraw()

    def wait_for_weights(self) -> None:
        """Once a step was submitted: waits for the weights that no forward waits for."""
        if (gate := self.open_gate) is not None:
            gate.wait_for_uncovered()
        else:
            self.finish()

    def discard(self) -> None:
        """Once a step was skipped or refused: forgets what was copied for it.

        No later step takes that, and its gradients may be freed.
        """
        if self.engine is not None:
            self.engine.discard()
