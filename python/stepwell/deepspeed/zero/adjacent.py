"""Pieces of gradients that lie side by side, copied by one call. Imports no DeepSpeed.

What ranks reduce together lies in one memory, and has neighbours there and in host memory. A call
per piece takes the thread of autograd, which is late with its launches, 20 microseconds and more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from stepwell.deepspeed.zero.fragment import Fragment

__all__ = ["are_adjacent", "clones", "joined", "runs"]

# Of what is copied in vain, between pieces: their number of elements over this.
_GAPS_FRACTION = 8


def are_adjacent(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether flat `second` begins where flat `first` ends, in the same memory."""
    return (
        first.dtype == second.dtype
        and int(first.storage_offset()) + first.numel() == int(second.storage_offset())
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat view of all, of which each is adjacent to the one before."""
    first = pieces[0]
    numel = sum(piece.numel() for piece in pieces)
    return first.as_strided((numel,), (1,), first.storage_offset())


def clones(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Clones of flat pieces of one dtype.

    Where the pieces fill a part of one memory, it is copied at once, with small gaps, and the
    clones are views of one memory as well. Others are cloned one by one.
    """
    if not pieces:
        return []
    begin = min(piece.storage_offset() for piece in pieces)
    end = max(piece.storage_offset() + piece.numel() for piece in pieces)
    numel = sum(piece.numel() for piece in pieces)
    are_together = len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    if not are_together or end - begin - numel > numel // _GAPS_FRACTION:
        return [piece.clone() for piece in pieces]
    whole = pieces[0].as_strided((end - begin,), (1,), begin).clone()
    return [whole.narrow(0, piece.storage_offset() - begin, piece.numel()) for piece in pieces]


def runs(
    pieces: Sequence[torch.Tensor], fragments: Sequence[Fragment]
) -> Iterator[tuple[torch.Tensor, Sequence[Fragment]]]:
    """Flat pieces of fragments, those together that lie side by side here and in their partition.

    Gives one piece for each run, and its fragments.
    """
    begin = 0
    for end in range(1, len(pieces) + 1):
        if end < len(pieces):
            group, first, numel = fragments[end - 1]
            if (group, first + numel) == fragments[end][:2] and are_adjacent(
                pieces[end - 1], pieces[end]
            ):
                continue
        yield joined(pieces[begin:end]), fragments[begin:end]
        begin = end
