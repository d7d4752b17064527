"""The norm of all gradients, on the device that has them: a few kernels and no wait for the host."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from stepwell._sharding import is_dtensor, local

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["squared_norm"]


def squared_norm(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """The sum of squares of all gradients, a float64 scalar on `device`; not finite if a gradient is not.

    Norms of single gradients are float32 and their squares are summed in double precision, in the
    order given: equal gradients give equal bits. Pieces of DTensors are summed over the ranks that
    hold them, which all have to call this.

    Args:
        params: the parameters.
        grads: their gradients, sharded as they are.
        device: where they are.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    pieces = [local(grad) for grad in grads]
    for index, piece in enumerate(pieces):
        by_dtype[piece.dtype].append(index)
    norms = torch.zeros(len(pieces), dtype=torch.float32, device=device)
    for indices in by_dtype.values():
        found = torch._foreach_norm([pieces[index] for index in indices], 2.0, dtype=torch.float32)
        if len(indices) == len(pieces):
            norms = torch.stack(found)
        else:
            norms[indices] = torch.stack(found)
    squares = norms.double().square()
    sharded = [index for index, param in enumerate(params) if is_dtensor(param)]
    if not sharded:
        return squares.sum()
    return _over_ranks(params, squares, sharded)


def _over_ranks(
    params: Sequence[torch.Tensor], squares: torch.Tensor, sharded: list[int]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    layouts: dict[Any, list[int]] = defaultdict(list)
    for index in sharded:
        param = params[index]
        if is_dtensor(param):
            # Copies of a piece count once.
            cuts = tuple(not placement.is_replicate() for placement in param.placements)
            layouts[param.device_mesh, cuts].append(index)
    plain = sorted(set(range(len(params))) - set(sharded))
    total = squares[plain].sum()
    for (mesh, cuts), indices in layouts.items():
        mine = squares[indices].sum()
        placements = [Partial("sum") if cut else Replicate() for cut in cuts]
        if mine.device.type != mesh.device_type:
            mine = mine.to(mesh.device_type)
        total = total + DTensor.from_local(
            mine, mesh, placements, run_check=False
        ).full_tensor().to(total.device)
    return total
