"""The host sides of parameters on a device.

A weight and a gradient each. All parameters that are added at once share two buffers, which are
freed when none of these parameters has a twin any more, and no engine has them. Where they are
paged each twin begins a page, so that the memory of some can be pinned, and that of others not.

A bfloat16 weight and its trailing bits are one fp32 number (see the core's `state::split`), and
fingerprints in the state tell whether they still belong together. Steps alone write the host side
of a weight, with two exceptions: what a program has written on the device comes to the host, and
state is loaded. Only the step after those verifies the fingerprints. Other steps neither verify nor
take them, which saves a tenth of the arithmetic of a step with q8 moments. So a step outdates them,
until they are taken: before a weight is replaced, and before a program sees the state.

Shards that FSDP2 keeps in host memory are their own host sides (`Twins.are_params`): there is no
buffer, gradients are read where they are, and every step verifies the fingerprints.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from stepwell import _core, _state
from stepwell._sharding import like, local
from stepwell._sizes import TWIN_ALIGN_BYTES
from stepwell._tensors import tensor_on, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


__all__ = ["Twin", "Twins", "laid_out"]


@dataclass(slots=True, eq=False)
class Twin:
    """The host side of one parameter."""

    param: torch.Tensor
    weight: torch.Tensor
    """A step writes it, and the device gets a copy of it."""
    grad: torch.Tensor
    """Where the gradient comes to. Where gradients are deferred the engine has their memory. Then
    this only has the shape, and its memory is never touched. Of a parameter that is its own host
    side it is empty."""
    grad_view: _core.TensorView
    """This rank's piece of it."""
    dtype: torch.dtype
    shape: torch.Size
    """Of what this rank has of the parameter on the device."""
    nbytes: int
    """Of the same."""
    buffers: tuple[_core.Buffer, ...]
    """The memory of `weight` and `grad`, and of others that were added with them."""
    byte_range: tuple[int, int]
    """Which bytes of each of them."""
    checksums: torch.Tensor | None = None
    """Of the weight on the device when it was that of the host last (`contents`); None: it never
    was."""
    fresh: _state.State | None = None
    """State that was set aside for it, until the optimizer has some."""
    is_unverified: bool = False
    """Whether the next step has to verify the fingerprints, which are current."""
    is_outdated: bool = False
    """Whether a step has written the weight, and has not taken the fingerprints."""
    stepped: _state.State | None = None
    """With that: the state that it has worked on; None: whichever the optimizer has."""
    master: tuple[object, ...] | None = None
    """The tensors of the state that are the master beside the weight, as they were bound last;
    None: none were."""

    def mark_unverified(self) -> None:
        """Something else than a step has written the weight, or the state."""
        self.is_unverified, self.is_outdated, self.stepped = True, False, None

    def mark_outdated(self, stepped: _state.State | None) -> None:
        """A step writes the weight, and takes fingerprints only where it verifies them."""
        if not self.is_unverified:
            self.is_outdated, self.stepped = True, stepped


def laid_out(
    pieces: Sequence[torch.Tensor], align_bytes: int = TWIN_ALIGN_BYTES
) -> tuple[_core.Buffer, list[torch.Tensor], list[tuple[int, int]]]:
    """Memory for plain tensors.

    Args:
        pieces: the tensors, which are not copied.
        align_bytes: where each may begin.

    Returns:
        a buffer; for each tensor one of its dtype and shape there, with a storage of its own: state
        dicts may have it, and what saves them looks for shared storages; and its bytes, with what
        is left behind it.

    Raises:
        OSError: there is no memory for them.
    """
    sizes = [-(-piece.nbytes // align_bytes) * align_bytes for piece in pieces]
    ends = list(itertools.accumulate(sizes))
    ranges = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    buffer = _core.Buffer(sum(sizes))
    places = [
        tensor_on(buffer, begin, piece.nbytes).view(piece.dtype).view(piece.shape)
        for piece, (begin, _) in zip(pieces, ranges, strict=True)
    ]
    return buffer, places, ranges


class Twins:
    """For each parameter a `Twin`, in the order in which they were added.

    Its tensors have the parameter's dtype and the shape of this rank's piece; those of a DTensor
    are DTensors placed as it is.

    Args:
        have_gradients: whether they have memory for gradients.
        is_paged: whether each has whole pages, the unit that is pinned.
    """

    def __init__(self, *, have_gradients: bool = True, is_paged: bool = False) -> None:
        self._align_bytes = mmap.PAGESIZE if is_paged else TWIN_ALIGN_BYTES
        # By the parameter's id, as what the step, the gate and hooks have: the hash of a tensor is
        # a function in Python. While a parameter has a twin, that holds it, and its id is its own.
        self._twins: dict[int, Twin] = {}
        self._num_buffers = 2 if have_gradients else 1
        self.device = torch.device("cpu")
        """Where the parameters are."""
        self.are_params = False
        """Whether parameters are their own host sides. May change while there is none."""

    def nbytes(self, params: Iterable[torch.Tensor]) -> int:
        """Bytes of host memory that `add` takes."""
        pieces = (0 if self.are_params else local(param).nbytes for param in params)
        return self._num_buffers * sum(map(self._aligned, pieces))

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._align_bytes) * self._align_bytes

    @property
    def buffers(self) -> list[_core.Buffer]:
        """The memory of all twins, each buffer once."""
        found = {id(buffer): buffer for twin in self._twins.values() for buffer in twin.buffers}
        return list(found.values())

    @property
    def total_nbytes(self) -> int:
        """Bytes of their memory."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def byte_ranges(
        self, params: Iterable[torch.Tensor], side: Literal["weight", "grad"]
    ) -> list[tuple[_core.Buffer, int, int]]:
        """The memory of weights or gradients of `params`: a buffer, and which bytes of it.

        Neighbours are one. `params`: in the order in which they were added.
        """
        found: list[tuple[_core.Buffer, int, int]] = []
        index = ("weight", "grad").index(side)
        for param in params:
            twin = self._twins[id(param)]
            for buffer in twin.buffers[index : index + 1]:
                begin, end = twin.byte_range
                if found and found[-1][0] is buffer and found[-1][2] == begin:
                    begin = found.pop()[1]
                found.append((buffer, begin, end))
        return found

    def add(
        self,
        params: Sequence[torch.Tensor],
        place: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Makes the twins of `params`, and copies their weights.

        Args:
            params: the parameters.
            place: called with each parameter and the weight of its twin, once that is copied: what
                the parameter had may go. None: it stays.

        Raises:
            OSError: there is no memory for them; nothing was changed.
        """
        if self.are_params:
            for param in params:
                self._add_own(param)
            return
        pieces = [local(param) for param in params]
        buffer, weights, ranges = laid_out(pieces, self._align_bytes)
        buffers: tuple[_core.Buffer, ...] = (buffer,)
        if self._num_buffers == 1:
            # Of the largest; pages that are not touched are not there.
            largest = max((piece.nbytes for piece in pieces), default=0)
            grads = torch.empty(largest, dtype=torch.uint8, device="cpu")
        else:
            # One memory: sums that lie side by side go together (`adder`).
            buffers = buffer, _core.Buffer(buffer.nbytes)
            grads = tensor_on(buffers[1])
        for param, piece, weight, byte_range in zip(params, pieces, weights, ranges, strict=True):
            self.device = piece.device
            begin = byte_range[0] if len(buffers) > 1 else 0
            grad = grads[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
            self._twins[id(param)] = Twin(
                param=param,
                weight=like(param, weight),
                grad=like(param, grad),
                grad_view=view(grad),
                dtype=piece.dtype,
                shape=piece.shape,
                nbytes=piece.nbytes,
                buffers=buffers,
                byte_range=byte_range,
            )
        del pieces
        for param in params:
            weight = self._twins[id(param)].weight
            local(weight).copy_(local(param))
            if place is not None:
                place(param, weight)

    def _add_own(self, param: torch.Tensor) -> None:
        piece = local(param)
        grad = torch.empty(0, dtype=piece.dtype, device="cpu")
        self.device = piece.device
        self._twins[id(param)] = Twin(
            param=param,
            weight=param,
            grad=grad,
            grad_view=view(grad),
            dtype=piece.dtype,
            shape=piece.shape,
            nbytes=piece.nbytes,
            buffers=(),
            byte_range=(0, 0),
        )

    def remove(self, params: Iterable[torch.Tensor]) -> None:
        """Lets go of the twins of `params`, which no step and no copy uses."""
        for param in params:
            self._twins.pop(id(param), None)

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._twins

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The parameters, in the order in which they were added."""
        return iter([twin.param for twin in self._twins.values()])

    def __len__(self) -> int:
        return len(self._twins)

    def values(self) -> Iterable[Twin]:
        """The twins, in that order."""
        return self._twins.values()

    @property
    def ids(self) -> Mapping[int, object]:
        """Has the ids of the parameters as keys."""
        return self._twins

    def __getitem__(self, param: torch.Tensor) -> Twin:
        return self._twins[id(param)]

    def get(self, param: torch.Tensor) -> Twin | None:
        """The twin of `param`; None: it has none."""
        return self._twins.get(id(param))

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """The host side of `param`."""
        return self._twins[id(param)].weight

    def grad(self, param: torch.Tensor) -> torch.Tensor:
        """Where the gradient of `param` comes to."""
        return self._twins[id(param)].grad
