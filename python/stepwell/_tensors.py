"""Torch tensors as the core takes them.

Which are fit, where they lie, how many refer to their memory, and that no two of them overlap.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from bisect import bisect_left
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

import torch

from stepwell import _core
from stepwell._sharding import PLAIN, check_placements, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "COUNT_ALONE",
    "COUNT_ALONE_IN_PYTHON",
    "FLOATS",
    "Written",
    "check_memory",
    "check_param",
    "check_strided",
    "contiguous_hint",
    "has_memory",
    "is_run",
    "ordinary_tensors",
    "references",
    "tensor_on",
    "view",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int16: "int16",
    torch.uint8: "uint8",
    torch.int32: "int32",
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters and gradients."""


def ordinary_tensors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`method` without grad mode and outside of inference mode.

    Tensors of inference mode could not be written outside of it.
    """

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(mode=False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class _Memory(Protocol):
    """Bytes at an address, for as long as this object lives."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def tensor_on(buffer: _Memory, begin: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Bytes of `buffer`, which lives as long as the tensor or a view of it.

    The tensor has a storage of its own, of so many bytes (default: all from `begin` on).
    """
    nbytes = buffer.nbytes - begin if nbytes is None else nbytes
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_uint8 * nbytes).from_address(buffer.address + begin)
    memory.owner = buffer  # type: ignore[attr-defined]  # torch's storage holds `memory`
    return torch.frombuffer(memory, dtype=torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """What the core calls `dtype`."""
    return _NAMES[dtype]


def view(tensor: torch.Tensor, numel: int | None = None) -> _core.TensorView:
    """The first `numel` elements (default: all) of a contiguous CPU tensor.

    The caller keeps it alive.
    """
    return _core.TensorView(
        address=tensor.data_ptr(),
        dtype=name_of(tensor.dtype),
        numel=tensor.numel() if numel is None else numel,
    )


def is_run(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` lie one after the other, in row-major order."""
    # A lazily negated tensor holds the opposite of what it reads; a lazy zero holds nothing.
    return (
        tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of `tensor`, and how many refer to it in C++ and in Python.

    Tensors that share their memory have one storage. Counts say something beside other counts only.
    """
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return storage._cdata, count, sys.getrefcount(storage)


_, COUNT_ALONE, COUNT_ALONE_IN_PYTHON = references(torch.empty(1, device="cpu"))
"""Both counts for a tensor that shares its memory with none. They depend on the versions of torch
and Python."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a strided `tensor` lie in its storage, as far as that can be told.

    A program may have freed it, or made it smaller, under the tensor.
    """
    if type(tensor) not in PLAIN or tensor._is_zerotensor() or tensor.numel() == 0:
        return True
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        places = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in places)
    end = tensor.storage_offset() + extent
    return bool(tensor.untyped_storage().nbytes() >= end * tensor.itemsize)


def check_memory(tensor: torch.Tensor, label: Callable[[], str]) -> None:
    """Raises ValueError, which names `tensor` by `label()`, if its memory was freed under it."""
    if not has_memory(tensor):
        before = tensor.storage_offset() * tensor.itemsize
        left = max(tensor.untyped_storage().nbytes() - before, 0)
        raise ValueError(
            f"{label()} takes `{tensor.nbytes}` bytes, but its storage has `{left}` for it. "
            "hint: the program has freed it, or a part (untyped_storage().resize_()); give it "
            "back before the step"
        )


def check_strided(tensor: torch.Tensor, label: Callable[[], str], hint: str) -> None:
    """Raises ValueError, which names `tensor` by `label()`, if it is sparse or nested."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{label()} is `{kind}`, expected a dense tensor. hint: {hint}")


def check_param(param: torch.Tensor, label: str, *, on_device: bool = False) -> None:
    """Raises ValueError, which names the parameter by `label`, if no step could update `param`.

    `on_device`: it need not lie in host memory, but in one run.
    """
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"{label} is uninitialized. hint: run the model once before making the optimizer"
        )
    check_placements(param, label)
    check_strided(param, lambda: label, "make the parameter dense")
    piece = local(param)
    if piece.is_meta:
        raise ValueError(
            f"{label} is on `meta`, expected the CPU. hint: model.to_empty(device='cpu') and load "
            "its weights"
        )
    if not piece.is_cpu and not on_device:
        raise ValueError(
            f"{label} is on `{piece.device}`, expected the CPU. hint: stepwell.OffloadAdamW steps "
            "parameters on an "
            "accelerator; this one takes model.cpu()"
        )
    check_memory(piece, lambda: label)
    if piece.numel() > 0 and piece.data_ptr() == 0:
        raise ValueError(
            f"{label} has no memory of its own (`{type(param).__name__}`), expected a plain "
            "tensor. hint: unwrap it"
        )
    if on_device and not is_run(piece):
        raise ValueError(
            f"{label} is not contiguous (strides `{piece.stride()}`), expected rows one after the "
            f"other. hint: before the optimizer is made, {contiguous_hint(piece)}"
        )
    if piece.is_complex():
        raise ValueError(
            f"{label} is `{piece.dtype}`, expected real numbers. hint: optimize "
            "torch.view_as_real(parameter)"
        )
    if piece.dtype not in FLOATS:
        raise ValueError(
            f"{label} is `{piece.dtype}`, expected float32, bfloat16 or float16. hint: "
            "parameter.to(torch.float32)"
        )
    if _overlaps_itself(piece):
        raise ValueError(
            f"{label} holds the same element more than once (an expanded tensor). hint: "
            "parameter.clone()"
        )


def contiguous_hint(param: torch.Tensor) -> str:
    """What makes `param`, a plain tensor, contiguous, and keeps what its layout was chosen for."""
    if param.dim() in (4, 5):
        # Convolutions compute in this format if either their input or their weight has it.
        return (
            "model.to(memory_format=torch.contiguous_format); inputs may stay channels_last, "
            "and convolutions then compute in it"
        )
    return "parameter.data = parameter.data.contiguous()"


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of `tensor` share memory."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride == 0:
            return True
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    # Rare: the strides interleave. Number the elements and see whether one was overwritten.
    begin, end = _span(tensor)
    numbers = torch.arange(tensor.numel(), dtype=torch.int64, device="cpu").view(tensor.shape)
    room = torch.empty((end - begin) // tensor.itemsize, dtype=torch.int64, device="cpu")
    places = room.as_strided(tensor.shape, tensor.stride())
    return not torch.equal(places.copy_(numbers), numbers)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte behind the last, that `tensor` reaches."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _share_an_element(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have a byte in common.

    Takes a byte of memory per byte of the spans.
    """
    begins, ends = zip(_span(first), _span(second), strict=True)
    begin = min(begins)
    marked = torch.zeros(max(ends) - begin, dtype=torch.uint8, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        shape = [*tensor.shape, tensor.itemsize]
        stride = [step * tensor.itemsize for step in tensor.stride()]
        return marked.as_strided(shape, [*stride, 1], tensor.data_ptr() - begin)

    bytes_of(first).fill_(1)
    return bool(bytes_of(second).any())


class Written:
    """The memory that steps write, so that each finds its own."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes (label, local tensor) pairs.

        Raises:
            ValueError: two of them share memory; it names both by their labels.
        """
        spans = [(*_span(tensor), label, tensor) for label, tensor in tensors if tensor.numel() > 0]
        spans.sort(key=lambda span: span[:2])
        still_open: list[tuple[int, int, str, torch.Tensor]] = []
        for span in spans:
            begin, _, label, tensor = span
            still_open = [other for other in still_open if other[1] > begin]
            for _, _, other_label, other in still_open:
                # This one begins within the other, which may have gaps (columns of a matrix).
                if other.is_contiguous() or _share_an_element(tensor, other):
                    raise ValueError(
                        f"{label} shares memory with {other_label}. "
                        "hint: give each its own memory (.clone()), or pass a tied parameter once; "
                        "where one has replaced the other in its module (weight_norm), remove that "
                        "from optimizer.param_groups"
                    )
            still_open.append(span)
        # What is not a run is copied for a step, so no gradient can be in its way.
        self._runs = [(begin, end, label) for begin, end, label, tensor in spans if is_run(tensor)]

    def owner_of(self, grad: torch.Tensor) -> str | None:
        """What a step writes in the memory of `grad`, a run: its label. None: nothing."""
        if grad.numel() == 0:
            return None
        begin, end = _span(grad)
        # The last run that begins before the gradient ends: runs are disjoint, so no earlier one
        # reaches further.
        index = bisect_left(self._runs, (end,)) - 1
        is_shared = index >= 0 and self._runs[index][1] > begin
        return self._runs[index][2] if is_shared else None
