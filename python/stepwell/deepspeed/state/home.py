"""Where the state of a flat partition is, and how checkpoints, fragments and loaders get at it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stepwell import _core, _state, optim
from stepwell.deepspeed.state.decoding import MOMENT_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from stepwell.deepspeed.zero.partitions import Partitions

__all__ = ["Home", "attach", "check_writable", "home_of", "loading", "optimizer_of"]

_ATTRIBUTE = "stepwell_home"

_BEING_LOADED: WeakSet[torch.optim.Optimizer] = WeakSet()
# What steps the parameters of the model under ZeRO-1/2, also those that other ranks hold.
_OPTIMIZERS: MutableMapping[torch.Tensor, ReferenceType[torch.optim.Optimizer]] = (
    WeakIdKeyDictionary()
)


class Home:
    """State in host memory: a tensor, and its entry in `optimizer.state`.

    Or on a volume: then the same tensors are brought into memory when they are used.

    Args:
        optimizer: steps the partition.
        master: the partition.
        partitions: what steps it in the background; None: it is stepped by `optimizer.step()`.
        group: its number there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master: torch.Tensor,
        partitions: Partitions | None = None,
        group: int = 0,
    ) -> None:
        self._optimizer = optimizer
        self._master = master
        self._partitions, self._group = partitions, group

    def master(self) -> torch.Tensor:
        """The fp32 partition, flat, after the last step.

        The next step begins from what is written to it.
        """
        self.wait_for_step()
        return self._master

    def holds_moments(self) -> bool:
        """Whether `moment` has the moments: those of Stepwell's optimizers, or on a volume.

        If not, they are found where DeepSpeed's optimizers keep them; so also while DeepSpeed loads
        a checkpoint.
        """
        partitions = self._partitions
        is_swapped = partitions is not None and partitions.is_swapped(self._group)
        is_held = isinstance(self._optimizer, optim.Adam) or is_swapped
        return is_held and self._optimizer not in _BEING_LOADED

    def moment(self, name: str) -> torch.Tensor | None:
        """A moment, flat. A copy where it is held in codes; None before the first step."""
        self.wait_for_step()
        state = self._optimizer.state.get(self._master)
        if not state:
            return None
        if name in state:
            moment: torch.Tensor = state[name]
            return moment
        with torch.no_grad():
            return _state.decode(self._master, state).get(name)

    def wait_for_step(self) -> None:
        """Waits until the last step is complete, with all updates."""
        if self._partitions is not None:
            self._partitions.complete()

    def gradient(self, begin: int, numel: int) -> torch.Tensor | None:
        """A piece of the gradient, in the master's dtype; None: it is DeepSpeed's."""
        if self._partitions is None:
            return None
        return self._partitions.gradient(self._group, begin, numel)

    def set_gradient(self, begin: int, value: torch.Tensor) -> bool:
        """Sets a piece of the gradient. False: it is DeepSpeed's, and nothing was changed."""
        if self._partitions is None:
            return False
        self._partitions.set_gradient(self._group, begin, value)
        return True

    def pieces(self, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor] | None:
        """As `Partitions.pieces`."""
        return None if self._partitions is None else self._partitions.pieces(self._group, runs)


def check_writable(optimizer: torch.optim.Optimizer | None, name: str) -> None:
    """Raises ValueError for a moment of `optimizer` of which parts cannot be written."""
    if not isinstance(optimizer, optim.Adam) or name not in MOMENT_NAMES:
        return
    codec = optimizer._moments
    if name not in {part.name for part in _core.moments_parts(codec)}:
        raise ValueError(
            f"`{name}` is held in codes (moments `{codec}`), of which parts cannot be set. "
            "hint: moments `fp32` or `bf16` for runs that set optimizer state"
        )


def optimizer_of(param: torch.Tensor) -> torch.optim.Optimizer | None:
    """What steps a parameter of the model under ZeRO-1/2, on this rank or another; or None."""
    reference = _OPTIMIZERS.get(param)
    return None if reference is None else reference()


def attach(home: Home, params: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """Has DeepSpeed's fragments of `params` know the home of the partition that they lie in.

    Args:
        home: that partition's.
        params: all parameters of a group, also those that lie in partitions of other ranks.
        optimizer: steps them.
    """
    for param in params:
        _OPTIMIZERS[param] = ref(optimizer)
    fragments = [param._hp_mapping for param in params if param._hp_mapping is not None]
    addresses = [fragment.hp_fragment_address for fragment in fragments]
    pieces = home.pieces([(address.start, address.numel) for address in addresses])
    for index, fragment in enumerate(fragments):
        setattr(fragment, _ATTRIBUTE, home)
        if pieces is not None:
            fragment.hp_fragment = pieces[index]


def home_of(fragment: Any) -> Home | None:
    """The home of the partition of one of DeepSpeed's fragments; None: its state is DeepSpeed's."""
    home: Home | None = getattr(fragment, _ATTRIBUTE, None)
    return home


@contextlib.contextmanager
def loading(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """DeepSpeed loads a universal checkpoint. Meanwhile it hands over fragments, not state.

    At the end what it has written into the state of an optimizer of Stepwell's, plain float32
    moments and one `step` for several partitions, takes the optimizer's form.
    """
    _BEING_LOADED.add(optimizer)
    try:
        yield
    finally:
        _BEING_LOADED.discard(optimizer)
    if not isinstance(optimizer, optim.Adam):
        return
    with torch.no_grad():
        for index, (param, state) in enumerate(optimizer.state.items()):
            if state:
                optimizer.state[param] = _state.convert(
                    param,
                    state,
                    optimizer._moments,
                    key=_state.key_of(0, index, param),
                    current=state,
                    label=f"partition {index}",
                )
