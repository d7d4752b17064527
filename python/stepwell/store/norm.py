"""The norm of all gradients, on the device that has them.

A few kernels, and one number that the host waits for.

Norms of single gradients are float32, their squares are summed in double precision, in the order
given: equal gradients give equal bits. The square of a finite gradient may overflow float32. So a
norm that is not finite is computed once more in double precision, in which nothing that is finite
overflows, and only gradients that are not finite have a norm that is not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell._sharding import is_dtensor, local

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CLIP_EPS", "gradient_norm", "norms_of"]

CLIP_EPS = 1e-6
"""Added to the norm that gradients are clipped by, as torch's clip_grad_norm_ and DeepSpeed do."""


def gradient_norm(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    device: torch.device,
    read: Callable[[torch.Tensor], float] = float,
    norms: torch.Tensor | None = None,
) -> float:
    """The 2-norm of all gradients; not finite if, and only if, a gradient is not.

    Pieces of DTensors are summed over the ranks that hold them, which all have to call this.

    Args:
        params: the parameters.
        grads: their gradients, sharded as they are.
        device: where they are.
        read: brings the one number to the host, perhaps with others that are wanted there.
        norms: of each gradient its norm, as `norms_of` has it. None: they are found here.
    """
    pieces = [local(grad) for grad in grads]
    if norms is None:
        norms = norms_of(pieces, device)
    squares = norms.double().square()
    shares = _shares(params)
    sums = [share.over_ranks(squares) for share in shares]
    squared_norm = read(reduce(torch.add, sums))
    if not math.isfinite(squared_norm):
        # Ranks that hold pieces of one share have the same sum of it, and so look again together.
        squared_norm = sum(
            found if math.isfinite(found) else float(share.over_ranks(_wide(pieces, share, device)))
            for share, found in zip(shares, map(float, sums), strict=True)
        )
    return math.sqrt(squared_norm)


def norms_of(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norms of gradients, float32, where they are: on `device`."""
    return _norms(pieces, device, torch.float32)


def _norms(
    pieces: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The 2-norm of each of `pieces`, a vector of `dtype` on `device`, where they are.

    float32 overflows where the squares of a piece do; float64 does not for any finite piece.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        by_dtype[piece.dtype].append(index)
    norms = torch.zeros(len(pieces), dtype=dtype, device=device)
    for indices in by_dtype.values():
        found = torch._foreach_norm([pieces[index] for index in indices], 2.0, dtype=dtype)
        if len(indices) == len(pieces):
            return torch.stack(found)
        norms[indices] = torch.stack(found)
    return norms


class _Share(NamedTuple):
    """Parameters whose squares are summed over the same ranks."""

    indices: list[int] | None
    """Of the parameters; None: all."""
    mesh: DeviceMesh | None
    """None: each rank has all of each gradient."""
    cuts: tuple[bool, ...]
    """Per dimension of the mesh whether it cuts the parameters: copies of a piece count once."""

    def over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of the share's squares, of all parameters' `squares` on this rank."""
        mine = squares.sum() if self.indices is None else squares[self.indices].sum()
        if self.mesh is None:
            return mine
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Partial("sum") if cut else Replicate() for cut in self.cuts]
        there = (
            mine.to(self.mesh.device_type) if mine.device.type != self.mesh.device_type else mine
        )
        whole = DTensor.from_local(there, self.mesh, placements, run_check=False).full_tensor()
        return whole.to(mine.device)


def _shares(params: Sequence[torch.Tensor]) -> list[_Share]:
    layouts: dict[Any, list[int]] = defaultdict(list)
    plain = []
    for index, param in enumerate(params):
        if is_dtensor(param):
            cuts = tuple(not placement.is_replicate() for placement in param.placements)
            layouts[param.device_mesh, cuts].append(index)
        else:
            plain.append(index)
    if not layouts:
        return [_Share(None, None, ())]
    # Always the plain ones, too, so that sums are added in one order.
    sharded = (_Share(indices, mesh, cuts) for (mesh, cuts), indices in layouts.items())
    return [_Share(plain, None, ()), *sharded]


def _wide(pieces: Sequence[torch.Tensor], share: _Share, device: torch.device) -> torch.Tensor:
    """The squares of the share's gradients in double precision; 0 for the others."""
    indices = range(len(pieces)) if share.indices is None else share.indices
    squares = torch.zeros(len(pieces), dtype=torch.float64, device=device)
    if indices:
        of_share = [pieces[index] for index in indices]
        squares[list(indices)] = _norms(of_share, device, torch.float64).square()
    return squares
