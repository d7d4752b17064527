"""Weights that are partitioned are whole on the device while modules use them, and freed after.

It stands in the place of DeepSpeed's `PartitionedParameterCoordinator`, and follows its settings.
On one rank a partition is the whole parameter in host memory: a fetch is a copy. On several each
has a part, and a fetch is a gather. The thread waits for neither: streams do, by events. So the
device never waits for the thread.

- A parameter is as DeepSpeed has it: `ds_status` is `AVAILABLE` or `NOT_AVAILABLE`, and only then
  empty. What is copied ahead of its use is with the lane, and of no effect until it is used. It is
  dropped if the partition has been written since.
- `ds_active_sub_modules` has what uses a parameter: a module in its forward, a call of one in its
  backward. While there is one, the parameter stays.
- The order of uses is that of the pass before (`order.py`). Where a pass leaves it, the rest of
  that pass is fetched at its use, and freed behind it.
- Elements on the device: those in use, and at most `stage3_prefetch_bucket_size` ahead of their
  use, begun while fewer than `stage3_max_live_parameters` are there. Memory that the device still
  reads counts as well: then the thread waits for the device.
- All ranks gather the same in one order. So what is gathered follows from the order of uses and
  from counts of elements, which are the same on all ranks, and never from how far a step or the
  device has come. From a step to its backward little is gathered ahead: the thread would wait for
  that part of the step before it launches what is there. At other times nothing is while more than
  half of `stage3_prefetch_bucket_size` is ahead.

Cost per use of a module with weights that are there: about 3 microseconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from stepwell.deepspeed.zero.gather_order import GatherOrder
from stepwell.deepspeed.zero.order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from stepwell.deepspeed.zero.weight_lane import Arrival, WeightLane

__all__ = ["Fetcher", "is_in_backward"]

# Elements that several ranks gather ahead of their use while a step may be running: enough for a
# gather to pass while a module computes, and few milliseconds of a step.
_NUMEL_BEHIND_STEP = 16 << 20


_NO_BACKWARD = -1


def _backward_id() -> int:
    """Which backward this thread runs."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Whether this thread runs a backward: a forward within it computes activations again."""
    return _backward_id() != _NO_BACKWARD


class _Repeated(NamedTuple):
    """A forward that computes activations again, and has not ended."""

    backward: int
    module: torch.nn.Module
    params: Sequence[Any]


class _Ahead(NamedTuple):
    """A weight that was copied before its use."""

    weight: torch.Tensor
    arrival: Arrival
    source: tuple[int, int]
    """The address and the version of the partition that was copied."""


def _state_of(partition: torch.Tensor) -> tuple[int, int] | None:
    """The address and the version of a partition; None: a step may write it."""
    if type(partition) is not torch.Tensor:
        return None
    return partition.data_ptr(), partition._version


class Fetcher:
    """Which weights of a model are on the device.

    Args:
        lane: copies weights.
        prefetch_numel_max: elements that are copied ahead of their use.
        reuse_numel_max: a weight stays that is used again before so many elements.
        live_numel_max: elements on the device from which on nothing is copied ahead.
    """

    hierarchy = 0
    """DeepSpeed sets it, for its messages."""

    def __init__(
        self,
        lane: WeightLane,
        *,
        prefetch_numel_max: int,
        reuse_numel_max: int,
        live_numel_max: int,
    ) -> None:
        self._lane = lane
        self._prefetch_numel_max = prefetch_numel_max
        self._live_numel_max = live_numel_max
        self.has_step_ended: Callable[[], bool] = lambda: True
        """Whether no step is running: what one writes is not copied ahead, which would wait. Behind
        its end no weight waits for its own part of it."""
        self.is_behind_step = False
        """Whether a step was taken, and no backward has begun since: the same on all ranks."""
        self.gather_order = GatherOrder()
        self._reuse_numel_max = reuse_numel_max
        self._order = Order(reuse_numel_max)
        # Of weights on the device, by `ds_id`: elements; and when they arrive, where that was not
        # waited for on the stream that uses them.
        self._numels: dict[int, int] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._ahead: dict[int, _Ahead] = {}
        self._ahead_numel = self._live_numel = 0
        # Freed, and perhaps still read by the device: elements.
        self._leaving: deque[tuple[Arrival, int]] = deque()
        self._leaving_numel = 0
        # Calls whose backward has begun, with their parameters.
        self._in_backward: dict[Hashable, Sequence[Any]] = {}
        # Forwards within a backward, by their token. An activation checkpoint leaves the last one
        # by an exception, once it has what it needs.
        self._repeated: dict[Hashable, _Repeated] = {}
        # Hooks of one backward may be called on several threads.
        self._lock = threading.RLock()

    @property
    def _is_collective(self) -> bool:
        """Whether all ranks fetch together."""
        return self._lane.num_ranks > 1

    def is_invalid_trace(self) -> bool:
        """Whether there is nothing that changed hooks would make invalid: always."""
        return True

    # ---- passes ----

    def reset_step(self) -> None:
        """A forward of the whole model begins."""
        with self._lock:
            self._drop_ahead()
            self._order.begin()
            self._prefetch()

    def forget_order(self) -> None:
        """What is used when is learnt anew: ranks have parted, and each knows another order."""
        with self._lock:
            self._drop_ahead()
            self._order = Order(self._reuse_numel_max)

    def release_and_reset_all(self, module: torch.nn.Module) -> None:
        """Frees the weights of a module and of those within it, whatever uses them.

        All copies have ended then, and a step may write the partitions.
        """
        with self._lock:
            self._drop_ahead()
            self._lane.finish()
            self._in_backward.clear()
            self._repeated.clear()
            params = list(module.parameters())
            for param in params:
                param.ds_active_sub_modules.clear()  # type: ignore[attr-defined]
            self._free(params)

    def release_backward_leftovers(self) -> None:
        """A backward has ended: frees what is left of modules whose inputs got no gradient.

        And of forwards within it that did not end.
        """
        with self._lock:
            left = list(self._in_backward.items())
            left += [(token, each.params) for token, each in self._repeated.items()]
            self._in_backward.clear()
            self._repeated.clear()
            for token, params in left:
                for param in params:
                    param.ds_active_sub_modules.discard(token)
                self._free([param for param in params if _may_leave(param)])

    # ---- uses ----

    def enter(self, module: torch.nn.Module, params: Sequence[Any], token: Hashable) -> None:
        """A use of a module begins: its weights are on the device for the current stream.

        Args:
            module: the module.
            params: its parameters.
            token: what `leave` is called with.
        """
        with self._lock:
            # One rank may use by itself what never leaves.
            is_expected = not self._is_collective or not all(p.ds_persist for p in params)
            if is_expected:
                self._order.note(module, params)
            missing = []
            if (backward := _backward_id()) != _NO_BACKWARD and token not in self._in_backward:
                self._keep_for_backward(params)
                self._repeated[token] = _Repeated(backward, module, params)
            for param in params:
                param.ds_active_sub_modules.add(token)
                if param.ds_status is not ZeroParamStatus.AVAILABLE:
                    missing.append(param)
            if missing:
                self._fetch(missing)
            if self._arrivals:
                self._wait_for(params)
            if is_expected:
                self._prefetch()

    def leave(self, module: torch.nn.Module, params: Sequence[Any], token: Hashable) -> None:
        """A use of a module ends: what is not used again soon is freed."""
        with self._lock:
            self._repeated.pop(token, None)
            for param in params:
                param.ds_active_sub_modules.discard(token)
            leaving = [
                param
                for param in params
                if _may_leave(param) and not self._order.is_used_soon(param.ds_id)
            ]
            if leaving:
                self._free(leaving)

    def enter_backward(
        self, module: torch.nn.Module, params: Sequence[Any], token: Hashable
    ) -> bool:
        """As `enter`. Returns whether it has begun now, and not at another output.

        What does not leave by itself does in `release_backward_leftovers`.
        """
        with self._lock:
            if token in self._in_backward:
                return False
            self._in_backward[token] = params
            self.enter(module, params, token)
            # Behind it: what both use stays.
            self._leave_repeated()
            return True

    def _leave_repeated(self) -> None:
        """A node of a backward runs, so no forward within that one does."""
        if self._repeated:
            backward = _backward_id()
            for token, each in list(self._repeated.items()):
                if each.backward == backward:
                    self.leave(each.module, each.params, token)

    def _keep_for_backward(self, params: Sequence[Any]) -> None:
        """Activations are computed again: frozen weights stay until the backward behind it ends.

        The checkpoint has the parameters themselves, and compares their shapes.
        """
        frozen = [param for param in params if not param.requires_grad]
        if frozen:
            token = next(reversed(self._in_backward), self)
            self._in_backward[token] = [*self._in_backward.get(token, ()), *frozen]
            for param in frozen:
                param.ds_active_sub_modules.add(token)

    def leave_backward(self, module: torch.nn.Module, token: Hashable) -> None:
        """As `leave`."""
        with self._lock:
            self._leave_repeated()
            params = self._in_backward.pop(token, None)
            if params is not None:
                self.leave(module, params, token)

    def fetch_sub_module(self, module: torch.nn.Module, forward: bool) -> None:
        """As DeepSpeed's coordinator has it, for programs that call it."""
        self.enter(module, params_of(module), module.ds_id)

    def release_sub_module(self, module: torch.nn.Module, forward: bool = False) -> None:
        """As DeepSpeed's coordinator has it, for programs that call it."""
        self.leave(module, params_of(module), module.ds_id)

    # ---- memory ----

    def _fetch(self, params: Iterable[Any]) -> None:
        missing = []
        for param in params:
            if param.ds_status is ZeroParamStatus.INFLIGHT:
                raise RuntimeError(
                    f"parameter `{param.ds_id}` is being gathered by `all_gather(async_op=True)`, "
                    "whose end a module's forward cannot wait for. hint: wait for its handle"
                )
            ahead = self._pop_ahead(param)
            if ahead is not None and ahead.source == _state_of(param.ds_tensor):
                self._put(param, ahead.weight, ahead.arrival)
            else:
                missing.append(param)
        if missing:
            self.has_step_ended()
            numel = sum(param.ds_numel for param in missing)
            self._has_room(numel, is_waiting=True)
            weights, arrival = self._copy(missing)
            for param, weight in zip(missing, weights, strict=True):
                self._put(param, weight, arrival)

    def _copy(self, params: Sequence[Any]) -> tuple[list[torch.Tensor], Arrival]:
        if self._is_collective:
            self.gather_order.note(param.ds_id for param in params)
        # A later forward in training may use what is copied in one that is not.
        with _outside_inference_mode():
            return self._lane.copy(params)

    def _put(self, param: Any, weight: torch.Tensor, arrival: Arrival) -> None:
        param.data = weight
        param.ds_status = ZeroParamStatus.AVAILABLE
        self._live_numel += param.ds_numel - self._numels.get(param.ds_id, 0)
        self._numels[param.ds_id] = param.ds_numel
        if arrival is not None:
            self._arrivals[param.ds_id] = arrival

    def _wait_for(self, params: Iterable[Any]) -> None:
        # Of one copy all have one.
        last, has_passed = None, False
        for param in params:
            arrival = self._arrivals.get(param.ds_id)
            if arrival is None:
                continue
            if arrival is not last:
                last, has_passed = arrival, self._lane.wait(arrival)
            if has_passed:
                del self._arrivals[param.ds_id]

    def _prefetch(self) -> None:
        """Copies what is used next, as far as there is room."""
        params: list[Any] = []
        ids: set[int] = set()
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
                param
                for param in use.params
                if param.ds_status is ZeroParamStatus.NOT_AVAILABLE
                and param.ds_id not in self._ahead
                and param.ds_id not in ids
                and (not is_collective or self._is_everywhere(param))
            ]
            more = sum(param.ds_numel for param in missing)
            if missing and (
                not self._has_room(numel + more, is_waiting=is_collective)
                or (not is_collective and self._would_wait(missing))
            ):
                self._order.put_back()
                break
            params += missing
            ids.update(param.ds_id for param in missing)
            numel += more
        if not params:
            return
        weights, arrival = self._copy(params)
        for param, weight in zip(params, weights, strict=True):
            state = _state_of(param.ds_tensor)
            if state is not None:
                self._ahead[param.ds_id] = _Ahead(weight, arrival, state)
                self._ahead_numel += param.ds_numel
                self._live_numel += param.ds_numel

    def _is_everywhere(self, param: Any) -> bool:
        """Whether each rank has elements of a parameter.

        A rank that has none sees no write to it: it would use a copy made ahead, where others copy.
        """
        return bool(param.ds_numel > (self._lane.num_ranks - 1) * param.partition_numel())

    def _would_wait(self, params: Iterable[Any]) -> bool:
        return any(_state_of(param.ds_tensor) is None for param in params) and not (
            self.has_step_ended()
        )

    def _pop_ahead(self, param: Any) -> _Ahead | None:
        ahead = self._ahead.pop(param.ds_id, None)
        if ahead is not None:
            self._ahead_numel -= param.ds_numel
            self._live_numel -= param.ds_numel
        return ahead

    def _drop_ahead(self) -> None:
        """Frees what was copied and is not used. It was on no stream but the lane's."""
        self._ahead.clear()
        self._live_numel -= self._ahead_numel
        self._ahead_numel = 0

    def _has_room(self, numel: int, *, is_waiting: bool) -> bool:
        """Whether so many more elements may be on the device."""
        while (
            self._leaving and self._live_numel + self._leaving_numel + numel > self._live_numel_max
        ):
            arrival, left = self._leaving[0]
            if not self._lane.has_ended(arrival, is_waiting=is_waiting):
                return False
            self._leaving.popleft()
            self._leaving_numel -= left
        return self._live_numel + self._leaving_numel + numel <= self._live_numel_max

    def _free(self, params: Iterable[Any]) -> None:
        numel, leaving = 0, []
        for param in params:
            # A program may have freed it, or gathered it by itself.
            left = self._numels.pop(param.ds_id, 0)
            self._live_numel -= left
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                arrival = self._arrivals.pop(param.ds_id, None)
                if arrival is not None:
                    # Copied, and used by nothing.
                    self._lane.wait(arrival)
                # First: after Ctrl-C it is fetched anew.
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                leaving.append(param)
                numel += left
        if not leaving:
            return
        with _outside_inference_mode():
            mark = self._lane.free(leaving)
        if numel and mark is not None:
            self._leaving.append((mark, numel))
            self._leaving_numel += numel


def _outside_inference_mode() -> AbstractContextManager[object]:
    """A context in which tensors are made that training may use."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(mode=False)
    return contextlib.nullcontext()


def _may_leave(param: Any) -> bool:
    # Of an external parameter DeepSpeed says so as well.
    return not (param.ds_active_sub_modules or param.ds_persist or param.is_external_param)


def params_of(module: torch.nn.Module) -> Sequence[Any]:
    """The parameters that the hooks of a module fetch, each once.

    They are its own and those registered as external. Those of a leaf are of all modules in it.
    """
    known = module.__dict__
    external = known.get("_external_params")
    if known.get("_z3_leaf"):
        own: list[Any] = list(module.parameters())
    else:
        own = [param for param in module._parameters.values() if param is not None]
    if external:
        own += external.values()
    return own if len(own) < 2 else list({id(param): param for param in own}.values())
