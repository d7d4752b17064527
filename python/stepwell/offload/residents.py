"""Parameters whose state stays on the device, which steps them itself: `device_bytes_max`.

A GPU often has memory left where optimizer state as a whole has no room. Each parameter whose state
is there is a *resident*: it has no host side, no gradient of it crosses the bus, and host memory is
neither taken nor read for it.

- A step of residents is a launch or a few on the current stream (`_core.DeviceSteps`), directly
  behind the submit of the others, with the same norm, clip coefficient and decision. Nothing waits
  for it: what the program does next comes behind it on the stream, as with torch's optimizers.
- State is fp32, in one piece of device memory per resident: master, `exp_avg`, `exp_avg_sq`. A step
  has the bits that one in host memory with fp32 moments has.
- The optimizer's `state` has views of that memory. What the program puts in their place, or loads,
  counts: the next step brings it to the device (`_take_up`). In state dicts a resident's state has
  the form that state in host memory has, so that either kind of optimizer goes on from the other's.
- A weight that is not its master's was written by the program, and is the master from then on.
  The step itself compares them, so every write counts, whatever it was made through.

Cost per parameter: 12 B of device memory, and 30 B of it are moved by a step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core, _state
from stepwell._hyper import hyper_of
from stepwell._sharding import is_dtensor
from stepwell._tensors import name_of, view
from stepwell.offload.budget import GIB
from stepwell.offload.engine import current_stream, device_name
from stepwell.offload.gradients import Label, gradients_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stepwell._hyper import Hyper

__all__ = ["ResidentUpdate", "Residents"]

_LOGGER = logging.getLogger(__name__)

# In the order in which a resident's memory has them.
_PARTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(slots=True, eq=False)
class _Resident:
    """A parameter whose state is on the device."""

    param: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int
    """Of the parameter, when it was added."""
    memory: torch.Tensor | None = None
    """Bytes of its state; None: nothing is there yet."""
    state: _state.State | None = None
    """What the optimizer's `state` has of the parameter while `memory` is its state."""
    parts: tuple[tuple[str, torch.Tensor, int], ...] = ()
    """The tensors of `state` that are views of `memory`, by name, and their addresses."""

    def is_current(self, state: _state.State | None) -> bool:
        """Whether `state`, which the optimizer has of the parameter, is what `memory` has."""
        return (
            state is not None
            and state is self.state
            and all(
                state.get(name) is part and part.data_ptr() == address
                for name, part, address in self.parts
            )
        )


class ResidentUpdate(NamedTuple):
    """One resident of a step, checked. Its state is on the device."""

    resident: _Resident
    grad: torch.Tensor
    hyper: Hyper
    step: int
    """Which update of the parameter it is, from 1."""


class Residents:
    """The residents of an optimizer, in the order in which they were added.

    Args:
        bytes_max: the most device memory that their state may take.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        # By the parameter's id, which is its own as long as this holds it (`twins`).
        self._residents: dict[int, _Resident] = {}
        self._steps: _core.DeviceSteps | None = None
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([each.param for each in self._residents.values()])

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._residents

    @property
    def ids(self) -> Mapping[int, object]:
        """The ids of the parameters."""
        return self._residents

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for their state."""
        return sum(_nbytes(each.param) or 0 for each in self._residents.values())

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(each.param.numel() for each in self._residents.values())

    # ---- which ones ----

    def choose(
        self, params: Sequence[torch.Tensor], labels: Mapping[torch.Tensor, str]
    ) -> list[torch.Tensor]:
        """Those of `params`, new and checked, whose state has room on the device.

        In their order, which is that of the forward: gradients of the first ones come last, and
        their weights are needed first, so theirs is the state that a step waits for.

        Raises:
            ValueError: one of them is a DTensor.
        """
        chosen, left = [], self._bytes_left
        for param in params:
            if left and is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is a DTensor and `device_bytes_max` is given, expected plain "
                    "parameters. hint: device_bytes_max=0"
                )
            nbytes = _nbytes(param)
            if nbytes is not None and nbytes <= left:
                chosen.append(param)
                left -= nbytes
        return chosen

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Makes `params` residents, which were chosen.

        Raises:
            OSError: the device cannot be had, or does not compile the kernel; nothing was changed.
        """
        if not params:
            return
        self._device = params[0].device
        if self._steps is None:
            self._steps = _core.DeviceSteps(device_name(self._device))
        nbytes = sum(_nbytes(param) or 0 for param in params)
        _LOGGER.info(
            "%.2f GiB of device memory for the state of %d parameters, which are stepped there",
            nbytes / GIB,
            sum(param.numel() for param in params),
        )
        self._bytes_left -= nbytes
        for param in params:
            self._residents[id(param)] = _Resident(param, param.dtype, param.shape, param.nbytes)

    def remove(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets `params`. State that the optimizer has of them stays, as in torch's."""
        for param in params:
            if self._residents.pop(id(param), None) is not None:
                self._bytes_left += _nbytes(param) or 0

    # ---- a step ----

    def gradients(self, params: Iterable[torch.Tensor], label: Label) -> list[torch.Tensor]:
        """The gradients of residents, which all have one, each contiguous.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        return gradients_of(
            params, lambda param: self._residents.get(id(param)), self._device, label
        )

    def updates(
        self,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[int, torch.Tensor],
        states: Mapping[torch.Tensor, _state.State],
        label: Label,
    ) -> list[ResidentUpdate]:
        """The updates of residents, checked, once their state is on the device.

        Args:
            groups: the optimizer's.
            grads: by the id of each resident that is stepped its gradient.
            states: those that the optimizer has.
            label: what errors call a parameter.

        Raises:
            ValueError: one of them cannot be made; no weight and no state was changed.
        """
        found = []
        for index, group in enumerate(groups):
            hyper = hyper_of(group, f"group {index}")
            for param in group["params"]:
                resident, grad = self._residents.get(id(param)), grads.get(id(param))
                if resident is None or grad is None:
                    continue
                state = states.get(param) or None
                step = 0 if state is None else _state.step_of(state, partial(label, param))
                if not resident.is_current(state):
                    self._take_up(resident, state, label)
                found.append(ResidentUpdate(resident, grad, hyper, step + 1))
        return found

    def submission(
        self,
        updates: Sequence[ResidentUpdate],
        grad_scale: float,
        states: dict[torch.Tensor, _state.State],
    ) -> list[partial[Any]]:
        """The calls that step residents, in which no Python can be interrupted.

        Until they are made, what this has done changes no weight and no state.

        Args:
            updates: of the step.
            grad_scale: what all gradients are multiplied by.
            states: those that the optimizer has; it has those of all updates from now on.
        """
        if not updates:
            return []
        assert self._steps is not None
        hypers = {each.hyper: each.hyper.core(grad_scale) for each in updates}
        for update in updates:
            param, state = update.resident.param, update.resident.state
            assert state is not None
            _state.repair_step(state, update.step - 1)
            states[param] = state
        torch.autograd.graph.increment_version([each.resident.param for each in updates])
        counters = [states[each.resident.param]["step"] for each in updates]
        return [
            partial(
                self._steps.step,
                [each.resident.param.data_ptr() for each in updates],
                [each.grad.data_ptr() for each in updates],
                [_memory(each.resident).data_ptr() for each in updates],
                numels=[each.grad.numel() for each in updates],
                dtypes=[name_of(each.resident.dtype) for each in updates],
                steps=[each.step for each in updates],
                hypers=[hypers[each.hyper] for each in updates],
                stream=current_stream(self._device),
            ),
            partial(torch._foreach_add_, counters, _state.step_tensor(1), alpha=1.0),
        ]

    # ---- state ----

    def fresh_state(self, param: torch.Tensor, label: Label) -> _state.State:
        """State of a resident that was never stepped."""
        resident = self._residents[id(param)]
        self._take_up(resident, None, label)
        assert resident.state is not None
        return resident.state

    def _take_up(self, resident: _Resident, state: _state.State | None, label: Label) -> None:
        """Brings `state`, which the optimizer has of a resident, to memory on the device.

        To new memory: of what was there before the program may have views. None: there is none.

        Raises:
            ValueError: the state is not of an Adam, or not of this parameter.
        """
        param = resident.param.detach()
        nbytes = _nbytes(param)
        assert nbytes is not None
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        parts = _parts(memory, param)
        others: _state.State = {}
        if state is None:
            parts["master"].copy_(param)
            counter = _state.step_tensor(0)
        else:
            weight = param.cpu()
            name_of_param = label(resident.param)
            found = self.converted(resident.param, state, name_of_param, weight=weight)
            parts["master"].copy_(_master(weight, found, state, name_of_param))
            for name in ("exp_avg", "exp_avg_sq"):
                parts[name].copy_(found[name])
            counter = found["step"]
            others = {
                name: value
                for name, value in found.items()
                if name != "step" and not _state.is_part(name)
            }
        if param.dtype == torch.float32:
            # The parameter is its own master.
            del parts["master"]
        resident.memory, resident.state = memory, {"step": counter, **parts, **others}
        resident.parts = tuple((name, part, part.data_ptr()) for name, part in parts.items())

    def converted(
        self,
        param: torch.Tensor,
        state: _state.State,
        label: str,
        *,
        weight: torch.Tensor | None = None,
    ) -> _state.State:
        """`state` in the form that it has in host memory, with fp32 moments; always a copy.

        Args:
            param: a resident.
            state: ours in any form, torch.optim.AdamW's or DeepSpeedCPUAdam's.
            label: names the parameter in errors.
            weight: the parameter in host memory; None: it is copied.

        Raises:
            ValueError: the state is not of an Adam, or not of this parameter.
        """
        weight = param.detach().cpu() if weight is None else weight
        return _state.convert(weight, state, "fp32", key=0, current={}, label=label)

    def host_state(self, param: torch.Tensor, state: _state.State) -> _state.State:
        """`state`, which the optimizer has of a resident, as a copy in host memory.

        In the form that state in host memory has, for the weight that the parameter has now.
        """
        weight = param.detach().cpu()
        found = self.converted(param, state, "the parameter", weight=weight)
        master = state.get("master")
        if weight.dtype != torch.bfloat16 or not isinstance(master, torch.Tensor):
            return found
        # Rounds it, into memory that stands for the parameter.
        rounded, on_host = weight.clone(), master.detach().cpu().contiguous()
        _core.write_state(_bound(rounded, found), step=1, master=view(on_host))
        written = rounded.view(torch.int16) != weight.view(torch.int16)
        found["trailing"].masked_fill_(written, 0)
        _state.take_fingerprints(weight, found, "fp32")
        return found


def _nbytes(param: torch.Tensor) -> int | None:
    """Bytes of device memory for the state of a parameter; None: it cannot be a resident."""
    return _core.DeviceSteps.state_nbytes(param.numel()) if param.numel() else None


def _memory(resident: _Resident) -> torch.Tensor:
    assert resident.memory is not None
    return resident.memory


def _parts(memory: torch.Tensor, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The views of a resident's memory, in the parameter's shape."""
    numel = param.numel()
    floats = memory[: len(_PARTS) * 4 * numel].view(torch.float32).view(len(_PARTS), *param.shape)
    return dict(zip(_PARTS, floats, strict=True))


def _bound(weight: torch.Tensor, state: _state.State) -> _core.AdamTensor:
    """A weight in host memory with its state there, as the core takes it."""
    runs = {name: state[name] for name in _state.part_names(weight, "fp32")}
    return _state.adam_tensor(weight, runs)


def _master(
    weight: torch.Tensor, found: _state.State, state: _state.State, label: str
) -> torch.Tensor:
    """The master of a weight in host memory.

    Args:
        weight: of a resident.
        found: its state, as `converted` gives it.
        state: what the optimizer has, of which `found` was made.
        label: names the parameter in errors.

    Raises:
        ValueError: `state` has a master that is none.
    """
    kept = state.get("master")
    if weight.dtype == torch.bfloat16 and "trailing" not in state and kept is not None:
        # Of a resident's own form, or a copy of it.
        is_float32 = isinstance(kept, torch.Tensor) and kept.dtype == torch.float32
        if isinstance(kept, torch.Tensor) and is_float32 and kept.shape == weight.shape:
            return kept.detach()
        raise ValueError(
            f"`master` in the state of {label} is `{kept!r}`, expected float32 of "
            f"`{tuple(weight.shape)}`. hint: del optimizer.state[parameter] starts afresh"
        )
    master = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    _core.read_state(_bound(weight, found), master=view(master))
    return master
