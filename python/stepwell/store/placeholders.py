"""What stands for state that is on a volume: tensors at addresses that nothing is at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from stepwell import _core, _state
from stepwell._tensors import tensor_on

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MASTER", "Placeholder", "Placeholders", "lay_out"]

_Laid = TypeVar("_Laid")

# Of each: that of the core's slots.
_ALIGN_BYTES = 64

MASTER = "param"
"""The master, among the names of state that has one beside the weight."""


class Placeholder(torch.Tensor):
    """A tensor at addresses that nothing is at: only what does not read it may be called.

    Programs print the arguments of a call that has failed (pytest and debuggers do): it prints.
    """

    # Nothing is looked up in Python, and all but `view` gives a torch.Tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placeholder:
        """`tensor` as a placeholder, and as no view of it."""
        made: Placeholder = cls._make_subclass(cls, tensor)
        return made

    def view(self, *shape: Any) -> Placeholder:
        """As torch.Tensor's."""
        return Placeholder.of(super().view(*shape))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch has no types for it
        return f"<state on a volume, shape={tuple(self.shape)}, dtype={self.dtype}>"


class Placeholders(NamedTuple):
    """Of one parameter, or partition."""

    weight: torch.Tensor
    """Where the weight is."""
    state: _state.State
    """Where each tensor of the state is."""
    in_memory: _state.State
    """What of the state is in memory, as it was never stepped."""
    is_packed: bool
    """Whether a master is on the volume as what the weight lacks of it."""

    @classmethod
    def of(
        cls, weight: torch.Tensor, state: _state.State, *, is_packed: bool = False
    ) -> Placeholders:
        """Placeholders of a weight, and of state that was never stepped."""
        kept = [name for name in state if name in ("step", _state.FINGERPRINTS)]
        in_memory = {name: state.pop(name) for name in kept}
        return cls(weight, state, in_memory, is_packed)


def lay_out(make: Callable[[_state.Allocate], _Laid]) -> tuple[_core.AddressSpace, _Laid]:
    """Addresses for all state that `make` asks for, where it then is, and what `make` returns.

    Args:
        make: asks a function for each tensor, flat, of so many elements of a dtype. It is called
            twice: first it gets tensors without memory, then placeholders, one behind the other.
    """
    end = 0

    def count(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal end
        end = _end_of(end, numel, dtype)
        return torch.empty(numel, dtype=dtype, device="meta")

    make(count)
    addresses = _core.AddressSpace(max(end, 1))
    memory = tensor_on(addresses)
    begin = 0

    def give(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal begin
        found = memory[begin : begin + numel * dtype.itemsize].view(dtype)
        begin = _end_of(begin, numel, dtype)
        return Placeholder.of(found)

    return addresses, make(give)


def _end_of(begin: int, numel: int, dtype: torch.dtype) -> int:
    """Where the next one begins."""
    return begin + -(-numel * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
