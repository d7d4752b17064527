"""Gradients on their way from autograd to the host.

Which backward is the last, and what was copied.

A gradient that is copied during the backward may still be changed before the step (clipping,
another backward). It is then copied again. A copy counts only while the gradient is the same tensor
at the same version, and has the checksum that it had when it was copied: writes through `.data` do
not change the version. Of a DTensor all of this is said of its local tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from stepwell._sharding import PLAIN, is_dtensor, local
from stepwell._tensors import check_memory, contiguous_hint, is_run
from stepwell.offload.checksums import differences
from stepwell.offload.marker import GradMarker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

__all__ = [
    "Gradients",
    "Known",
    "Label",
    "OnGrad",
    "apart_from",
    "check_in_place",
    "checked",
    "gradients_of",
    "lies_as",
    "may_change_after_backward",
    "memories_of",
    "piece_of",
]


_Owner = TypeVar("_Owner")

Label: TypeAlias = "Callable[[torch.Tensor], str]"
"""What errors call a parameter."""

Checksums: TypeAlias = "Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]"
"""`Engine.checksums`."""

BATCH_BYTES = 256 << 20
"""Of gradients that are copied by one call: 5 ms of the bus. Less costs more calls of the thread
that launches the backward; more leaves more of them to the step."""


class Gradients:
    """What has been copied since the last step.

    Args:
        accumulation_steps: backwards per step; None: not known.
    """

    def __init__(self, accumulation_steps: int | None) -> None:
        self._accumulation_steps = accumulation_steps or 1
        self._is_last = True
        # By the parameter's id (`twins`). They are forgotten before its twin is.
        self._backwards: dict[int, int] = {}
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._waiting_stream = 0
        self._waiting_nbytes = 0
        # The memory of the latest, if it is a DTensor's.
        self._waiting_memory: int | None = None
        self._copied: dict[int, _Copied] = {}
        self._checksums: Checksums | None = None
        self.knows_last = accumulation_steps is not None
        """Whether the user says which backward is the last."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in it are not the last."""
        before, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = before

    def count(self, param: torch.Tensor) -> bool:
        """Counts a backward that reached `param`.

        Returns whether it is known to be the last before the step.
        """
        key = id(param)
        count = self._backwards[key] = self._backwards.get(key, 0) + 1
        return self.knows_last and self._is_last and count >= self._accumulation_steps

    def has_counted(self, param: torch.Tensor) -> bool:
        """Whether a backward since the last step has reached `param`."""
        return id(param) in self._backwards

    def add(
        self, param: torch.Tensor, grad: torch.Tensor, stream: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sets a last gradient aside, and returns those that are to be copied now.

        Each comes with its parameter.

        They are copied in batches, since each copy costs a call. All gradients of a batch were made
        on `stream`, the current one: copies are ordered after no other. Where it changes, what was
        set aside is left to the step.

        The latest is never among them. The last of all is so left to the step, whose norm it would
        hold up: that comes down behind what is on its way. Nor are DTensors that share its memory:
        FSDP2 reduces those of a group into one tensor, so they come together, and have one version,
        which an addition to each of them changes.
        """
        if stream != self._waiting_stream:
            self._waiting, self._waiting_stream, self._waiting_nbytes = {}, stream, 0
        piece, memory = piece_of(grad), None
        if piece is not grad:
            memory = piece.untyped_storage().data_ptr()
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_of_group = memory is not None and memory == self._waiting_memory
        if self._waiting_nbytes >= BATCH_BYTES and not is_of_group:
            batch = list(self._waiting.values())
            self._waiting, self._waiting_nbytes = {}, 0
        self._waiting_memory = memory
        key = id(param)
        if key not in self._waiting:
            self._waiting_nbytes += piece.nbytes
        self._waiting[key] = param, grad
        return batch

    def mark_copied(
        self,
        batch: Iterable[tuple[torch.Tensor, torch.Tensor]],
        sums: Iterable[torch.Tensor],
        checksums: Checksums,
    ) -> None:
        """These gradients are copied as they are now, in the order of the current stream.

        Args:
            batch: parameters with their gradients.
            sums: their checksums, of now.
            checksums: gives those of a later time.
        """
        self._checksums = checksums
        for (param, grad), found in zip(batch, sums, strict=True):
            piece = piece_of(grad)
            memory = piece.shape, piece.device, piece.data_ptr()
            self._copied[id(param)] = _Copied(grad, piece, piece._version, memory, found)

    def is_copied(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether `grad` is on the host as it is now, as far as `read_with` has looked."""
        copied = self._copied.get(id(param))
        return copied is not None and copied.grad is grad and copied.is_current

    def read_with(self, numbers: torch.Tensor) -> list[float]:
        """The values of `numbers`, a vector on the device.

        On the way, in the same transfer, it looks whether gradients that were copied have changed.
        """
        copied = {key: each for key, each in self._copied.items() if each.is_current}
        # `grad.data = ...` gives it other memory.
        changed = {key for key, each in copied.items() if not each.is_in_place}
        compared = [key for key in copied if key not in changed]
        count = len(numbers)
        if compared:
            assert self._checksums is not None
            now = self._checksums([copied[key].piece for key in compared])
            differ = differences([copied[key].checksum for key in compared], now)
            numbers = torch.cat([numbers, differ.to(numbers)])
        found: list[float] = numbers.tolist()
        pairs = zip(compared, found[count:], strict=True)
        changed.update(key for key, differs in pairs if differs)
        for key in changed:
            self._copied[key] = copied[key]._replace(version=_CHANGED)
        return found[:count]

    def is_outdated(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether a gradient of `param` was copied that `grad` is not any more."""
        return id(param) in self._copied and not self.is_copied(param, grad)

    def is_replaced(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether another tensor than `grad` was copied or set aside for `param`."""
        copied, waiting = self._copied.get(id(param)), self._waiting.get(id(param))
        return (copied is not None and copied.grad is not grad) or (
            waiting is not None and waiting[1] is not grad
        )

    @property
    def is_any_copied(self) -> bool:
        """Whether a gradient was copied since the last step."""
        return bool(self._copied)

    @property
    def is_any_taken(self) -> bool:
        """Whether a gradient was copied or set aside since the last step."""
        return bool(self._copied or self._waiting)

    def reset(self) -> None:
        """Begins the next step, or this one anew."""
        self._backwards = {}
        self._waiting = {}
        self._waiting_nbytes = 0
        self._copied = {}
        self._checksums = None


# No tensor has this version.
_CHANGED = -1


class _Copied(NamedTuple):
    """A gradient as it was when it was copied."""

    grad: torch.Tensor
    piece: torch.Tensor
    version: int
    memory: tuple[torch.Size, torch.device, int]
    checksum: torch.Tensor

    @property
    def is_current(self) -> bool:
        """Whether no write was seen."""
        return self.version == self.piece._version and piece_of(self.grad) is self.piece

    @property
    def is_in_place(self) -> bool:
        """Whether it is where it was, in one run."""
        piece = self.piece
        return is_run(piece) and self.memory == (piece.shape, piece.device, piece.data_ptr())


def piece_of(grad: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `grad`: the same tensor each time, in any grad mode."""
    return grad._local_tensor if is_dtensor(grad) else grad


class OnGrad(Generic[_Owner]):
    """A hook that calls a method with the parameter whose gradient has been accumulated.

    It does so as long as the method's object lives. It holds object and method apart: a call of a
    `WeakMethod` takes as long as the rest of it.
    """

    def __init__(self, owner: _Owner, method: Callable[[_Owner, torch.Tensor], None]) -> None:
        self._owner, self._method = weakref.ref(owner), method

    def __call__(self, param: torch.Tensor) -> None:
        """Autograd has accumulated the gradient of `param`."""
        if (owner := self._owner()) is not None:
            self._method(owner, param)


def may_change_after_backward() -> bool:
    """Whether other ranks may still add to the gradient of a plain parameter after autograd (DDP).

    Hooks of a DTensor are called where FSDP2 has reduced its gradient.
    """
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class Known(Protocol):
    """What a parameter was when it was added."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> torch.Size:
        """Of this rank's piece of it."""

    @property
    def nbytes(self) -> int:
        """Of the same."""


def gradients_of(
    params: Iterable[torch.Tensor],
    known: Callable[[torch.Tensor], Known | None],
    device: torch.device,
    label: Label,
) -> list[torch.Tensor]:
    """The gradients of `params`, which all have one, as they are stepped.

    Args:
        params: the parameters.
        known: what each was when it was added; None: it never was.
        device: where they are.
        label: what errors call them.

    Raises:
        ValueError: one of them cannot be stepped.
    """
    grads = []
    for param in params:
        was, grad = known(param), param.grad
        # Most are as they should be. What is not plain is looked at by itself.
        is_ready = (
            was is not None
            and grad is not None
            and lies_as(param, was, device)
            and lies_as(grad, was, device)
        )
        if not is_ready:
            check_in_place(param, was, device, label)
            grad = checked(param, label)
        assert grad is not None
        grads.append(grad)
    return grads


def memories_of(params: Iterable[torch.Tensor]) -> set[int]:
    """Where the storages of `params` begin, for `apart_from`."""
    return {_memory_of(param) for param in params} - {0}


def apart_from(memories: Collection[int], grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`grads`, with a copy of each that lies in memory which the step writes.

    The step reads some gradients when other weights are there already.

    Args:
        memories: `memories_of` the parameters whose weights come with the step.
        grads: gradients of the step.
    """
    return [grad.clone() if _memory_of(grad) in memories else grad for grad in grads]


def _memory_of(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def lies_as(tensor: torch.Tensor, known: Known, device: torch.device) -> bool:
    """Whether a plain tensor on `device` is as it is `known`: a copy reads what it has.

    It is in one run, and its memory was not freed under it. False of what is not plain.
    """
    # What `is_run` and `has_memory` ask, in one: a step asks this twice of each parameter. With the
    # dtype and the shape it has the bytes.
    return (
        type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and tensor.dtype == known.dtype
        and tensor.device == device
        and tensor.shape == known.shape
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (
            known.nbytes == 0
            or (
                tensor.data_ptr() != 0
                and tensor.untyped_storage().nbytes()
                >= tensor.storage_offset() * tensor.itemsize + known.nbytes
            )
        )
    )


def check_in_place(
    param: torch.Tensor, known: Known | None, device: torch.device, label: Label
) -> None:
    """Raises ValueError if `param` is not what it was when it was added.

    `known`: that; None: it was never added.
    """
    if known is None:
        raise ValueError(
            f"{label(param)} has a gradient, but is frozen. "
            "hint: parameter.requires_grad_(True), or parameter.grad = None"
        )
    piece = local(param)
    if piece.device != device:
        raise ValueError(
            f"{label(param)} is on `{piece.device}`, expected `{device}`, where it was. "
            "hint: move the model before the optimizer is made"
        )
    if piece.dtype != known.dtype or piece.shape != known.shape:
        raise ValueError(
            f"{label(param)} is `{piece.dtype}` of `{tuple(piece.shape)}`, expected "
            f"`{known.dtype}` of `{tuple(known.shape)}`, as it was. hint: make a new optimizer and "
            "load this one's state_dict()"
        )
    check_memory(piece, partial(label, param))
    if piece.is_neg():
        raise ValueError(
            f"{label(param)} is negated lazily, expected its own elements in memory. "
            "hint: parameter.data = parameter.data.resolve_neg()"
        )
    if not piece.is_contiguous():
        raise ValueError(
            f"{label(param)} is not contiguous any more (strides `{piece.stride()}`), expected "
            f"rows one after the other, as it was. hint: {contiguous_hint(piece)}"
        )


def checked(param: torch.Tensor, label: Label) -> torch.Tensor:
    """The gradient of `param`, which has one, as it is copied.

    It is placed as the parameter is, in one run.

    Raises:
        ValueError: it cannot be stepped; the message calls the parameter `label(param)`.
    """
    piece, grad = local(param), param.grad
    assert grad is not None
    if isinstance(grad, GradMarker):
        raise ValueError(  # noqa: TRY004
            f"the gradient of {label(param)} is not there: an optimizer with `accumulate` `host` "
            "moved it to host memory, and the program put back or shared what was in its place. "
            "hint: accumulate='device' where gradients are stored, restored or used by two "
            "optimizers"
        )
    found = local(grad)
    if found.device != piece.device:
        raise ValueError(
            f"the gradient of {label(param)} is on `{found.device}`, expected `{piece.device}`, "
            "where the parameter is. "
            "hint: grad.to(parameter.device)"
        )
    if found.layout != torch.strided:
        raise ValueError(
            f"the gradient of {label(param)} is `{found.layout}`, expected a dense tensor. "
            "hint: use dense gradients (nn.Embedding(sparse=False))"
        )
    if found.dtype != piece.dtype:
        raise ValueError(
            f"the gradient of {label(param)} is `{found.dtype}`, expected `{piece.dtype}`, as the "
            "parameter. "
            "hint: grad.to(parameter.dtype)"
        )
    if is_dtensor(param) != is_dtensor(grad):
        raise ValueError(
            f"only one of {label(param)} and its gradient is a DTensor. hint: distribute both alike"
        )
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
        found = local(grad)
    if found.shape != piece.shape:
        raise ValueError(
            f"the gradient of {label(param)} has the shape `{tuple(found.shape)}`, expected "
            f"`{tuple(piece.shape)}`. "
            "hint: clear stale gradients by zero_grad() after a change of the parameter"
        )
    check_memory(found, lambda: f"the gradient of {label(param)}")
    # A copy of a lazy zero has memory.
    return (
        grad if is_run(found) else grad.clone(memory_format=torch.contiguous_format).resolve_neg()
    )
