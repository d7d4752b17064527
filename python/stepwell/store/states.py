"""The states of an optimizer's parameters, wherever they are, after the last step.

`own` is what torch's optimizer has in its `__dict__` as `state`. What is on a volume or on the
device has a stand-in there, until a program asks: then it is read into host memory, and the next
step takes it up again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

from stepwell.store.state_in_memory import StateInMemory

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Iterator, Sequence

    import torch

    from stepwell import _state
    from stepwell.store.background import Background
    from stepwell.store.engine import Submitted
    from stepwell.store.host_side import HostSide
    from stepwell.store.residents import Residents

__all__ = ["States"]


class States:
    """The states of one optimizer.

    Args:
        optimizer: whose they are; held weakly.
        host: the host side of its parameters.
        residents: those whose state is on the device.
        background: what steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: HostSide,
        residents: Residents,
        background: Background,
    ) -> None:
        self._host, self._residents, self._background = host, residents, background
        self._optimizer = weakref.ref(optimizer)
        # Once the optimizer is gone.
        self._own: defaultdict[torch.Tensor, _state.State]
        # The thread that decides on a step and submits it: what is deferred is not settled there.
        self._stepping_on: int | None = None
        # The last step that `note_submitted` has noted.
        self._noted: Submitted | None = None

    @property
    def own(self) -> defaultdict[torch.Tensor, _state.State]:
        """As it is in memory now: a step may be under way, and some of it is elsewhere."""
        if (optimizer := self._optimizer()) is not None:
            self._own = optimizer.__dict__["state"]
        return self._own

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which this thread decides on a step, and has it begin."""
        self._stepping_on = threading.get_ident()
        try:
            yield
        finally:
            self._stepping_on = None

    @property
    def is_stepping(self) -> bool:
        """Whether this thread is in a step."""
        return self._stepping_on == threading.get_ident()

    def as_seen(self) -> defaultdict[torch.Tensor, _state.State]:
        """What a program sees."""
        states = self._read()
        if self.is_stepping or (self._host.swapped is None and not len(self._residents)):
            return states
        return StateInMemory(self._in_memory)

    def settled(self) -> defaultdict[torch.Tensor, _state.State]:
        """After the last step, with all updates. What is elsewhere is not read."""
        engine = self._background.engine
        if engine is not None and not self.is_stepping:
            with engine.lock:
                engine.settle()
                if engine.busy:
                    self._background.finish()
        self.note_submitted()
        return self.own

    @contextlib.contextmanager
    def _in_memory(self) -> Iterator[defaultdict[torch.Tensor, _state.State]]:
        """As `_read`, with no step while it is entered."""
        with self._background.lock():
            yield self._read()

    def _read(self) -> defaultdict[torch.Tensor, _state.State]:
        """As `settled`. What is elsewhere is read into host memory, but for the step's own thread.

        That is state on a volume, and on the device.
        """
        with self._background.lock():
            states = self.settled()
            if len(self._residents) and not self.is_stepping:
                self._residents.read(states)
            swapped = self._host.swapped
            if swapped is not None and not self.is_stepping:
                # In this order: a first step, without an engine yet, may begin on another thread.
                num_noted = swapped.num_noted
                swapped.read(states, num_noted if self._stepping_on is None else None)
            if not self.is_stepping:
                # It may be kept, and put back beside the weights of now.
                self._host.take_fingerprints(self._host.twins, states)
            return states

    def in_state_dict(self, param: torch.Tensor, state: _state.State) -> _state.State:
        """The state of a parameter, as a state dict has it, which later steps leave alone."""
        if self.is_stepping and param in self._residents:
            # A signal's handler. The step goes on with what is on the device.
            return self._residents.as_read(param, state)
        swapped = self._host.swapped
        if swapped is not None and swapped.volume.commits and param not in swapped:
            # All else is read from the volume, and not written by later steps: so are counts of
            # parameters without elements here.
            return {name: each.clone() for name, each in state.items()}
        return state

    def reread(self, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies parameters to the host that the program has written; returns those with one."""
        stepped = [param for param in written if param in self._host.twins]
        if written:
            self._host.reread(stepped, self.settled())
        return stepped

    def note_submitted(self) -> None:
        """Has states and fingerprints be those behind the last step that has begun."""
        engine = self._background.engine
        submitted = None if engine is None else engine.submitted
        if submitted is None or submitted is self._noted:
            return
        for param, before, state in submitted.swapping:
            if self.own.get(param) is before:
                self.own[param] = state
        own, twins, swapped = self.own, self._host.twins, self._host.swapped
        verified = set(map(id, submitted.verified))
        for param in submitted.params:
            twin = twins[param]
            if id(param) in verified:
                twin.is_unverified = False
            else:
                # What is read of a volume is an object of its own.
                is_in_place = swapped is None or param not in swapped
                twin.mark_outdated(own.get(param) if is_in_place else None)
        self._noted = submitted
