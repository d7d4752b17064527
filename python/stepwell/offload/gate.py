"""Waits in front of module forwards: for the weights that a forward needs, and for no others.

What is gated is the forward of `torch.nn.Module`s that hold parameters of the optimizer. A module
waits for its own parameters, and for those of submodules that it uses without calling them. A
forward in training mode shows which submodules are called. In evaluation mode, where modules may
take short cuts, the first module called waits for everything beneath it; and so does an evaluation
in training mode, where updates are deferred (`Gate.is_look`).

The gate is there for speed: it waits for all weights of a module at once, before they are needed
one by one. `guard` makes every access wait, also one that no hook sees. The step itself waits for
weights that no forward is known to wait for, and for those that can be reached past the guard. What
FSDP2 gathers ahead of a forward waits in the gather (`shard_guard`).

A module whose calls go to compiled code waits before that, for all that is within it
(`compiled_calls`). Modules within it have a hook for what calls them by themselves. Where
torch.compile traces a module that has a hook, since it was compiled after the first step or as a
part of some other code, or torch.jit does, or a CUDA graph captures its forward, the gate is
closed: every step then waits for its uploads. The result is the same.

A gate is made by the first step. What that waits for itself no guard sees a look at, and where
updates are deferred such a look counts. So where a run is resumed, `forwards.Forwards` tells the
gate which modules the forward before that step has called, as the run that went on knows.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell._sharding import is_dtensor
from stepwell.offload.compiled_calls import (
    before_forwards,
    in_calls,
    is_compiled,
    something_is_compiled,
)
from stepwell.offload.guard import WeightGuard
from stepwell.offload.module_tree import (
    Hook,
    ModuleTree,
    living,
    modules_alive,
    reached,
    remove,
)
from stepwell.offload.shard_guard import ShardGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from stepwell.offload.guard import UnderWayIn, Uploads


__all__ = ["LANDING_BYTES_MAX", "Gate"]

LANDING_BYTES_MAX = 256 << 20
"""Of `Gate.wait_bytes_max`, where updates are deferred: weights are there before the forward then,
but for their way up, of 5 ms per share."""

_LOGGER = logging.getLogger(__name__)

_GATES: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_KEYS = map(str, itertools.count(1))


def _traced(key: str) -> bool:
    """Called by torch.compile when it traces a hook, not when the compiled code runs."""
    gate = _GATES.get(key)
    if gate is not None:
        gate.close()
    return True


def _traced_within(key: str) -> bool:
    """As `_traced`, of a hook within a compiled module, whose own code does not close the gate."""
    gate = _GATES.get(key)
    return (gate is not None and gate.is_in_call()) or _traced(key)


# What torch.compiler.assume_constant_result does, which takes seconds to import.
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_traced_within._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Gate:
    """Hooks on the modules that hold `params`.

    Args:
        params: the parameters on the device.
        uploads: what makes the current stream wait for their weights.
        release: a method that waits until the gradients of the last step may be written; held
            weakly. None: they may be written once a step was submitted.
        settle: as `WeightGuard` has it.
        confirm: likewise.
        has_pending: a method that says whether updates are deferred that `settle` would apply; held
            weakly. None: none is.
        wait_bytes_max: of weights that one module waits for at once, before it begins, though only
            modules within it use them; 0: each module waits for its own.
        called: modules that forwards in training have called already.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        uploads: Uploads,
        release: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
        *,
        confirm: Callable[[], None] | None = None,
        has_pending: Callable[[], bool] | None = None,
        wait_bytes_max: int = 0,
        called: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._params = set(params)
        self.is_on_cuda = any(param.is_cuda for param in self._params)
        """Whether a CUDA graph may capture a forward."""
        self._called: set[int] = set()
        self._waits: dict[int, list[torch.Tensor]] = {}
        # The ids of what is in them.
        self._covered: set[int] = set()
        self._num_called = -1
        self._uncovered: list[torch.Tensor] = []
        self._release = None if release is None else weakref.WeakMethod(release)
        # The thread whose step has not waited for what it has to, after `open`.
        self._unfinished_on: int | None = None
        # The modules with hooks.
        self._by_id: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        # Whether a forward in training has begun since the last step.
        self._is_entered = False
        self._nbytes: dict[int, int] = {}
        self._has_pending = None if has_pending is None else weakref.WeakMethod(has_pending)
        self._wait_bytes_max = wait_bytes_max
        modules = modules_alive()
        tree = ModuleTree(self._params, modules)
        self._children, self._parents, self._owned = tree.children, tree.parents, tree.owned
        self.guard = (
            ShardGuard(self._params, uploads, settle, modules)
            if any(map(is_dtensor, self._params))
            else WeightGuard(uploads, settle, confirm)
        )
        """What knows which weights are under way."""
        self.is_open = False
        """Whether forwards wait by themselves. If not, the step has to wait for all uploads."""
        self._attach(tree)
        self._called.update(id(module) for module in called if id(module) in self._by_id)

    def _attach(self, tree: ModuleTree) -> None:
        unowned = len(self._params.difference(*self._owned.values()))
        compiled = [type(module).__name__ for module in tree.called if is_compiled(module)]
        scripts = [one for one in tree.gated if issubclass(type(one), torch.jit.ScriptModule)]
        if something_is_compiled() and not compiled:
            why = "torch.compile was used before the first step, and would not see hooks"
        elif compiled and any(map(is_dtensor, self._params)):
            why = f"`{compiled[0]}` is compiled, and has DTensor parameters"
        elif scripts:
            why = f"`{type(scripts[0]).__name__}` is compiled"
        elif unowned:
            why = f"{unowned} parameters are in no module"
            if gc.get_freeze_count():
                why += " that is seen: gc.freeze() hides modules, call it after the first step"
        else:
            self._hook(tree)
            return
        _LOGGER.info("gate='step': %s, so forwards cannot wait by themselves", why)

    def _hook(self, tree: ModuleTree) -> None:
        key = next(_KEYS)
        _GATES[key] = self
        self._by_id.update((id(module), module) for module in tree.called)
        state = _StateHook(key)
        handles = before_forwards(tree.called, _ForwardHook(key))
        handles += before_forwards(tree.within, _InnerHook(key))
        for module in tree.gated:
            # torch has no types for these.
            handles += [
                module.register_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(state),  # type: ignore[no-untyped-call]
            ]
        weakref.finalize(self, remove, handles)
        self.is_open = True

    def open(self, params: Iterable[torch.Tensor], exposed: Iterable[torch.Tensor] = ()) -> None:
        """From now on accesses to `params` wait. Call it before the step is submitted.

        Args:
            params: as `opening` has it.
            exposed: likewise.
        """
        params = list(params)
        if self.opening(params, exposed) is not None:
            self.guard.protect(params)

    def opening(
        self, params: Iterable[torch.Tensor], exposed: Iterable[torch.Tensor] = ()
    ) -> UnderWayIn | None:
        """What the call that begins a step does, for accesses to `params` to wait from then on.

        None: there is nothing to do.

        Closes the gate instead where torch.compile has traced an access to a parameter.

        Args:
            params: what the step updates.
            exposed: those of `params` that the step itself has to wait for, in
                `wait_for_uncovered`, whatever forwards do.
        """
        if self.guard.was_compiled:
            # Compiled again in every step otherwise: parameters change their class.
            self.close()
            return None
        params = list(params)
        self._uncovered = self.not_covered(params, exposed)
        self._unfinished_on = threading.get_ident()
        self._is_entered = False
        return self.guard.protection(params)

    def exposed(
        self, params: Iterable[torch.Tensor], held: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """Those of `params` whose memory can be reached without an access that the guard sees.

        Args:
            params: what is about to be stepped.
            held: as `guard.exposed` has it.
        """
        return self.guard.exposed(params, self._params, held)

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

    @property
    def called(self) -> list[torch.nn.Module]:
        """The modules that forwards in training have called, as far as they are alive."""
        return living(self._called, self._by_id)

    @property
    def uncovered(self) -> list[torch.Tensor]:
        """What `wait_for_uncovered` waits for next."""
        return self._uncovered

    def wait_for_uncovered(self) -> None:
        """Waits for the weights that no forward is known to wait for, and for those exposed."""
        if self._uncovered:
            # A program may have a way to them that no guard sees.
            self.guard.confirm()
        self.guard.wait_for(self._uncovered)
        self._uncovered = []
        self._unfinished_on = None

    def close(self) -> None:
        """No forward waits any more: compiled code does not call the hooks."""
        if self.is_open:
            _LOGGER.info("gate='step': a module whose forward would have to wait is compiled")
            self.is_open = False
        if not (self._is_entered and torch.is_grad_enabled()):
            self.guard.settle()
        self.finish()

    def capture(self) -> None:
        """The forward of a module is captured in a CUDA graph, whose replays call no hooks.

        Raises:
            ValueError: weights are under way, or lack updates that are deferred, and a capture
                cannot wait for them.
        """
        if self.guard.any_under_way or self._is_any_pending():
            raise ValueError(
                "a CUDA graph is captured while new weights are under way. "
                "hint: optimizer.synchronize() before the capture"
            )
        _LOGGER.info("gate='step': a module whose forward would have to wait is in a CUDA graph")
        self.is_open = False

    def finish(self) -> None:
        """The current stream waits for all weights."""
        self.guard.finish()
        self._uncovered = []

    def clear(self, step: int) -> None:
        """All weights have arrived.

        Args:
            step: `guard.num_steps` as it was before that was waited for.
        """
        self.guard.clear(step)
        if step == self.guard.num_steps:
            self._uncovered = []
            self._unfinished_on = None

    def _share_out(self) -> dict[int, list[torch.Tensor]]:
        """Which module waits for which parameters.

        For each owner of parameters: on every way up from it, the nearest module that was called,
        or one further up that has `wait_bytes_max` beneath it at most.
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
            if self._nbytes_beneath(key) > self._wait_bytes_max:
                break
            if key in self._called:
                found = key
        return found

    def _nbytes_beneath(self, key: int) -> int:
        if key not in self._nbytes:
            beneath = reached([key], self._children)
            params = {param for each in beneath for param in self._owned.get(each, ())}
            self._nbytes[key] = sum(param.nbytes for param in params)
        return self._nbytes[key]

    def _is_any_pending(self) -> bool:
        """Whether `settle` would apply updates that are deferred."""
        has_pending = None if self._has_pending is None else self._has_pending()
        return has_pending is not None and has_pending()

    def is_look(self, module: torch.nn.Module) -> bool:
        """Whether the forward of `module` is no forward in training, and sees all updates.

        So without gradients in training mode, where no forward with gradients has begun since the
        last step: a program that evaluates need not call `eval()`. Within one (a reentrant
        checkpoint, a part that is frozen), or behind it, weights are those that it reads.
        """
        if not module.training:
            return True
        return not (self._is_entered or torch.is_grad_enabled()) and self._is_any_pending()

    def is_in_call(self) -> bool:
        """Whether this thread is in a call of a compiled module that has waited."""
        return any(key in self._by_id for key in in_calls())

    def enter(self, module: torch.nn.Module) -> None:
        """The forward of `module` is about to begin."""
        if module.training:
            self._called.add(id(module))
        if self.is_look(module):
            self.enter_all(module)
            return
        self._is_entered = True
        if self._unfinished_on is not None or self._uncovered:
            self._end_interrupted_step()
        if self.guard.any_under_way:
            self.guard.enter(self._waits.get(id(module), ()))

    def enter_all(self, module: torch.nn.Module) -> None:
        """All weights beneath `module` are about to be used."""
        self._end_interrupted_step()
        # Not where a forward in training uses a part in evaluation mode: its other parts have read
        # their weights, which backward needs as they are.
        is_part = self._is_entered and torch.is_grad_enabled() and self._is_part(module)
        if not is_part:
            self.guard.settle()
        if self.guard.any_under_way:
            if not is_part:
                self.guard.confirm()
            beneath = reached([id(module)], self._children)
            self.guard.enter(param for key in beneath for param in self._owned.get(key, ()))

    def _is_part(self, module: torch.nn.Module) -> bool:
        """Whether `module` is within one that is in training mode."""
        above = living(reached([id(module)], self._parents), self._by_id)
        return any(one.training for one in above)

    def _end_interrupted_step(self) -> None:
        """Waits for what the last step would have waited for, had Ctrl-C not ended it."""
        if self._unfinished_on == threading.get_ident():
            release = None if self._release is None else self._release()
            if release is not None:
                release()
            self.wait_for_uncovered()
        elif self._uncovered:
            # On another thread, while the step goes on.
            self.wait_for_uncovered()


class _ForwardHook(Hook):
    # Called twice per module and step where activations are computed again: each microsecond is
    # one of the thread that launches the forward.
    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _traced(self.key)
            return
        gate = _GATES.get(self.key)
        if gate is None or not gate.is_open:
            return
        if torch._C._is_tracing():
            if not module.training:
                gate.enter_all(module)
            gate.close()
        elif gate.is_on_cuda and torch.cuda.is_current_stream_capturing():
            gate.capture()
        else:
            gate.enter(module)


class _InnerHook(Hook):
    """Of a module within a compiled one.

    In training the compiled one waits for its weights; without it, each access does.
    """

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _traced_within(self.key)
            return
        gate = _GATES.get(self.key)
        if gate is None or not gate.is_open:
            return
        if gate.is_on_cuda and torch.cuda.is_current_stream_capturing():
            gate.capture()
            return
        if gate.is_look(module):
            gate.enter_all(module)
        if torch._C._is_tracing():
            gate.close()


class _StateHook(Hook):
    """Before a state dict is made or loaded."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        gate = _GATES.get(self.key)
        if gate is not None:
            # Also where the gate was closed since the last step.
            gate.guard.settle()
        if gate is not None and gate.is_open:
            gate.enter_all(module)
