"""Weights are whole on the device while modules use them, and leave it after.

On one rank a fetch is a copy of what the host has, on several, which have a part each, a gather
(`lane.py`). The thread waits for neither: streams do, by events. So the device never waits for the
thread.

- What is copied ahead of its use is with the fetcher, and of no effect until it is used. It is
  dropped if its source has been written since.
- `Weight.users` has a token for each use: of a module in its forward, of a call in its backward.
  What has none and stays for its next use rests: whose it is may want to see other uses.
- The order of uses is that of the pass before (`order.py`). Where a pass leaves it, the rest of
  that pass is fetched at its use, and freed behind it.
- Elements on the device: those in use, and at most `prefetch_numel_max` ahead of their use, begun
  while fewer than `live_numel_max` are there. Memory that the device still reads counts as well:
  then the thread waits for the device.
- All ranks gather the same in one order. So what is gathered follows from the order of uses and
  from counts of elements, which are the same on all ranks, and never from how far a step or the
  device has come. From a step to its backward little is gathered ahead: the thread would wait for
  that part of the step before it launches what is there. At other times nothing is while more than
  half of `prefetch_numel_max` is ahead.

Cost per use of a module with weights that are there: about 3 microseconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell.access.descriptive import without_waiting
from stepwell.weights.gather_order import GatherOrder
from stepwell.weights.order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from stepwell.weights.lane import Arrival, Lane
    from stepwell.weights.weight import Weight

__all__ = ["Fetcher", "backward_id"]

# Elements that several ranks gather ahead of their use while a step may be running: enough for a
# gather to pass while a module computes, and few milliseconds of a step.
_NUMEL_BEHIND_STEP = 16 << 20


def backward_id() -> int | None:
    """Which backward this thread runs: a forward within it computes activations again."""
    found = torch._C._current_graph_task_id()
    return None if found < 0 else found


class _Ahead(NamedTuple):
    """A weight that was copied before its use."""

    whole: torch.Tensor
    arrival: Arrival
    source: tuple[int, int]
    """What was copied, as `_version_of` has it."""


def _version_of(source: torch.Tensor) -> tuple[int, int] | None:
    """The address and the version of what is copied; None: a step may write it."""
    if type(source) is not torch.Tensor:
        return None
    return source.data_ptr(), source._version


class Fetcher:
    """Which weights of a model are on the device.

    Args:
        lane: brings weights.
        there: the `Weight.state` of one that is on the device.
        absent: that of one that is not, and may be brought.
        prefetch_numel_max: elements that are copied ahead of their use.
        reuse_numel_max: a weight stays that is used again before so many elements.
        repeats: as `Order` has it, and passes end with their backward.
        live_numel_max: elements on the device from which on nothing is copied ahead.
        lock: what a thread has that changes anything here; None: one of its own.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        there: Any,
        absent: Any,
        prefetch_numel_max: int,
        reuse_numel_max: int,
        live_numel_max: int,
        repeats: bool = False,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._lane = lane
        # Whether all ranks fetch together.
        self._is_collective = lane.num_ranks > 1
        self._there = there
        self._absent = absent
        self._prefetch_numel_max = prefetch_numel_max
        self._live_numel_max = live_numel_max
        self.has_step_ended: Callable[[], bool] = lambda: True
        """Whether no step is running: what one writes is not copied ahead, which would wait. Behind
        its end no weight waits for its own part of it."""
        self.is_behind_step = False
        """Whether a step was taken, and no backward has begun since: the same on all ranks."""
        self.gather_order = GatherOrder()
        self._repeats = repeats
        self._new_order = partial(Order, reuse_numel_max, repeats=repeats)
        self._order = self._new_order()
        # On the device for modules; and when they arrive, where that was not waited for on the
        # stream that uses them.
        self._live: set[Weight] = set()
        self._arrivals: dict[Weight, Arrival] = {}
        # On the device, and used by nothing until their next use.
        self._resting: set[Weight] = set()
        self._ahead: dict[Weight, _Ahead] = {}
        self._ahead_numel = self._live_numel = 0
        # Freed, and perhaps still read by the device: elements.
        self._leaving: deque[tuple[Arrival, int]] = deque()
        self._leaving_numel = 0
        # By their tokens: calls whose backward has begun, and those of forwards within a backward;
        # each with that backward. An activation checkpoint leaves the last of these forwards by an
        # exception, once it has what it needs.
        self._in_backward: dict[Hashable, tuple[int | None, Sequence[Weight]]] = {}
        self._repeated: dict[Hashable, tuple[int, Sequence[Weight]]] = {}
        # Hooks of one backward may be called on several threads.
        self._lock = threading.RLock() if lock is None else lock

    # ---- passes ----

    def begin_pass(self) -> None:
        """A forward of the model, or of its first part, begins."""
        with self._lock:
            self._drop_ahead()
            self._order.begin()
            self._prefetch()

    def forget_order(self) -> None:
        """What is used when is learnt anew: ranks have parted, and each knows another order."""
        with self._lock:
            self._drop_ahead()
            self._order = self._new_order()

    def free_all(self, weights: Sequence[Weight]) -> None:
        """Frees weights, whatever uses them.

        All copies have ended then, and a step may write their sources.
        """
        with self._lock:
            self._drop_ahead()
            self._lane.finish()
            self._in_backward.clear()
            self._repeated.clear()
            for weight in weights:
                weight.users.clear()
            self._free(weights)

    def finish_copies(self) -> None:
        """The thread waits until all copies have ended."""
        with self._lock:
            self._lane.finish()

    def end_backward(self, ended: int | None = None) -> None:
        """A backward has ended: frees what is left of modules whose inputs got no gradient.

        And of forwards within it that did not end. What the next pass begins with may stay.

        Args:
            ended: which one, as `backward_id` has it; None: all have.
        """
        with self._lock:
            soon = self._order.used_soon() if self._repeats else ()
            for uses in (self._in_backward, self._repeated):
                for token, (backward, weights) in list(uses.items()):
                    if ended is None or backward in (ended, None):
                        del uses[token]
                        self._end_use(_unused(weights, token), soon)

    # ---- uses ----

    def enter(self, module: torch.nn.Module, weights: Sequence[Weight], token: Hashable) -> None:
        """A use of a module begins: its weights are on the device for the current stream.

        Args:
            module: the module.
            weights: what it uses.
            token: what `leave` is called with.
        """
        with self._lock:
            # One rank may use by itself what never leaves.
            is_expected = not (self._is_collective and all(w.is_persistent for w in weights))
            if is_expected:
                self._order.note(module, weights)
            if (backward := backward_id()) is not None and token not in self._in_backward:
                self._keep_for_backward(weights)
                self._repeated[token] = backward, weights
            self._bring(weights, token)
            if is_expected:
                self._prefetch()

    def _bring(self, weights: Sequence[Weight], token: Hashable) -> None:
        missing, there = [], self._there
        for weight in weights:
            weight.users.add(token)
            if weight.state is not there:
                missing.append(weight)
            elif weight in self._resting:
                weight.resume()
                self._resting.discard(weight)
        if missing:
            self._fetch(missing)
        if self._arrivals:
            self._wait_for(weights)

    def borrow(self, weights: Sequence[Weight], token: Hashable) -> None:
        """As `enter`, of what uses weights outside of all modules; `give_back` ends it."""
        with self._lock:
            self._bring(weights, token)

    def give_back(self, weights: Sequence[Weight], token: Hashable) -> None:
        """Ends a use that `borrow` has begun: what nothing else uses is freed."""
        with self._lock:
            self._free(_unused(weights, token))

    def hold(self, weights: Sequence[Weight], token: Hashable) -> None:
        """A module's weights stay until a backward has ended: it is not seen when its own does."""
        with self._lock:
            self._in_backward[token] = None, weights
            for weight in weights:
                weight.users.add(token)

    def leave(self, weights: Sequence[Weight], token: Hashable) -> None:
        """A use of a module ends: what is not used again soon is freed."""
        with self._lock:
            self._repeated.pop(token, None)
            if unused := _unused(weights, token):
                self._end_use(unused, self._order.used_soon())

    def _end_use(self, unused: Iterable[Weight], soon: Container[Weight]) -> None:
        """Frees what is not in `soon`; the others rest."""
        leaving = []
        for weight in unused:
            if weight not in soon:
                leaving.append(weight)
            elif weight.state is self._there:
                self._resting.add(weight)
                weight.rest()
        if leaving:
            self._free(leaving)

    def enter_backward(
        self, module: torch.nn.Module, weights: Sequence[Weight], token: Hashable
    ) -> bool:
        """As `enter`. Returns whether it has begun now, and not at another output.

        What does not leave by itself does in `end_backward`.
        """
        with self._lock:
            if token in self._in_backward:
                return False
            self._in_backward[token] = backward_id(), weights
            self.enter(module, weights, token)
            # Behind it: what both use stays.
            self._leave_repeated()
            return True

    def _leave_repeated(self) -> None:
        """A node of a backward runs, so no forward within that one does."""
        if self._repeated:
            running = backward_id()
            for token, (backward, weights) in list(self._repeated.items()):
                if backward == running:
                    self.leave(weights, token)

    def _keep_for_backward(self, weights: Sequence[Weight]) -> None:
        """Activations are computed again: frozen weights stay until the backward behind it ends.

        The checkpoint has the parameters themselves, and compares their shapes.
        """
        frozen = [weight for weight in weights if not weight.param.requires_grad]
        if frozen:
            token = next(reversed(self._in_backward), self)
            backward, kept = self._in_backward.get(token, (backward_id(), ()))
            self._in_backward[token] = backward, [*kept, *frozen]
            for weight in frozen:
                weight.users.add(token)

    def leave_backward(self, token: Hashable) -> None:
        """As `leave`."""
        with self._lock:
            self._leave_repeated()
            if (found := self._in_backward.pop(token, None)) is not None:
                self.leave(found[1], token)

    # ---- memory ----

    def _fetch(self, weights: Iterable[Weight]) -> None:
        missing = []
        for weight in weights:
            ahead = self._ahead.pop(weight, None)
            if ahead is not None:
                self._ahead_numel -= weight.numel
                self._live_numel -= weight.numel
                if ahead.source == _version_of(weight.source):
                    self._put(weight, ahead.whole, ahead.arrival)
                    continue
            missing.append(weight)
        if missing:
            self.has_step_ended()
            self._has_room(sum(weight.numel for weight in missing), is_waiting=True)
            wholes, arrival = self._copy(missing)
            for weight, whole in zip(missing, wholes, strict=True):
                self._put(weight, whole, arrival)

    def _copy(self, weights: Sequence[Weight]) -> tuple[list[torch.Tensor], Arrival]:
        if self._is_collective:
            self.gather_order.note(weight.key for weight in weights)
        # A later forward in training may use what is copied in one that is not.
        with _outside_inference_mode(), _outside_transforms():
            return self._lane.copy(weights)

    def _put(self, weight: Weight, whole: torch.Tensor, arrival: Arrival) -> None:
        weight.put(whole)
        if weight not in self._live:
            self._live.add(weight)
            self._live_numel += weight.numel
        if arrival is not None:
            self._arrivals[weight] = arrival

    def _wait_for(self, weights: Iterable[Weight]) -> None:
        # Of one copy all have one.
        last, has_passed = None, False
        for weight in weights:
            arrival = self._arrivals.get(weight)
            if arrival is None:
                continue
            if arrival is not last:
                last, has_passed = arrival, self._lane.wait(arrival)
            if has_passed:
                del self._arrivals[weight]

    def _prefetch(self) -> None:
        """Copies what is used next, as far as there is room."""
        # In their order.
        weights: dict[Weight, None] = {}
        numel, numel_max = 0, self._prefetch_numel_max
        is_collective = self._is_collective
        if is_collective and self.is_behind_step:
            numel_max = min(numel_max, _NUMEL_BEHIND_STEP)
        elif is_collective and self._ahead_numel > numel_max // 2:
            # A gather of many weights is one launch, and half of those ahead cover its time.
            return
        while self._ahead_numel + numel < numel_max:
            use = self._order.next_ahead()
            if use is None:
                break
            missing = [
                weight
                for weight in use.weights
                if weight.state is self._absent
                and weight not in self._ahead
                and weight not in weights
                # A rank that has no elements of it sees no write to it: it would use a copy made
                # ahead, where others copy.
                and weight.numel > (self._lane.num_ranks - 1) * weight.part_numel
            ]
            more = sum(weight.numel for weight in missing)
            if missing and (
                not self._has_room(numel + more, is_waiting=is_collective)
                or (not is_collective and self._would_wait(missing))
            ):
                self._order.put_back()
                break
            weights.update(dict.fromkeys(missing))
            numel += more
        if not weights:
            return
        copied = list(weights)
        wholes, arrival = self._copy(copied)
        for weight, whole in zip(copied, wholes, strict=True):
            version = _version_of(weight.source)
            if version is not None:
                self._ahead[weight] = _Ahead(whole, arrival, version)
                self._ahead_numel += weight.numel
                self._live_numel += weight.numel

    def _would_wait(self, weights: Iterable[Weight]) -> bool:
        return any(_version_of(weight.source) is None for weight in weights) and not (
            self.has_step_ended()
        )

    def _drop_ahead(self) -> None:
        """Frees what was copied and is not used. It was on no stream but the lane's."""
        for weight in self._ahead:
            weight.discard()
        self._ahead.clear()
        self._live_numel -= self._ahead_numel
        self._ahead_numel = 0

    def _has_room(self, numel: int, *, is_waiting: bool) -> bool:
        """Whether so many more elements may be on the device."""
        while (
            self._leaving and self._live_numel + self._leaving_numel + numel > self._live_numel_max
        ):
            mark, left = self._leaving[0]
            if is_waiting:
                mark.synchronize()
            elif not mark.query():
                return False
            self._leaving.popleft()
            self._leaving_numel -= left
        return self._live_numel + self._leaving_numel + numel <= self._live_numel_max

    def _free(self, weights: Iterable[Weight]) -> None:
        numel, leaving = 0, []
        with _outside_inference_mode(), _outside_transforms():
            for weight in weights:
                # A program may have freed it, or brought it by itself.
                left = weight.numel if weight in self._live else 0
                self._live.discard(weight)
                self._resting.discard(weight)
                self._live_numel -= left
                if weight.state is self._there:
                    arrival = self._arrivals.pop(weight, None)
                    if arrival is not None:
                        # Copied, and used by nothing.
                        self._lane.wait(arrival)
                    leaving.append(weight)
                    numel += left
            if not leaving:
                return
            with without_waiting():
                mark = self._lane.release([weight.param.data for weight in leaving])
            for weight in leaving:
                weight.drop()
        if numel and mark is not None:
            self._leaving.append((mark, numel))
            self._leaving_numel += numel


# Transforms of torch.func refuse writes to tensors that they have not been given.
_outside_transforms = torch._C._DisableFuncTorch


def _outside_inference_mode() -> AbstractContextManager[object]:
    """A context in which tensors are made that training may use."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(mode=False)
    return contextlib.nullcontext()


def _unused(weights: Iterable[Weight], token: Hashable) -> list[Weight]:
    """Those that may leave once the use with such a token has ended."""
    for weight in weights:
        weight.users.discard(token)
    return [weight for weight in weights if not (weight.users or weight.stays)]
