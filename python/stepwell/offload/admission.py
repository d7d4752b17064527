"""Parameters that come to an `OffloadAdamW`, and leave it.

What requires a gradient is stepped on the device as long as that has room for its state, and in
host memory else. A frozen parameter takes nothing until it thaws.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state
from stepwell._sharding import is_dtensor, local
from stepwell.access.gate import remove

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from stepwell.offload.parts import Parts

__all__ = ["Admission"]


class Admission:
    """Of the parameters of one optimizer.

    Args:
        parts: what it is made from.
        moments: how moments are held in host memory.
        model: whose forwards use them; held weakly.
    """

    def __init__(self, parts: Parts, moments: str, model: torch.nn.Module | None) -> None:
        self._parts, self._moments = parts, moments
        self._model = None if model is None else weakref.ref(model)
        # What removes the hooks of a parameter, by its id. Its twin holds it.
        self._hooked: dict[int, weakref.finalize[Any, Admission]] = {}

    def named(self, group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """`group`, with the model's names where the groups before it have some."""
        if self._model is None or not groups or "param_names" not in groups[0]:
            return group
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(not isinstance(param, torch.Tensor) for param in params):
            return {**group, "params": params}
        model, at = self._model(), len(groups)
        names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        pairs = [(names.get(id(p), f"group {at}, {n}"), p) for n, p in enumerate(params)]
        return {**group, "params": pairs}

    def admit(
        self,
        params: Iterable[torch.Tensor],
        labelled: Callable[[], Iterable[tuple[torch.Tensor, str]]],
    ) -> None:
        """Takes up those of `params` that are new and are to be stepped.

        `labelled`: gives the parameters of all groups, with what errors call them.

        Raises:
            ValueError: one of them could not be stepped; nothing was changed.
            OSError: there is no memory.
        """
        spans = self._parts.spans
        if new := [param for param in params if param.requires_grad and param not in spans]:
            with self._parts.host.awaited(new):
                self._admit(new, dict(labelled()))
        self.hook()

    def _admit(self, new: list[torch.Tensor], labels: dict[torch.Tensor, str]) -> None:
        host, residents = self._parts.host, self._parts.residents
        host.choose(new, None if self._model is None else self._model())
        host.check(new, labels)
        found = residents.choose(new, labels)
        if host.weights is not None:
            found = host.weights.keep(found)
        try:
            residents.add(found)
            self._admit_to_host([param for param in new if param not in residents])
        except BaseException:
            residents.remove(found)
            raise
        host.twins.device = local(new[0]).device

    def _admit_to_host(self, new: list[torch.Tensor]) -> None:
        if not new:
            return
        host, states = self._parts.host, self._parts.keeper.settled()
        has_engine = self._parts.background.engine is not None
        with host.announce(new, states, has_engine=has_engine):
            # It is made for a fixed list of parameters.
            self._parts.collector.end_engine()
            host.admit(new, states)

    def let_go(self, living: Collection[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Frees the host memory of parameters that are in no group any more.

        All but their state, as in torch's optimizers. Returns those that had a host side.
        """
        host, residents = self._parts.host, self._parts.residents
        if leaving := [param for param in residents if param not in living]:
            states = self._parts.keeper.settled()
            residents.read(states, leaving)
            residents.remove(leaving)
            for param in leaving:
                if state := states.get(param):
                    # They may come back to host memory, which refuses what is no state.
                    with contextlib.suppress(ValueError):
                        weight = param.detach().cpu()
                        states[param] = _state.convert(
                            weight, state, self._moments, key=0, current=state, label="a parameter"
                        )
        if params := [param for param in host.twins if param not in living]:
            # It has pinned the memory.
            self._parts.collector.end_engine(params)
            # Before the twins, which hold the parameters whose ids these are: Ctrl-C may come.
            for param in params:
                if remove_hooks := self._hooked.pop(id(param), None):
                    remove_hooks()
            host.let_go(params, self._parts.keeper.settled())
        return params

    def hook(self) -> None:
        """Has autograd tell the collector when it is done with a gradient, if that wants it.

        A frozen parameter takes no hook. It gets one in the first `no_sync` after it thaws.
        """
        collector = self._parts.collector
        if collector.wants_hooks:
            for param in self._parts.host.twins:
                if id(param) not in self._hooked and param.requires_grad and _calls_hooks(param):
                    handles = collector.watch(param)
                    self._hooked[id(param)] = weakref.finalize(self, remove, handles)


def _calls_hooks(param: torch.Tensor) -> bool:
    """Whether hooks of `param` may be of use.

    Not where its shards are offloaded by FSDP2, which waits for the gradients that have a hook.
    """
    return not is_dtensor(param) or param.device.type == param.device_mesh.device_type
