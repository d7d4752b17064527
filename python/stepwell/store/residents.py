"""Parameters whose state stays on the device, which steps them itself: `device_bytes_max`.

A GPU often has memory left where optimizer state as a whole has no room. Each parameter whose state
is there is a *resident*: it has no host side, no gradient of it crosses the bus, and host memory is
neither taken nor read for it.

- They are spans of the optimizer's store, with their gradients in its look. A step of theirs is a
  launch or a few on the current stream (`_core.DeviceSteps`), by the call that submits the others,
  with the same norm, clip coefficient and decision. Nothing waits for it: what the program does
  next comes behind it on the stream, as with torch's optimizers.
- State is fp32, in one piece of device memory per resident: master, `exp_avg`, `exp_avg_sq`. A step
  has the bits that one in host memory with fp32 moments has.
- What the optimizer's `state` has of a resident while that memory counts is a *stand-in*, which no
  program sees. A look at `state`, and a state dict, bring all of it to host memory first, in the
  form that state with fp32 moments has there (`read`). From then on that counts, as written by the
  program or not, and the next step brings it back (`_take_up`). So nothing else has to know a
  second form of state.
- A weight that is not its master's was written by the program, and is the master from then on.
  The step itself compares them, so every write counts, whatever it was made through.

Steps, looks and waits come one after the other: the optimizer's lock sees to it.

Cost per parameter: 12 B of device memory, and 30 B of it are moved by a step. A look brings 10 B to
host memory, and the step behind it brings them back.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from stepwell import _core, _state
from stepwell._budget import GIB
from stepwell._sharding import PLAIN, is_dtensor
from stepwell._sizes import resident_bytes, residents
from stepwell._streams import current_stream, device_name, stream_of
from stepwell._tensors import ordinary_tensors, view
from stepwell.store.grad_checks import Label, gradients_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stepwell.store.grad_checks import Known

__all__ = ["Residents"]

_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Resident:
    """A parameter whose state is on the device, and what it was when it was added."""

    param: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int
    """Of the parameter."""
    state_nbytes: int
    """Of its state on the device."""
    memory: torch.Tensor | None = None
    """Of the state, as bytes; None: no step has needed it yet."""
    stand_in: _state.State | None = None
    """What the optimizer's `state` has of the parameter while `memory` has its state: the count of
    updates, and what a program has added. None: `memory` means nothing."""


class Residents:
    """The residents of an optimizer, in the order in which they were added.

    Args:
        bytes_max: the most device memory that their state may take.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = self._bytes_left = bytes_max
        # By the parameter's id, which is its own as long as this holds it (`twins`).
        self._residents: dict[int, _Resident] = {}
        self._steps: _core.DeviceSteps | None = None
        self._device = torch.device("cpu")
        # That of the last step.
        self._stream = 0

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([each.param for each in self._residents.values()])

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._residents

    def known(self, param: torch.Tensor) -> Known | None:
        """What a resident was when it was added; None: it is none."""
        return self._residents.get(id(param))

    @property
    def state_nbytes(self) -> int:
        """Bytes of device memory that their state takes in a step."""
        return sum(each.state_nbytes for each in self._residents.values())

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(math.prod(each.shape) for each in self._residents.values())

    # ---- which ones ----

    def choose(
        self, params: Sequence[torch.Tensor], labels: Mapping[torch.Tensor, str]
    ) -> list[torch.Tensor]:
        """Those of `params`, new and checked, whose state has room on the device.

        Raises:
            ValueError: one of them is a DTensor.
        """
        for param in params:
            if self._bytes_max and is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is a DTensor and `device_bytes_max` is given, expected plain "
                    "parameters. hint: device_bytes_max=0"
                )
        numels = [param.numel() for param in params]
        return [params[index] for index in residents(numels, self._bytes_left)]

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
        found = [(param, resident_bytes(param.numel()) or 0) for param in params]
        _LOGGER.info(
            "%.2f GiB of device memory for the state of %d parameters, which are stepped there",
            sum(nbytes for _, nbytes in found) / GIB,
            sum(param.numel() for param in params),
        )
        for param, nbytes in found:
            self._residents[id(param)] = _Resident(
                param, param.dtype, param.shape, param.nbytes, nbytes
            )
            self._bytes_left -= nbytes

    def remove(self, params: Iterable[torch.Tensor]) -> None:
        """Forgets `params`. What is to be kept of their state was read."""
        for param in params:
            if resident := self._residents.pop(id(param), None):
                self._bytes_left += resident.state_nbytes

    # ---- a step ----

    def tell(self, store: _core.Store) -> None:
        """Has `store` look at them with its other parameters."""
        if self._steps is not None:
            store.set_residents([each.param for each in self._residents.values()], self._steps)

    def gradients(self, params: Iterable[torch.Tensor], label: Label) -> list[torch.Tensor]:
        """The gradients of residents, which all have one, as they are stepped.

        Raises:
            ValueError: one of them cannot be stepped.
        """
        return [
            grad if grad.data_ptr() % grad.itemsize == 0 else grad.clone()
            for grad in gradients_of(params, self.known, self._device, label)
        ]

    def bind(
        self,
        store: _core.Store,
        position: int,
        param: torch.Tensor,
        grad: torch.Tensor,
        *,
        state: _state.State | None,
        is_kept: bool,
        label: Label,
    ) -> _state.State:
        """Has `store` step a resident, once its state is on the device.

        Args:
            store: the store.
            position: in the lists of its last look.
            param: the resident.
            grad: its gradient, as it is stepped.
            state: what the optimizer has of it; None: nothing.
            is_kept: whether the next step may go on with it, if it looks the same.
            label: what errors call a parameter.

        Returns:
            the stand-in, which is the parameter's state once the step is taken.

        Raises:
            ValueError: the state is not of an Adam, or not of this parameter.
        """
        resident = self._residents[id(param)]
        memory, stand_in = resident.memory, resident.stand_in
        if memory is None or stand_in is None or state is not stand_in:
            memory, stand_in = self._take_up(resident, state, label)
        _state.repair_step(stand_in, _state.step_of(stand_in, partial(label, param)))
        store.bind_on_device(
            position,
            grad,
            memory=memory,
            state=stand_in,
            piece=None if type(param) in PLAIN else param,
            is_kept=is_kept,
        )
        return stand_in

    def begin(self) -> int:
        """A step begins: the stream that it is launched on, the current one."""
        self._stream = current_stream(self._device)
        return self._stream

    def synchronize(self) -> None:
        """Waits until the last step of residents is complete."""
        if self._device.type == "cuda":
            stream_of(self._stream, self._device).synchronize()

    # ---- state ----

    def _take_up(
        self, resident: _Resident, state: _state.State | None, label: Label
    ) -> tuple[torch.Tensor, _state.State]:
        """Brings `state`, which the optimizer has of a resident, to the device.

        Args:
            resident: whose it is.
            state: it stays what counts until the optimizer has the stand-in; None: there is none.
            label: what errors call a parameter.

        Returns:
            the memory that has it now, and its stand-in.

        Raises:
            ValueError: the state is not of an Adam, or not of this parameter.
        """
        param = resident.param.detach()
        if param.data_ptr() % param.itemsize:
            raise ValueError(
                f"{label(resident.param)} is at `{param.data_ptr():#x}`, expected a multiple of "
                f"`{param.itemsize}`. hint: parameter.data = parameter.data.clone()"
            )
        resident.stand_in = None
        if resident.memory is None:
            nbytes = resident.state_nbytes
            resident.memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        memory = resident.memory
        master, exp_avg, exp_avg_sq = _parts(memory, param.shape)
        stand_in: _state.State = {"step": _state.step_tensor(0)}
        if state is None:
            memory.zero_()
            master.copy_(param)
        else:
            weight = param.cpu()
            found = _with_fp32_moments(weight, state, label(resident.param), current=state)
            on_host = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
            _core.read_state(_bound(weight, found), master=view(on_host))
            master.copy_(on_host)
            exp_avg.copy_(found["exp_avg"])
            exp_avg_sq.copy_(found["exp_avg_sq"])
            stand_in = {name: value for name, value in found.items() if not _state.is_part(name)}
        resident.stand_in = stand_in
        return memory, stand_in

    @ordinary_tensors
    def read(
        self,
        states: dict[torch.Tensor, _state.State],
        params: Iterable[torch.Tensor] | None = None,
    ) -> None:
        """Brings the state of residents to host memory.

        Args:
            states: those that the optimizer has: it has copies of the state from now on.
            params: residents; None: all.

        Raises:
            ValueError: there is no memory for it.
        """
        residents = [self._residents[id(param)] for param in (self if params is None else params)]
        on_device = [
            each
            for each in residents
            if each.stand_in is not None and states.get(each.param) is each.stand_in
        ]
        if not on_device:
            return
        nbytes = sum(each.state_nbytes for each in on_device)
        free = _core.free_memory_bytes()
        if free is not None and nbytes > free:
            raise ValueError(
                f"state on the device takes `{nbytes}` bytes of host memory as tensors, `{free}` "
                "are free. hint: a smaller device_bytes_max"
            )
        _LOGGER.info("%.2f GiB of host memory for state that is read from the device", nbytes / GIB)
        self.synchronize()
        for each in on_device:
            memory, stand_in = each.memory, each.stand_in
            if memory is None or stand_in is None:
                # A signal's handler has read it meanwhile.
                continue
            found = _host_state(each, memory, stand_in)
            if states.get(each.param) is stand_in:
                states[each.param] = found
                each.stand_in = None

    def as_read(self, param: torch.Tensor, state: _state.State) -> _state.State:
        """A copy of `state`, which the optimizer has of a resident, as `read` would have it."""
        resident = self._residents[id(param)]
        if state is not resident.stand_in or resident.memory is None:
            return state
        # The step that is under way counts on.
        found = _host_state(resident, resident.memory, state)
        return {**found, "step": state["step"].clone()}

    def converted(self, param: torch.Tensor, state: _state.State, label: str) -> _state.State:
        """Loaded state of a resident as state in host memory, with fp32 moments.

        Args:
            param: a resident.
            state: ours in any form, torch.optim.AdamW's or DeepSpeedCPUAdam's.
            label: names the parameter in errors.

        Raises:
            ValueError: the state is not of an Adam, or not of this parameter.
        """
        return _with_fp32_moments(param.detach().cpu(), state, label, current={})


def _parts(memory: torch.Tensor, shape: torch.Size) -> Sequence[torch.Tensor]:
    """Master, `exp_avg` and `exp_avg_sq`: views of a resident's memory."""
    nbytes = 3 * math.prod(shape) * torch.float32.itemsize
    return memory[:nbytes].view(torch.float32).view(3, *shape).unbind()


def _with_fp32_moments(
    weight: torch.Tensor, state: _state.State, label: str, *, current: _state.State
) -> _state.State:
    """`state` of a weight in host memory in the form that it has there.

    What it shares with `current` is not copied.
    """
    # Decoding draws on no noise, so no key has to tell parameters apart.
    return _state.convert(weight, state, "fp32", key=0, current=current, label=label)


def _host_state(resident: _Resident, memory: torch.Tensor, stand_in: _state.State) -> _state.State:
    """A copy of the state of a resident in host memory, for the weight that it has now.

    Args:
        resident: whose it is.
        memory: its state on the device.
        stand_in: what the optimizer has in its place.
    """
    master, *moments = (part.to("cpu", copy=True) for part in _parts(memory, resident.shape))
    # What masters are rounded to, in memory that stands for the parameter.
    rounded = torch.empty(resident.shape, dtype=resident.dtype, device="cpu")
    found = _state.new(rounded, "fp32")
    _core.write_state(_bound(rounded, found), step=1, master=view(master))
    found |= {**dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)), **stand_in}
    param = resident.param.detach()
    if param.dtype == torch.bfloat16 and param.shape == resident.shape:
        # The program may have given it other strides; its state has none.
        weight = param.contiguous().cpu()
        written = rounded.view(torch.int16) != weight.view(torch.int16)
        found["trailing"].masked_fill_(written, 0)
        _state.take_fingerprints(weight, found, "fp32")
    return found


def _bound(weight: torch.Tensor, state: _state.State) -> _core.AdamTensor:
    """A weight in host memory with its state there, as the core takes it."""
    runs = {name: state[name] for name in _state.part_names(weight, "fp32")}
    return _state.adam_tensor(weight, runs)
