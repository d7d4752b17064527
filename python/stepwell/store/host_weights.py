"""Weights that lie in host memory, and are on the device only while modules use them.

The host side of a parameter is its weight: a step leaves it there, and forwards and backwards fetch
it (`stepwell.weights`). A parameter keeps its identity, shape, views and storage. Only the bytes of
the storage leave: autograd, which keeps the parameter or a view of it, finds them again.

- A parameter whose weight is away has the class of one that is under way
  (`stepwell.access.writes`). So a use outside of all modules brings it. It stays until the next
  step. Where they are more than `BORROWED_BYTES_MAX`, those leave before of whose use no node of
  autograd's graph is left, which the first use tells. One that the program holds memory of (a view,
  `.data`) stays for good, and has the new weight when `step()` returns.
- One that nothing uses, and that is on the device for its next use, has that class as well.
- What the program has written to a weight that was brought goes to the host before it leaves: its
  contents tell. To one that modules have fetched, its version tells: `.data` has one of its own, so
  that a write by way of it within a forward is lost.
- One optimizer at a time has a parameter (`weight_owners`).
- What stays on the device (`staying`) is none of them, but goes to host memory with them.
- Forwards are on one thread at a time.
- What transforms of torch.func use, and backwards with create_graph, stays until the next step.
- What a module uses of others without calling them comes with it once a forward of it has ended.
- While a step runs the host side has the class of what a step writes: a fetch, and whoever reads a
  state dict, waits for its own part of the step.
- State dicts have the host side itself. While one is made, one module's weights come at a time.

Cost: of host memory nothing beside the weights; on the device those of a block of the model, and
what comes ahead of its use. Per pass each weight crosses the bus once, in a backward once more.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from stepwell import _core
from stepwell._tensors import COUNT_ALONE, references
from stepwell.access.compiled_calls import CompiledCall, is_compiled, is_compiled_in_place
from stepwell.access.writes import Writes, end, forget_when_gone
from stepwell.store.host_weight import Graph, HostWeight
from stepwell.store.twins import laid_out
from stepwell.store.weight_owners import check_place, disown, own
from stepwell.weights.calls import CallHook, Calls
from stepwell.weights.fetcher import Fetcher
from stepwell.weights.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepwell.access.writes import Protection
    from stepwell.store.engine import Engine
    from stepwell.store.staying import Staying

__all__ = ["BORROWED_BYTES_MAX", "HostWeights"]

BORROWED_BYTES_MAX = 1 << 30
"""Of weights that a program uses outside of modules, and of which it holds no memory."""


class _Away:
    """What a use of a weight that is away asks: it is brought.

    Args:
        owner: brings it; held weakly.
    """

    def __init__(self, owner: HostWeights) -> None:
        self._owner = weakref.ref(owner)

    def use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        if tensors is None:
            # All are waited for, and those that are away are not used.
            return
        owner = self._owner()
        if owner is None:
            raise ValueError(
                "a parameter is used whose weight was in host memory with its model, which is "
                "gone. hint: keep the model as long as its parameters"
            )
        owner.bring(tensors)

    def note_result(self, tensors: Sequence[torch.Tensor], result: object) -> None:
        if (owner := self._owner()) is not None:
            owner.note_result(tensors, result)

    def take(self, weight: HostWeight) -> None:
        """The host gets what the program has written to a weight that is about to leave."""
        if (owner := self._owner()) is not None:
            owner.take([weight])


class HostWeights:
    """The weights of a model whose host side is their place.

    Args:
        staying: those of the model that stay on the device, which are none of them.
        engine: gives what steps them; None: nothing does.
        lock: what a thread has that submits a step.
        reread: called with parameters that the program has written, to copy them to the host;
            returns those that it knows.
        owner: the optimizer, held weakly.
    """

    def __init__(
        self,
        staying: Staying,
        engine: Callable[[], Engine | None],
        *,
        lock: Any,
        reread: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]],
        owner: object,
    ) -> None:
        self.device, self.staying = staying.device, staying
        self._engine = engine
        self._owner = weakref.ref(owner)
        self._lock, self._reread = lock, reread
        # By the parameter's id, which the weight holds.
        self._weights: dict[int, HostWeight] = {}
        # What modules use of others without calling them, by the module's id.
        self._used_within: dict[int, dict[HostWeight, None]] = {}
        # In the order of their first use.
        self._borrowed: dict[HostWeight, None] = {}
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._has_let_go = False
        # Whether `end_step` finds a step that has begun.
        self._is_begun = False
        self.buffers: list[_core.Buffer] = []
        """The memory of weights that are not stepped."""
        # Modules whose calls are compiled code.
        self._compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._handles: list[torch.utils.hooks.RemovableHandle | CompiledCall] = []
        self._fetcher = Fetcher(
            Lane(self.device),
            there=True,
            absent=False,
            prefetch_numel_max=staying.ahead_numel_max,
            # A block that computes its activations again uses its weights twice.
            reuse_numel_max=2 * staying.block_numel,
            live_numel_max=staying.live_numel_max,
            # Where no step comes between, what a backward has used last is used first.
            repeats=True,
            lock=self._lock,
        )
        self._fetcher.has_step_ended = self._has_step_ended
        self._calls = Calls(
            self._fetcher,
            self._weights_of,
            stack=[],
            map_tensors=_map_tensors,
            on_output=self._keep_returned,
            on_uses=self._note_uses,
            sees_passes=True,
        )
        self._away = _Away(self)
        self._writes: Writes[torch.Tensor] = Writes(self._wait, _nothing)

    # ---- the model ----

    def place(self, param: torch.Tensor, source: torch.Tensor) -> None:
        """From now on the weight of `param` is `source`, in host memory, which has its elements.

        One that stays on the device has it beside that.
        """
        assert isinstance(param, Parameter)
        weight = self._weights.get(id(param))
        if weight is not None:
            weight.source = source
            if not weight.is_held:
                weight.users.clear()
                self._fetcher.give_back([weight], self)
                self._borrowed.pop(weight, None)
        elif self.staying.keep(param, source):
            own(param, self)
        else:
            while True:
                try:
                    self._take_memory_of(param)
                    break
                except torch.OutOfMemoryError:
                    if (kept := self.staying.give_way()) is None:
                        raise
                    assert kept.source is not None
                    self._send_away(kept.param, kept.source)
            self._send_away(param, source)

    def keep(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Moves parameters to the device that stay there, and have no host side; returns these."""
        kept: list[torch.Tensor] = []
        for param in params:
            if isinstance(param, Parameter) and self.staying.keep(param):
                own(param, self)
                kept.append(param)
        return kept

    def _take_memory_of(self, param: Parameter) -> None:
        """Gives a parameter memory on the device that is its own."""
        if param.device != self.device:
            param.data = torch.empty(param.shape, dtype=param.dtype, device=self.device)
        elif (
            # What others hold of its memory stays theirs.
            references(param)[1] > COUNT_ALONE
            or not param.untyped_storage().resizable()
            or not param.is_contiguous()
        ):
            param.data = torch.empty_like(param, memory_format=torch.contiguous_format)

    def _send_away(self, param: Parameter, source: torch.Tensor) -> None:
        """The memory that a parameter has on the device is there only between uses from now on."""
        weight = HostWeight(param, source, len(self._weights), self._away)
        self._weights[id(param)] = weight
        own(param, self)
        forget_when_gone(param)
        if weight.numel:
            weight.drop()

    def watch(self, model: torch.nn.Module) -> None:
        """Has the weights of a model come to its modules; and its buffers be on the device.

        Those that are not placed yet, which are frozen, get memory of their own.

        Raises:
            ValueError: another optimizer has them, or they are no plain parameters.
            OSError: there is no memory for them.
        """
        self._model = weakref.ref(model)
        new = [p for p in model.parameters() if not (id(p) in self._weights or p in self.staying)]
        for param in new:
            check_place(param, self)
        kept = set(self.keep(new))
        self._place_frozen([param for param in new if param not in kept])
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        for module in model.modules():
            if is_compiled(module):
                self._compiled.add(module)
        within = {each for module in self._compiled for each in module.modules()}
        for module in model.modules():
            is_in_place = is_compiled_in_place(module)
            if is_in_place:
                self._handles.append(self._calls.watch_compiled(module, str(id(self))))
            is_within = is_in_place or (module in within and module not in self._compiled)
            self._handles += self._calls.watch(module, is_within_compiled=is_within)
            if module._parameters:
                self._handles += [
                    # torch has no types for these.
                    module.register_state_dict_pre_hook(CallHook(self._begin_state)),  # type: ignore[no-untyped-call]
                    module._register_state_dict_hook(CallHook(self._end_state)),  # type: ignore[no-untyped-call]
                ]

    @property
    def is_abandoned(self) -> bool:
        """Whether the optimizer is gone."""
        return self._owner() is None

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether they are those of `model`."""
        return self._model is not None and self._model() is model

    def let_go(self) -> None:
        """Parameters are plain from now on, and lie in host memory. No step begins any more."""
        with self._lock, torch.no_grad():
            self.take(self._borrowed)
            self.finish_copies()
            for handle in self._handles:
                handle.remove()
            for key, weight in list(self._weights.items()):
                end(weight.param)
                weight.param.data = weight.source.data
                del self._weights[key]
                disown(weight.param)
            for param in self.staying.let_go():
                disown(param)
            self._borrowed.clear()
            self._has_let_go = True

    def finish_copies(self) -> None:
        """The thread waits: the memory of weights may be unpinned."""
        self._fetcher.finish_copies()

    def _place_frozen(self, params: Sequence[Parameter]) -> None:
        if any(param.numel() for param in params):
            buffer, places, _ = laid_out(params)
            self.buffers.append(buffer)
            for param, place in zip(params, places, strict=True):
                place.copy_(param.detach())
                self.place(param, place)

    def _weights_of(self, module: torch.nn.Module) -> Sequence[HostWeight]:
        params: Any = module._parameters.values()
        if module in self._compiled:
            params = module.parameters()
        if _is_transforming():
            # No nodes of its backwards are seen.
            params = (param for param in params if param is not None)
            self.bring([p for p in map(_unwrapped, params) if id(p) in self._weights])
            return ()
        own = map(self._weights.get, map(id, params))
        found = [weight for weight in own if weight is not None and weight.numel]
        if within := self._used_within.get(id(module)):
            found += within
        # Others are where they were put.
        for weight in filter(self._borrowed.__contains__, found) if self._borrowed else ():
            weight.check_device()
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def _note_uses(self, module: torch.nn.Module, weights: Iterable[Any]) -> None:
        """From its next forward on they come with a module that has used them."""
        self._used_within.setdefault(id(module), {}).update(dict.fromkeys(weights))

    def _keep_returned(self, module: torch.nn.Module, output: Any) -> None:
        """What a module returns of the memory of its weights is used outside of it."""
        weights = {weight.storage: weight for weight in self._weights_of(module)}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            is_plain = tensor.layout is torch.strided
            weight = weights.get(tensor.untyped_storage()._cdata) if is_plain else None
            if weight is not None:
                self.bring([weight.param])
            return tensor

        if weights:
            keep(output) if type(output) is torch.Tensor else _map_tensors(keep, output)

    # ---- state dicts ----

    def _begin_state(self, module: torch.nn.Module, *_: Any) -> None:
        """The host has the module's weights, and the state dict finds those on the device."""
        with self._lock:
            weights = self._weights_of(module)
            self.take([weight for weight in weights if weight in self._borrowed])
            self.bring([weight.param for weight in weights if weight not in self._borrowed])

    def _end_state(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """The state dict has the host sides, and not the parameters, which came for it."""
        for name, param in module._parameters.items():
            weight, key = self._weights.get(id(param)), prefix + name
            # Not where the program wants the parameters.
            if weight is not None and key in state and state[key] is not param:
                state[key] = weight.source
        with self._lock:
            brought = [weight for weight in self._weights_of(module) if weight in self._borrowed]
            self._give_back([w for w in brought if not (w.is_in_graph or w.is_held)])

    # ---- uses outside of modules ----

    def bring(self, params: Iterable[torch.Tensor]) -> None:
        """Brings weights that are about to be used."""
        with self._lock:
            weights = [self._weights[id(param)] for param in params]
            # First: wherever Ctrl-C comes, what is written to them counts.
            self._borrowed.update(dict.fromkeys(weights))
            self._fetcher.borrow(weights, self)
            for weight in weights:
                # Of one that is there Ctrl-C may have left the class.
                end(weight.param)
            self._calls.note_uses(weights)
            left = sum(weight.view.nbytes for weight in self._borrowed) - BORROWED_BYTES_MAX
            leaving = []
            for weight in self._borrowed:
                if left <= 0:
                    break
                if not (weight in weights or weight.is_in_graph or weight.is_held):
                    leaving.append(weight)
                    left -= weight.view.nbytes
            self._return(leaving)

    def note_result(self, params: Iterable[torch.Tensor], result: object) -> None:
        """What uses weights outside of modules has returned: a graph may have them."""
        results = result if isinstance(result, (tuple, list)) else [result]
        nodes: list[Any] = [each.grad_fn for each in results if isinstance(each, torch.Tensor)]
        for node in nodes:
            if node is not None:
                graph = node.metadata[Graph] = Graph()
                for param in params:
                    self._weights[id(param)].graph = weakref.ref(graph)

    def _return(self, weights: Sequence[HostWeight]) -> None:
        """Weights that were brought leave, and what the program has written goes to the host."""
        if weights:
            self.take(weights)
            self._give_back(weights)

    def _give_back(self, weights: Sequence[HostWeight]) -> None:
        self._fetcher.give_back(weights, self)
        for weight in weights:
            self._borrowed.pop(weight, None)

    def take(self, weights: Iterable[HostWeight]) -> None:
        """Copies to the host what the program has written.

        Raises:
            ValueError: the program has given a parameter what cannot be its weight.
        """
        weights = list(weights)
        for weight in weights:
            weight.check()
        with torch.no_grad():
            written = [weight for weight in weights if weight.is_written]
            known = set(map(id, self._reread([weight.param for weight in written])))
            for weight in written:
                if id(weight.param) not in known:
                    weight.source.copy_(weight.param)
                if weight.is_replaced:
                    weight.put_back()
                weight.note_taken()

    # ---- steps ----

    def begin_step(self) -> None:
        """A step is about to be decided on: the host has what the program has written.

        No weight is on the device, and none is copied, but for those that the program holds.
        """
        if self._has_let_go:
            raise ValueError(
                "step() of an optimizer whose model has another one with weights='host' since, "
                "expected one. hint: one optimizer with several groups"
            )
        # Forwards that have begun have ended, also those that Ctrl-C has.
        self._calls.forget()
        self._writes.use(None)
        self._is_begun = False
        for weight in self._weights.values():
            if weight.is_replaced:
                weight.check_device()
                end(weight.param)
                weight.state = True
                weight.users.add(self)
                self._borrowed[weight] = None
        self.take(self._borrowed)
        staying = {weight: None for weight in self._borrowed if weight.is_held}
        self._fetcher.free_all([w for w in self._weights.values() if w not in staying])
        self._borrowed = staying

    def protection(self, stepped: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Protection:
        """What the call that begins a step does, for uses of what it writes to wait from then on.

        Args:
            stepped: parameters, each with its weight in host memory.
        """
        self._is_begun = True
        return self._writes.protection([], {weight: param for param, weight in stepped})

    def end_step(self) -> None:
        """If a step has begun the thread waits for the weights whose memory the program holds."""
        with torch.no_grad():
            for weight in self._borrowed if self._is_begun else ():
                weight.view.copy_(weight.source)
        self._is_begun = False

    def _wait(self, params: Sequence[torch.Tensor]) -> None:
        if (engine := self._engine()) is not None:
            engine.wait(params)

    def _has_step_ended(self) -> bool:
        engine = self._engine()
        return engine is None or not engine.busy


def _is_transforming() -> bool:
    """Whether a transform of torch.func runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What transforms of torch.func have wrapped."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return tree_map(lambda each: function(each) if isinstance(each, torch.Tensor) else each, value)


def _nothing(*_: object) -> None:
    pass
