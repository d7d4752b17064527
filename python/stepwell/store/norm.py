"""The norm of all gradients, of plain PyTorch's and of ZeRO's, where they are.

A few kernels, and one number that the host waits for.

Norms of single gradients are float32 (of ZeRO's in host memory float64), their squares are summed
in double precision, in the order given: equal gradients give equal bits. The square of a finite
gradient may overflow float32. So a norm that is not finite is computed once more in double
precision (`wide_squares`), in which nothing that is finite overflows, and only gradients that are
not finite have a norm that is not.

ZeRO takes the norm of each gradient when it is complete (`norm_of`, `norms_of`), and adds their
squares up over the ranks (`norm_over_ranks`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._sharding import is_dtensor, local
from stepwell._tensors import is_run, view
from stepwell.ranks.agreement import NORM_DTYPE, WIDE_NORM_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "CLIP_EPS",
    "float32_norms",
    "gradient_norm",
    "norm_of",
    "norm_over_ranks",
    "norms_of",
    "squares_of",
    "wide_squares",
]

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
        norms: of each gradient its norm, as `float32_norms` has it. None: they are found here.
    """
    pieces = [local(grad) for grad in grads]
    if norms is None:
        norms = float32_norms(pieces, device)
    squares = norms.double().square()
    shares = _shares(params)
    sums = [share.over_ranks(squares) for share in shares]

    def again() -> float:
        wide = _norms(pieces, device, torch.float64).square()
        # Ranks that hold pieces of one share have the same sum of it, and so look again together.
        return sum(
            found if math.isfinite(found) else float(share.over_ranks(wide))
            for share, found in zip(shares, map(float, sums), strict=True)
        )

    return _norm(read(reduce(torch.add, sums)), again)


def norm_over_ranks(
    squares: torch.Tensor,
    wide: Callable[[], torch.Tensor],
    add_up: Callable[[torch.Tensor], float],
) -> float:
    """The 2-norm of the gradients of all ranks; infinite if, and only if, one is not finite.

    Args:
        squares: the sum of this rank's squares: a scalar on the device.
        wide: gives the same of `wide_squares`.
        add_up: gives the sum over the ranks of a scalar on the device, which it may write to. All
            ranks call it equally often.
    """
    norm = _norm(add_up(squares.to(NORM_DTYPE)), lambda: add_up(wide().to(WIDE_NORM_DTYPE)))
    return norm if math.isfinite(norm) else math.inf


def _norm(squared: float, again: Callable[[], float]) -> float:
    """The norm of which this is the square; where that is not finite, of what `again` gives."""
    return math.sqrt(squared if math.isfinite(squared) else again())


def _norm_dtype(piece: torch.Tensor) -> torch.dtype:
    # Sums of many float32 squares are pairwise on GPUs, and are not on CPUs.
    return torch.float64 if piece.is_cpu else torch.float32


def norm_of(piece: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient, where it is: a scalar."""
    norm: torch.Tensor = torch.linalg.vector_norm(piece, dtype=_norm_dtype(piece))
    return norm


def norms_of(pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """As `norm_of` of each of some gradients on one device, by one call."""
    if not pieces:
        return []
    norms: Sequence[torch.Tensor] = torch._foreach_norm(list(pieces), dtype=_norm_dtype(pieces[0]))
    return norms


def squares_of(norms: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of norms on `device`: a scalar there, in double precision."""
    if not (found := list(norms)):
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(found).double().square().sum()


def wide_squares(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of gradients: a scalar on `device`, all in double precision.

    It is not finite if, and only if, one of them is not.

    Args:
        pieces: flat; all on `device`, or all in host memory.
        device: where the sum is wanted.
    """
    if pieces and pieces[0].is_cpu:
        stats = _core.grad_stats([view(piece) for piece in pieces])
        squares = stats.sq_norm if stats.finite else math.inf
        return torch.tensor(squares, dtype=torch.float64, device=device)
    return _norms(pieces, device, torch.float64).square().sum()


def float32_norms(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norms of gradients, float32, where they are: on `device`."""
    return _norms(pieces, device, torch.float32)


def _norms(
    pieces: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The 2-norm of each of `pieces`, a vector of `dtype` on `device`.

    float32 overflows where the squares of a piece do; float64 does not for any finite piece.
    """
    if device.type == "cpu" and all(piece.is_cpu and is_run(piece) for piece in pieces):
        # torch's norm of bfloat16 takes 20 times as long.
        squares = [_core.grad_stats([view(piece)]).sq_norm for piece in pieces]
        return torch.tensor(squares, dtype=torch.float64, device=device).abs().sqrt().to(dtype)
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        by_kind[piece.dtype, piece.device].append(index)
    norms = torch.zeros(len(pieces), dtype=dtype, device=device)
    for indices in by_kind.values():
        found = torch._foreach_norm([pieces[index] for index in indices], 2.0, dtype=dtype)
        if len(indices) == len(pieces):
            return torch.stack(found).to(device)
        norms[indices] = torch.stack(found).to(device)
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
