"""DTensor parameters: their local pieces, and state that is sharded like them.

Also what their ranks have to agree on.

A q8 code or a fingerprint belongs to a *piece* of a parameter, not to one of its elements, so it
cannot be laid out as the parameter is. Each piece gets a row: a tensor of shape (pieces along dim
0, ..., pieces along dim n - 1, row length) with the parameter's own placements. A checkpoint then
saves every rank's row, and loads it only where the parameter is cut into the same pieces: another
cut has another shape, which torch.distributed.checkpoint refuses.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

__all__ = [
    "PLAIN",
    "check_placements",
    "cut_of",
    "greatest",
    "is_dtensor",
    "is_exactly_dtensor",
    "like",
    "local",
    "longest_piece",
    "meshes",
    "parted",
    "piece_index",
    "piece_of",
    "rows",
]


PLAIN = (torch.nn.Parameter, torch.Tensor)
"""Types of tensors of which this rank has all."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor.

    Importing DTensor takes a second: where it was not imported, there is none.
    """
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_exactly_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the class of `tensor` is DTensor itself."""
    return is_dtensor(tensor) and type(tensor) is sys.modules["torch.distributed.tensor"].DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of `tensor` that this rank holds (all of it, unless it is a DTensor).

    Call it without grad mode.
    """
    # First what most are: steps call this often.
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return tensor
    piece = tensor.to_local()
    # A collective may still be filling it.
    return cast("torch.Tensor", piece.wait()) if hasattr(piece, "wait") else piece


def piece_of(tensor: torch.Tensor) -> torch.Tensor:
    """As `local`, in any grad mode, and the same tensor each time; it waits for no collective."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def check_placements(param: torch.Tensor, label: str) -> None:
    """Raises ValueError if `param` is a DTensor whose ranks do not hold pieces or copies of it."""
    if not is_dtensor(param):
        return
    for placement in param.placements:
        if placement.is_partial() or not (placement.is_replicate() or hasattr(placement, "dim")):
            raise ValueError(
                f"{label} is placed as `{placement}`, expected Shard or Replicate. hint: "
                "redistribute it first"
            )


def _cuts(param: DTensor) -> list[tuple[int, int, int]]:
    """(dimension cut, number of pieces, the piece here) per mesh dimension that cuts it."""
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    # Not `is_shard()`: the strided shards of FSDP over tensor parallelism deny it.
    return [
        (cast("Shard", placement).dim, mesh.size(axis), coordinate[axis])
        for axis, placement in enumerate(param.placements)
        if not placement.is_replicate()
    ]


def _pieces(param: DTensor) -> list[int]:
    """The number of pieces along each dimension of the parameter."""
    pieces = [1] * param.ndim
    for dim, count, _ in _cuts(param):
        pieces[dim] *= count
    return pieces


def piece_index(param: torch.Tensor) -> int:
    """A number for the piece that this rank holds; ranks that hold copies of a piece agree on it.

    0 for a plain tensor.
    """
    index = 0
    for _, count, here in _cuts(param) if is_dtensor(param) else ():
        index = index * count + here
    return index


def cut_of(param: torch.Tensor) -> tuple[object, ...]:
    """How ranks have cut `param`, and which piece is here, as plain values; empty: it is whole."""
    if not is_dtensor(param):
        return ()
    placements = tuple(map(str, param.placements))
    return tuple(param.device_mesh.shape), placements, piece_index(param)


def longest_piece(param: torch.Tensor) -> int:
    """The number of elements of the longest piece of `param`."""
    if not is_dtensor(param):
        return param.numel()
    return math.prod(
        -(-size // count) for size, count in zip(param.shape, _pieces(param), strict=True)
    )


def _wrap(piece: torch.Tensor, param: DTensor, shape: Sequence[int]) -> torch.Tensor:
    """A DTensor of `shape`, placed as `param`, whose local tensor is `piece` itself.

    Not `DTensor.from_local`, which moves the piece to the mesh's device: the mesh of a model on an
    accelerator names that device, while FSDP2 keeps the pieces of its offloaded parameters on the
    CPU, by this same constructor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, piece.dtype)
    spec = DTensorSpec(param.device_mesh, tuple(param.placements), tensor_meta=meta)
    return cast("torch.Tensor", DTensor(piece, spec, requires_grad=False))


def like(param: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """State of the shape of `param` from this rank's `piece`: sharded as `param` is."""
    return _wrap(piece, param, param.shape) if is_dtensor(param) else piece


def row_shape(param: torch.Tensor, length: int) -> list[int]:
    """The global shape of state that has `length` entries per piece of `param`."""
    return [*_pieces(param), length] if is_dtensor(param) else [length]


def rows(param: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """State with a row per piece of `param`, from this rank's 1-D `row`.

    `row` itself for a plain tensor.
    """
    if not is_dtensor(param):
        return row
    shape = row_shape(param, row.numel())
    in_mesh = param.device_mesh.get_coordinate() is not None
    return _wrap(row.view([1] * param.ndim + [-1]) if in_mesh else row, param, shape)


def meshes(params: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    """The distinct meshes of more than one rank among `params`, in their order."""
    found = {param.device_mesh: None for param in params if is_dtensor(param)}
    return [mesh for mesh in found if mesh.size() > 1 and mesh.get_coordinate() is not None]


def greatest(meshes: Sequence[DeviceMesh], numbers: Sequence[float]) -> list[float]:
    """The greatest of each number on the ranks of the meshes, all of which have to call it.

    As float32 has them.
    """
    found = list(map(float, numbers))
    for mesh in meshes:
        from torch.distributed.tensor import DTensor, Partial

        mine = torch.tensor(found, dtype=torch.float32, device=mesh.device_type)
        of_all = DTensor.from_local(mine, mesh, [Partial("max")] * mesh.ndim, run_check=False)
        found = of_all.full_tensor().tolist()
    return found


def parted(who: str) -> OSError:
    """The error of a step that was taken, but not by the ranks `who`."""
    return OSError(
        f"{who} left a step by an error, and others have taken it: the weights are not those of "
        "any step. hint: the error of that rank says why; resume all ranks from a checkpoint"
    )
