"""Waits in front of module forwards: for the weights that a forward needs, and for no others.

The modules of a model that hold parameters of the optimizer have hooks from when the optimizer is
made until it is gone. A module waits for its own parameters, and for those of submodules that it
uses without calling them. A forward in training mode shows which submodules are called. In
evaluation mode, where modules may take short cuts, the first module called waits for everything
beneath it; and so does an evaluation in training mode, where updates are deferred (`is_look`).

The gate is there for speed: it waits for all weights of a module at once, before they are needed
one by one. `guard` makes every other use wait. The step itself waits for weights that no forward is
known to wait for, and for those that can be reached past the guard. What FSDP2 gathers ahead of a
forward waits in the gather (`shard_guard`).

A module whose calls go to compiled code waits before that, for all that is within it. Where
torch.compile traces a hook as a part of other code, or torch.jit does, or a CUDA graph captures a
forward, the gate is closed: every step then waits for its uploads. The result is the same.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell._sharding import is_dtensor
from stepwell.access.compiled_calls import CompiledCall, is_compiled, is_compiled_in_place
from stepwell.access.guard import Forwards, WeightGuard
from stepwell.access.hooks import Hook
from stepwell.access.shard_guard import ShardGuard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from stepwell.access.guard import Uploads
    from stepwell.access.writes import Protection


__all__ = ["LANDING_BYTES_MAX", "Gate", "remove"]

LANDING_BYTES_MAX = 256 << 20
"""Of `Gate.wait_bytes_max`, where updates are deferred: weights are there before the forward then,
but for their way up, of 5 ms per share."""

_LOGGER = logging.getLogger(__name__)

_GATES: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_KEYS = map(str, itertools.count(1))


class Gate:
    """Hooks on the modules of a model that hold parameters of an optimizer.

    Until weights are attached it only learns which modules forwards call.

    Args:
        model: is not kept alive.
        params: those on the device.
        wait_bytes_max: of weights that one module waits for at once, before it begins, though only
            modules within it use them; 0: each module waits for its own.
    """

    def __init__(
        self, model: torch.nn.Module, params: Iterable[torch.Tensor], *, wait_bytes_max: int = 0
    ) -> None:
        self._model = weakref.ref(model)
        self._wait_bytes_max = wait_bytes_max
        self._forwards = Forwards()
        self.guard: WeightGuard | None = None
        """What knows which weights are under way; None: none can be."""
        # Whether forwards cannot wait, by what was compiled or captured.
        self._is_closed = False
        # The modules with hooks, and what removes those.
        self._by_id: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self._handles: list[torch.utils.hooks.RemovableHandle | CompiledCall] = []
        self._key = next(_KEYS)
        _GATES[self._key] = self
        weakref.finalize(self, remove, self._handles)
        # The modules that forwards in training have called.
        self._called: set[int] = set()
        self._compiled: set[int] = set()
        self._waits: dict[int, list[torch.Tensor]] = {}
        # The ids of what is in them.
        self._covered: set[int] = set()
        self._num_called = -1
        self._uncovered: list[torch.Tensor] = []
        # Whether a forward in training has begun since the last step.
        self._is_entered = False
        self._follow(params)

    @property
    def is_open(self) -> bool:
        """Whether forwards wait by themselves. If not, the step has to wait for all uploads."""
        guard = self.guard
        return guard is not None and not (self._is_closed or guard.was_compiled)

    # ---- the model ----

    def _follow(self, params: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
        """Takes the model as it is now, with these parameters.

        Returns its modules that were compiled since.
        """
        self._params = set(params)
        self.is_on_cuda = any(param.is_cuda for param in self._params)
        """Whether a CUDA graph may capture a forward."""
        by_id = {id(module): module for module in self._modules()}
        self._children = {key: list(map(id, each.children())) for key, each in by_id.items()}
        self._parents: dict[int, list[int]] = {}
        for key, children in self._children.items():
            for child in children:
                self._parents.setdefault(child, []).append(key)
        # The parameters that a module holds itself.
        self._owned: dict[int, list[torch.Tensor]] = {}
        for key, module in by_id.items():
            owned: list[torch.Tensor] = [*module.parameters(recurse=False)]
            if owned := [param for param in owned if param in self._params]:
                self._owned[key] = owned
        gated = [by_id[key] for key in _reached(self._owned, self._parents)]
        before = self._compiled
        self._compiled = {id(module) for module in gated if is_compiled(module)}
        beneath = [child for key in self._compiled for child in self._children[key]]
        # Those within compiled ones.
        self._within = set(_reached(beneath, self._children))
        self._called -= self._within
        self._nbytes: dict[int, int] = {}
        self._num_called = -1
        scripts = [each for each in gated if isinstance(each, torch.jit.ScriptModule)]
        if scripts:
            self._tell_closed(f"`{type(scripts[0]).__name__}` is compiled")
            return []
        # One may have been compiled anew.
        found = (self._compiled - before).union(self._hook(gated))
        return [by_id[key] for key in found]

    def _modules(self) -> list[torch.nn.Module]:
        model = self._model()
        return [] if model is None else list(model.modules())

    def _hook(self, gated: Iterable[torch.nn.Module]) -> list[int]:
        """Puts hooks where there are none. Returns modules whose compiled call had none."""
        found = []
        hooks = _Before(self._key), _Behind(self._key)
        state = _StateHook(self._key)
        for module in gated:
            if self._by_id.get(id(module)) is not module:
                self._by_id[id(module)] = module
                self._called.discard(id(module))
                self._handles += [
                    module.register_forward_pre_hook(hooks[0], prepend=True),
                    module.register_forward_hook(hooks[1], always_call=True),
                    # torch has no types for these.
                    module.register_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
                ]
            if is_compiled_in_place(module) and self._key not in CompiledCall.keys_of(module):
                self._handles.append(CompiledCall(module, self._key, *hooks))
                found.append(id(module))
        return found

    def _tell_closed(self, why: str) -> None:
        if not self._is_closed:
            _LOGGER.info("%s, so forwards cannot wait: every step waits for all weights", why)
        self._is_closed = True

    # ---- the weights ----

    def attach(self, params: Iterable[torch.Tensor], uploads: Uploads) -> None:
        """From now on forwards wait for what steps of `params` upload."""
        self._follow(params)
        if not any(map(is_dtensor, self._params)):
            self.guard = WeightGuard(uploads, self._forwards)
            return
        self.guard = ShardGuard(self._params, uploads, self._forwards, self._modules())
        if self._compiled:
            self._tell_closed("a module with DTensor parameters is compiled")

    def detach(self) -> None:
        """No step comes until weights are attached again. All of the last one are there."""
        self.guard, self._uncovered = None, []

    def opening(
        self,
        params: Iterable[torch.Tensor],
        exposed: Iterable[torch.Tensor] = (),
        read: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> Protection | None:
        """What the call that begins a step does, for uses of `params` to wait from then on.

        None: the gate is closed.

        Args:
            params: what the step updates.
            exposed: those of `params` that the step itself has to wait for, in
                `wait_for_uncovered`, whatever forwards do.
            read: the gradients that it reads where they are, by their parameters. What would write
                them waits, too.
        """
        # Ctrl-C may have left a forward without its end.
        self._forwards.end()
        if self.guard is None or not self.is_open:
            return None
        params = list(params)
        self._is_entered = False
        found = self.guard.protection(params, read or {})
        found.entries.append((vars(self), {"_uncovered": self.not_covered(params, exposed)}))
        return found

    def exposed(
        self,
        params: Iterable[torch.Tensor],
        held: Collection[int] = (),
        read: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Those of `params` whose memory can be reached without a use that the guard sees.

        Weights are attached.

        Args:
            params: what is about to be stepped.
            held: as `guard.exposed` has it.
            read: as `opening` has it. Their memory counts as that of their parameters.
        """
        assert self.guard is not None
        found = self.guard.exposed(params, self._params, held)
        return found + self.guard.exposed_reads(read or {})

    def not_covered(
        self, params: Iterable[torch.Tensor], exposed: Iterable[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Those of `params` that no forward is known to wait for, and those of `exposed`."""
        if self._num_called != len(self._called):
            self._waits = self._share_out()
            self._covered = {id(param) for waited in self._waits.values() for param in waited}
            self._num_called = len(self._called)
        covered = self._covered.difference(map(id, exposed))
        return [param for param in params if id(param) not in covered]

    def wait_for_uncovered(self) -> None:
        """Waits for the weights that no forward is known to wait for, and for those exposed."""
        if self.guard is not None and self._uncovered:
            step = self.guard.num_steps
            # A program may have a way to them that no guard sees.
            self.guard.confirm()
            self.guard.wait_for(self._uncovered)
            self._clear_uncovered(step)

    def _clear_uncovered(self, step: int) -> None:
        # Not those of a step that another thread has begun meanwhile.
        if self.guard is None or step == self.guard.num_steps:
            self._uncovered = []

    def close(self, why: str) -> None:
        """No forward waits any more: compiled code does not call the hooks."""
        self._tell_closed(why)
        if self.guard is not None:
            if not (self._is_entered and torch.is_grad_enabled()):
                self.guard.uploads.settle()
            self.finish()

    def note_trace(self) -> None:
        """torch.compile traces a module that has a hook."""
        if not self._compiled.isdisjoint(self._forwards.compiled):
            # Its own code, before which it has waited.
            return
        has_shards = any(map(is_dtensor, self._params))
        if compiled := [] if has_shards else self._follow(self._params):
            # It was compiled since, and this is its first call: the next ones wait.
            self._called.update(id(module) for module in compiled if module.training)
            self._forwards.compiled += map(id, compiled)
            self.finish()
            if self.guard is not None:
                # What is compiled now may have seen parameters that were under way. The next calls
                # see none.
                self.guard.was_compiled = False
        else:
            self.close("a module is traced as a part of other code")

    def capture(self) -> None:
        """The forward of a module is captured in a CUDA graph, whose replays call no hooks.

        Raises:
            ValueError: weights are under way, or lack updates that are deferred, and a capture
                cannot wait for them.
        """
        guard = self.guard
        if guard is not None and (guard.any_under_way or guard.uploads.has_pending()):
            raise ValueError(
                "a CUDA graph is captured while new weights are under way. "
                "hint: optimizer.synchronize() before the capture"
            )
        self._tell_closed("a module is in a CUDA graph")

    def finish(self) -> None:
        """The current stream waits for all weights."""
        if self.guard is not None:
            step = self.guard.num_steps
            self.guard.finish()
            self._clear_uncovered(step)

    def clear(self, step: int) -> None:
        """All weights have arrived.

        Args:
            step: `guard.num_steps` as it was before that was waited for.
        """
        if self.guard is not None:
            self.guard.clear(step)
            self._clear_uncovered(step)

    # ---- which module waits for what ----

    def _share_out(self) -> dict[int, list[torch.Tensor]]:
        """Which module waits for which parameters.

        For each owner of parameters: on every way up from it, the nearest module that was called,
        or one further up that has less than `wait_bytes_max` beneath it.
        """
        waits: dict[int, list[torch.Tensor]] = {}
        for owner, params in self._owned.items():
            ahead, seen = [owner], {owner}
            while ahead:
                key = ahead.pop()
                if key in self._called:
                    waits.setdefault(self._waits_with(key), []).extend(params)
                    continue
                above = [parent for parent in self._parents.get(key, []) if parent not in seen]
                seen.update(above)
                ahead += above
        return waits

    def _waits_with(self, key: int) -> int:
        """The furthest module above this one, or it, that may wait for all that is beneath."""
        found = key
        while len(above := self._parents.get(key, [])) == 1:
            key = above[0]
            if self._nbytes_beneath(key) >= self._wait_bytes_max:
                break
            if key in self._called:
                found = key
        return found

    def _nbytes_beneath(self, key: int) -> int:
        if key not in self._nbytes:
            self._nbytes[key] = sum(param.nbytes for param in set(self._beneath(key)))
        return self._nbytes[key]

    def _beneath(self, key: int) -> list[torch.Tensor]:
        """The parameters of a module and of all within it."""
        modules = _reached([key], self._children)
        return [param for each in modules for param in self._owned.get(each, ())]

    # ---- forwards ----

    def is_look(self, module: torch.nn.Module) -> bool:
        """Whether the forward of `module` is no forward in training, and sees all updates.

        So without gradients in training mode, where no forward with gradients has begun since the
        last step: a program that evaluates need not call `eval()`. Within one (a reentrant
        checkpoint, a part that is frozen), or behind it, weights are those that it reads.
        """
        if not module.training:
            return True
        if self._is_entered or torch.is_grad_enabled():
            return False
        return self.guard is not None and self.guard.uploads.has_pending()

    def enter(self, module: torch.nn.Module) -> None:
        """The forward of `module` is about to begin."""
        if torch._C._is_tracing():
            if not module.training:
                self.enter_all(module)
            self.close("a module is traced by torch.jit")
        elif self.is_on_cuda and torch.cuda.is_current_stream_capturing():
            self.capture()
        key, forwards = id(module), self._forwards
        if forwards.outermost is None:
            forwards.outermost = key
        if key in self._compiled:
            forwards.compiled.append(key)
        if module.training and key not in self._within:
            self._called.add(key)
        guard = self.guard
        if guard is None or self._is_closed:
            return
        if self.is_look(module):
            self.enter_all(module)
            return
        self._is_entered = True
        if self._uncovered:
            # Ctrl-C has ended the step's own wait, or this is another thread.
            self.wait_for_uncovered()
        if guard.any_under_way:
            guard.enter(self._waits.get(key, ()))

    def leave(self, module: torch.nn.Module) -> None:
        """The forward of `module` has ended."""
        key, forwards = id(module), self._forwards
        if forwards.outermost == key:
            forwards.end()
        elif key in self._compiled and key in forwards.compiled:
            forwards.compiled.remove(key)

    def enter_all(self, module: torch.nn.Module) -> None:
        """All weights beneath `module` are about to be used."""
        guard = self.guard
        if guard is None or self._is_closed:
            return
        self.wait_for_uncovered()
        # Not where a forward in training uses a part in evaluation mode: its other parts have read
        # their weights, which backward needs as they are.
        is_part = self._is_entered and torch.is_grad_enabled() and self._is_part(module)
        if not is_part:
            guard.uploads.settle()
        if guard.any_under_way:
            if not is_part:
                guard.confirm()
            guard.enter(self._beneath(id(module)))

    def _is_part(self, module: torch.nn.Module) -> bool:
        """Whether `module` is within one that is in training mode."""
        above = map(self._by_id.get, _reached([id(module)], self._parents))
        return any(one is not None and one.training for one in above)


def remove(handles: Iterable[torch.utils.hooks.RemovableHandle | CompiledCall]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()


def _reached(keys: Iterable[int], steps: Mapping[int, list[int]]) -> list[int]:
    """Where `steps` lead from `keys`, which are included; in the order of a walk, each once."""
    reached: dict[int, None] = {}
    ahead = list(keys)[::-1]
    while ahead:
        key = ahead.pop()
        if key not in reached:
            reached[key] = None
            ahead += steps.get(key, ())[::-1]
    return list(reached)


def _traced(key: str) -> bool:
    """Called by torch.compile when it traces a hook, not when the compiled code runs."""
    gate = _GATES.get(key)
    if gate is not None:
        gate.note_trace()
    return True


# What torch.compiler.assume_constant_result does, which takes seconds to import.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _GateHook(Hook):
    """A hook on modules, of the gate with this key, which it does not keep alive."""

    def __init__(self, key: str) -> None:
        # No number: torch.compile would take one that differs for a size that varies.
        self.key = key


class _Before(_GateHook):
    # Called twice per module and step where activations are computed again: each microsecond is
    # one of the thread that launches the forward.
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _traced(self.key)
        elif (gate := _GATES.get(self.key)) is not None:
            gate.enter(module)


class _Behind(_GateHook):
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (gate := _GATES.get(self.key)) is not None:
            gate.leave(module)


class _StateHook(_GateHook):
    """Before a state dict is made or loaded."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        gate = _GATES.get(self.key)
        if gate is not None and gate.guard is not None:
            # Also in the middle of a forward, and where the gate is closed.
            gate.guard.uploads.settle()
            gate.enter_all(module)
