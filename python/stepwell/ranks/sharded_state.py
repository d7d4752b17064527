"""State dicts of an optimizer whose ranks have a share of the state each.

- *Of this rank* (`of_rank`): each tensor is a `Rows`, over this rank's own memory, which knows
  where it lies in the whole. It is what torch.distributed.checkpoint saves and loads, at any number
  of ranks. torch.save refuses it: a file with the state of one rank is not a checkpoint.
- *Whole* (`whole`): plain tensors, as without `shard`. It loads anywhere.
- Both load (`own`): of a whole tensor each rank takes its rows.

A chunk of state is of one rank, so codes, scales and fingerprints of the ranks, one behind the
other, are those of the whole.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from stepwell import _state
from stepwell._budget import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from stepwell.ranks.sharding import Sharding

__all__ = ["Rows", "of_rank", "own", "whole"]

_LOGGER = logging.getLogger(__name__)


class Rows(torch.Tensor):
    """Rows of a tensor, of which other ranks have the others.

    Operations give plain tensors. What torch.distributed.checkpoint asks of it is the protocol of
    torch.distributed._checkpointable.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    begin: int
    """The first row, in the whole."""
    whole_shape: Sequence[int]
    """The shape of the whole."""

    @classmethod
    def of(cls, piece: torch.Tensor, begin: int, whole_shape: Sequence[int]) -> Rows:
        """Rows in the memory of `piece`."""
        rows = piece.as_subclass(cls)
        rows.begin, rows.whole_shape = begin, whole_shape
        return rows

    @property
    def plain(self) -> torch.Tensor:
        """The rows, as a tensor like any other, in the same memory."""
        return self.as_subclass(torch.Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole, as a DTensor's: a load compares it with what was saved."""
        size = torch.Size(self.whole_shape)
        return size if dim is None else size[dim]

    def _chunk(self) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = [self.begin, *[0] * (len(self.whole_shape) - 1)]
        return ChunkStorageMetadata(torch.Size(offsets), self.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What this rank saves: nothing, where it has no row."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.numel() and 0 not in self.whole_shape:
            return []
        chunk = self._chunk()
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk,
                    TensorProperties.create_from_tensor(self.plain),
                    torch.Size(self.whole_shape),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank loads."""
        return [self._chunk()] if self.numel() else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        """The memory that is saved, or loaded into."""
        return self.plain

    def __deepcopy__(self, _: dict[int, Any]) -> Rows:
        return Rows.of(self.plain.clone(), self.begin, self.whole_shape)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "`state_dict()` of an optimizer with `shard` has this rank's share alone, and is not "
            "pickled. hint: torch.distributed.checkpoint on all ranks; or full_state_dict() on all "
            "ranks, and torch.save of what one of them gets"
        )


class _Cut:
    """Where a tensor of the state of a parameter is cut.

    Args:
        sharding: the ranks.
        param: the parameter.
        name: of the part of its state.
    """

    def __init__(self, sharding: Sharding, param: torch.Tensor, name: str) -> None:
        numel, shares = param.numel(), sharding.shares
        spans = [shares.elements(param, rank) for rank in range(shares.world_size)]
        length = _state.part_length(name)
        self.shape = [length(numel)] if length else list(param.shape) or [1]
        """Of the whole."""
        row_len = math.prod(self.shape[1:])
        of = length or (lambda count: count // row_len)
        self.rows = [(of(begin), of(end)) if end > begin else (0, 0) for begin, end in spans]
        """The rows of each rank; (0, 0): none."""

    def shape_of(self, rank: int) -> list[int]:
        """The shape of the rows of `rank`."""
        begin, end = self.rows[rank]
        return [end - begin, *self.shape[1:]]


def of_rank(sharding: Sharding, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with this rank's pieces as `Rows`, in their memory."""
    return {
        name: _rows(_Cut(sharding, param, name), sharding.peers.rank, value)
        if _is_cut(sharding, param, name)
        else value
        for name, value in state.items()
    }


def _is_cut(sharding: Sharding, param: torch.Tensor, name: str) -> bool:
    """Whether each rank has a piece of this part of the state of `param`.

    Not of a frozen parameter whose state was not loaded, but set by the program.
    """
    return _state.is_part(name) and param in sharding.shares


def _rows(cut: _Cut, rank: int, piece: torch.Tensor) -> Rows:
    return Rows.of(piece, cut.rows[rank][0], cut.shape)


def own(
    sharding: Sharding, param: torch.Tensor, state: Mapping[str, Any], label: str
) -> dict[str, Any]:
    """Loaded state of a parameter, of which this rank takes its piece.

    Raises:
        ValueError: it is the piece of another rank, or of another number of ranks.
    """
    rank = sharding.peers.rank
    taken: dict[str, Any] = {}
    for name, value in state.items():
        taken[name] = value
        if not (_state.is_part(name) and isinstance(value, torch.Tensor)):
            continue
        cut = _Cut(sharding, param, name)
        begin, end = cut.rows[rank]
        if isinstance(value, Rows):
            if [*value.whole_shape] != cut.shape or (value.begin, len(value)) != (
                begin,
                end - begin,
            ):
                raise ValueError(
                    f"`{name}` in the loaded state of {label} has the rows `{value.begin}` to "
                    f"`{value.begin + len(value)}` of `{tuple(value.whole_shape)}`, expected those "
                    f"of this rank, `{begin}` to `{end}` of `{tuple(cut.shape)}`. hint: state of "
                    "another rank, or of another number of ranks, is loaded by "
                    "torch.distributed.checkpoint, or as a whole (full_state_dict())"
                )
            taken[name] = value.plain
        elif list(value.shape) in (cut.shape, list(param.shape)):
            taken[name] = value.view(cut.shape)[begin:end]
    return taken


def whole(
    sharding: Sharding,
    params: list[torch.Tensor],
    states: Mapping[int, Mapping[str, Any]],
    to: int | None,
) -> dict[int, dict[str, Any]] | None:
    """The whole state by index of the parameters. Collective.

    Args:
        sharding: the ranks.
        params: of all groups.
        states: of this rank, by index of the parameter.
        to: the rank of the group that gets it; None: every rank.

    Returns:
        the state; None on the other ranks.

    Raises:
        ValueError: the ranks have state of different parameters.
        OSError: another rank is gone.
    """
    peers = sharding.peers
    catalog = {
        index: {
            name: str(value.dtype) if _is_cut(sharding, params[index], name) else None
            for name, value in sorted(state.items())
        }
        for index, state in sorted(states.items())
    }
    if any(other != catalog for other in peers.objects(catalog)):
        raise ValueError(
            "the ranks have state of different parameters, or in different forms. "
            "hint: load and delete state alike on all ranks"
        )
    is_here = to is None or peers.rank == to
    nbytes = sum(
        math.prod(_Cut(sharding, params[index], name).shape) * value.itemsize
        for index, state in states.items()
        for name, value in state.items()
        if _is_cut(sharding, params[index], name)
    )
    if is_here:
        _LOGGER.info("%.2f GiB of host memory for the whole state", nbytes / GIB)
    found: dict[int, dict[str, Any]] = {}
    for index, state in sorted(states.items()):
        found[index] = {}
        param = params[index]
        for name, value in sorted(state.items()):
            if not _is_cut(sharding, param, name):
                found[index][name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            cut = _Cut(sharding, param, name)
            memory = torch.empty(cut.shape if is_here else 0, dtype=value.dtype, device="cpu")
            for owner, (begin, end) in enumerate(cut.rows):
                if end == begin:
                    continue
                if peers.rank == owner:
                    piece = value.contiguous()
                elif is_here:
                    piece = memory[begin:end]
                else:
                    piece = torch.empty(cut.shape_of(owner), dtype=value.dtype, device="cpu")
                if owner != to:
                    peers.broadcast(piece, owner)
                if is_here and peers.rank == owner:
                    memory[begin:end].copy_(piece)
            if is_here:
                is_per_element = _state.part_length(name) is None
                found[index][name] = memory.view(param.shape) if is_per_element else memory
    return found if is_here else None
